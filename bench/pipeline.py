"""How much of a step the members of a pipeline wait, beside what the formula of the schedule says.

Layers sleep instead of computing (equally long forward, and for both halves of the backward pass), so that more members
than cores can be measured; activations and gradients of 64 KB per micro-batch are real, and so is all that moves them.
  bubble_over_formula_SCHEDULE        share of a step that a member waits / the formula's; 4 members, 8 micro-batches
  bubble_over_formula_SCHEDULE_S_M    the same for S members and M micro-batches
  step_over_torch_S_M                 time of a step with 1f1b / with PyTorch's own 1F1B on gloo, in the same processes
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from bench.harness import Figure, Report, arguments, compare, middle, short
from paceline.core.settings import Settings
from paceline.parallel.schedule import SCHEDULES, bubble
from paceline.testing.cluster import Cluster

_MAIN = (4, 8)
_WIDTH = 1 << 14
_SECONDS = 0.03  # forward, of one member and micro-batch


def main() -> None:
    options = arguments(__doc__)
    report = Report("bench.pipeline")
    places = [_MAIN] if options.quick else [_MAIN, (2, 4), (2, 8), (4, 16)]
    for members, micros in places:
        found = _measure(members, micros, 3 if options.quick else 9)
        at = "" if (members, micros) == _MAIN else f"_{members}_{micros}"
        for schedule in SCHEDULES:
            formula = bubble(schedule, members, micros)
            shares = [1 - busy / took for took, busy in found[schedule]]
            low, high = middle([share / formula for share in shares])
            report.add(
                Figure(
                    name=f"bubble_over_formula_{schedule.replace('-', '_')}{at}",
                    value=statistics.median(shares) / formula,
                    ours=f"{100 * statistics.median(shares):.1f} %",
                    peer=f"{100 * formula:.1f} %",
                    spread=f"{short(low)} .. {short(high)}",
                )
            )
        ours, theirs = ([took for took, _ in found[side]] for side in ("1f1b", "torch"))
        name = f"step_over_torch_{members}_{micros}"
        report.add(compare(name, ours, theirs, ratio=lambda mine, peer: mine / peer))
    report.note("ours: share of a step in which members wait; peer: the formula's. step_over_torch: times of steps")
    report.finish(options.json)


def _measure(members: int, micros: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """By schedule: seconds of each step, and seconds that a member computed in it."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            "micros": micros,
            "repeats": repeats,
            "schedules": SCHEDULES,
            "width": _WIDTH,
            "seconds": _SECONDS,
            "store": f"file://{folder}/gloo",
        }
        settings = Settings(progress="off", mesh=f"stage={members}", checkpoint_keep=0)
        script = Path(__file__).with_name("_pipeline_worker.py")
        ended = Cluster(members).run(script, [json.dumps(wanted)], limit_s=300, settings=settings)
    for member in ended:
        if member.code:
            raise SystemExit(f"a member failed:\n{member.output}")
    line = next(line for line in ended[0].output.splitlines() if "FOUND " in line)
    found: dict[str, list[tuple[float, float]]] = json.loads(line.split("FOUND ", 1)[1])
    return found


if __name__ == "__main__":
    main()
