"""Hosts: connected, as fast and as far apart as asked for, and gone after any end of their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, PacelineError, TimedOut
from paceline.testing.hosts import Hosts, bits_per_s, clean

needs_hosts = pytest.mark.skipif(bool(Hosts.missing(delay=True)), reason=Hosts.missing(delay=True))

ECHO = """
import socket
server = socket.create_server(("", 7000))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 20):
            connection.sendall(data[-1:])
"""
PING = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), float(sys.argv[2])) as s:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        s.sendall(b"x")
        s.recv(1)
        times.append(time.perf_counter() - start)
print(min(times))
"""
STREAM = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), 10) as s:
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    block, end, sent = bytes(65536), time.perf_counter() + float(sys.argv[2]), 0
    start = time.perf_counter()
    while time.perf_counter() < end:
        s.sendall(block)
        sent += len(block)
    s.shutdown(socket.SHUT_WR)
    while s.recv(1 << 16):
        pass
    print(8 * sent / (time.perf_counter() - start))
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def serve(hosts: Hosts, host: int) -> None:
    program = hosts.popen(host, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "up\n"
    program.stdout.close()


def measure(hosts: Hosts, source: int, target: int, code: str, word: str) -> float | None:
    argv = [sys.executable, "-c", code, hosts.ips[target], word]
    program = hosts.popen(source, argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    out, _ = program.communicate(timeout=30)
    return float(out) if program.returncode == 0 else None


def best_rate(hosts: Hosts, source: int, target: int) -> float:
    """Bits per second of a stream; of three, since a busy machine can only slow it down."""
    return max(measure(hosts, source, target, STREAM, "0.5") or 0.0 for _ in range(3))


@needs_hosts
@pytest.mark.parametrize("delay_ms", [0, 1])
def test_every_pair_is_connected_and_nothing_is_left(delay_ms: float) -> None:
    with Hosts(3, delay_ms=delay_ms) as hosts:
        for i in range(3):
            serve(hosts, i)
        for i in range(3):
            for j in range(3):
                assert measure(hosts, i, j, PING, "5") is not None
        pids = [program.pid for program in hosts._programs]
        assert hosts._guard is not None
        pids.append(hosts._guard.pid)
        assert hosts._name in namespaces()
    assert hosts._name not in namespaces()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@needs_hosts
def test_hosts_see_only_each_other() -> None:
    with Hosts(2) as hosts:
        done = hosts.run(["ip", "-o", "-4", "addr"])
    for finished, address in zip(done, ("10.77.0.1/24", "10.77.0.2/24")):
        lines = finished.output.splitlines()
        assert len(lines) == 2
        assert "127.0.0.1/8" in lines[0]
        assert address in lines[1]


@needs_hosts
def test_run_gives_environment_output_and_codes() -> None:
    with Hosts(3) as hosts:
        line = "echo $HOSTS_RANK/$HOSTS_SIZE $HOSTS_IP $HOSTS_FIRST_IP $MORE; "
        done = hosts.run(["sh", "-c", line], env={"MORE": "more"})
        assert [f.output for f in done] == [f"{i}/3 10.77.0.{i + 1} 10.77.0.1 more\n" for i in range(3)]
        start = time.monotonic()
        done = hosts.run(
            ["sh", "-c", "[ $HOSTS_RANK = 1 ] && exit 3; exec sleep 60"]
        )  # a shell could tell of its child's death before its own
        assert [f.code for f in done] == [-signal.SIGKILL, 3, -signal.SIGKILL]
        assert time.monotonic() - start < 10


@needs_hosts
def test_run_at_its_limit_kills_grandchildren_too() -> None:
    with Hosts(2) as hosts:
        with pytest.raises(TimedOut, match=r"hosts \[0, 1\] did not finish sh within 0.5 s"):
            hosts.run(["sh", "-c", "echo here; (trap '' TERM; sleep 1000) & wait"], limit_s=0.5)
        for space in hosts._spaces:
            out = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True)
            assert out.stdout == ""


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("delay_ms", [0, 5])
def test_rate_and_delay_hold(delay_ms: float) -> None:
    with Hosts(2, rate=["100mbit", "20mbit"], delay_ms=delay_ms) as hosts:
        serve(hosts, 1)
        serve(hosts, 0)
        trips_s = [measure(hosts, 0, 1, PING, "5") or 9.0 for _ in range(3)]
        assert 2e-3 * delay_ms <= min(trips_s) < 2e-3 * delay_ms + 5e-3
        for source, target in ((0, 1), (1, 0)):  # the slower card decides, at either end
            assert 0.75 < best_rate(hosts, source, target) / 20e6 < 1.05
        hosts.set_rate(1, "100mbit")
        assert 0.7 < best_rate(hosts, 0, 1) / 100e6 < 1.05


@needs_hosts
@pytest.mark.parametrize("delay_ms", [0, 1])
def test_a_cut_cable_can_be_restored(delay_ms: float) -> None:
    with Hosts(2, delay_ms=delay_ms) as hosts:
        serve(hosts, 0)
        assert measure(hosts, 1, 0, PING, "5") is not None
        hosts.cut(1)
        assert measure(hosts, 1, 0, PING, "0.5") is None
        hosts.restore(1)
        deadline = time.monotonic() + 10
        while measure(hosts, 1, 0, PING, "0.5") is None:
            assert time.monotonic() < deadline


OWNER = """
import sys, time
from paceline.testing.hosts import Hosts
hosts = Hosts(2, delay_ms=float(sys.argv[1])).__enter__()
hosts.popen(0, ["sleep", "1000"])
print(hosts._name, hosts._guard.pid, flush=True)
if sys.argv[2] == "exit":
    sys.exit()
time.sleep(1000)
"""


@needs_hosts
@pytest.mark.parametrize("end", ["exit", "term", "kill", "kill both"])
@pytest.mark.parametrize("delay_ms", ["0", "1"])
def test_nothing_stays_when_the_owner_ends(end: str, delay_ms: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, delay_ms, end], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name, guard = owner.stdout.readline().split()
    if end == "term":
        owner.terminate()
    if end == "kill both":
        os.kill(int(guard), signal.SIGKILL)
    if end.startswith("kill"):
        owner.kill()
    owner.wait(10)
    owner.stdout.close()
    if end == "kill both":
        assert name in namespaces()
        assert len([each for each in clean() if each.startswith(name)]) == 3
    deadline = time.monotonic() + 10
    while name in namespaces():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_hosts
def test_two_sets_of_hosts_do_not_meet_and_cleaning_spares_the_living() -> None:
    with Hosts(2) as one, Hosts(2) as other:
        serve(one, 0)
        assert measure(other, 1, 0, PING, "0.3") is None
        assert measure(one, 1, 0, PING, "5") is not None
        assert clean() == []


@needs_hosts
def test_a_setup_that_fails_leaves_nothing() -> None:
    hosts = Hosts(2, rate="1mbit")
    hosts._rates[1] = "0.0001kbit"  # less than a bit per second: tc refuses it
    with pytest.raises(PacelineError, match=r"tc .* qdisc"):
        hosts.__enter__()
    assert hosts._name not in namespaces()


def test_bad_input() -> None:
    for rate in ("fast", "10", "10mbyte", "0mbit", ""):
        with pytest.raises(ConfigError, match=r"rate=.*write it as 100mbit"):
            Hosts(2, rate=rate)
    with pytest.raises(ConfigError, match="count=2 with 1 rates"):
        Hosts(2, rate=["1gbit"])
    with pytest.raises(ConfigError, match="delay_ms=-1"):
        Hosts(2, delay_ms=-1)
    assert bits_per_s("1.5gbit") == 1.5e9


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="need root"):
        Hosts(2).__enter__()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "iproute2" in Hosts.missing()
