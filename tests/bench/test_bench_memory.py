"""bench.memory's two ways to count, on members whose memory is known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench._memory_marks import Charged, Mark, Sampled, best

MB = 1 << 20
MEMBER = """
import mmap, sys, time

def take(fd, megabytes, write=True):
    memory = mmap.mmap(fd, megabytes << 20)
    for at in range(0, megabytes << 20, mmap.PAGESIZE):
        if write:
            memory[at] = 1
        memory[at]
    return memory

file = open(sys.argv[1], "r+b")
print("here", flush=True)
for line in sys.stdin:
    match line.split():
        case "hold", number:
            private = take(-1, int(number))
        case "share", number:
            shared = take(file.fileno(), int(number))
        case "read", number:
            shared = take(file.fileno(), int(number), write=False)
        case "touch", number, seconds:
            passing = take(-1, int(number))  # gone again when this is answered
            time.sleep(float(seconds))
            passing.close()
    print("done", flush=True)
"""


class Member:
    def __init__(self, shared: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", MEMBER, shared], stdin=pipe, stdout=pipe, text=True)
        self.answer()

    def answer(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        self.answer()


@pytest.fixture(params=[Charged, Sampled])
def marked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[tuple[Member, Mark]]]:
    if request.param is Charged and best() is not Charged:
        pytest.skip("needs root and control groups of version 1")
    shared = Path("/dev/shm") / f"bench-memory-{tmp_path.name}"
    shared.write_bytes(b"")
    with ExitStack() as stack, shared.open("r+b") as file:
        stack.callback(shared.unlink)
        file.truncate(30 * MB)
        found = []
        for _ in range(2):
            member = Member(shared)
            mark = request.param(member.process.pid)
            stack.callback(mark.close)
            stack.callback(member.process.communicate)
            found.append((member, mark))
        yield found


def test_shared_memory_counts_once(marked: list[tuple[Member, Mark]]) -> None:
    before = [mark.now() for _, mark in marked]
    for _, mark in marked:
        mark.restart()
    for (member, _), what in zip([*marked, *marked], ["hold 20", "hold 20", "share 30", "read 30"]):
        member.tell(what)
    now = sum(mark.now() for _, mark in marked) - sum(before)
    assert 69.5 * MB < now < 74 * MB  # resident pages would be 100 MB
    peaks = [mark.peak() - had for (_, mark), had in zip(marked, before)]
    if isinstance(marked[0][1], Charged):
        assert 49.5 * MB < peaks[0] < 52 * MB  # who has made it
        assert 19.5 * MB < peaks[1] < 22 * MB


def test_what_has_come_and_gone_is_in_the_peak_of_its_stage(marked: list[tuple[Member, Mark]]) -> None:
    (member, mark), _ = marked
    before = mark.now()
    mark.restart()
    for _ in range(1 if isinstance(mark, Charged) else 30):  # who samples may miss it
        member.tell(f"touch 40 {0 if isinstance(mark, Charged) else 0.2}")
        if mark.peak() - before > 30 * MB:
            break
    assert 39.5 * MB < mark.peak() - before < 42 * MB
    mark.restart()
    assert mark.peak() - before < 2 * MB
