"""What Paceline adds: to the step of a run of one, and to a member's memory.

  overhead_cnn, overhead_gpt   percent that a run of one adds to plain PyTorch's step (`run.log` included)
  huge_pages_mlp, _cnn, _gpt   the step of plain PyTorch in malloc's own pages / in huge ones, as `paceline run`
                               has malloc ask for
  memory_over_ddp              peak memory per member on the MLP of 25M parameters, ours / DDP's. Memory is
                               the proportional set size (a page shared by two members counts half for each),
                               summed over both members, sampled every 10 ms, largest sum, divided by two
  memory_over_ddp_views        the same against DDP(gradient_as_bucket_view=True) (not with --quick)
and where there is a CUDA device:
  overhead_gpt_cuda            percent that a run of one adds to the step of a GPT of GPT-2-small's size,
                               bf16 autocast, AdamW, batch 8 x 1024
  cuda_equal_max_diff          a small GPT after some steps of SGD, on two members that share the GPU and on
                               one with the doubled batch: the largest difference between any two weights
                               (`ours` shows how far the weights moved at all)

For the overhead, plain and ours alternate in the same process, step by step in blocks, with a model each.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

from bench.harness import Figure, Report, arguments, compare, interleave, overhead, short
from bench.team import Team


def main() -> None:
    options = arguments(__doc__)
    if options.worker:
        return _worker()
    report = Report("bench.overhead")
    for task in "cnn", "gpt":
        report.add(_alone(f"overhead_{task}", task, goal="<= 2", quick=options.quick))
    for task in "mlp", "cnn", "gpt":
        report.add(_huge_pages(task, options.quick))
    _memory(report, options.quick)
    import torch

    if torch.cuda.is_available():
        gpt2 = {"device": "cuda", "autocast": True, "adamw": True}
        report.add(_alone("overhead_gpt_cuda", "gpt2", goal="<= 1", quick=options.quick, threads=4, **gpt2))
        report.add(equality("cuda", steps=5 if options.quick else 20))
    else:
        report.note("overhead_gpt_cuda and cuda_equal_max_diff skipped: no CUDA device here")
    return report.finish(options.json)


def _alone(figure: str, task: str, *, goal: str, quick: bool, threads: int = 1, **loop: Any) -> Figure:
    """Short blocks, many of them: two percent is less than what a busy machine wavers by within a second."""
    repeats, limit_s = (40, 8.0) if quick else (200, 90.0)
    with Team.of(1, "bench.overhead", threads=threads) as team:
        for side in "ours", "plain":
            team.call("make", name=side, task=task, side=side, **loop)
        blocks = {
            side: lambda k, side=side: team.slowest("block", name=side, steps=k)  # type: ignore[misc]
            for side in ("ours", "plain")
        }
        times = interleave(blocks, repeats=repeats, block_s=0.15, limit_s=limit_s)
        team.call("finish")
    return compare(figure, times["ours"], times["plain"], goal=goal, ratio=overhead)


def _huge_pages(task: str, quick: bool) -> Figure:
    repeats, limit_s = (5, 5.0) if quick else (41, 40.0)
    with (
        Team.of(1, "bench.overhead", ours=False) as huge,
        Team.of(1, "bench.overhead", ours=False, env={"GLIBC_TUNABLES": ""}) as plain,
    ):
        teams = {"huge": huge, "plain": plain}
        for team in teams.values():
            team.call("make", name="plain", task=task, side="plain")
        blocks = {
            name: lambda k, team=team: team.slowest("block", name="plain", steps=k)  # type: ignore[misc]
            for name, team in teams.items()
        }
        times = interleave(blocks, repeats=repeats, block_s=0.3, limit_s=limit_s)
        for team in teams.values():
            team.call("finish")
    return compare(f"huge_pages_{task}", times["huge"], times["plain"])


def _memory(report: Report, quick: bool) -> None:
    steps, rounds = (8, 1) if quick else (20, 3)
    sides: dict[str, dict[str, Any]] = {"ours": {"side": "ours"}, "ddp": {"side": "ddp"}}
    if not quick:
        sides["views"] = {"side": "ddp", "ddp": {"gradient_as_bucket_view": True}}
    peaks: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, choice in sides.items():
            with Team.of(2, "bench.overhead", ours=name == "ours") as team, Peak(team.pids) as peak:
                team.call("make", name=name, task="mlp", **choice)
                team.call("block", name=name, steps=steps)
                team.call("finish")
            peaks[name].append(peak.bytes / 2)
    for name in list(sides)[1:]:
        ratios = [a / b for a, b in zip(peaks["ours"], peaks[name])]
        report.add(
            Figure(
                name="memory_over_ddp" + ("_views" if name == "views" else ""),
                value=statistics.median(ratios),
                ours=f"{short(statistics.median(peaks['ours']) / 1e6)} MB",
                peer=f"{short(statistics.median(peaks[name]) / 1e6)} MB",
                spread=f"{short(min(ratios))} .. {short(max(ratios))}",
                goal="<= 1" if name == "ddp" else "",
            )
        )


class Peak:
    """The largest sum of the proportional set sizes of some processes, or of a part of them, while the block runs."""

    def __init__(self, pids: list[int], lines: tuple[str, ...] = ("Pss:",)) -> None:
        self.pids, self.lines, self.bytes = pids, lines, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(5)

    def _watch(self) -> None:
        while not self._end.is_set():
            self.bytes = max(self.bytes, sum(pss(pid, self.lines) for pid in self.pids))
            time.sleep(0.01)


def pss(pid: int, lines: tuple[str, ...]) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has left
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(lines))


def equality(device: str, steps: int, half: int = 8) -> Figure:
    """How far two members that share a device end from one with the doubled batch."""
    with Team.of(2, "bench.overhead") as two, Team.of(1, "bench.overhead") as one:
        for team, batch in (two, half), (one, 2 * half):
            file = str(one.folder / f"weights-{team.size}")
            team.call("train", steps=steps, batch=batch, file=file, device=device)
        files = {"first": str(one.folder / "weights-1"), "second": str(one.folder / "weights-2")}
        (end,) = one.call("difference", **files)
        two.call("finish")
        one.call("finish")
    return Figure(
        name=f"{device}_equal_max_diff",
        value=end["difference"],
        ours=f"moved {short(end['moved'])}",
        goal="<= 1e-5",
    )


def _worker() -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from bench import workers
    from bench.models import TASKS
    from bench.team import serve

    torch.set_num_threads(max(1, torch.get_num_threads()))

    def make(adamw: bool = False, **choice: Any) -> None:
        if adamw:
            choice["optimizer"] = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True)
        workers.make(**choice)

    def train(steps: int, batch: int, file: str, device: str) -> None:
        """Train a GPT on this member's part of the same samples; the first member writes the weights."""
        task, run = TASKS["gpt"], workers.run()
        momentum = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
        loop = workers.Loop(task, "ours", device=device, optimizer=momentum)
        if run.is_first:
            save_file({k: v.cpu() for k, v in loop.model.state_dict().items()}, file + "-begin")
        for step in range(steps):
            x, y = task.batch(run.size * batch, step)
            mine = slice(run.rank * batch, (run.rank + 1) * batch)
            loop.batch = x[mine].to(device), y[mine].to(device)
            loop.step()
        if run.is_first:
            save_file({k: v.cpu() for k, v in loop.model.state_dict().items()}, file)

    def difference(first: str, second: str) -> dict[str, float]:
        begin, one, two = load_file(first + "-begin"), load_file(first), load_file(second)
        return {
            "difference": max((one[k] - two[k]).abs().max().item() for k in one),
            "moved": max((one[k] - begin[k]).abs().max().item() for k in one),
        }

    serve(workers.FUNCTIONS | {"make": make, "train": train, "difference": difference})


if __name__ == "__main__":
    main()
