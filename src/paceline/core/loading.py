"""The user's own Python, which a command names: a file or a module, imported, with what goes wrong said in a line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from paceline.core.errors import ConfigError, nearest

T = TypeVar("T")


def file(path: Path) -> ModuleType:
    """The module in this file, beside which it finds its neighbours."""
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}{instead(path)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    loader = spec.loader

    def load() -> ModuleType:
        loader.exec_module(module)
        return module

    return _loaded(str(path), load)


def module(name: str) -> ModuleType:
    """The module of this name, here or among the installed ones."""
    sys.path.insert(0, "")
    if not name or importlib.util.find_spec(name.partition(".")[0]) is None:
        raise ConfigError(f"there is no module {name!r}, nor is it a file: write train.py:make_model")
    return _loaded(name, lambda: importlib.import_module(name))


def named(text: str) -> tuple[ModuleType, str, str]:
    """FILE[:FUNCTION] or package.module[:FUNCTION]: the module, what it was called, and the function's name or ""."""
    where, _, name = text.partition(":")
    found = file(Path(where)) if where.endswith(".py") or "/" in where else module(where)
    return found, where, name


def function(module: ModuleType, name: str, where: str) -> Callable[[], Any]:
    """That function of the module, which needs no arguments."""
    found = getattr(module, name, None)
    own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    if found is None:
        raise ConfigError(f"{where} has no function {name!r}: {nearest(name, own)}")
    if not callable(found):
        raise ConfigError(f"{where}:{name} is a {type(found).__name__}, not a function that makes a model")
    if missing := needed(found):
        raise ConfigError(
            f"{where}:{name} needs {', '.join(missing)}: name a function without arguments, which makes the model"
        )
    made: Callable[[], Any] = found
    return made


def result(module: ModuleType, name: str, where: str) -> Any:
    """What that function returns; ConfigError names the line of the user's file in which it fails."""
    make = function(module, name, where)
    try:
        return make()
    except ConfigError:
        raise
    except SystemExit as error:
        raise ConfigError(f"{where}:{name} ends the process ({error.code}) instead of returning") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = ([frame for frame in frames if frame.filename == module.__file__] or frames)[-1]
        at = f"{last.filename}, line {last.lineno}"
        raise ConfigError(f"{where}:{name} fails ({at}): {type(error).__name__}: {error}") from error


def needed(function: Any) -> list[str]:
    """The arguments that must be given."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def instead(path: Path) -> str:
    """The end of a message about a file that is not there: what else is, of the same kind."""
    near = [str(p) for p in sorted(path.parent.glob(f"*{path.suffix}"))] if path.parent.is_dir() else []
    return f": {nearest(str(path), near)}" if near else ""


def where(error: BaseException) -> str:
    """The file and the line in which it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}"


def _loaded(name: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except SystemExit:
        raise ConfigError(
            f'{name} ends while it is imported: put what trains under if __name__ == "__main__"'
        ) from None
    except Exception as error:
        raise ConfigError(f"{name} cannot be imported: {type(error).__name__}: {error} ({where(error)})") from error
