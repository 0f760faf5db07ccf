"""The page at / in a real browser: figures, charts, orders, a token, and words from outside that stay words."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _browser import PROGRAM, WHY, browser
from _browser import Page as Tab
from _serving import NET, Served, until
from safetensors.torch import save_file

from paceline.serve.page import Page, make_docs, make_page

ITEM = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
HOLDOUT = """
def holdout():
    torch.manual_seed(5)
    x = torch.randn(64, 2, 3)
    return x, make()(x).argmax(1)
"""
# A name that is markup: what it is made of must not be.
EVIL = "<img src=x onerror=window.hit=1><b>w<b>.safetensors"
needs_browser = pytest.mark.skipif(not PROGRAM, reason=WHY)


def put(path: Path, shift: float, more: str = "") -> None:
    """Weights that are those of `make`, moved, and one more; in one go."""
    space: dict[str, Any] = {}
    exec(NET, space)
    state = {name: tensor + shift for name, tensor in space["make"]().state_dict().items()}
    if more:
        state[more] = torch.zeros(2)
    part = path.with_suffix(".part")
    save_file(state, part)
    os.replace(part, path)


def status(server: Served) -> dict[str, Any]:
    code, _, body = server.ask("GET", "/status")
    assert code == 200, body
    told: dict[str, Any] = json.loads(body)
    return told


def current(server: Served) -> int:
    return int(status(server)["standing"]["current"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two versions of a file, with a holdout on which both are as good."""
    directory = tmp_path_factory.mktemp("served")
    (directory / "net.py").write_text(NET + HOLDOUT)
    put(directory / EVIL, 0.0)
    with Served(directory, "--replicas", "1", "--holdout", "net.py:holdout", what=EVIL) as made:
        made.wait()
        put(directory / EVIL, 1e-6)
        until(lambda: current(made) == 2, "the second version")
        yield made


@pytest.fixture(scope="module")
def tab(server: Served) -> Iterator[Tab]:
    with browser() as made:
        made.size(1200, 900)
        made.go(f"http://127.0.0.1:{server.port}/")
        yield made


@pytest.mark.parametrize("make", [make_page, make_docs])
def test_a_page_loads_nothing_and_allows_no_script_but_its_own(make: Callable[[], Page]) -> None:
    page = make()
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = page.body.decode()
    assert text.count("<script>") == text.count("</script>") == text.count("<style>") == 1
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in text


@pytest.mark.slow
def test_status_has_what_the_page_shows(server: Served) -> None:
    for _ in range(20):
        assert server.predict([ITEM])[0] == 200
    until(lambda: status(server)["answered"] >= 20, "counts that have come in")
    until(lambda: sum(status(server)["seconds"]["answered"]) > 0, "a second with requests")
    told = status(server)
    assert told["name"] == f"file {EVIL}"
    assert told["standing"]["source"].startswith(f"follows file {EVIL}, version 2")
    assert not told["standing"]["lost"]
    assert [version["metric"] for version in told["standing"]["versions"]] == [1.0, 1.0]
    assert told["replicas"] == {"ready": 1, "starting": 0, "down": 0}
    assert told["learning"] is None
    columns = told["seconds"]
    assert {len(column) for column in columns.values()} == {len(columns["at"])}
    assert [v for v in columns["p99_ms"] if v is not None]
    assert columns["metric"][-1] == 1.0


@pytest.mark.slow
def test_a_file_cannot_learn_and_another_sites_page_cannot_order(server: Served) -> None:
    body = json.dumps({"inputs": [ITEM], "labels": [1]}).encode()
    kind = {"Content-Type": "application/json"}
    code, _, said = server.ask("POST", "/learn", body, kind)
    assert code == 409
    assert b"no run" in said
    before = status(server)["standing"]
    for path in ("/versions/pause", "/versions/rollback", "/learn"):
        code, _, said = server.ask("POST", path, body, {**kind, "Origin": "http://elsewhere.example"})
        assert code == 403, said
    after = status(server)["standing"]
    assert (after["current"], after["paused"]) == (before["current"], before["paused"])
    code, _, said = server.ask("POST", "/versions/resume", b"", {"Origin": f"http://127.0.0.1:{server.port}"})
    assert code == 200, said


@needs_browser
@pytest.mark.slow
def test_figures_and_charts_are_on_the_page(server: Served, tab: Tab) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.02):
            server.predict([ITEM])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        tab.until("document.querySelector('#version').innerText === 'version 2'")
        for key in ("version", "latency", "rate", "queue", "metric"):
            tab.until(f"document.querySelector('[data-key={key}] .line').getAttribute('d').split(/[LHV]/).length > 3")
        tab.until("Number([...document.querySelectorAll('#tiles dd')][0].innerText) > 0")
        assert "ms" in tab.text("#tiles")
        assert "1 of 1" in tab.text("#tiles")
        tab.until("document.querySelectorAll('#versions tr').length === 2")
        assert "served" in tab.text("#versions tr:first-child")
        for width, phone, dark in ((390, True, True), (390, True, False), (1200, False, True), (1200, False, False)):
            tab.size(width, 800, phone=phone, dark=dark)
            assert tab.value("document.documentElement.scrollWidth") <= width
            lightness = tab.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] * 1")
            assert (lightness < 128) == dark
        box = tab.value("(({x, y, width}) => [x, y, width])(document.querySelector('.plot').getBoundingClientRect())")
        tab.tell("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 0.9 * box[2], y=box[1] + 20)
        tab.until("document.querySelector('.plot .tip').innerText.includes('version  2')")
        if folder := os.environ.get("PICTURES"):
            tab.picture(Path(folder) / "wide.png")
            tab.size(390, 844, phone=True, dark=True)
            tab.picture(Path(folder) / "phone.png")
            tab.size(1200, 900)
    finally:
        stop.set()
        asking.join(10)
    assert not tab.faults


@needs_browser
@pytest.mark.slow
def test_words_from_outside_stay_words(server: Served, tab: Tab) -> None:
    tab.until(f"document.querySelector('#name').innerText === {json.dumps(f'file {EVIL}')}")
    tab.until(f"document.querySelector('#health').innerText.includes({json.dumps(EVIL)})")
    assert tab.value("document.querySelectorAll('main img, main b').length") == 0
    assert tab.value("window.hit") is None
    assert not tab.faults


@needs_browser
@pytest.mark.slow
def test_orders_by_click(server: Served, tab: Tab) -> None:
    tab.until("document.querySelector('#version').innerText === 'version 2'")
    tab.click("#rollback")
    tab.until("document.querySelector('#version').innerText === 'version 1'")
    tab.until("!document.querySelector('#paused').hidden")
    until(lambda: server.predict([ITEM])[1]["version"] == 1, "answers by version 1")
    tab.click("#rollback")  # there is nothing before it: the page says why
    tab.until("(document.querySelector('#said.ill') || {innerText: ''}).innerText.includes('no version before 1')")
    tab.click("#resume")
    tab.until("document.querySelector('#paused').hidden")
    tab.click("#versions tr:last-child .pin")
    tab.until("document.querySelector('#pinned').innerText === 'pinned to 1'")
    until(lambda: server.predict([ITEM])[1]["version"] == 1, "answers by the pinned version")
    tab.click("#unpin")
    tab.until("document.querySelector('#pinned').hidden")
    tab.click("#pause")
    tab.until("!document.querySelector('#paused').hidden")
    assert status(server)["standing"]["paused"]
    tab.click("#resume")
    tab.until("document.querySelector('#paused').hidden")
    assert not tab.faults


@needs_browser
@pytest.mark.slow
def test_a_refused_version_is_told(server: Served, tab: Tab) -> None:
    before = tab.text("#version")
    put(server.directory / EVIL, 0.0, more="<b>other</b>")
    tab.until("document.querySelector('#reasons').innerText.includes('<b>other</b>')")
    assert tab.value("document.querySelectorAll('main b').length") == 0
    assert tab.text("#version") == before


@needs_browser
@pytest.mark.slow
def test_the_token_is_asked_for_and_the_end_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right & <proper>\n")
    with Served(tmp_path, "--replicas", "1", "--token-file", "token") as server, browser() as tab:
        server.token = "right & <proper>"
        server.wait()
        server.token, url = "", f"http://127.0.0.1:{server.port}"
        assert server.ask("GET", "/status")[0] == 401
        tab.go(f"{url}/")
        for word, outcome in (
            ("wrong", "document.querySelector('#wrong').innerText.includes('not its token')"),
            ("right & <proper>", "document.querySelector('#version').innerText === 'version 1'"),
        ):
            tab.until("!document.querySelector('#ask').hidden")
            tab.click("#token")
            tab.tell("Input.insertText", text=word)
            tab.click("#ask button")
            tab.until(outcome)
        assert tab.value("document.querySelector('#ask').hidden")
        tab.click("#pause")
        tab.until("!document.querySelector('#paused').hidden")
        assert server.stop() == 0
        tab.until("document.querySelector('#silent').innerText.startsWith('No answer from the server for')")
        assert not tab.faults


def test_the_holdout_of_these_tests_is_one() -> None:
    space: dict[str, Any] = {}
    exec(NET + HOLDOUT, space)
    x, y = space["holdout"]()
    assert torch.unique(y).numel() > 1  # else any version would be right
    assert x.shape[1:] == (2, 3)
