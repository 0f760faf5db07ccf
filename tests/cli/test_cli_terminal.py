"""`paceline run` on a terminal: member 0 draws on it, the others' lines stand above."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from paceline.cli.display import Screen


class Terminal:
    """The launcher on a terminal of its own, with the test at the keyboard."""

    def __init__(self, *args, columns=87, **env):
        self.text = b""
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.execve(
                sys.executable, [sys.executable, "-m", "paceline", "run", *args], os.environ | {"TERM": "xterm"} | env
            )
        self.resize(columns)

    def resize(self, columns):
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def read_until(self, word, count=1, limit_s=20):
        deadline = time.monotonic() + limit_s
        while self.text.count(word) < count:
            ready, _, _ = select.select([self.screen], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {word!r} in {self.text!r}"
            try:
                data = os.read(self.screen, 4096)
            except OSError:
                data = b""
            assert data, f"ended without {word!r}: {self.text!r}"
            self.text += data
        return self.text

    def code(self, limit_s=20):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self.screen], [], [], 0.05)
            try:
                data = os.read(self.screen, 4096) if ready else None
            except OSError:
                data = b""
            if data == b"":
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.text += data or b""
        raise AssertionError(f"did not end: {self.text!r}")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)


def write(source):
    Path("train.py").write_text(textwrap.dedent(source))
    return "train.py"


def test_member_0_has_a_terminal_of_our_size_and_the_others_have_none():
    source = """
        import os, sys
        size = os.get_terminal_size() if sys.stdout.isatty() else None
        print(os.environ["PACELINE_RANK"], sys.stdout.isatty(), size and size.columns)
    """
    terminal = Terminal("-n", "2", write(source), columns=87)
    assert terminal.code() == 0
    assert b"\r\n0 True 87\r\n" in terminal.text
    assert re.search(rb"\x1b\[\d+m\[1\] \x1b\[0m1 False None\r\n", terminal.text)


def test_a_new_size_is_passed_on():
    source = """
        import os, signal, time
        if os.environ["PACELINE_RANK"] == "0":
            signal.signal(signal.SIGWINCH, lambda *_: print("now", os.get_terminal_size().columns, "wide"))
            print("ready")
            time.sleep(20)
    """
    terminal = Terminal("-n", "2", write(source))
    terminal.read_until(b"ready")
    terminal.resize(55)
    terminal.read_until(b"now 55 wide")
    os.write(terminal.screen, b"\x03")
    assert terminal.code() == 130


def test_ctrl_c_at_the_keyboard():
    terminal = Terminal("-n", "2", write("import os, time; print('up', os.getpid()); time.sleep(60)"))
    terminal.read_until(b"[1]")
    terminal.read_until(b"up", count=2)
    pids = [int(p) for p in re.findall(rb"up (\d+)", terminal.text)]
    os.write(terminal.screen, b"\x03")
    assert terminal.code() == 130
    assert b"stopped by Ctrl-C" in terminal.text
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_by_rank(env, coloured):
    terminal = Terminal("-n", "3", "--progress", "plain", write("print('hello')"), **env)
    assert terminal.code() == 0
    found = set(re.findall(rb"(\x1b\[\d+m)?\[\d\] ", terminal.text))
    assert (len(found) == 3) if coloured else found == {b""}


def test_the_log_of_a_display_does_not_keep_each_frame():
    source = """
        import os, sys, time
        for i in range(50 if os.environ["PACELINE_RANK"] == "0" else 0):
            sys.stdout.write(f"\\r\\x1b[2K\\x1b[1A\\x1b[2Kframe {i}\\nsecond line")
            sys.stdout.flush()
            time.sleep(0.01)
    """
    terminal = Terminal("-n", "1", "--name", "x", write(source))
    assert terminal.code() == 0
    assert b"frame 20" in terminal.text
    assert Path("runs/x/logs/rank-0.log").read_text() == "frame 49\nsecond line\n"


FRAME = b"\r\x1b[2K\x1b[1A\x1b[2K\x1b[1mepoch %d\x1b[0m\nloss"


def test_lines_slip_in_where_the_display_is_drawn_again(capsysbinary):
    screen = Screen(2)
    screen.raw(b"epoch 0\nloss")
    screen.line(1, "out", "hello")
    assert b"hello" not in capsysbinary.readouterr().out  # it would be written into the display
    screen.raw(FRAME % 1)
    assert capsysbinary.readouterr().out == FRAME[:13] + b"\r\x1b[2K[1] hello\n" + (FRAME % 1)[13:]
    screen.line(1, "out", "again")
    screen.raw(FRAME[:9])  # cut off in the middle of going up: not yet
    assert b"again" not in capsysbinary.readouterr().out
    screen.close()
    assert capsysbinary.readouterr().out == b"\n\x1b[?25h[1] again\n"


def test_lines_do_not_wait_for_ever(capsysbinary):
    screen = Screen(2)
    screen.raw(b"half a line")
    screen.line(1, "out", "hello")
    screen.tick()
    assert b"hello" not in capsysbinary.readouterr().out
    screen._since -= 2
    screen.tick()
    assert capsysbinary.readouterr().out == b"\n[1] hello\n"
