"""A real browser without a window: Debian's chromium, told what to do over a pair of pipes (DevTools protocol).

Nothing has to be installed but chromium itself: it reads commands from descriptor 3 and answers on 4, as JSON with a
zero byte behind each. Every wait has a limit.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
WHY = "there is no chromium here: apt-get install chromium"
LIMIT_S = 120.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--hide-scrollbars"),
)
# The browser wants its pipes at these numbers.
_BEGIN = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One page. What its scripts threw and what its policy forbade is in `faults`."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._rest = b""
        self._number = 0
        self._session = ""
        self.faults: list[str] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            heard = self._hear(deadline)
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                result: dict[str, Any] = heard["result"]
                return result
            self._note(heard)

    def _note(self, heard: dict[str, Any]) -> None:
        if heard.get("method") == "Runtime.exceptionThrown":
            details = heard["params"]["exceptionDetails"]
            self.faults.append(str(details.get("exception", details).get("description", details)))
        elif heard.get("method") == "Log.entryAdded" and heard["params"]["entry"]["source"] == "security":
            self.faults.append(heard["params"]["entry"]["text"])

    def _hear(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has said nothing for {LIMIT_S:g} s")
            got = os.read(self._back, 1 << 16)
            if not got:
                raise EOFError("the browser has ended")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def go(self, url: str) -> None:
        assert "errorText" not in self.tell("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """Of an expression."""
        found = self.tell("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def until(self, script: str, limit_s: float = LIMIT_S) -> Any:
        """Wait until an expression is true; what it is then."""
        deadline = time.monotonic() + limit_s
        while not (found := self.value(script)):
            assert time.monotonic() < deadline, f"{script} is still false: {self.value('document.body.innerText')}"
            time.sleep(0.1)
        return found

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is there: something over it would get the click."""
        name = json.dumps(selector)
        self.until(f"!document.querySelector({name}).disabled")
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({name}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.tell("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        scale = 2 if phone else 1
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """The whole page, as PNG."""
        made = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser of its own, which knows nothing and leaves nothing."""
    reads, to = os.pipe()
    back, writes = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as home:
        words = [PROGRAM, *_FLAGS, f"--user-data-dir={home}", "about:blank"]
        begin = [sys.executable, "-c", _BEGIN, str(reads), str(writes), *words]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(begin, pass_fds=(reads, writes), stdin=quiet, stdout=quiet, stderr=quiet)
        os.close(reads)
        os.close(writes)
        try:
            page = Page(to, back)
            yield page
            with contextlib.suppress(Exception):
                page._session = ""
                page.tell("Browser.close")
        finally:
            os.close(to)
            os.close(back)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
