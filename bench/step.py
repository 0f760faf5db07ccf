"""The whole training step of two members with one thread each, against DDP over gloo.

  speedup_mlp   an MLP of 25M parameters, batch 32 per member      DDP's time / ours
  speedup_cnn   a CNN with batch-norm, batch 32 per member
  speedup_gpt   a small GPT, batch 8 per member
  speedup_*_views   the same against DDP(gradient_as_bucket_view=True), its leaner setting (not with --quick)

Both systems live in the same two processes, each with a model of its own; blocks of steps are interleaved.
"""

from __future__ import annotations

from typing import Any

from bench.harness import Report, arguments, compare, interleave
from bench.team import Team

GOALS = {"mlp": ">= 1.5", "cnn": ">= 1", "gpt": ">= 1"}


def main() -> None:
    options = arguments(__doc__)
    if options.worker:
        return _worker()
    report = Report("bench.step")
    repeats, block_s, limit_s = (7, 0.6, 8.0) if options.quick else (25, 1.0, 90.0)
    sides: dict[str, dict[str, Any]] = {"ours": {"side": "ours"}, "ddp": {"side": "ddp"}}
    if not options.quick:
        sides["views"] = {"side": "ddp", "ddp": {"gradient_as_bucket_view": True}}
    for task, goal in GOALS.items():
        with Team.of(2, "bench.step", threads=1) as team:
            for name, choice in sides.items():
                team.call("make", name=name, task=task, **choice)
            blocks = {
                name: lambda k, name=name: team.slowest("block", name=name, steps=k)  # type: ignore[misc]
                for name in sides
            }
            times = interleave(blocks, repeats=repeats, block_s=block_s, limit_s=limit_s)
            team.call("finish")
        report.add(compare(f"speedup_{task}", times["ours"], times["ddp"], goal=goal))
        if "views" in times:
            report.add(compare(f"speedup_{task}_views", times["ours"], times["views"]))
    return report.finish(options.json)


def _worker() -> None:
    import torch

    from bench import workers
    from bench.team import serve

    torch.set_num_threads(1)
    workers.gloo()
    serve(workers.FUNCTIONS)


if __name__ == "__main__":
    main()
