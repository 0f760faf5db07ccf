"""`paceline plan memory train.py:make_model`: what each member would hold for each choice, before anything runs.

The reckoning is `paceline.parallel.memory`; here are the words, the table and the verdict. What the user names is found
by `cli.target`.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from paceline.cli.flags import Parser, whole
from paceline.core.errors import ConfigError, nearest
from paceline.launch import names

if TYPE_CHECKING:
    from paceline.cli.target import Target
    from paceline.parallel.memory import Choice, Plan

KINDS = ("memory",)
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_UNITS |= {"ti": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
_EPILOG = """\
examples:
  paceline plan memory train.py:make_model --batch 8x1024:int64 -n 8 --memory 80GB --precision bf16
  paceline plan memory train.py -n 4 --optimizer "sgd(momentum=0.9)"      a file with one such function

The function takes no arguments and makes the model; it is called with tensors that have shapes and no values, so
nothing is allocated. What a batch of one member looks like is said with --batch, once for each argument of the model,
or by a function example_inputs() beside it, which returns the arguments. The exit code is 1 where nothing fits.
"""


def main(argv: list[str]) -> int:
    parser = _parser()
    if not argv or argv[0].startswith("-"):
        if argv[:1] in (["-h"], ["--help"]):
            parser.parse_args(["--help"])
        raise ConfigError("plan what? paceline plan memory train.py:make_model")
    if argv[0] not in KINDS:
        raise ConfigError(f"paceline plan {argv[0]!r} is not known: {nearest(argv[0], KINDS)}")
    _, rest = parser.split(argv[1:])
    parser.split(rest[1:])  # an unknown option behind the file gets the nearest name too
    given = parser.parse_args(argv[1:])
    return _memory(given)


def _parser() -> Parser:
    parser = Parser(
        prog="paceline plan memory",
        description="What each member would hold for each choice, before anything runs.",
        epilog=_EPILOG,
    )
    parser.option("-n", "--members", parse=whole(1), metavar="N", default=1, help="how many members (1)")
    parser.option("--batch", parse=shape, metavar="SHAPE", action="append", help="of one member, as in 8x1024:int64")
    parser.option("--memory", parse=nbytes, metavar="SIZE", help="of one member, as in 24GB: says what fits")
    parser.option("--optimizer", parse=str, metavar="NAME", default="adamw", help='such as "sgd(momentum=0.9)" (adamw)')
    parser.option(
        "--precision", parse=names.precision, metavar="NAME", default="fp32", help="as of paceline run (fp32)"
    )
    parser.option(
        "--device", parse=names.device, metavar="NAME", default="cuda", help="cpu: nothing is offloaded (cuda)"
    )
    parser.option("--all", help="every mesh, not only those that are cut in one way")
    parser.option("--json", help="print a JSON object instead of a table")
    parser.add_argument("model", metavar="FILE[:FUNCTION]", help="what makes the model: train.py:make_model")
    return parser


def shape(text: str) -> tuple[list[int], str]:
    """
    >>> shape("8x1024:int64")
    ([8, 1024], 'int64')
    """
    found = _SHAPE.fullmatch(text.strip())
    if not found:
        raise ConfigError(f"{text!r} is not a shape: write it as 8x3x224x224, with a type as 8x1024:int64")
    return [int(number) for number in found[1].split("x")], found[2] or "float32"


def nbytes(text: str) -> int:
    """
    >>> nbytes("24GB"), nbytes("1.5GiB")
    (24000000000, 1610612736)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise ConfigError(f"{text!r} is not a size: write it as 24GB, 80GiB or 500MB")
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def _memory(given: Namespace) -> int:
    from paceline.cli.target import find
    from paceline.parallel.memory import memory_plan

    target = find(given.model)
    inputs, said = target.inputs(given.batch)
    plan = memory_plan(
        target.make,
        inputs,
        members=given.members,
        optimizer=given.optimizer,
        precision=given.precision,
        memory=given.memory,
        device=given.device.partition(":")[0].replace("auto", "cuda"),
    )
    if given.json:
        print(json.dumps(_plain(plan), indent=2))
    else:
        head = f"{target.name}: {_count(plan.num_parameters)} parameters, {given.optimizer}, {given.precision}"
        print(f"{head}, a batch of {said} on each of {given.members} member{'s' * (given.members > 1)}\n")
        show(plan, every=given.all)
        print("\n".join(["", *_verdict(plan, target)]))
    return 0 if given.memory is None or plan.best else 1


def show(plan: Plan, *, every: bool = False) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = [c for c in plan.choices if every or c.mesh.count("=") < 2]
    if not every and plan.best and plan.best not in shown:
        shown.append(plan.best)
    host = any(c.host for c in shown)
    again = any(c.recomputed is not None for c in shown)
    head = ["each member", "parameters", "gradients", "state", "activations", "at once"]
    head += ["recomputed"] * again + ["host"] * host + ["fits"] * (plan.memory is not None)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(head):
        table.add_column(title, justify="right" if 0 < number < len(head) - (plan.memory is not None) else "left")
    for choice in shown:
        row = [choice.words, *map(size, (choice.parameters, choice.gradients, choice.state, choice.activations))]
        row += [size(choice.at_once)] + [size(choice.recomputed)] * again + [size(choice.host)] * host
        fits = choice.fits(plan.memory)
        table.add_row(*row, *([fits] * bool(fits)), style={"yes": "green", "no": "red"}.get(fits))
    console = Console(file=sys.stdout)
    console = console if console.is_terminal else Console(file=sys.stdout, width=140)
    console.print(table)


def _verdict(plan: Plan, target: Target) -> list[str]:
    lines = []
    cut = plan.best if plan.memory is not None else None
    if plan.memory is None:
        lines.append("--memory 24GB says what fits; leave a tenth of it for what libraries and allocators take.")
    elif cut:
        lines.append(f"fits in {size(plan.memory)}: {_how(cut, plan.memory, target)}")
    else:
        lines.append(f"nothing fits in {size(plan.memory)} on {plan.members} member{'s' * (plan.members > 1)}")
    if plan.smallest and (not cut or plan.smallest.members < plan.members):
        lines.append(f"the smallest that would do: {_how(plan.smallest, plan.memory, target)}")
    elif plan.memory is not None and not plan.smallest:
        least = min(plan.choices, key=lambda c: c.recomputed or c.at_once)
        lines.append(
            f"no number of members would do: activations of one batch alone take {size(least.activations)}. Take a "
            "smaller batch per member, or put layers into a ModuleList so that they can be recomputed"
        )
    return lines


def _how(choice: Choice, memory: int | None, target: Target) -> str:
    options = ["recompute=True"] * (choice.fits(memory) == "recomputed")
    options += [f'offload="{choice.offload}"'] * (choice.offload != "none")
    cuts = bool(choice.mesh) or bool(options)
    inside = f", with run.model({', '.join(['make', *options])})" if cuts else ""
    return f"paceline run {choice.flags} {target.script}{inside}"


def size(number: int | None) -> str:
    """
    >>> size(24_000_000_000), size(1_234_567), size(0), size(None)
    ('24 GB', '1.23 MB', '0', '-')
    """
    if number is None:
        return "-"
    for unit, value in ("GB", 1e9), ("MB", 1e6), ("kB", 1e3):
        if number >= value:
            return f"{number / value:.3g} {unit}" if number < 1000 * value else f"{number / value:.0f} {unit}"
    return str(number)


def _count(number: int) -> str:
    return f"{number / 1e9:.3g}B" if number >= 1e9 else f"{number / 1e6:.3g}M" if number >= 1e6 else str(number)


def _plain(plan: Plan) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [{**asdict(c), "words": c.words, "fits": c.fits(plan.memory)} for c in plan.choices]
    best, smallest = ({"flags": c.flags, "members": c.members} if c else None for c in (plan.best, plan.smallest))
    return {
        "parameters": plan.num_parameters,
        "members": plan.members,
        "memory": plan.memory,
        "choices": rows,
        "best": best if plan.memory is not None else None,
        "smallest": smallest,
    }
