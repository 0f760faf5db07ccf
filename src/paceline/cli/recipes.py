"""A recipe: a run written down, in a TOML file or by a Python function, with the words of the command line.

Its keys are the options of the parser (`checkpoint_every_s` is `--checkpoint-every-s`), and `script` or `module` and
`args`. It becomes arguments, which are read as if they had been typed; what is typed goes before it. So there is one
table of options, and one check of each value, however it is given. What a run was started with becomes a recipe again,
which is kept in its directory: `--again` starts from there.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

from paceline.cli import runs, toml
from paceline.cli.flags import Option, Parser, Size
from paceline.core import loading
from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import Settings
from paceline.launch import record

FILE = "recipe.toml"  # in the directory of a run
_WHAT = ("script", "module", "args")  # what is started; on the command line it has no names
_OF_ONE_START = ("name", "fresh")  # a repetition is a run of its own
_COUNTS = ("N", "K")  # in the help these stand for a number, where words are allowed too
_FUNCTION = re.compile(r"(.+\.py):(\w+)")

Table: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class _Written:
    """A recipe, and where its keys stand, for messages."""

    table: Table
    where: Callable[[str], str]


def resolve(make: Callable[[list[str]], Parser], argv: list[str]) -> tuple[Namespace, list[str], Table]:
    """The options, the script with its arguments, and both as a recipe: of the command line alone, or of what it makes
    of a recipe that it names.

    Args:
        make: the parser for these words, of which some may decide what others there are.
    """
    parser = make(argv)
    options, rest = parser.split(argv)
    given = parser.parse_args(options)
    if given.again is not None:
        written, more = _of_run(given), argv[len(options) :]
    elif rest and is_recipe(rest[0]):
        written, more = read(rest[0]), rest[1:]
    elif given.set:
        raise ConfigError(f"--set {given.set[0]} changes a recipe: name one (recipe.toml), or --again RUN")
    else:
        return given, rest, table_of(parser, options, rest)
    parser = make(_guessed(argv, written.table))
    behind, args = parser.split(more)
    if args and more[len(behind)] != "--":
        raise ConfigError(
            f"{args[0]!r} is not understood: the script comes from the recipe, and so do its arguments; others in "
            "their place come last, after --"
        )
    options = [*options, *behind]
    given = parser.parse_args(options)
    table = _with_changes(parser, written, given)
    if args:
        table["args"] = args
    typed = {key for key in parser.keys if getattr(given, key) not in (None, False)}
    of_recipe = arguments(parser, {key: value for key, value in table.items() if key not in (*typed, *_WHAT)})
    options, rest = [*of_recipe, *options], started(table)
    final = table_of(parser, options, rest)
    if isinstance(table.get("args"), dict) and table["args"]:
        final["args"] = table["args"]  # whose names --set can change
    return parser.parse_args(options), rest, final


def _guessed(argv: list[str], table: Table) -> list[str]:
    """The words of a recipe behind those that were typed, before there is a parser that knows them."""
    typed = argv[: argv.index("--")] if "--" in argv else argv
    changes = [change.partition("=") for flag, change in pairwise(typed) if flag == "--set"]
    texts = {key: value for key, value in table.items() if isinstance(value, str) and key not in _WHAT}
    texts |= {key: value for key, _, value in changes if key not in _WHAT}
    return [*typed, *(f"--{key.replace('_', '-')}={value}" for key, value in texts.items())]


def is_recipe(word: str) -> bool:
    """Whether a word in the place of the script is a recipe.

    >>> is_recipe("big.toml"), is_recipe("recipes.py:big"), is_recipe("train.py")
    (True, True, False)
    """
    return word.endswith(".toml") or (_FUNCTION.fullmatch(word) is not None and not Path(word).exists())


def read(name: str) -> _Written:
    """The recipe in a TOML file, or of FILE.py:FUNCTION."""
    if function := _FUNCTION.fullmatch(name):
        return _Written(_made(name, function[1], function[2]), lambda key: name)
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {name!r}{loading.instead(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = text.splitlines()

    def where(key: str) -> str:
        if not key:
            return name
        head = re.compile(rf"\s*\[?\s*[\"']?{re.escape(key)}\b")
        return next((f"{name}, line {n}" for n, line in enumerate(lines, 1) if head.match(line)), name)

    return _Written(toml.read(text, name), where)


def arguments(parser: Parser, table: Mapping[str, Any]) -> list[str]:
    """A recipe as it would be typed."""
    words = []
    for key, value in table.items():
        if key in _WHAT:
            continue
        name = parser.keys[key].name
        if isinstance(value, bool):
            words += [name] * value
        else:
            words += [f"{name}={toml.word(each)}" for each in (value if isinstance(value, list) else [value])]
    what = started(table)
    return words + (["--"] if what and what[0] != "-m" else []) + what


def started(table: Mapping[str, Any]) -> list[str]:
    """The script, or -m and a module, with the arguments."""
    what = ["-m", table["module"]] if "module" in table else [table["script"]] if "script" in table else []
    return [*what, *_words(table.get("args", []))] if what else []


def table_of(parser: Parser, options: list[str], rest: list[str]) -> Table:
    """What was typed, as a recipe: what is no number or text of its own stands as it was typed."""
    given, texts = parser.parse_args(options), parser.texts(options)
    table: Table = {}
    if rest:
        at = 1 if rest[0] == "-m" else 0
        what = rest[at : at + 1]
        table = dict(zip(["module" if at else "script"], what))
        if args := rest[at + 1 :]:
            table["args"] = args
    for key, option in parser.keys.items():
        value = getattr(given, key)
        if isinstance(value, Size):
            table[key] = str(value) if value.elastic else value.most
        elif value is not None and value is not False:
            table[key] = value if toml.plain(value) else texts[key] if option.repeats else texts[key][-1]
    return table


def write(directory: Path, table: Table) -> None:
    """Keep what a run is started with."""
    head = f"# What this run was started with; to do it again: paceline run --again {directory.name}\n"
    part = directory / f".{FILE}"
    part.write_text(head + toml.text(table), encoding="utf-8")
    part.replace(directory / FILE)


def check(parser: Parser, table: Table, where: Callable[[str], str]) -> None:
    """ConfigError where a key is unknown, or a value is not what its option takes."""
    for key, value in table.items():
        if key not in parser.keys and key not in _WHAT:
            raise ConfigError(f"{where(key)}: unknown key {key!r}: {_instead(parser, key)}")
        shown = f"{where(key)}: {key} = {toml.shown(value)}"
        if wanted := _wanted(parser.keys.get(key), key, value):
            raise ConfigError(f"{shown}: expected {wanted}")
        if key in parser.keys and (parse := parser.keys[key].parse):
            try:
                for each in value if isinstance(value, list) else [value]:
                    parse(toml.word(each))
            except ConfigError as error:
                raise ConfigError(f"{shown}: {error}") from None
    if "script" in table and "module" in table:
        raise ConfigError(f"{where('module')}: script and module: a run has one of them")
    if "script" not in table and "module" not in table:
        raise ConfigError(f'{where("")}: which script? Write script = "train.py", or module = "package.train"')
    if is_recipe(str(table.get("script", ""))):
        raise ConfigError(f"{where('script')}: script = {table['script']!r} is a recipe itself: name the script to run")


def _instead(parser: Parser, key: str) -> str:
    """Of a key that is not known."""
    option = "--" + key.replace("_", "-")
    return parser.elsewhere(option) or nearest(key, [*parser.keys, *_WHAT])


def _wanted(option: Option | None, key: str, value: Any) -> str:
    """What the value must be, if it is not that."""
    if key == "args":
        fits = toml.plain(value) if isinstance(value, dict | list) else False
        return "" if fits else "a list of words, or a table of names and values, such as {lr = 0.1}"
    if option is None:
        return "" if isinstance(value, str) and value else "the name of one, as a string"
    if option.parse is None:
        return "" if isinstance(value, bool) else "true or false"
    if option.repeats and isinstance(value, list):
        return "" if all(isinstance(each, str) for each in value) else "a list of strings"
    kinds, words = _kinds(option)
    return "" if isinstance(value, kinds) and not isinstance(value, bool) else words


def _kinds(option: Option) -> tuple[tuple[type, ...], str]:
    """What an option's value may be in TOML, by what its parser returns."""
    assert option.parse
    returns = str if option.parse is str else get_type_hints(option.parse).get("return")
    if returns is int:
        return (int,), "a whole number"
    if returns is float:
        return (int, float), "a number"
    if option.metavar in _COUNTS:
        return (int, str), "a whole number, or a string"
    return (str,), "a string or a list of strings" if option.repeats else "a string"


def _words(args: Any) -> list[str]:
    """Of a list its words; of a table --name value, a switch for true, nothing for false."""
    if isinstance(args, list):
        return [toml.word(each) for each in args]
    words: list[str] = []
    for parts, value in toml.flat(args):
        name = _dashed(parts)
        if isinstance(value, bool):
            words += [name] * value
        elif isinstance(value, list):
            words += [name, *map(toml.word, value)]
        elif toml.word(value).startswith("-") and name.startswith("--"):
            words.append(f"{name}={toml.word(value)}")
        else:
            words += [name, toml.word(value)]
    return words


def _dashed(parts: Iterable[str]) -> str:
    name = ".".join(parts)
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _made(name: str, file: str, function: str) -> Table:
    module = loading.file(Path(file))
    make = getattr(module, function, None)
    if make is None:
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"{file} has no function {function!r}: {nearest(function, own)}")
    if not callable(make):
        raise ConfigError(f"{name} is a {type(make).__name__}, not a function that returns a recipe")
    try:
        made = make()
    except Exception as error:
        raise ConfigError(f"{name} fails: {type(error).__name__}: {error} ({loading.where(error)})") from error
    if not isinstance(made, Mapping):
        raise ConfigError(f"{name} returns a {type(made).__name__}: expected a dict with the keys of a recipe")
    if odd := next((key for key in made if not isinstance(key, str)), None):
        raise ConfigError(f"{name} returns a dict with the key {odd!r}: keys of a recipe are strings")
    return {key: list(value) if isinstance(value, tuple) else value for key, value in made.items()}


def _of_run(given: Namespace) -> _Written:
    root = Path(given.root or Settings().root)
    directory = runs.submitted(root, given.again) or runs.find(root, given.again).directory
    file = directory / FILE
    if not file.exists():
        raise ConfigError(
            f"{directory} has no {FILE}, which `paceline run` keeps there: it was started by other means, or by "
            "an older version; start it by its command"
        )
    written = read(str(file))
    table = {key: value for key, value in written.table.items() if key not in _OF_ONE_START}
    run, script = record.read(directory), table.get("script")
    if run and run.cwd and isinstance(script, str) and not Path(script).exists() and Path(run.cwd, script).exists():
        raise ConfigError(f"script {script!r} is not here: the run was started in {run.cwd}; go there first")
    return _Written(table, written.where)


def _with_changes(parser: Parser, written: _Written, given: Namespace) -> Table:
    """The recipe after each --set, checked."""
    table, changed = dict(written.table), {}
    for text in given.set or ():
        path, equals, value = text.partition("=")
        key, *parts = path.strip().split(".")
        if not equals or not key:
            raise ConfigError(f"--set {text}: write KEY=VALUE, such as seed=3 or args.lr=0.1")
        if key not in parser.keys and key not in _WHAT:
            raise ConfigError(f"--set {text}: unknown key {key!r}: {_instead(parser, key)}")
        if parts and key != "args":
            raise ConfigError(f"--set {text}: {key} has no parts; only args has, as in args.lr=0.1")
        if getattr(given, key, None) not in (None, False) and key in parser.keys:
            raise ConfigError(f"--set {text}: {parser.keys[key].name} is given too: leave one of them out")
        if parts:
            table["args"] = _with_argument(table.get("args", {}), parts, toml.value(value), text)
        else:
            table[key] = _read_as(parser.keys.get(key), value)
            for other in {"script": ("module",), "module": ("script",)}.get(key, ()):
                table.pop(other, None)
        changed[key] = f"--set {text}"
    check(parser, table, lambda key: changed.get(key) or written.where(key))
    return table


def _read_as(option: Option | None, text: str) -> Any:
    """The text behind --set: a word without quotes is one."""
    value = toml.value(text)
    if isinstance(value, str) or (option and option.parse is None):
        return value
    if option and not isinstance(value, list) and str not in _kinds(option)[0]:
        return value
    return value if isinstance(value, list | dict) else text


def _with_argument(args: Any, parts: list[str], value: Any, text: str) -> Any:
    """The arguments of the script, one of them changed or added."""
    if isinstance(args, list):
        return _replaced(args, _dashed(parts), value)
    first, *others = parts
    if not isinstance(args, dict):
        raise ConfigError(f"--set {text}: args.{first} is below a value, not a table")
    return args | {first: _with_argument(args.get(first, {}), others, value, text) if others else value}


def _replaced(words: list[Any], name: str, value: Any) -> list[Any]:
    """A list of words in which `--name` has this value.

    >>> _replaced(["data", "--lr", "0.1"], "--lr", 0.2), _replaced(["--lr=0.1", "data"], "--lr", 0.2)
    (['data', '--lr', '0.2'], ['--lr=0.2', 'data'])
    """
    if isinstance(value, bool):
        return [each for each in words if each != name] + [name] * value
    new = [toml.word(each) for each in (value if isinstance(value, list) else [value])]
    for i, each in enumerate(words):
        if each == name:
            return [*words[: i + 1], *new, *words[i + 2 :]]
        if str(each).startswith(f"{name}=") and len(new) == 1:
            return [*words[:i], f"{name}={new[0]}", *words[i + 1 :]]
    return [*words, name, *new]
