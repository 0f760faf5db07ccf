"""What a member says it does: cheap to say, whole to read, while it works and after it was killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from paceline.core.status import Status, read

WRITER = """
import sys, time
from pathlib import Path
from paceline.core.status import Status
end = time.monotonic() + 60  # also where nobody is left to kill it
status = Status(Path(sys.argv[1]))
n = 0
print("up", flush=True)
while time.monotonic() < end:
    n += 1
    for _ in range(n % 50 * 10): pass  # a step of up to some tens of microseconds
    status.at(n, -n)
    if n % 3 == 0:
        status.set(f"n {n} " + "x" * (n % 200))
"""


def test_a_step_is_told_without_changing_what_is_done(tmp_path: Path) -> None:
    status = Status(tmp_path / "rank-0")
    status.set("training")
    before = read(tmp_path / "rank-0", 0)
    time.sleep(0.01)
    status.at(7, 2)
    after = read(tmp_path / "rank-0", 0)
    assert before is not None
    assert after is not None
    assert (after.step, after.epoch, after.what) == (7, 2, "training")
    assert (after.pid, after.since > before.since) == (before.pid, True)
    assert (status.step, status.epoch) == (7, 2)
    status.set("evaluating")
    last = read(tmp_path / "rank-0", 0)
    assert last is not None
    assert (last.step, last.epoch, last.what) == (7, 2, "evaluating")
    Status(None).at(1, 1)  # a run that keeps no status


def test_records_are_read_whole_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen = set()
        began = time.monotonic()
        while len(seen) < 1000 and time.monotonic() - began < 60:
            doing = read(path, 0)
            assert doing is not None
            assert doing.epoch == -doing.step
            if doing.what.startswith("n "):
                _, told, *rest = doing.what.split()
                assert 0 <= doing.step - int(told) <= 3
                assert len("".join(rest)) == int(told) % 200
            seen.add(doing.step)
    finally:
        writer.kill()
        writer.communicate()
    assert len(seen) == 1000


def test_a_member_that_was_killed_while_it_wrote_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    Status(path).set("training")
    data = bytearray(path.read_bytes())
    data[0] |= 1
    path.write_bytes(data)
    doing = read(path, 0)
    assert doing is not None
    assert doing.what == "training"


def test_who_comes_after_leaves_the_one_before_alone(tmp_path: Path) -> None:
    old = Status(tmp_path / "rank-0")
    new = Status(tmp_path / "rank-0")
    new.at(5, 1)
    old.at(9, 9)
    doing = read(tmp_path / "rank-0", 0)
    assert doing is not None
    assert (doing.step, doing.epoch) == (5, 1)
