"""Which hosts there are, and what each has for members: as named (a:4,b:4), from a file, or from a program that prints.

Between `--hosts` and the engines. Whatever cannot be read is a ConfigError that names the word, or the line.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.core import labels
from paceline.core.errors import ConfigError
from paceline.core.lost import how
from paceline.launch.spec import Room

_PROGRAM_LIMIT_S, _GLANCE_S = 30.0, 0.2
_MOST = 10_000  # slots
_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.%-]*")
_FILES = (".txt", ".hosts", ".list", ".conf", ".cfg", ".sh", ".py")


def read(source: str, over: Callable[[], bool] = lambda: False) -> dict[str, Room]:
    """Hosts by name, as in a:4,b:4, from a file or from what a program prints; ConfigError says what is wrong with it.

    Blank lines and what follows a # do not count; a host without a number has one slot, and without labels none. Once
    it is `over`, no program is waited for.
    """
    path = Path(source)
    if is_list(source):
        return _named(source)
    if not os.path.isfile(source):
        there = (
            "can be read only once, or not at all: give a file" if os.path.exists(source) else "there is no such file"
        )
        raise ConfigError(f"--hosts {source!r}: {there}, or a program that prints hosts")
    if os.access(path, os.X_OK):
        return parse(_printed(path, source, over), source)
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"--hosts {source!r}: the file cannot be read: {error.strerror}") from None
    return parse(text, source)


def some(source: str) -> dict[str, Room]:
    """As `read`, for who cannot begin without any."""
    found = read(source)
    if not found:
        raise ConfigError(
            f"--hosts {source!r}: no line of it names a host; write a name and its slots into each, as in 'node7 4'"
        )
    return found


def is_list(source: str) -> bool:
    """Whether hosts are named, and not a file or a program.

    >>> is_list("a:4,b"), is_list("node7"), is_list("hosts.txt"), is_list("./find-hosts")
    (True, True, False, False)
    """
    looks = "/" not in source and Path(source).suffix not in _FILES
    return looks and not os.path.isfile(source)  # which does not mind that many hosts are too long for a file's name


def numbered(source: str) -> bool:
    """Whether slots are said: of hosts that are named, of any of them.

    >>> numbered("a,b:2"), numbered("a,::1"), numbered("hosts.txt")
    (True, False, True)
    """
    return not is_list(source) or any(split(word.strip())[1] for word in source.split(","))


def parse(text: str, source: str) -> dict[str, Room]:
    """
    >>> parse("a 4 gpu,site-a  # the large one\\n\\nb\\nc:2 gpu\\n", "hosts.txt")["c"]
    Room(slots=2, labels=('gpu',))
    """
    found: dict[str, Room] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{source}:{number}"
        try:
            name, slots = split(words[0])
            if slots:  # as it is written on a command line
                words[1:1] = [slots]
            if len(words) > 3:
                raise ValueError
            count = _count(words[1] if len(words) > 1 else "1")
        except ValueError:
            raise ConfigError(
                f"{where}: {line.strip()!r} is not a host's name, slots and labels, as in 'node7 4' or "
                f"'node7 4 gpu,site-a'{_of_six(words[0])}"
            ) from None
        _add(found, name, Room(count, labels.parse(words[2] if len(words) > 2 else "", where)), where)
    return found


def split(word: str) -> tuple[str, str]:
    """A host's name, and the slots behind its colon; ValueError for what is neither. An IPv6 address has colons of its
    own, so it stands in brackets where slots follow.

    >>> split("a:4"), split("me@[::1]:2"), split("2001:db8::1"), split("node7")
    (('a', '4'), ('me@::1', '2'), ('2001:db8::1', ''), ('node7', ''))
    """
    user, at, host = word.rpartition("@")
    if host.startswith("["):
        host, closed, behind = host[1:].partition("]")
        colon, slots = behind[:1], behind[1:]
        if not closed or not _is_six(host) or (behind and (colon != ":" or not slots)):
            raise ValueError(word)
    elif _is_six(host):
        slots = ""
    else:
        host, colon, slots = host.partition(":")
        if (colon and not slots) or not _NAME.fullmatch(host):
            raise ValueError(word)
    if at and not _NAME.fullmatch(f"{user}@host"):
        raise ValueError(word)
    return f"{user}{at}{host}", slots


def text(rooms: Mapping[str, Room]) -> str:
    """As on a command line, without labels.

    >>> text({"a": Room(4), "me@::1": Room(2)})
    'a:4,me@[::1]:2'
    """
    return ",".join(f"{bracketed(name)}:{room.slots}" for name, room in rooms.items())


def bracketed(name: str) -> str:
    """A host's name where a colon follows."""
    user, at, host = name.rpartition("@")
    return f"{user}{at}[{host}]" if ":" in host else name


def _named(source: str) -> dict[str, Room]:
    """Hosts that are named, as in a:4,b."""
    found: dict[str, Room] = {}
    for word in source.split(","):
        try:
            name, slots = split(word.strip())
            room = Room(_count(slots or "1"))
        except ValueError:
            raise ConfigError(
                f"--hosts {source!r}: {word!r} is not a host's name and its slots, as in a:4; hosts are separated by "
                f"commas{_of_six(word)}"
            ) from None
        _add(found, name, room, f"--hosts {source!r}")
    return found


def _printed(path: Path, source: str, over: Callable[[], bool]) -> str:
    """What a program prints; one that does not end is ended, with all that it has started."""
    deadline = time.monotonic() + _PROGRAM_LIMIT_S
    pipe = subprocess.PIPE
    try:
        program = subprocess.Popen(
            [path.absolute()], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"--hosts {source!r}: the program cannot be started: {error.strerror}") from None
    with program:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = program.communicate(timeout=_GLANCE_S)
                    break
                if over() or time.monotonic() >= deadline:
                    text = f"--hosts {source!r}: the program did not end within {_PROGRAM_LIMIT_S:g} s"
                    raise ConfigError(text)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            raise
    if program.returncode:
        last = (err.decode(errors="replace").strip().splitlines() or ["it printed no error"])[-1]
        raise ConfigError(f"--hosts {source!r}: the program ended with {how(program.returncode)}: {last}")
    return out.decode(errors="replace")


def _add(found: dict[str, Room], name: str, room: Room, where: str) -> None:
    address = name.rpartition("@")[2]
    if _is_six(address) and "%" not in address and ipaddress.ip_address(address).is_link_local:
        raise ConfigError(
            f"{where}: {name} is an address of one link only: say which interface of this host is on it, as in "
            f"{name}%eth0, or name the host by another address"
        )
    if name in found:
        raise ConfigError(f"{where}: host {name!r} stands there twice")
    found[name] = room


def _count(slots: str) -> int:
    if not slots.isdecimal() or not 0 < int(slots) <= _MOST:
        raise ValueError(slots)
    return int(slots)


def _is_six(host: str) -> bool:
    """Whether it is an IPv6 address."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _of_six(word: str) -> str:
    return "; an IPv6 address stands in brackets before its slots, as in [2001:db8::1]:4" if word.count(":") > 1 else ""
