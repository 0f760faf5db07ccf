"""The display while a run goes on: what it writes to a pipe, and what a person sees on a real terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.events import Event
from paceline.train.pace import Pace
from paceline.train.progress import make_progress


def step(step: int, at: float, *, epoch: int = 0, **fields: object) -> Event:
    times = {"samples": 100, "data_s": 0.1, "compute_s": 0.6, "wait_s": 0.3}
    return {"kind": "step", "time": at, "rank": 0, "epoch": epoch, "step": step, **times, **fields}


# Pace


def test_rate_and_split_are_of_the_last_seconds() -> None:
    pace = Pace()
    for second in range(1, 61):  # a slow minute, then a fast one
        pace.take(step(second, second, samples=10, data_s=1.0, compute_s=0.0, wait_s=0.0))
    assert pace.samples_per_s() == pytest.approx(10)
    assert pace.split() == (1.0, 0.0, 0.0)
    for second in range(61, 121):
        pace.take(step(second, second, samples=1000, data_s=0.0, compute_s=0.75, wait_s=0.25))
    assert pace.samples_per_s() == pytest.approx(1000, rel=1e-3)
    assert pace.split() == pytest.approx((0.0, 0.75, 0.25), abs=1e-3)


def test_time_left_counts_what_happens_between_epochs() -> None:
    pace = Pace()
    pace.take({"kind": "start", "time": 0.0})
    pace.take({"kind": "epoch", "time": 100.0, "epoch": 0, "epochs": 4, "steps": 2})  # set-up took 100 s
    pace.take(step(1, 101.0))
    assert pace.left_s() == pytest.approx(7.0)
    pace.take(step(2, 102.0))
    pace.take({"kind": "epoch", "time": 104.0, "epoch": 1, "epochs": 4, "steps": 2})  # evaluation took 2 s
    pace.take(step(3, 105.0, epoch=1))
    assert pace.left_s() == pytest.approx(5 * 5 / 3, rel=0.05)
    assert (pace.within(), pace.done()) == (1, 3 / 8)


def test_who_comes_within_a_run_counts_from_the_epoch_it_is_told() -> None:
    pace = Pace()
    pace.take({"kind": "epoch", "time": 100.0, "epoch": 2, "epochs": 4, "steps": 10, "step": 20})
    pace.take(step(25, 105.0, epoch=2))
    assert pace.where() == "epoch 3/4"
    assert (pace.within(), pace.left_s()) == (5, pytest.approx(15.0))


def test_who_leads_from_within_an_epoch_tells_the_time_left_by_the_steps_since() -> None:
    pace = Pace()
    pace.take({"kind": "epoch", "time": 100.0, "epoch": 0, "epochs": 1, "steps": 1000, "step": 0})  # it came at 200
    pace.take({"kind": "view", "time": 105.0, "size": 2, "step": 250, "steps": 600})
    pace.take(step(260, 106.0))
    assert (pace.within(), pace.left_s()) == (260, pytest.approx(34.0))
    pace.take({"kind": "view", "time": 106.0, "size": 1, "step": 260, "steps": 940})
    assert pace.left_s() == pytest.approx(68.0)


def test_without_totals_there_is_no_time_left_until_an_epoch_was_seen() -> None:
    pace = Pace()
    pace.take({"kind": "epoch", "time": 0.0, "epoch": 0, "epochs": 2})
    pace.take(step(1, 1.0))
    pace.take(step(5, 5.0))
    assert pace.left_s() is None
    assert pace.done() is None
    pace.take({"kind": "epoch", "time": 5.0, "epoch": 1, "epochs": 2})
    pace.take(step(6, 6.0, epoch=1))
    assert pace.epoch_steps == 5
    assert pace.left_s() == pytest.approx(4.0, rel=1e-3)


def test_a_run_resumed_within_an_epoch_knows_where_it_is() -> None:
    told, untold = Pace(), Pace()
    for pace, extra in ((told, {"step": 10, "steps": 10}), (untold, {})):
        pace.take({"kind": "start", "time": 0.0, "resumed_step": 17})
        pace.take({"kind": "epoch", "time": 1.0, "epoch": 1, "epochs": 3, **extra})
        pace.take(step(18, 2.0, epoch=1))
    assert (told.within(), told.left_s()) == (8, pytest.approx(12.0))
    untold.take(step(20, 4.0, epoch=1))
    untold.take({"kind": "epoch", "time": 4.0, "epoch": 2, "epochs": 3})
    assert untold.epoch_steps is None  # three steps were seen of an epoch of ten


# Plain lines


def plain(events: list[Event]) -> list[str]:
    stream = io.StringIO()
    progress = make_progress("auto", stream)  # a StringIO is no terminal
    for event in events:
        progress(event)
    progress.close()
    return stream.getvalue().splitlines()


def test_plain_lines() -> None:
    lines = plain(
        [
            {
                "kind": "start",
                "time": 0.0,
                "name": "digits",
                "size": 2,
                "strategy": "allreduce",
                "device": "cpu",
            },
            {"kind": "epoch", "time": 0.0, "epoch": 0, "epochs": 2, "steps": 3},
            step(1, 1.0, scalars={"loss": 2.5}),
            step(2, 2.0, scalars={"loss": 1.5}),
            step(3, 3.0, scalars={"loss": 0.12341, "lr": 0.1}),
            {"kind": "metric", "time": 3.0, "name": "accuracy", "value": 0.9722, "step": 3, "epoch": 0},
            {
                "kind": "checkpoint",
                "time": 3.0,
                "step": 3,
                "path": "c/3",
                "seconds": 0.25,
                "bytes": 2_500_000,
            },
            {"kind": "epoch", "time": 3.0, "epoch": 1, "epochs": 2, "steps": 3},
            step(5, 5.0, epoch=1, scalars={"loss": "nan"}),
            {"kind": "warning", "time": 5.0, "message": "two\nlines"},
            {"kind": "checkpoint_failed", "time": 5.0, "reason": "disk full"},
            {"kind": "end", "time": 5.0, "outcome": "stopped", "step": 5, "seconds": 65},
        ]
    )
    split = "100 samples/s  data 10% compute 60% wait 30%"
    assert lines == [
        "run digits  2 members  allreduce  cpu",
        f"epoch 1/2  step 3  loss 0.1234  lr 0.1000  {split}  left 0:03",
        "epoch 1/2  step 3  accuracy 0.9722",
        "checkpoint  step 3  2.5 MB in 0.25 s  c/3",
        "warning: two lines",
        "warning: checkpoint not written: disk full",
        f"epoch 2/2  step 5  loss nan  lr 0.1000  {split}  left 0:01",
        "stopped  step 5  after 1:05",
    ]


def test_the_line_of_an_epoch_shows_the_means_over_it() -> None:
    events: list[Event] = [{"kind": "epoch", "time": 0.0, "epoch": 0, "epochs": 2, "steps": 2}]
    events += [step(n, float(n), scalars={"loss": 9.0, "lr": 0.5}) for n in (1, 2)]
    means = [
        {"kind": "metric", "time": 2.0, "name": "epoch/loss", "value": 7.0, "step": 2},
        {"kind": "metric", "time": 2.0, "name": "epoch/lr", "value": 0.25, "step": 2},
    ]
    stream = io.StringIO()
    progress = make_progress("plain", stream)
    for event in [*events, *means]:
        progress(event)
    # Told with the last of the means, not only when something else happens.
    assert re.findall("loss.*?  lr.*?  ", stream.getvalue()) == ["loss 7.000  lr 0.2500  "]
    again = plain([*events, means[0], {"kind": "epoch", "time": 3.0, "epoch": 1}, step(3, 4.0, epoch=1)])
    assert [line.split("  ")[:4] for line in again] == [
        ["epoch 1/2", "step 2", "loss 7.000", "lr 0.5000"],
        ["epoch 2/2", "step 3", "loss 9.000", "lr 0.5000"],  # the means of one epoch are not those of the next
    ]


def test_tiny_epochs_and_frequent_checkpoints_are_thinned_out() -> None:
    events: list[Event] = []
    for epoch in range(1000):
        events.append({"kind": "epoch", "time": epoch, "epoch": epoch, "epochs": 1000, "steps": 1})
        events.append(step(epoch + 1, epoch + 1.0, epoch=epoch))
        events.append({"kind": "checkpoint", "time": epoch, "step": epoch + 1, "path": "c", "bytes": 1})
    lines = plain([*events, {"kind": "end", "time": 1000.0, "outcome": "finished"}])
    assert sum(line.startswith("checkpoint") for line in lines) == 1
    assert 100 < sum(line.startswith("epoch") for line in lines) < 120
    assert lines[-1].startswith("epoch 1000/1000")


def test_an_epoch_of_unknown_length_is_shown_when_the_next_begins() -> None:
    lines = plain(
        [
            {"kind": "epoch", "time": 0.0, "epoch": 0},
            step(7, 1.0),
            {"kind": "epoch", "time": 1.0, "epoch": 1},
            step(9, 2.0, epoch=1),
        ]
    )
    assert [line.split("  ")[:2] for line in lines] == [["epoch 1", "step 7"], ["epoch 2", "step 9"]]


def test_plain_lines_within_an_epoch_are_seconds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    progress = make_progress("plain", stream)
    progress({"kind": "epoch", "time": 0.0, "epoch": 0, "epochs": 1, "steps": 10_000})
    for number in range(1, 301):  # thirty seconds, ten events each
        clock[0] += 0.1
        progress(step(number, number / 10))
    assert 5 <= len(stream.getvalue().splitlines()) <= 6


def test_no_line_comes_just_before_that_of_the_epochs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    progress = make_progress("plain", stream)
    progress({"kind": "epoch", "time": 0.0, "epoch": 0, "epochs": 1, "steps": 52})
    for number in range(1, 53):  # a line is due at step 50
        clock[0] += 0.1
        progress(step(number, number / 10))
    progress({"kind": "metric", "time": 5.2, "name": "epoch/loss", "value": 0.5, "step": 52})
    progress.close()
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == ["step 52"]


def test_modes() -> None:
    stream = io.StringIO()
    off = make_progress("off", stream)
    off(step(1, 1.0))
    off.line("text")
    off.close()
    assert stream.getvalue() == ""
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        make_progress("plian")


def test_odd_events_do_not_reach_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress("plain", io.StringIO())
    progress({"kind": "step", "step": "seven"})
    progress({"kind": "step", "step": 8})
    said = capsys.readouterr().err
    assert said.count("the progress display stopped") == 1


def run_script(body: str, tmp_path: Path, **streams: object) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(_HEAD.format(done=str(tmp_path / "done")) + textwrap.dedent(body))
    return subprocess.Popen([sys.executable, str(script)], text=True, **streams)  # type: ignore[call-overload,no-any-return]


_HEAD = """\
import logging, os, sys, time
logging.basicConfig(level=logging.INFO, format="log %(message)s")
from pathlib import Path
from paceline.core.events import Events
from paceline.train.progress import make_progress

def begin(mode="auto", stream=None, **more):
    global progress, events
    progress = make_progress(mode, stream)
    events = Events(0, [progress])
    events.emit("start", size=2, name="digits", strategy="allreduce", device="cpu")
    events.emit("epoch", epoch=0, epochs=2, steps=1000, step=0)

def step(n, loss=0.5):
    times = dict(data_s=0.002, compute_s=0.09, wait_s=0.008)
    events.emit("step", epoch=0, step=n, samples=64, scalars={{"loss": loss}}, **times)

def done(text="done"):
    Path({done!r}).write_text(text)

"""


@pytest.mark.parametrize("mode", ["plain", "rich"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_broken_pipe_does_not_stop_the_run(tmp_path: Path, stream: str, mode: str) -> None:
    process = run_script(
        f"""
        begin({mode!r}, sys.{stream})
        for n in range(1, 40):
            events.emit("warning", message="x" * 1000)
            step(n)
            time.sleep(0.01)
        events.emit("end", outcome="finished", step=n, seconds=1.0, members=[])
        progress.close()
        done()
        """,
        tmp_path,
        **{stream: subprocess.PIPE},
    )
    pipe = getattr(process, stream)
    assert "digits" in pipe.readline()
    pipe.close()
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "done").read_text() == "done"


# On a terminal


class Screen:
    """As much of a terminal as the display uses; anything else fails the test."""

    _PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        at = 0
        while match := self._PARTS.match(text, at):
            at = match.end()
            self._take(match)
        assert at == len(text), f"not understood: {text[at : at + 20]!r}"

    def _take(self, match: re.Match[str]) -> None:
        text, command = match[0], match[2]
        if text == "\r":
            self.column = 0
        elif text == "\n":
            self._down()
        elif command == "A":
            self.row = max(self.row - int(match[1] or 1), 0)
        elif text == "\x1b[2K":
            self.rows[self.row] = ""
        elif command is None:
            for character in text:
                if self.column == self.columns:
                    self.column = 0
                    self._down()
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1
        else:
            assert command == "m", f"not understood: {text!r}"

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def lines(self) -> list[str]:
        return [row.rstrip() for row in self.rows if row.strip()]


def on_terminal(
    body: str, tmp_path: Path, columns: int = 100, hang_up_at: str = "", stdout: int | None = None
) -> tuple[str, int]:
    """Runs a script on a terminal of its own; returns everything that it wrote there, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = os.environ | {"TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    out = theirs if stdout is None else stdout
    process = run_script(body, tmp_path, stdin=theirs, stdout=out, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    seen = b""
    try:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the last holder of the other side is gone
                break
            seen += part
            if not part or (hang_up_at and hang_up_at.encode() in seen):
                break
    finally:
        os.close(ours)
        try:
            code = process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return seen.decode(), code


def screen_of(text: str, columns: int = 100) -> list[str]:
    screen = Screen(columns)
    screen.feed(text)
    return screen.lines()


def test_two_living_lines_below_everything_else(tmp_path: Path) -> None:
    text, code = on_terminal(
        """
        begin()
        for n in range(1, 13):
            step(n, loss=1 / n)
            time.sleep(0.15)
            if n == 2:
                print("printed", n)
                print("to stderr", file=sys.stderr)
            if n == 4:
                print("dots ", end="", flush=True)
            if n in (5, 6, 7):
                print(".", end="", flush=True)
            if n == 8:
                print(" end")
                logging.info("from a handler that is older than the display")
            if n == 10:
                events.emit("metric", name="acc [red]", value=0.5, step=n)
                events.emit("warning", message="odd")
                progress.line("from another member")
        events.emit("end", outcome="finished", step=n, seconds=1.2, members=[])
        progress.close()
        print("last words")
        """,
        tmp_path,
    )
    assert code == 0
    assert "\x1b[36m" in text  # colours
    *above, where, how, last = screen_of(text)
    assert above == [
        "run digits  2 members  allreduce  cpu",
        "printed 2",
        "to stderr",
        "dots ... end",
        "log from a handler that is older than the display",
        "epoch 1/2  step 10  acc [red] 0.5000",
        "warning: odd",
        "from another member",
    ]
    assert re.fullmatch(r"epoch 1/2  [━─]{60}  step 12/1000  in 0:0\d", where)
    assert re.fullmatch(r"loss 0.08333  640 samples/s  ━{16}  data 2% compute 90% wait 8%", how)
    assert last == "last words"


def test_lines_never_fold_on_a_narrow_terminal(tmp_path: Path) -> None:
    text, code = on_terminal(
        """
        begin()
        for n in range(1, 5):
            step(n, loss=1 / n)
            time.sleep(0.12)
        done()
        """,
        tmp_path,
        columns=30,
    )
    assert code == 0
    lines = screen_of(text, 30)
    assert [line[:9] for line in lines] == ["run digit", "ce  cpu", "epoch 1/2", "loss 0.25"]
    assert all(len(line) < 30 for line in lines[2:])


def test_drawing_is_thinned_out(tmp_path: Path) -> None:
    text, code = on_terminal(
        """
        begin()
        began = time.time()
        while time.time() - began < 1.0:
            step(1)
        """,
        tmp_path,
    )
    assert code == 0
    draws = text.count("samples/s")
    assert 2 <= draws <= 13


def test_a_failing_script_leaves_its_traceback_and_a_cursor(tmp_path: Path) -> None:
    text, code = on_terminal(
        """
        begin()
        step(1)
        raise ArithmeticError("boom")
        """,
        tmp_path,
    )
    assert code == 1
    lines = screen_of(text)
    assert "ArithmeticError: boom" in lines
    assert sum(line.startswith("epoch 1/2") for line in lines) == 1
    assert "\x1b[?25l" not in text  # hidden cursors are what killed programs leave behind
    assert text.endswith("\n")  # the prompt of the shell begins a line


def test_a_terminal_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    _, code = on_terminal(
        """
        import signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        begin()
        for n in range(1, 30):
            step(n)
            time.sleep(0.02)
            events.emit("warning", message="still here")
        progress.close()
        done()
        """,
        tmp_path,
        hang_up_at="still here",
    )
    assert (tmp_path / "done").read_text() == "done"
    assert code == 0


def test_the_users_print_goes_on_when_our_stream_is_closed(tmp_path: Path) -> None:
    text, code = on_terminal(
        """
        begin()
        step(1)
        sys.stderr.close()
        print("still here")
        step(2)
        progress.close()
        done()
        """,
        tmp_path,
    )
    assert (tmp_path / "done").read_text() == "done"
    assert "still here" in text
    assert code == 0


def test_output_to_a_file_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        text, code = on_terminal(
            """
            begin()
            for n in range(1, 4):
                step(n)
                print("row", n)
                time.sleep(0.11)
            for n in range(4, 14):
                print("row", n)
                time.sleep(0.06)
            """,
            tmp_path,
            stdout=out.fileno(),
        )
    assert code == 0
    assert (tmp_path / "out").read_text() == "".join(f"row {n}\n" for n in range(1, 14))
    assert text.count("\x1b[2K") < 12  # what is not on the terminal does not disturb it
    assert [line[:9] for line in screen_of(text)] == ["run digit", "epoch 1/2", "loss 0.50"]


def test_a_forked_child_prints_while_another_thread_draws(tmp_path: Path) -> None:
    # The lock of the display may be held by the drawing thread when the child is born.
    text, code = on_terminal(
        """
        import threading
        begin()
        stop = threading.Event()
        def draw():
            while not stop.is_set():
                progress.line("above")
        thread = threading.Thread(target=draw)
        thread.start()
        for n in range(30):
            child = os.fork()
            if child == 0:
                print("from the child")
                step(n)
                os._exit(0)
            began = time.time()
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.time() - began > 5:
                    os.kill(child, 9)
                    done("the child hangs")
                    os._exit(3)
                time.sleep(0.001)
        stop.set()
        thread.join()
        done()
        """,
        tmp_path,
    )
    assert (tmp_path / "done").read_text() == "done"
    assert code == 0
    assert "from the child" in text


def test_streams_are_given_back(tmp_path: Path) -> None:
    text, code = on_terminal(
        """
        begin()
        step(1)
        assert "write" in sys.stdout.__dict__ and "write" in sys.stderr.__dict__
        progress.close()
        assert "write" not in sys.stdout.__dict__ and "write" not in sys.stderr.__dict__
        done()
        """,
        tmp_path,
    )
    assert code == 0, text
