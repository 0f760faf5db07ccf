"""`paceline doctor`: what this machine has, and what that means for a run. The checks are in `checks` and
`torch_checks`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.cli import checks, torch_checks
from paceline.cli.checks import Check
from paceline.cli.display import coloured
from paceline.cli.flags import Parser
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings

_COLOURS = {"ok": 32, "warning": 33, "error": 31}


def main(argv: list[str]) -> int:
    parser = Parser(prog="paceline doctor", description="Check this machine, and say what it means for a run.")
    parser.option("--json", help="print a JSON object instead of lines")
    parser.option("--root", parse=str, metavar="DIR", default=Settings().root, help="where runs would live (runs)")
    if rest := parser.split(argv)[1]:
        raise ConfigError(f"paceline doctor takes no argument {rest[0]!r}")
    given = parser.parse_args(argv)
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


def _line(check: Check) -> str:
    level = f"{check.level:7}"
    if coloured(sys.stdout):
        level = f"\x1b[{_COLOURS[check.level]}m{level}\x1b[0m"
    return f"{level}  {check.name:11}  {check.found}" + (f": {check.means}" if check.means else "")
