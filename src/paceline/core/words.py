"""Objects written as words: `topk(0.01)` on the command line is `TopK(0.01)` in Python."""

from __future__ import annotations

import ast
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from paceline.core.errors import ConfigError, nearest

T = TypeVar("T")

_WORD = re.compile(  # such as 2bit and 50..400, which Python cannot read; what is quoted stays as it is
    r"""(?P<quoted>'[^']*'|"[^"]*")|(?<=[=(,\s])(?!\d+[eE]\d)(?P<word>\d+[A-Za-z_]\w*|\d+\.\.\d+)(?=\s*[,)])"""
)

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
    >>> build("pair(1)", {"pair": lambda a, b, c=0: (a, b, c)}, "tuple")
    Traceback (most recent call last):
      ...
    paceline.core.errors.ConfigError: tuple 'pair(1)': missing a required argument: 'b'. Write it as pair(a, b, c=0)
    """
    said = read(text, kind, known)
    make = known[said.name]
    signature = _signature(make)
    if signature:
        allowed = list(signature.parameters)
        for key in said.named:
            if key not in allowed:
                known_ones = nearest(key, allowed) if allowed else "it has none"
                raise ConfigError(f"{kind} {said.name!r} has no option {key!r}: {known_ones}")
        try:
            signature.bind(*said.positional, **said.named)
        except TypeError as error:  # too few of them, too many, or one twice
            raise ConfigError(f"{kind} {text!r}: {error}. Write it as {_form(said.name, signature)}") from None
    try:
        return make(*said.positional, **said.named)
    except TypeError as error:
        raise ConfigError(f"{kind} {text!r}: {error}") from None


def _quoted(found: re.Match[str]) -> str:
    return found["quoted"] or f"'{found['word']}'"


class Said(NamedTuple):
    """Words, read but not made into anything yet."""

    name: str
    positional: list[Any]
    named: dict[str, Any]

    def given(self, make: Callable[..., Any]) -> dict[str, Any]:
        """The options that were given, by the names that `make` has for them."""
        return dict(inspect.signature(make).bind_partial(*self.positional, **self.named).arguments)


def read(text: str, kind: str, known: Iterable[str] = ()) -> Said:
    """What `text` says; a name outside of `known`, where that is given, is refused. Words within words stay words.

    >>> read("sync(backups=1)", "strategy")
    Said(name='sync', positional=[], named={'backups': 1})
    >>> read("local(every=50..400, codec=topk(0.01, values=2bit))", "strategy").named
    {'every': '50..400', 'codec': "topk(0.01, values='2bit')"}
    >>> read("local(codec='topk(0.01, values=2bit), decay=0.9')", "strategy").named
    {'codec': 'topk(0.01, values=2bit), decay=0.9'}
    >>> read("guest(at=a:7000)", "strategy")
    Traceback (most recent call last):
      ...
    paceline.core.errors.ConfigError: cannot read strategy 'guest(at=a:7000)': write it as name or name(key=value), \
with quotes around what is not one word or number
    """
    keyword = _KEYWORD.match(text)
    try:
        with _PARSING:
            tree = ast.parse(_WORD.sub(_quoted, _KEYWORD.sub(r"\1_", text.strip())), mode="eval").body
    except SyntaxError:
        quotes = ", with quotes around what is not one word or number" if "=" in text else ""
        raise ConfigError(f"cannot read {kind} {text!r}: write it as name or name(key=value){quotes}") from None
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


def split(text: str, known: Sequence[str], kind: str) -> tuple[str, dict[str, str]]:
    """An object's words, and what is said of it behind them.

    >>> split("sign,back=quantize(8, block=64), warmup=9", ("back", "warmup"), "codec")
    ('sign', {'back': 'quantize(8, block=64)', 'warmup': '9'})
    """
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    said: dict[str, str] = {}
    for part in parts[1:]:
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value or not key.isidentifier():
            options = ", ".join(f"{name}=..." for name in known)
            raise ConfigError(
                f"cannot read {kind} {text!r}: behind the first name, say {options}, not {part.strip()!r}"
            )
        if key not in known:
            raise ConfigError(f"{kind} {text!r}: {key!r} is not known there: {nearest(key, known)}")
        if key in said:
            raise ConfigError(f"{kind} {text!r}: say {key} once")
        said[key] = value
    return parts[0].strip(), said


def whole(value: object) -> bool:
    """Whether a setting is a whole number; True and 2.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def finite(value: object) -> bool:
    """Whether a setting is a number that can be counted with; True, nan, inf and words are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _value(tree: ast.expr) -> Any:
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return ast.unparse(tree)
    return tree.id if isinstance(tree, ast.Name) else ast.literal_eval(tree)


def _signature(make: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(make)
    except ValueError:  # a builtin without a signature
        return None


def _form(name: str, signature: inspect.Signature) -> str:
    """How it is written, with the options that it must have by name and the others by their defaults."""
    options = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in signature.parameters.values()
    ]  # fmt: skip
    return f"{name}({', '.join(options)})" if options else name
