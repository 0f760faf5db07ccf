"""Links broken while programs run: partitions of both kinds, resets, a slow link, a byte that was flipped."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from paceline.core.errors import ConfigError
from paceline.testing.hosts import Hosts

needs_hosts = pytest.mark.skipif(bool(Hosts.missing(delay=True)), reason=Hosts.missing(delay=True))

# One datagram a few milliseconds to everybody; whoever is heard is printed now and then.
HEARD = """
import os, socket, time
me, size = int(os.environ["HOSTS_RANK"]), int(os.environ["HOSTS_SIZE"])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 7001))
s.settimeout(0.005)
heard, told = set(), time.monotonic()
while True:
    for i in range(size):
        try:
            s.sendto(bytes([me]), (f"10.77.0.{i + 1}", 7001))
        except OSError:
            pass
    try:
        while True:
            heard.add(s.recv(1)[0])
    except OSError:
        pass
    if time.monotonic() - told > 0.1:
        print(*sorted(heard - {me}), flush=True)
        heard, told = set(), time.monotonic()
"""


class Ears:
    """Who hears whom, as (from, to)."""

    def __init__(self, hosts: Hosts) -> None:
        streams = {"stdout": subprocess.PIPE, "text": True}
        self._programs = [hosts.popen(i, [sys.executable, "-c", HEARD], **streams) for i in range(hosts.count)]

    def now(self) -> set[tuple[int, int]]:
        pairs = set()
        for i, program in enumerate(self._programs):
            assert program.stdout is not None
            pairs |= {(int(word), i) for word in program.stdout.readline().split()}
        return pairs

    def become(self, pairs: set[tuple[int, int]]) -> bool:
        """Whether it is so within a few seconds, and stays so for a while."""
        deadline = time.monotonic() + 10
        same = 0
        while same < 2 and time.monotonic() < deadline:
            same = same + 1 if self.now() == pairs else 0
        return same == 2


def pairs(*groups: str) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for group in groups for a in group for b in group if a != b}


@needs_hosts
@pytest.mark.parametrize("delay_ms", [0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_groups_are_parted_both_ways_or_one_way_and_healed(delay_ms: float) -> None:
    with Hosts(3, delay_ms=delay_ms) as hosts:
        ears = Ears(hosts)
        assert ears.become(pairs("012"))
        hosts.partition([0])
        assert ears.become(pairs("12"))
        hosts.heal()
        assert ears.become(pairs("012"))
        hosts.partition([0], way="out")  # ARP is asked again when what is known has expired: others still answer it
        assert ears.become(pairs("012") - {(0, 1), (0, 2)})
        hosts.partition([1], [2], way="in")
        assert ears.become(pairs("012") - {(0, 1), (0, 2), (2, 1)})
        hosts.heal([1], [2])
        assert ears.become(pairs("012") - {(0, 1), (0, 2)})
        hosts.heal()
        assert ears.become(pairs("012"))


# Reads a stream of a known byte; prints what it got when it is not that, and how the stream ended.
READ = """
import socket, sys
server = socket.create_server(("", 7002))
print("up", flush=True)
connection, _ = server.accept()
print("met", flush=True)
place, wrong = 0, []
try:
    while data := connection.recv(1 << 16):
        wrong += [place + i for i, b in enumerate(data) if b != 7] if data.strip(b"\\7") else []
        place += len(data)
    print("end", *wrong, flush=True)
except ConnectionError as error:
    print(type(error).__name__, flush=True)
"""
WRITE = """
import socket, sys, time
with socket.create_connection(("10.77.0.2", 7002), 10) as s:
    print("met", flush=True)
    sys.stdin.readline()
    s.sendall(b"\\7" * int(sys.argv[1]))
    if not int(sys.argv[1]):
        try:
            s.recv(1)
        except ConnectionError as error:
            print(type(error).__name__, flush=True)
"""


def stream(hosts: Hosts, count: int) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """A reader on host 1 and a writer on host 0 that have met; the writer writes when it is told."""
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
    reader = hosts.popen(1, [sys.executable, "-c", READ], **pipes)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "up\n"
    writer = hosts.popen(0, [sys.executable, "-c", WRITE, str(count)], **pipes)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "met\n"
    assert reader.stdout.readline() == "met\n"
    return reader, writer


@needs_hosts
def test_connections_are_reset_at_both_ends() -> None:
    with Hosts(2) as hosts:
        reader, writer = stream(hosts, 0)
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
        time.sleep(0.2)  # it waits for an answer by now
        hosts.reset(1)
        told = [reader.communicate(timeout=10)[0], writer.communicate(timeout=10)[0]]
        assert told == ["ConnectionAbortedError\n", "ConnectionResetError\n"]


@needs_hosts
def test_one_byte_is_flipped_where_it_was_asked_for() -> None:
    with Hosts(2, delay_ms=0.1) as hosts:
        reader, writer = stream(hosts, 3_000_000)
        hosts.corrupt(0, after_bytes=1_500_000)
        hosts.corrupt(0, after_bytes=2_000_000)
        time.sleep(0.2)
        writer.communicate("\n", timeout=20)
        word, *places = reader.communicate(timeout=20)[0].split()
        assert word == "end"
        assert len(places) == 2
        for place, asked in zip(places, (1_500_000, 2_000_000)):
            assert asked - 200_000 < int(place) <= asked  # what a busy machine sends again counts too


@needs_hosts
def test_only_a_host_that_was_asked_for_dies() -> None:
    with Hosts(2) as hosts:
        programs = [hosts.popen(i, ["sleep", "100"]) for i in (0, 0, 1)]
        hosts.kill(0)
        assert [programs[0].wait(5), programs[1].wait(5), programs[2].poll()] == [-9, -9, None]
        assert hosts.pids(0) == []
        assert hosts.pids(1) == [programs[2].pid]


def test_bad_input() -> None:
    hosts = Hosts(3)
    with pytest.raises(ConfigError, match=r"hosts=\[0, 3\]"):
        hosts.partition([0, 3])
    with pytest.raises(ConfigError, match="none in both"):
        hosts.partition([0, 1], [1, 2])
    with pytest.raises(ConfigError, match="did you mean 'both'"):
        hosts.partition([0], way="bot")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give a delay"):
        hosts.corrupt(0)
