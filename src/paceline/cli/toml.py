"""TOML as recipes have it: read with errors that name the file, written by hand, since Python only reads it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read(source: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f'{name} is not TOML: {error}; a text has quotes, as in strategy = "async"') from None


def value(source: str) -> Any:
    """A single value; what is none is a text.

    >>> value("0.1"), value("true"), value('["a", 2]'), value("topk(0.01)"), value("'3'")
    (0.1, True, ['a', 2], 'topk(0.01)', '3')
    """
    try:
        found = tomllib.loads(f"value = {source}")
    except tomllib.TOMLDecodeError:
        return source
    return found["value"] if len(found) == 1 and plain(found["value"]) else source


def plain(value: Any) -> bool:
    """Whether it is made of texts, numbers, true and false, in lists and tables: of what can be typed.

    >>> plain({"a": [1, "x"]}), plain([[1]]), plain(None)
    (True, False, False)
    """
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and key and plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in value)
    return isinstance(value, str | int | float)


def word(value: str | int | float) -> str:
    """A value as it is typed."""
    return value if isinstance(value, str) else repr(value)


def shown(value: Any) -> str:
    """A value in a message."""
    return _text(value) if plain(value) and not isinstance(value, Mapping) else f"{type(value).__name__} {value!r}"


def flat(table: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of a table and of those within it, each with its path.

    >>> list(flat({"a": 1, "b": {"c": 2}}))
    [(('a',), 1), (('b', 'c'), 2)]
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, (*before, key))
        else:
            yield (*before, key), value


def text(table: Mapping[str, Any]) -> str:
    """A table as TOML, tables within it last.

    >>> print(text({"script": "train.py", "args": {"lr": 0.1, "model": {"depth": 3}}, "seed": 3}), end="")
    script = "train.py"
    seed = 3
    <BLANKLINE>
    [args]
    lr = 0.1
    model.depth = 3
    """
    lines = [f"{_key(key)} = {_text(each)}" for key, each in table.items() if not isinstance(each, Mapping)]
    for key, each in table.items():
        if isinstance(each, Mapping):
            lines += ["", f"[{_key(key)}]"]
            lines += [f"{'.'.join(map(_key, path))} = {_text(one)}" for path, one in flat(each)]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
