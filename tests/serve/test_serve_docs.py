"""The page at /docs in a real browser: it has all that /openapi.json has, and its forms ask the server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from _browser import PROGRAM, WHY, browser
from _browser import Page as Tab
from _serving import Served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PROGRAM, reason=WHY)]


def described(server: Served) -> dict[str, Any]:
    status, _, body = server.ask("GET", "/openapi.json")
    assert status == 200
    told: dict[str, Any] = json.loads(body)
    return told


def part(tab: Tab, name: str, inside: str) -> str:
    """A selector for what is inside of one page's part; opened, so that it can be seen and clicked."""
    selector = f"[id={json.dumps(name)}]"
    tab.value(f"document.querySelector({json.dumps(selector)}).open = true")
    return f"{selector} {inside}"


def test_all_pages_are_there_and_can_be_tried(tmp_path: Path) -> None:
    with Served(tmp_path, "--replicas", "1") as server, browser() as tab:
        server.wait()
        tab.go(f"http://127.0.0.1:{server.port}/docs")
        paths = described(server)["paths"]
        tab.until("document.querySelectorAll('details').length > 0")
        shown = tab.value("[...document.querySelectorAll('details')].map((one) => one.id)")
        assert shown == [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]

        whole = tab.text(part(tab, "POST /predict", ".try").removesuffix(" .try"))
        for word in ("X-Paceline-Deadline-Ms", "{inputs: list of 2 × 3 × number}", "application/x-safetensors", "429"):
            assert word in whole
        told = tab.text(part(tab, "POST /predict", ".command"))
        assert f"http://127.0.0.1:{server.port}/predict" in told
        assert '{"inputs":[[[0,0,0],[0,0,0]]]}' in told

        tab.click(part(tab, "POST /predict", ".try button"))
        said = part(tab, "POST /predict", ".said")
        tab.until(f"document.querySelector({json.dumps(said)}).innerText.startsWith('200, version 1, after')")
        assert '"outputs":[[' in tab.text(said)
        tab.click(part(tab, "POST /versions/pause", ".try button"))
        said = part(tab, "POST /versions/pause", ".said")
        tab.until(f"document.querySelector({json.dumps(said)}).innerText.includes('\"paused\":true')")
        tab.click(part(tab, "POST /versions/pin", ".try button"))
        said = part(tab, "POST /versions/pin", ".said")
        tab.until(f"document.querySelector({json.dumps(said)}).innerText.startsWith('200')")

        for width, phone in ((390, True), (1200, False)):
            tab.size(width, 800, phone=phone)
            assert tab.value("document.documentElement.scrollWidth") <= width
            if folder := os.environ.get("PICTURES"):
                tab.picture(Path(folder) / f"docs-{width}.png")
        assert not tab.faults


def test_the_token_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with Served(tmp_path, "--replicas", "1", "--token-file", "token") as server, browser() as tab:
        server.token = "secret"
        server.wait()
        tab.go(f"http://127.0.0.1:{server.port}/docs")
        for word, outcome in (
            ("wrong", "document.querySelector('#wrong').innerText.includes('not its token')"),
            ("secret", "document.querySelectorAll('details').length > 0"),
        ):
            tab.until("!document.querySelector('#ask').hidden")
            assert tab.value("document.querySelectorAll('details').length") == 0
            tab.click("#token")
            tab.tell("Input.insertText", text=word)
            tab.click("#ask button")
            tab.until(outcome)
        assert "secret" not in tab.value("document.body.innerText")
        assert "Authorization: Bearer TOKEN" in tab.text(part(tab, "GET /versions", ".command"))
        tab.click(part(tab, "GET /versions", ".try button"))
        said = part(tab, "GET /versions", ".said")
        tab.until(f"document.querySelector({json.dumps(said)}).innerText.startsWith('200')")
        assert not tab.faults
