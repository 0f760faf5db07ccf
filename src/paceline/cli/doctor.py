"""`paceline doctor`: what this machine has, and what that means for a run. The checks are in `checks` and
`torch_checks`; those of other hosts in `matrix`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from paceline.cli import checks, matrix, torch_checks
from paceline.cli.checks import Check
from paceline.cli.display import coloured
from paceline.cli.flags import Parser, variable
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.launch import typed

_COLOURS = {"ok": 32, "warning": 33, "error": 31}


def main(argv: list[str]) -> int:
    parser = Parser(prog="paceline doctor", description="Check this machine, and say what it means for a run.")
    parser.option("--json", help="print a JSON object instead of lines")
    parser.option("--root", parse=str, metavar="DIR", default=Settings().root, help="where runs would live (runs)")
    parser.option(
        "--hosts", parse=typed.hosts, metavar="a,b|FILE", help="check these, over ssh, and the links between them"
    )
    parser.option(
        "--ssh", parse=typed.command, metavar="COMMAND", help="with --hosts: what is called, as in 'ssh -F FILE'"
    )
    parser.option("--python", parse=str, metavar="PATH", help="with --hosts: of Python there (the same as here)")
    parser.option("--interface", parse=str, metavar="NAME", help="with --hosts: of this host, towards the others")
    parser.option("--env", parse=variable, metavar="NAME[=VALUE]", action="append", help="with --hosts: as for a run")
    if rest := parser.split(argv)[1]:
        raise ConfigError(f"paceline doctor takes no argument {rest[0]!r}")
    given = parser.parse_args(argv)
    if given.hosts:
        return _hosts(given)
    if other := next((name for name in ("ssh", "python", "interface", "env") if getattr(given, name)), ""):
        raise ConfigError(f"--{other} is about other hosts: give --hosts a,b")
    results = [*checks.all_of(Path(given.root)), *torch_checks.all_of()]
    stops = any(c.level == "error" for c in results)
    if given.json:
        items = [{"name": c.name, "level": c.level, "found": c.found, "means": c.means} for c in results]
        print(json.dumps({"ok": not stops, "checks": items}, indent=2))
    else:
        for check in results:
            print(_line(check))
        print("\nsomething above would stop a run" if stops else "\na run can start here")
    return 1 if stops else 0


def _hosts(given: Namespace) -> int:
    way = matrix.way_of(given.ssh, given.python, dict(given.env or ()))
    report = matrix.look(given.hosts, way, given.interface or "")
    told = matrix.as_json(report)
    print(json.dumps(told, indent=2) if given.json else "\n".join(matrix.lines(report)))
    return 0 if told["ok"] else 1


def _line(check: Check) -> str:
    level = f"{check.level:7}"
    if coloured(sys.stdout):
        level = f"\x1b[{_COLOURS[check.level]}m{level}\x1b[0m"
    return f"{level}  {check.name:11}  {check.found}" + (f": {check.means}" if check.means else "")
