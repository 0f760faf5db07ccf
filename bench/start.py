"""From the command to the first step: `paceline run -n 2` against `torchrun --nproc-per-node 2`, for the same script.

  time_over_torchrun    from the command until both members have taken their first step: our time / torchrun's with DDP
  script_over_torchrun  the same until both members have begun with the script: what the launchers alone take
  whole_over_torchrun   the same until the command has ended, after four steps

The script (`_start_script.py`) trains a tiny model on two members of one thread each; both commands are started in
turns, each once before it counts, so that files are in the page cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.harness import Figure, Report, arguments, compare

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("_start_script.py")
COMMANDS = {
    "ours": ["paceline", "run", "-n", "2"],
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2"],
}
_LIMIT_S = 120.0
_TOLD = re.compile(r"began ([\d.]+) stepped ([\d.]+)")


class Start(NamedTuple):
    """Seconds from the command."""

    script: float
    step: float
    whole: float


def main() -> None:
    options = arguments(__doc__)
    report = Report("bench.start")
    figures, aborted = measure(repeats=3 if options.quick else 15)
    for figure in figures:
        report.add(figure)
    if aborted:
        report.note(f"torchrun's members aborted at their end {aborted} times, after the training: started again")
    report.finish(options.json)


def measure(repeats: int) -> tuple[list[Figure], int]:
    """The figures, and how often torchrun was started again."""
    aborted = 0
    times: dict[str, list[Start]] = {side: [] for side in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(-1, repeats):
            for side in list(COMMANDS) if repeat % 2 == 0 else reversed(list(COMMANDS)):
                while (taken := start(side, folder)) is None:
                    aborted += 1
                if repeat >= 0:
                    times[side].append(taken)
    figures = [
        compare(
            f"{name}_over_torchrun",
            [getattr(taken, field) for taken in times["ours"]],
            [getattr(taken, field) for taken in times["torchrun"]],
            goal="<= 1.2" if name == "time" else "",
            ratio=lambda ours, peer: ours / peer,
        )
        for name, field in (("time", "step"), ("script", "script"), ("whole", "whole"))
    ]
    return figures, aborted


def start(side: str, folder: str) -> Start | None:
    """Run the script once; None where gloo's threads have aborted torchrun's members after their last step."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    command = [sys.executable, "-m", *COMMANDS[side], str(SCRIPT)]
    begin = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    end = time.monotonic()
    told = [tuple(map(float, match.groups())) for match in _TOLD.finditer(done.stdout)]
    if side == "torchrun" and len(told) == 2 and "terminate called without an active exception" in done.stderr:
        return None
    if done.returncode or len(told) != 2:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    script, step = (max(moments) - begin for moments in zip(*told))
    return Start(script, step, end - begin)


if __name__ == "__main__":
    main()
