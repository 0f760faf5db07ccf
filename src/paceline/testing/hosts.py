"""Several hosts on one machine: network namespaces on a switch, each with a network card of a given speed.

    with Hosts(4, rate="1gbit", delay_ms=10) as hosts:
        hosts.run([sys.executable, "train.py"])

Programs on a host see one card, eth0, and only the other hosts. A token bucket at both ends of every cable
gives the card its speed each way. Nothing in the machine's own network is touched. With a delay, the switch
is a process of ours (`relay`), since the kernel's own delay is often missing; without one it is a bridge.

Links can be broken while programs run: `cut` and `restore` a cable, `partition` groups of hosts and `heal` them,
`set_rate`, `reset` connections, `corrupt` a byte.

Needs root and iproute2. Whatever happens, nothing stays: a guard process, at the other end of a pipe, takes
the hosts down when the owner ends in any way; should both be killed, the next `Hosts` cleans up after them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.core.errors import ConfigError, PacelineError, TimedOut, nearest
from paceline.testing import relay

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_NAME = re.compile(r"(pace(\d+)x\d+)n\d+-(\d+|sw)\b")
_numbers = itertools.count()
_COMMAND_LIMIT_S = 30.0
_NET = "10.77.0"

Way = Literal["both", "out", "in"]


class Finished(msgspec.Struct, frozen=True):
    """A program that has run on a host."""

    host: int
    code: int
    output: str


class Hosts:
    """`count` hosts. `rate` such as "100mbit", one for all or one for each; None: as fast as it goes.

    Programs get HOSTS_RANK, HOSTS_SIZE, HOSTS_IP and HOSTS_FIRST_IP in their environment.
    """

    def __init__(self, count: int, rate: str | Sequence[str | None] | None = None, delay_ms: float = 0.0) -> None:
        rates = [rate] * count if rate is None or isinstance(rate, str) else list(rate)
        if not 1 <= count <= 250 or len(rates) != count:
            raise ConfigError(f"count={count} with {len(rates)} rates: 1 to 250 hosts, and one rate for each")
        if delay_ms < 0:
            raise ConfigError(f"delay_ms={delay_ms}: a delay is 0 or more")
        for each in rates:
            bits_per_s(each)
        self.count = count
        self.delay_ms = delay_ms
        self.ips = [f"{_NET}.{i + 1}" for i in range(count)]
        self._rates = rates
        self._name = f"{owner(os.getpid())}n{next(_numbers)}"
        self._switch = f"{self._name}-sw"
        self._spaces = [f"{self._name}-{i}" for i in range(count)]
        self._programs: list[subprocess.Popen[Any]] = []
        self._guard: subprocess.Popen[str] | None = None
        self._parted: set[tuple[int, int]] = set()  # (from, to) whose frames are lost

    @staticmethod
    def missing(delay: bool = False) -> str:
        """Why hosts cannot be made on this machine; "" where they can."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None or shutil.which("tc") is None:
            return "no iproute2: apt-get install iproute2"
        if delay and not Path("/dev/net/tun").exists():
            return "a delay needs /dev/net/tun"
        return ""

    def __enter__(self) -> Hosts:
        if reason := self.missing(delay=self.delay_ms > 0):
            raise ConfigError(f"cannot make hosts: {reason}")
        clean()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        **more: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host; it is killed when the hosts are closed. `before` are words that it is started by,
        such as `Limits.words`: on a host, control groups are not to be seen. `more` as for subprocess.Popen.
        """
        own = {"HOSTS_RANK": str(host), "HOSTS_SIZE": str(self.count)}
        own |= {"HOSTS_IP": self.ips[host], "HOSTS_FIRST_IP": self.ips[0]}
        program = subprocess.Popen(
            [*before, "ip", "netns", "exec", self._spaces[host], *argv],
            env={**os.environ, **own, **(env or {})},
            start_new_session=True,
            **more,
        )
        self._programs.append(program)
        return program

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None, limit_s: float = 300.0) -> list[Finished]:
        """Run a program on every host at once and give back what each printed, both streams together.

        When one fails, or at the limit (TimedOut, with what was printed), the others are killed.
        """
        outputs = [""] * self.count
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        programs = [self.popen(i, argv, env, **streams) for i in range(self.count)]

        def collect(i: int) -> None:
            stream = programs[i].stdout
            assert stream is not None
            with stream:
                outputs[i] = stream.read()

        readers = [threading.Thread(target=collect, args=(i,), daemon=True) for i in range(self.count)]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + limit_s
        try:
            while None in (codes := [p.poll() for p in programs]) and not any(codes):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            self.kill()
            for reader in readers:
                reader.join(5.0)
        late = [i for i, code in enumerate(codes) if code is None]
        if late and not any(codes):
            said = "\n".join(f"[{i}] {line}" for i in late for line in outputs[i].splitlines()[-5:])
            raise TimedOut(f"hosts {late} did not finish {argv[0]} within {limit_s:g} s\n{said}")
        return [Finished(i, p.wait(), output) for i, (p, output) in enumerate(zip(programs, outputs))]

    def set_rate(self, host: int, rate: str | None) -> None:
        """Change the speed of a host's card, also while traffic flows."""
        bytes_per_s = bits_per_s(rate) / 8
        self._rates[host] = rate
        for space, device in ((self._spaces[host], "eth0"), (self._switch, f"p{host}")):
            if rate is None:
                _run("tc", "-n", space, "qdisc", "del", "dev", device, "root", check=False)
                continue
            burst = int(min(max(1e-3 * bytes_per_s, 16e3), 256e3))  # 1 ms: short messages are paced too
            limit = int(max(50e-3 * bytes_per_s, 256e3))  # a switch's buffer of 50 ms
            bucket = ("tbf", "rate", f"{int(8 * bytes_per_s)}bit", "burst", str(burst), "limit", str(limit))
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *bucket)

    def rate(self, host: int) -> str | None:
        """The speed of a host's card."""
        return self._rates[host]

    def cut(self, host: int) -> None:
        """Cut a host's cable; its programs go on."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def restore(self, host: int) -> None:
        _ip("-n", self._switch, "link", "set", f"p{host}", "up")

    def partition(self, hosts: Iterable[int], others: Iterable[int] | None = None, way: Way = "both") -> None:
        """Lose all frames between `hosts` and `others` (default: all the rest); the cables stay up.

        `way`: "both"; "out" loses only what `hosts` send to the others; "in" only what the others send to them.
        """
        ways: dict[str, tuple[bool, bool]] = {"both": (True, True), "out": (True, False), "in": (False, True)}
        if way not in ways:
            raise ConfigError(f"way={way!r}: {nearest(way, ways)}")
        these, those = self._sides(hosts, others)
        goes, comes = ways[way]
        pairs = {(i, j) for i in these for j in those if goes} | {(j, i) for i in these for j in those if comes}
        for pair in sorted(pairs - self._parted):
            self._lose(*pair)
            self._parted.add(pair)

    def heal(self, hosts: Iterable[int] | None = None, others: Iterable[int] | None = None) -> None:
        """End partitions, those between `hosts` and `others` or all; what `cut` has cut stays cut."""
        these, those = self._sides(range(self.count) if hosts is None else hosts, others)
        for i, j in sorted(self._parted):
            if hosts is None or (i in these and j in those) or (j in these and i in those):
                tc = ("tc", "-n", self._switch, "filter", "del", "dev", f"p{j}", "egress", "pref", str(i + 1))
                _run(*tc, "protocol", "all", check=False)
                self._parted.discard((i, j))

    def reset(self, host: int) -> None:
        """End every TCP connection that a host has with others: there with ECONNABORTED, here with ECONNRESET."""
        _run("ip", "netns", "exec", self._spaces[host], "ss", "-K", "-t", "-H", "dst", f"{_NET}.0/24")

    def corrupt(self, host: int, after_bytes: int = 0) -> None:
        """Flip one byte in what a host sends by TCP, after so many more bytes, those sent again included. No checksum
        below TLS notices.

        Only with a delay, where frames pass through a process of ours.
        """
        if not self.delay_ms:
            raise ConfigError("delay_ms=0: the kernel's bridge corrupts nothing; give a delay, such as delay_ms=0.1")
        if not 0 <= host < self.count or after_bytes < 0:
            raise ConfigError(f"corrupt({host}, {after_bytes}): there are {self.count} hosts, and bytes are 0 or more")
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{host} {after_bytes}\n")
        self._guard.stdin.flush()

    def name(self, host: int) -> str:
        """Of its network namespace, for `ip netns exec`."""
        return self._spaces[host]

    def pids(self, host: int) -> list[int]:
        """Of everything that runs on a host."""
        return [int(pid) for pid in _ip("netns", "pids", self._spaces[host]).split()]

    def kill(self, host: int | None = None) -> None:
        """Kill every program on a host, or on all; nothing is told to the others but by the kernel."""
        if host is not None:
            _kill_all(self._spaces[host])
            return
        for space in self._spaces:
            _kill_all(space)
        for program in self._programs:
            program.wait()
        self._programs.clear()

    def close(self) -> None:
        self.kill()
        _remove([*self._spaces, self._switch])
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.communicate(timeout=_COMMAND_LIMIT_S)  # closing its input ends it
            self._guard.kill()
            self._guard = None

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        for i, (space, address) in enumerate(zip(self._spaces, self.ips)):
            _ip("netns", "add", space)
            ends = ("netns", space, "type", "veth", "peer", "name", f"p{i}", "netns", self._switch)
            _ip("link", "add", "eth0", "address", relay.hardware_address(i), *ends)
            _ip("-n", space, "link", "set", "eth0", "addrgenmode", "none", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", self._switch, "link", "set", f"p{i}", "addrgenmode", "none", "up")
            self.set_rate(i, self._rates[i])
        self._start_guard()
        if self.delay_ms:
            for i in range(self.count):
                _ip("-n", self._switch, "link", "set", f"a{i}", "addrgenmode", "none", "up")
                self._redirect(f"p{i}", f"a{i}")
                self._redirect(f"a{i}", f"p{i}")
        else:
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for i in range(self.count):
                _ip("-n", self._switch, "link", "set", f"p{i}", "master", "br0")
                _run("tc", "-n", self._switch, "qdisc", "add", "dev", f"p{i}", "clsact")
        _ip("-n", self._switch, "link", "add", "void", "type", "veth", "peer", "name", "nowhere")
        for device in ("void", "nowhere"):
            _ip("-n", self._switch, "link", "set", device, "addrgenmode", "none", "up")

    def _sides(self, hosts: Iterable[int], others: Iterable[int] | None) -> tuple[set[int], set[int]]:
        these = set(hosts)
        those = set(range(self.count)) - these if others is None else set(others)
        if these & those or not these | those <= set(range(self.count)):
            raise ConfigError(
                f"hosts={sorted(these)}, others={sorted(those)}: give two groups of hosts 0 to {self.count - 1}, "
                "with none in both"
            )
        return these, those

    def _lose(self, source: int, target: int) -> None:
        """Lead what comes from one host, and would leave the switch towards another, to a cable that ends nowhere."""
        mac = relay.hardware_address(source).replace(":", "")
        first = ("match", "u32", f"0x{mac[:8]}", "0xffffffff", "at", "-8")
        rest = ("match", "u16", f"0x{mac[8:]}", "0xffff", "at", "-4")
        where = ("filter", "add", "dev", f"p{target}", "egress", "pref", str(source + 1), "protocol", "all", "u32")
        action = ("action", "mirred", "egress", "redirect", "dev", "void")
        _run("tc", "-n", self._switch, *where, *first, *rest, *action)

    def _start_guard(self) -> None:
        words = [self._name, str(self.count), str(self.delay_ms / 1e3)]
        argv = ["ip", "netns", "exec", self._switch, sys.executable, "-m", "paceline.testing.hosts", *words]
        pipe = subprocess.PIPE
        self._guard = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self._guard.stdout is not None
        if self._guard.stdout.readline() != "ready\n":
            raise PacelineError("the guard of the hosts did not start; what it printed stands above")

    def _redirect(self, source: str, target: str) -> None:
        """Let everything that comes into one device of the switch leave by another."""
        tc = ("tc", "-n", self._switch)
        _run(*tc, "qdisc", "add", "dev", source, "clsact")
        everything = ("protocol", "all", "u32", "match", "u32", "0", "0")
        action = ("action", "mirred", "egress", "redirect", "dev", target)
        _run(*tc, "filter", "add", "dev", source, "ingress", *everything, *action)


def bits_per_s(rate: str | None) -> float:
    """
    >>> bits_per_s("100mbit")
    100000000.0
    """
    if rate is None:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None or not float(match[1]):
        raise ConfigError(f"rate={rate!r}: write it as 100mbit, 1gbit or 64kbit")
    return float(match[1]) * _UNITS[match[2]]


def clean() -> list[str]:
    """Remove what owners that were killed outright have left; the names of the namespaces removed."""
    left = []
    for line in _ip("netns", "list").splitlines():
        match = _NAME.match(line)
        if match and owner(int(match[2])) != match[1]:
            left.append(match[0])
    _remove(left)
    return left


def owner(pid: int) -> str:
    """Which process, for a name that tells whether it still lives: its number and the time when it started."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return f"pace{pid}x{stat.rpartition(')')[2].split()[19]}"


def _remove(spaces: Sequence[str]) -> None:
    for space in spaces:
        _kill_all(space)
        _ip("netns", "del", space, check=False)


def _kill_all(space: str) -> None:
    """Kill what runs in a namespace, again until nothing is left, since some of it may be starting more."""
    for _ in range(100):
        pids = {int(p) for p in _ip("netns", "pids", space, check=False).split()} - {os.getpid()}
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _ip(*words: str, check: bool = True) -> str:
    return _run("ip", *words, check=check)


def _run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S)
    if check and done.returncode:
        raise PacelineError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _guard(name: str, count: int, delay_s: float) -> None:
    """Be the switch, where there is a delay, until the owner's end of the pipe is closed; then clear up."""
    taps = relay.open_taps(count) if delay_s else []
    if delay_s:
        with contextlib.suppress(OSError):  # a network does not slow down because programs compute
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    relay.carry(taps, delay_s, orders=relay.Orders(0))
    _remove([f"{name}-{i}" for i in range(count)])
    _ip("netns", "del", f"{name}-sw", check=False)  # nothing runs there but this


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
