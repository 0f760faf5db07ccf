"""The pages at `/` and `/docs`: each one HTML file with its style and script inside, the same for everybody who asks.

There is nothing of the model or the run in them: their scripts ask for `/status` or `/openapi.json`, with the token
where one is needed, and write what they get as text. They look like the report of a run, whose stylesheet they take.
The policy in their heads allows no script and no style but their own, nothing from elsewhere, and no frame around them:
so they work where there is no internet. FastAPI's own page at `/docs` does not.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import NamedTuple


class Page(NamedTuple):
    """What is sent."""

    body: bytes
    headers: dict[str, str]


def make_page() -> Page:
    """What is served, for people to look at."""
    return _put_together("page", ["page.css"])


def make_docs() -> Page:
    """How to ask, to read and to try."""
    return _put_together("docs", ["page.css", "docs.css"])


def _put_together(name: str, styles: list[str]) -> Page:
    own = files("paceline.serve")
    sheets = [files("paceline") / "train" / "report.css", *(own / sheet for sheet in styles)]
    style = "".join(sheet.read_text("utf-8") for sheet in sheets)
    script = (own / f"{name}.js").read_text("utf-8")
    text = (own / f"{name}.html").read_text("utf-8").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src 'sha256-{_digest(style)}'; "
        f"script-src 'sha256-{_digest(script)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(text.encode(), headers)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
