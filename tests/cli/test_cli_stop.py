"""`paceline stop` and `paceline logs`, on runs that really run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli import logs
from paceline.launch import reach, record
from paceline.membership import agent_line

LIMIT_S = 120.0
ALONE = """
import time
print("here", flush=True)
time.sleep(600)
"""


def paceline(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


def begin(cwd: Path, script: str, *options: str) -> subprocess.Popen[str]:
    (cwd / "train.py").write_text(script)
    command = [sys.executable, "-m", "paceline", "run", "--name", "big", *options, "train.py"]
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and "here" not in paceline("logs", "big", cwd=cwd).stdout:
        assert process.poll() is None, process.communicate()[0]
    return process


def test_a_run_is_stopped_and_its_logs_stay(tmp_path: Path) -> None:
    with begin(tmp_path, ALONE, "-n", "2") as process:
        done = paceline("stop", "big", cwd=tmp_path)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "ended with exit code 143" in done.stdout
    assert process.returncode == 143, out
    told = paceline("logs", "big", cwd=tmp_path).stdout
    assert sorted(re.findall(r"\[(\d)\] here", told)) == ["0", "1"]
    assert re.findall(r"\[(\d)\] here", paceline("logs", "big", "--rank", "1", cwd=tmp_path).stdout) == ["1"]
    again = paceline("stop", "big", cwd=tmp_path)
    assert again.returncode == 2
    assert "is not running here: ended with exit code 143" in again.stderr


def test_a_variable_that_is_not_set_is_not_the_newest_run(tmp_path: Path) -> None:
    """As in paceline stop "$RUN"."""
    with begin(tmp_path, ALONE, "-n", "1") as process:
        try:
            for words in (["stop", ""], ["scale", "", "2"], ["logs", ""], ["status", ""]):
                done = paceline(*words, cwd=tmp_path)
                assert (done.returncode, "'' names no run: give its name" in done.stderr) == (2, True), done
            assert process.poll() is None
        finally:
            process.kill()


def test_followed_logs_end_with_the_run(tmp_path: Path) -> None:
    script = "import time\nprint('here', flush=True)\ntime.sleep(3)\nprint('last', end='')\n"
    with begin(tmp_path, script, "-n", "1") as process:
        done = paceline("logs", "big", "--follow", cwd=tmp_path)
        process.communicate(timeout=LIMIT_S)
    assert done.stdout.splitlines() == ["[0] here", "[0] last"]


def test_a_member_that_there_is_not(tmp_path: Path) -> None:
    with begin(tmp_path, "print('here')", "-n", "1") as process:
        process.communicate(timeout=LIMIT_S)
    done = paceline("logs", "big", "--rank", "1", cwd=tmp_path)
    assert (done.returncode, "has members 0 to 0" in done.stderr) == (2, True)
    assert paceline("logs", "big", "--lines", "0", cwd=tmp_path).stdout == ""


@pytest.mark.slow
def test_the_scheduler_ends_a_run_whose_launcher_is_elsewhere(tmp_path: Path) -> None:
    with begin(tmp_path, ALONE, "-n", "1:2") as process:
        where = reach.read(tmp_path / "runs" / "big")
        assert where
        assert agent_line.halt(where.address, where.token, drain=False) == "the run ends"
        out, _ = process.communicate(timeout=LIMIT_S)
    assert "the run was stopped" in out
    assert process.returncode != 0
    run = record.read(tmp_path / "runs" / "big")
    assert run
    assert run.finished


def test_a_log_that_is_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("old\n")
    tail = logs._Tail(path, 0)
    assert tail.first(None, last=False) == ["old"]
    (tmp_path / "new").write_text("longer than the old one\n")
    (tmp_path / "new").replace(path)
    assert list(tail.more(last=False)) == ["longer than the old one"]
