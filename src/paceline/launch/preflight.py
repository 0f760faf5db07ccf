"""Before anything starts: what each host has, whether it fits the others, and how fast they reach each other.

A small program (`probe`) is sent to each host and stays for as long as there are questions. What would stop the run
names the host, what was tried, and what to change.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import ConfigError
from paceline.launch import probe
from paceline.transport.address import is_loopback

HERE = "this host"
_ANSWER_S = 20.0
_HELLO_S = 30.0  # with a name that is looked up, a slow login, and Python's start
_MEASURE_S = 0.2
_ALL_PAIRS = 6  # hosts; where there are more, each is measured to the next one and to the launcher


class Way(Protocol):
    """What leads to a host."""

    def start(self, host: str, program: str) -> subprocess.Popen[bytes]: ...
    def why(self, host: str, code: int, said: str, printed: str = "") -> str: ...
    def passes(self, code: int, said: str) -> bool:
        """Whether a host that was not reached may be so by itself after a while."""


class NotYet(ConfigError):
    """A host was not reached, and may be later."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a host says of itself."""

    python: str
    executable: str
    torch: str
    paceline: str
    cores: int
    gpus: int
    cwd: bool  # the working directory exists
    shared: bool  # and is the launcher's own
    rsync: bool
    name: str


@dataclass(frozen=True)
class Link:
    """From one host to another."""

    rtt_s: float
    bytes_per_s: float


@dataclass
class Report:
    """All that was found."""

    hosts: list[str]
    facts: dict[str, Facts] = field(default_factory=dict)
    address: dict[str, str] = field(default_factory=dict)  # by which the others reach it
    interface: dict[str, str] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)  # why not
    down: set[str] = field(default_factory=set)  # of these: that may come up
    wrong: list[str] = field(default_factory=list)  # what would stop a run
    odd: list[str] = field(default_factory=list)  # what is worth knowing

    @property
    def slowest(self) -> tuple[tuple[str, str], Link] | None:
        return min(self.links.items(), key=lambda item: item[1].bytes_per_s, default=None)


class Asked:
    """A host that answers questions. `ask` raises ConfigError when it does not."""

    def __init__(self, way: Way, host: str) -> None:
        self._way, self._host = way, host
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._said: list[bytes] = []
        self._printed: list[bytes] = []  # and was no answer
        self._process = way.start(host, Path(probe.__file__).read_text())
        self._errors = threading.Thread(target=self._hear_errors, daemon=True)
        self._errors.start()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, limit_s: float = _ANSWER_S, **question: Any) -> dict[str, Any]:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended, which is noticed below
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise ConfigError(
                f"host {self._host}: no answer within {limit_s:g} s (asked for {question['do']}); is it overloaded, or "
                "does its login shell wait for something?"
            ) from None
        if answer is None:
            code = self._process.wait()
            self._errors.join(2.0)
            said, printed = (b"".join(lines).decode(errors="replace") for lines in (self._said, self._printed))
            why = self._way.why(self._host, code, said, printed)
            raise NotYet(why) if self._way.passes(code, said) else ConfigError(why)
        return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            try:
                if not line.startswith(b"paceline "):
                    raise ValueError
                self._answers.put(json.loads(line[9:]))
            except ValueError:  # of a login shell, which greets or refuses
                self._printed.append(line)
                del self._printed[:-50]
        self._answers.put(None)

    def _hear_errors(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._said.append(line)
            del self._said[:-50]


class Preflight:
    """Asks hosts, one kind of question after another. Used as a context: the programs there end with it."""

    def __init__(self, way: Way, hosts: Sequence[str]) -> None:
        self._way = way
        self._asked: dict[str, Asked] = {}
        self.report = Report(list(hosts))

    def __enter__(self) -> Preflight:
        return self

    def __exit__(self, *error: object) -> None:
        self._on_all(list(self._asked), lambda host: self._asked[host].close())

    def meet(self, cwd: str) -> None:
        """Reach each host, and take down what it has; compare that with this one."""
        self._meet_all(self.report.hosts, cwd)
        self.report.wrong += compare(probe.facts({}), self.report.facts)

    def meet_again(self, cwd: str) -> None:
        """Reach those that were down."""
        again = [host for host in self.report.hosts if host in self.report.down]
        self._meet_all(again, cwd)
        facts = {host: self.report.facts[host] for host in again if host in self.report.facts}
        self.report.wrong += compare(probe.facts({}), facts)

    def _meet_all(self, hosts: Sequence[str], cwd: str) -> None:
        with _marked(cwd) as marker:
            self._on_all(hosts, lambda host: self._meet(host, cwd, marker))
        for found in (self.report.facts, self.report.unreached):  # told in the order in which hosts were named
            _sort(found, self.report.hosts)

    def exists(self, path: str) -> list[str]:
        """The hosts that have no such file."""
        answers = self._on_all(list(self._asked), lambda host: self._asked[host].ask(do="exists", path=path))
        return [host for host, answer in answers.items() if not answer.get("exists")]

    def routes(self, listen: str) -> None:
        """By which address each host reaches the launcher, and so the others it."""
        self.report.address[HERE], self.report.interface[HERE] = listen, probe.interface(listen)
        for host, told in self._on_all(
            list(self._asked), lambda host: self._asked[host].ask(do="route", to=listen)
        ).items():
            if "error" in told:
                self.report.wrong.append(
                    f"host {host}: has no route to {listen}, the launcher's address ({told['error']}); name one "
                    "that it reaches with --interface or --listen"
                )
            else:
                self.report.address[host], self.report.interface[host] = told["address"], told["interface"]

    def measure(self, listen: str, port: int = 0) -> None:
        """Latency and bandwidth between hosts, and whether they let each other through at all."""
        word = secrets.token_hex(16)
        ports: dict[str, int] = {}
        for host, address in self.report.address.items():
            own_port = port if host == HERE else 0
            told = self._ask(host, {"do": "listen", "address": address, "word": word, "port": own_port})
            if "error" in told:
                what = f"port {own_port} of {address}" if own_port else f"a port of {address}"
                then = "give another --port, or leave it out" if own_port else _instead(host)
                self.report.wrong.append(f"{_of(host)}: {what} cannot be had ({told['error']}); {then}")
            else:
                ports[host] = told["port"]
        for source, to in pairs(list(ports)):
            ask = {"do": "measure", "address": self.report.address[to], "port": ports[to], "word": word}
            told = self._ask(source, ask | {"seconds": _MEASURE_S})
            if "error" in told:
                self.report.wrong.append(
                    f"{_of(source)}: does not reach {_of(to)} at {self.report.address[to]}:{ports[to]} "
                    f"({told['error']}); let TCP through between the hosts, or choose the network with --interface"
                )
            else:
                self.report.links[source, to] = Link(told["rtt_s"], told["bytes_per_s"])

    def _ask(self, host: str, question: dict[str, Any]) -> dict[str, Any]:
        return probe.WHAT[question["do"]](question) if host == HERE else self._asked[host].ask(**question)

    def _meet(self, host: str, cwd: str, marker: str) -> None:
        try:
            asked = Asked(self._way, host)
            self._asked[host] = asked
            told = asked.ask(_HELLO_S, do="facts", cwd=cwd, marker=marker)
            if "error" in told:
                raise ConfigError(f"host {host}: cannot say what it has: {told['error']}")
            self.report.facts[host] = Facts(**told)
            self.report.unreached.pop(host, None)
            self.report.down.discard(host)
        except ConfigError as error:
            self.report.unreached[host] = str(error)
            (self.report.down.add if isinstance(error, NotYet) else self.report.down.discard)(host)
            if host in self._asked:
                self._asked.pop(host).close()

    def _on_all(self, hosts: Sequence[str], work: Callable[[str], Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(max(1, min(32, len(hosts)))) as pool:
            try:
                return dict(zip(hosts, pool.map(work, hosts)))
            except BaseException:  # a Ctrl-C, which those who wait for an answer do not hear
                for asked in list(self._asked.values()):
                    asked.kill()
                raise


def compare(
    here: Mapping[str, Any], there: Mapping[str, Facts], otherwise: str = ", or give --python PATH"
) -> list[str]:
    """What of the versions differs from this host's, a line for each host and thing.

    >>> facts = dict(executable="python3", cores=2, gpus=0, cwd=True, shared=True, rsync=False, name="b")
    >>> b = Facts(python="3.11.2", torch="2.9.0", paceline="0.1.0", **facts)
    >>> for line in compare({"python": "3.11.7", "torch": "2.13.0+cpu", "paceline": "0.1.0"}, {"b": b}): print(line)
    host b: has torch 2.9.0 (of python3), this host 2.13.0+cpu; install the same there, or give --python PATH
    """
    found = []
    for host, facts in there.items():
        for name in ("python", "torch", "paceline"):
            own, its = str(here[name]), str(getattr(facts, name))
            if _counts(name, own) != _counts(name, its):
                has = f"has {_title(name)} {its}" if its else f"has no {_title(name)}"
                found.append(
                    f"host {host}: {has} (of {facts.executable}), this host {own or 'none'}; install the same there"
                    f"{otherwise}"
                )
    return found


def crowded(facts: Mapping[str, Facts], slots: Mapping[str, int]) -> list[str]:
    """Hosts with more slots than cores."""
    return [
        f"host {host}: {slots[host]} slots on {f.cores} core{'' if f.cores == 1 else 's'}: its members take turns"
        for host, f in facts.items()
        if slots.get(host, 0) > f.cores
    ]


def pairs(hosts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Who is measured to whom, one after the other.

    >>> list(pairs(["a", "b", "c"]))
    [('a', 'b'), ('a', 'c'), ('b', 'a'), ('b', 'c'), ('c', 'a'), ('c', 'b')]
    """
    if len(hosts) <= _ALL_PAIRS:
        yield from itertools.permutations(hosts, 2)
        return
    first, *others = hosts
    yield from dict.fromkeys([*((other, first) for other in others), *zip(hosts, [*others, first])])


def interface_address(name: str) -> str:
    """The address of an interface of this host."""
    known = probe.interfaces()
    if name not in known:
        raise ConfigError(f"--interface {name!r}: this host has {', '.join(known)}")
    if not known[name]:
        raise ConfigError(f"--interface {name!r} has no IPv4 address: name another, or give --listen")
    return known[name]


def towards(targets: Iterable[str], own: Callable[[str], str]) -> str:
    """The launcher's address on the way to the hosts: of the first that is not this one, or else loopback."""
    addresses, unknown = [], []
    for target in targets:
        try:
            addresses.append(own(target))
        except ConfigError:  # a name that only ssh understands, or one that is down
            unknown.append(target)
    if not addresses:
        raise ConfigError(
            f"host {', '.join(unknown)}: no way to it is known here, so neither is the address by which it reaches "
            "this host. Check the spelling; where only ssh knows the way, give --listen ADDRESS or --interface NAME"
        )
    return next((address for address in addresses if not is_loopback(address)), addresses[0])


@contextlib.contextmanager
def _marked(cwd: str) -> Iterator[str]:
    """A file in a folder by which another host knows whether it is the same one; "": it cannot be written."""
    marker = Path(cwd) / f".paceline-{secrets.token_hex(8)}"
    try:
        marker.touch()
    except OSError:
        yield ""
        return
    try:
        yield str(marker)
    finally:
        marker.unlink(missing_ok=True)


def _sort(found: dict[str, Any], order: Sequence[str]) -> None:
    for host in order:
        if host in found:
            found[host] = found.pop(host)


def _instead(host: str) -> str:
    """What to do where an address cannot be listened on."""
    if host != HERE:
        return "what keeps programs from listening there?"
    own = ", ".join(f"{address} ({name})" for name, address in probe.interfaces().items() if address)
    return f"this host has {own}: give one of these to --listen, or leave it out"


def _of(host: str) -> str:
    return host if host == HERE else f"host {host}"


def _counts(name: str, version: str) -> str:
    """What must be the same: of Python the minor version, of torch not what it was built for."""
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def _title(name: str) -> str:
    return "Python" if name == "python" else "Paceline" if name == "paceline" else name
