"""The user's own Python, which a command names: a file or a module, imported, with what goes wrong said in a line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

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
