"""The options of `paceline run`, in one table: each setting's flag, its help, and what its value may be.

The table makes the parser, so a setting has its help text in one place; a test holds it against `Settings`. What is put
into the parser is known by name, so that a recipe (`recipes`) has the same keys with the same checks.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import Settings
from paceline.environment.paceline import VARIABLES
from paceline.launch import names, servers

LABEL_HELP = (
    "what the members on this host have, for loaders with bound=; site-NAME: their site, for local steps; gpu:0,1: "
    "these alone; may be repeated"
)


@dataclass(frozen=True)
class Flag:
    """How one field of Settings is written on the command line."""

    field: str
    metavar: str  # "": a switch
    parse: Callable[[str], Any]
    help: str

    @property
    def option(self) -> str:
        return "--" + self.field.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """An option that is in a parser, for those who write it in another way."""

    names: tuple[str, ...]  # such as "-n" and "--members"
    parse: Callable[[str], Any] | None  # None: a switch
    metavar: str
    repeats: bool

    @property
    def name(self) -> str:
        return self.names[-1]


def whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ConfigError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def seconds(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value < math.inf):
            raise ConfigError(f"{text!r} is not a number of seconds of at least {least:g}")
        return value

    return parse


class Size(NamedTuple):
    """How many members: N, or MIN:MAX where they may come and go."""

    least: int
    most: int
    elastic: bool

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


def size(text: str) -> Size:
    """
    >>> str(size("4")), str(size("2:4"))
    ('4', '2:4')
    """
    if ":" not in text:
        return Size(whole(1)(text), whole(1)(text), False)
    try:
        least, most = (int(part) for part in text.split(":"))
    except ValueError:
        least = most = 0
    if least < 1 or most < 1:
        raise ConfigError(f"{text!r} is not MIN:MAX in whole numbers of at least 1, such as 2:4")
    if least > most:
        raise ConfigError(f"{text!r} has its least above its most: write {most}:{least}")
    return Size(least, most, True)


def variable(text: str) -> tuple[str, str]:
    """Of --env: a name and a value, which is ours where none is given."""
    name, equals, value = text.partition("=")
    if not name.isidentifier():
        raise ConfigError(f"{text!r}: write NAME, or NAME=VALUE")
    if name in VARIABLES:
        raise ConfigError(f"{name}: the launcher sets it for each member")
    if not equals and name not in os.environ:
        raise ConfigError(f"{name}: it is not set here; set it, or write {name}=VALUE")
    return name, value if equals else os.environ[name]


def _words(known: tuple[str, ...]) -> str:
    return "|".join(known)


SETTINGS = (
    Flag("strategy", "NAME", names.strategy, f"how members agree: {', '.join(names.STRATEGIES)}"),
    Flag(
        "mesh",
        "D=N,...",
        str,
        "how each replica is cut over members, as in shard=2, stage=2 or shard=2,split=2; the rest is replicated",
    ),
    Flag("servers", "K", servers.parse, "of sync, bounded and async: how many; colocated: a shard with every worker"),
    Flag(
        "codec",
        "NAME",
        names.codec,
        f'what travels between hosts: {", ".join(names.CODECS)}; with options "quantize(4), back=sign, warmup=100"',
    ),
    Flag(
        "precision",
        "NAME",
        names.precision,
        f"what models compute in: {', '.join(names.PRECISIONS)}; bf16(weights): parameters in bf16 too",
    ),
    Flag("name", "NAME", names.run, "of the run; a run of that name goes on where it stopped"),
    Flag("root", "DIR", str, "where run directories live"),
    Flag("fresh", "", bool, "start over although the run has checkpoints"),
    Flag("seed", "N", whole(0), "of the shuffle and of each member's random states"),
    Flag("device", _words(names.DEVICES), names.device, "what to compute on; cuda:1 names one GPU"),
    Flag("transport", _words(names.TRANSPORTS), names.transport, "how gradients travel; auto chooses"),
    Flag("checkpoint_every_s", "S", seconds(0), "besides the checkpoint at the end of each epoch; 0: only those"),
    Flag("checkpoint_keep", "K", whole(0), "keep the last K checkpoints; 0: write none"),
    Flag("join_limit_s", "S", seconds(0.001), "how long to wait for all members to arrive"),
    Flag("wait_limit_s", "S", seconds(0.001), "how long any later wait for another member may last"),
    Flag(
        "lr_rule",
        _words(names.LR_RULES),
        names.lr_rule,
        "with -n MIN:MAX and fewer than MAX members: the learning rate in proportion to them, or to its square root",
    ),
    Flag(
        "stragglers",
        _words(names.STRAGGLERS),
        names.stragglers,
        "members that are slower than the others: name them, give them less of each batch, or (-n MIN:MAX) let them go",
    ),
    Flag("progress", _words(names.PROGRESS), names.progress, "auto: a display on a terminal, else plain lines"),
    Flag("check_finite", "", bool, "stop on a gradient that is not finite, naming member and parameter"),
)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours, and which says which option was meant."""

    def __init__(self, *, elsewhere: Callable[[str], str] = lambda option: "", **kwargs: Any) -> None:
        self.elsewhere = elsewhere  # where an option that is not known here would be
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.takes_value: dict[str, bool] = {"-h": False, "--help": False}
        self.keys: dict[str, Option] = {}  # what a recipe may hold, by the name that the value has in a Namespace

    def option(
        self, *names: str, parse: Callable[[str], Any] | None = None, of_recipe: bool = True, **kwargs: Any
    ) -> None:
        """Add an option whose value `parse` checks; without `parse`, a switch. `of_recipe`: it is of the run that is
        started, and not of this one start."""
        if parse is None:
            added = self.add_argument(*names, action="store_true", **kwargs)
        else:
            added = self.add_argument(*names, type=_typed(parse), **kwargs)
        self.takes_value |= dict.fromkeys(names, parse is not None)
        if of_recipe:
            repeats = kwargs.get("action") == "append"
            self.keys[added.dest] = Option(names, parse, str(added.metavar or ""), repeats)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:  # --root=--: Python 3.11 drops it
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)

    def texts(self, options: list[str]) -> dict[str, list[str]]:
        """What was typed for each key, before it was read.

        >>> parser = Parser()
        >>> parser.option("-n", "--members", parse=size)
        >>> parser.texts(["-n2:4"]), parser.texts(["--members", "2"])
        ({'members': ['2:4']}, {'members': ['2']})
        """
        keys = {name: key for key, option in self.keys.items() for name in option.names}
        found: dict[str, list[str]] = {}
        words = iter(options)
        for word in words:
            name, given, text = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
            if self.takes_value[name] and not given:
                text = next(words)
            if name in keys:
                found.setdefault(keys[name], []).append(text)
        return found

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        more = "" if message.endswith("?") else f"; `{self.prog} --help` lists the options"
        raise ConfigError(message + more)

    def split(self, argv: list[str]) -> tuple[list[str], list[str]]:
        """Our options, and what follows them: the script (or -m and a module) and its own arguments.

        An unknown option among ours is an error that names the nearest known one.
        """
        i = 0
        while i < len(argv):
            word = argv[i]
            if word == "--":
                return argv[:i], argv[i + 1 :]
            if word == "-m" or not word.startswith("-") or word == "-":
                break
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            if name not in self.takes_value:
                raise ConfigError(f"unknown option {name!r}: {self.elsewhere(name) or nearest(name, self.takes_value)}")
            alone = word == name
            i += 2 if self.takes_value[name] and alone else 1
        return argv[:i], argv[i:]


def add_settings(parser: Parser) -> None:
    """One option per setting."""
    defaults = Settings()
    for flag in SETTINGS:
        default = getattr(defaults, flag.field)
        if flag.metavar:
            note = f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
            text = flag.help + (note if default != "" else "")
            parser.option(flag.option, parse=flag.parse, metavar=flag.metavar, help=text)
        else:
            parser.option(flag.option, help=flag.help)


def settings_of(given: argparse.Namespace) -> Settings:
    """The settings that the command line gives; those that were typed are pinned, defaults among them too."""
    values = {flag.field: getattr(given, flag.field) for flag in SETTINGS}
    typed = {k: v for k, v in values.items() if v is not None and v is not False}
    return Settings().with_(**typed).pin(*typed)


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def typed(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed
