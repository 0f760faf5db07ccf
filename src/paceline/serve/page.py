"""The page at `/`: one HTML file with its style and script inside, the same for everybody who asks.

There is nothing of the model or the run in it: its script asks for `/status`, with the token where one is needed, and
writes what it gets as text. It looks like the report of a run, whose stylesheet it takes. The policy in its head allows
no script and no style but its own, nothing from elsewhere, and no frame around it.
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
    own = files("paceline.serve")
    style = (files("paceline") / "train" / "report.css").read_text("utf-8") + (own / "page.css").read_text("utf-8")
    script = (own / "page.js").read_text("utf-8")
    text = (own / "page.html").read_text("utf-8").replace("/*style*/", style).replace("/*script*/", script)
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
