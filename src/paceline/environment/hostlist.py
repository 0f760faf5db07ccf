"""Slurm's short notation for many hosts, and for many tasks."""

from __future__ import annotations

import itertools
import re

from paceline.core.errors import ConfigError

_MOST = 100_000  # hosts; a list that says more is a mistake
_PART = re.compile(r"\[([^\[\]]*)\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(text: str) -> list[str]:
    """The hosts of a list, in its order.

    >>> expand("login,n[08-10,12],r[1-2]c[1-2]-ib")
    ['login', 'n08', 'n09', 'n10', 'n12', 'r1c1-ib', 'r1c2-ib', 'r2c1-ib', 'r2c2-ib']
    """
    hosts: list[str] = []
    for word in re.split(r",(?![^\[]*\])", text.strip()):
        words = _PART.split(word)  # plain, range, plain, range, plain
        if not word or any(mark in plain for plain in words[::2] for mark in "[] "):
            raise _bad(text)
        choices = [_numbers(part, text) if i % 2 else [part] for i, part in enumerate(words)]
        for parts in itertools.product(*choices):
            hosts.append("".join(parts))
            if len(hosts) > _MOST:
                raise _bad(text)
    return hosts


def tasks(text: str) -> list[int]:
    """How many tasks each host has.

    >>> tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for word in text.split(","):
        match = _TASKS.fullmatch(word.strip())
        if not match or int(match[2] or 1) > _MOST:
            raise ConfigError(f"{text!r} does not say how many tasks each host has, as 2(x3),1 does")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for word in ranges.split(","):
        first, dash, last = word.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not 0 <= int(last) - int(first) < _MOST:
            raise _bad(text)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _bad(text: str) -> ConfigError:
    return ConfigError(f"{text[:200]!r} is not a list of hosts such as n1,n[08-10,12]")
