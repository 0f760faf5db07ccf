"""Members on Ray that stay, without Ray: their relays, the desk, and the actor of a host, as plain processes."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.launch.on_ray.desk import Desk
from paceline.launch.on_ray.seat_host import SeatHost
from paceline.launch.seats import FAR, Errand
from tests.launch._ssh import until


class _Called:
    """An actor's method, called here; `remote` answers at once, as Ray's does."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *given: Any) -> Any:
        return functools.partial(self._method, *given) if self._method.__name__ == "read" else self._method(*given)


class _Actor:
    def __init__(self, made: SeatHost) -> None:
        self.start, self.read, self.end = _Called(made.start), _Called(made.read), _Called(made.end)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """One with a host of its own; what Ray would bring there is called instead."""

    def get(answer: Any) -> Any:
        if (tmp_path / "lost").exists():
            raise RuntimeError("The node died.\nand pages")
        return answer()

    host = SeatHost("a", 2, cwd=str(tmp_path))

    def kill(actor: Any) -> None:
        for number in range(4):
            host.end(number)

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get=get, kill=kill))
    made = Desk()
    made.open({"a": _Actor(host)})
    yield made
    made.close()


def relayed(desk: Desk, *command: str) -> subprocess.Popen[bytes]:
    """A member on that host, by its relay."""
    words, first = desk.python_on("a", FAR)
    errand = Errand(command=list(command), env={"WORD": "given"}, threads=1, members=1)
    pipe = subprocess.PIPE
    started = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
    assert started.stdin
    started.stdin.write(first + msgspec.json.encode(errand) + b"\n")
    started.stdin.flush()
    return started


def test_a_relay_prints_and_ends_as_its_member_does(desk: Desk) -> None:
    code = "import os, sys; print(os.environ['WORD']); print('bad', file=sys.stderr); print('x' * 300_000); sys.exit(3)"
    one, other = relayed(desk, "-c", code), relayed(desk, "-c", "import os; os.kill(os.getpid(), 9)")
    out, err = one.communicate(timeout=60)
    assert (one.returncode, out.split(), err) == (3, [b"given", b"x" * 300_000], b"bad\n")
    assert other.wait(60) == 137


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_member_ends_with_its_relay(desk: Desk, tmp_path: Path, number: int) -> None:
    code = "import os, time; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(600)"
    with relayed(desk, "-c", code) as started:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith(" "))
        started.send_signal(number)
        started.wait(60)
    until(lambda: not Path("/proc", (tmp_path / "pid").read_text().strip()).exists())
    assert started.returncode == (143 if number == signal.SIGTERM else -9)


def test_a_host_that_is_lost_is_its_members_lost(desk: Desk, tmp_path: Path) -> None:
    with relayed(desk, "-c", "import time; open('on', 'w'); time.sleep(600)") as started:
        until(lambda: (tmp_path / "on").exists())
        (tmp_path / "lost").touch()
        assert started.wait(60) == 137
        assert started.stderr
        assert b"Ray has lost host a: The node died." in started.stderr.read()
    again = relayed(desk, "-c", "")  # nobody is there to start it
    assert again.wait(60) == 137
