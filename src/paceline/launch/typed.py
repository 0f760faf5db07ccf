"""What is typed for options of several commands and engines, checked before anything is done with it."""

from __future__ import annotations

import shlex

from paceline.core.errors import ConfigError

LAST_PORT = 65535


def port(text: str, least: int = 0, last: int = LAST_PORT) -> int:
    """A number above the last port would be cut to sixteen bits, and be another one.

    >>> port("8000")
    8000
    """
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{text!r} is not a whole number of at least {least}")
    if int(text) > last:
        raise ConfigError(f"{text!r} is no port: they end at {last}")
    return int(text)


def hosts(text: str) -> str:
    """An empty one is a variable of a shell that is not set, and would mean this host alone."""
    if not text.strip():
        raise ConfigError(f"{text!r} names no host: give a:4,b:4, a file or a program, or leave it out")
    return text


def words(text: str) -> str:
    """Words as a shell reads them."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {str(error).lower()}; it is read as a shell reads words") from None
    return text


def command(text: str) -> str:
    if not shlex.split(words(text)):
        raise ConfigError(f"{text!r}: say what is called, with its options, or leave it out")
    return text
