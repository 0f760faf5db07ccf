"""Objects written as words: `topk(0.01)` on the command line is `TopK(0.01)` in Python."""

from __future__ import annotations

import ast
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from paceline.core.errors import ConfigError, nearest

T = TypeVar("T")

_WORD = re.compile(r"(?<=[=(,\s])(?!\d+[eE]\d)(\d+[A-Za-z_]\w*)(?=\s*[,)])")  # such as 2bit, which Python cannot read

_PARSING = threading.Lock()  # Python 3.11 may fail where several threads parse at once
_KEYWORD = re.compile(r"\s*(async)\b")  # a name for us, though a word of Python's own


def build(text: str, known: Mapping[str, Callable[..., T]], kind: str) -> T:
    """Make the object that `text` names out of `known`.

    >>> build("complex(imag=2)", {"complex": complex}, "number")
    2j
    >>> build("str(2bit)", {"str": str}, "word")
    '2bit'
    >>> build("compelx", {"complex": complex}, "number")
    Traceback (most recent call last):
      ...
    paceline.core.errors.ConfigError: unknown number 'compelx': did you mean 'complex'?
    """
    said = read(text, kind, known)
    make = known[said.name]
    allowed = _parameters(make)
    for key in said.named:
        if allowed and key not in allowed:
            raise ConfigError(f"{kind} {said.name!r} has no option {key!r}: {nearest(key, allowed)}")
    try:
        return make(*said.positional, **said.named)
    except TypeError as error:
        raise ConfigError(f"{kind} {text!r}: {error}") from None


class Said(NamedTuple):
    """Words, read but not made into anything yet."""

    name: str
    positional: list[Any]
    named: dict[str, Any]

    def given(self, make: Callable[..., Any]) -> dict[str, Any]:
        """The options that were given, by the names that `make` has for them."""
        return dict(inspect.signature(make).bind_partial(*self.positional, **self.named).arguments)


def read(text: str, kind: str, known: Iterable[str] = ()) -> Said:
    """What `text` says; a name outside of `known`, where that is given, is refused.

    >>> read("sync(backups=1)", "strategy")
    Said(name='sync', positional=[], named={'backups': 1})
    """
    keyword = _KEYWORD.match(text)
    try:
        with _PARSING:
            tree = ast.parse(_WORD.sub(r"'\1'", _KEYWORD.sub(r"\1_", text.strip())), mode="eval").body
    except SyntaxError:
        raise ConfigError(f"cannot read {kind} {text!r}: write it as name or name(key=value)") from None
    if isinstance(tree, ast.Name):
        name, args, keywords = tree.id, [], []
    elif isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        name, args, keywords = tree.func.id, tree.args, tree.keywords
    else:
        raise ConfigError(f"cannot read {kind} {text!r}: write it as name or name(key=value)")
    if keyword:
        name = name.removesuffix("_")
    if known and name not in known:
        raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, known)}")
    given = [k.arg for k in keywords]
    if None in given or len(set(given)) < len(given):
        raise ConfigError(f"cannot read {kind} {text!r}: give each option once, as key=value")
    try:
        return Said(name, [_value(a) for a in args], {k.arg: _value(k.value) for k in keywords if k.arg})
    except ValueError:
        raise ConfigError(f"{kind} {text!r}: values must be plain numbers or words") from None


def _value(tree: ast.expr) -> Any:
    return tree.id if isinstance(tree, ast.Name) else ast.literal_eval(tree)


def _parameters(make: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(make).parameters)
    except ValueError:  # a builtin without a signature
        return []
