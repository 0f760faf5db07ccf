"""The user's script as a command line, looked at before anything is started."""

from __future__ import annotations

import difflib
import importlib.machinery
import sys
import zipfile
from pathlib import Path

from paceline.core.errors import ConfigError

_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")


def command(script: str, args: tuple[str, ...], *, module: bool, python: str, cwd: Path) -> tuple[str, ...]:
    """What runs the script; ConfigError where there is no such script or it is not Python."""
    if module:
        _check_module(script, cwd)
        return (python, "-m", script, *args)
    _check_file(script, cwd)
    return (python, script, *args)


def _check_file(script: str, cwd: Path) -> None:
    path = cwd / script
    if not path.exists():
        raise ConfigError(f"script {script!r} does not exist{_instead(path, script)}")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise ConfigError(f"script {script!r} is a directory without __main__.py: name the file to run")
        return
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"script {script!r} is a notebook: make a script of it, for instance with "
            f"`jupyter nbconvert --to script {script}`"
        )
    if path.suffix in _SUFFIXES:
        return
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError as error:
        raise ConfigError(f"script {script!r} cannot be read: {error.strerror}") from None
    if not (first.startswith(b"#!") and b"python" in first) and not zipfile.is_zipfile(path):
        raise ConfigError(
            f"script {script!r} is not a Python file: its name ends in none of {', '.join(_SUFFIXES)} "
            f"and it does not begin with a #! line that names python"
        )


def _instead(path: Path, script: str) -> str:
    try:
        there = [p.name for p in path.parent.iterdir() if p.suffix in _SUFFIXES]
    except OSError:
        return f": there is no directory {str(Path(script).parent)!r}"
    close = difflib.get_close_matches(path.name, there, n=1, cutoff=0.5)
    if not close and path.suffix not in _SUFFIXES:
        close = difflib.get_close_matches(path.name + ".py", there, n=1, cutoff=0.5)
    if close:
        return f": did you mean {str(Path(script).with_name(close[0]))!r}?"
    if not there:
        return ": there is no Python file in that directory"
    shown = ", ".join(sorted(there)[:5]) + (", …" if len(there) > 5 else "")
    return f": the Python files there are {shown}"


def _check_module(module: str, cwd: Path) -> None:
    top = module.partition(".")[0]  # looking further would import it
    if not module.replace(".", "").replace("_", "a").isalnum():
        raise ConfigError(f"-m {module!r} is not the name of a module, such as package.train")
    if top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top, [str(cwd), *sys.path]):
        return
    raise ConfigError(f"-m {module!r}: there is no module {top!r} here ({cwd}) or among the installed packages")
