"""The `paceline` command. Each subcommand is one module here, imported when it is asked for; torch is not."""

from __future__ import annotations

import importlib
import sys

from paceline.core.errors import PacelineError, nearest

COMMANDS = {
    "run": "train a script on several members",
    "status": "what each member of a run is doing or waiting for",
    "logs": "what the members of a run print",
    "stop": "end a run",
    "agent": "let this host take part in an elastic run",
    "scale": "let an elastic run have more members, or fewer",
    "plan": "what each member would hold, before anything runs",
    "serve": "answer requests with a model",
    "doctor": "check this machine, and what that means for a run",
}
_HELP = """\
usage: paceline COMMAND …

{commands}

  paceline run -n 2 train.py --lr 0.1    two members here; what follows the script belongs to the script
  paceline status                        what the newest run does, member by member
  paceline stop big                      end it; with the same --name it goes on later
  paceline scale big 3                   three members from now on, in a run of -n 2:4
  paceline plan memory train.py -n 4     parameters, gradients, state and activations, for each choice
  paceline doctor                        cores, memory, torch, GPUs, and how many members to start

`paceline COMMAND --help` says more about each; `paceline --version` says which version this is.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `paceline status | head`
        sys.stderr.close()
        return 141


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_HELP.format(commands="\n".join(f"  {name:8} {what}" for name, what in COMMANDS.items())))
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"paceline {version('paceline')}")
        return 0
    if argv[0] not in COMMANDS:
        kind = "option" if argv[0].startswith("-") else "command"
        print(f"paceline: error: unknown {kind} {argv[0]!r}: {nearest(argv[0], COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"paceline.cli.{argv[0]}")
    code: int = module.main(argv[1:])
    return code
