"""Labels: words for what a host's members are or have, such as a GPU, or a site's files.

A launcher gives them to members, and samples can be bound to one of them (`paceline.data.kinds`). A word of `--label`
is a label, or a label and the members that have it: `gpu:0,1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.core.errors import ConfigError

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_WORD = re.compile(r"([^:]*)(?::(\d+(?:,\d+)*))?")


def parse(text: str, source: str = "labels") -> tuple[str, ...]:
    """Labels between commas; `source` names the place in the message.

    >>> parse("gpu,site-a,gpu")
    ('gpu', 'site-a')
    """
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for label in found:
        check(label, source)
    return found


def check(label: str, source: str) -> str:
    """The label, if it is one."""
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise ConfigError(
            f"{source}: {label!r} is not a label: write a letter, then letters, digits and _ . -, such as site-a; "
            "at most 63 in all"
        )
    return label


def word(text: str) -> str:
    """A word of `--label`, if it is one.

    >>> word("gpu:0,1")
    'gpu:0,1'
    """
    _split(text)
    return text


def members_of(words: Iterable[str]) -> set[int]:
    """Those that are named.

    >>> members_of(["gpu:0,3", "site-a"])
    {0, 3}
    """
    return {id for text in words for id in _split(text)[1] or ()}


def labels_of(words: Iterable[str], member: int) -> tuple[str, ...]:
    """What a member has of these.

    >>> labels_of(["gpu:0,1", "site-a"], 2)
    ('site-a',)
    """
    split = [_split(text) for text in words]
    return tuple(dict.fromkeys(label for label, only in split if only is None or member in only))


def _split(text: str) -> tuple[str, frozenset[int] | None]:
    found = _WORD.fullmatch(text)
    if not found:
        raise ConfigError(f"--label {text!r}: write a label, or a label and the members that have it, as in gpu:0,1")
    label, ids = found.groups()
    return check(label, "--label"), frozenset(map(int, ids.split(","))) if ids else None
