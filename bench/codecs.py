"""What a codec costs: encode and decode of a gradient of 44.7 MB on two threads, in copies of the same tensor.

  NAME_encode_over_copy   `encode_into` with a residual: its time / that of `y.copy_(x)` into memory in use
  NAME_decode_over_copy   `decode_add` of that payload to a tensor: the same
  NAME_ratio              bytes of the tensor / bytes of the payload
and where there is a CUDA device, on it, where codecs take their torch path:
  NAME_encode_over_copy_cuda, NAME_decode_over_copy_cuda
The JSON also has each as FIGURE_at_best: the shortest block of the codec / the shortest of copies, which a machine that
is busy now and then disturbs less.

Blocks of copies and of the codec alternate. Gradients are noise that changes from step to step, and the residual is the
one that earlier steps left. `nonzero`, which leaves nothing, has 5 % of the rows of an embedding that are not zero.

The environment is as users have it: torch's threads wait for more work, at full speed, for some milliseconds after a
task, and a kernel that follows shares the cores with them. OMP_WAIT_POLICY=passive ends that. Measured once, beside
other work, an encode right after a copy then took 2.0 copies instead of 2.8 (int8), 3.0 instead of 4.4 (topk) and 3.4
instead of 4.5 (threshold).

Let nothing else run: one other process slows the copy, whose threads wait for each other, more than it slows a codec.
Every ratio then looks better than it is.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable

import torch

from bench.harness import Figure, Report, arguments, compare, interleave, milliseconds, short
from paceline.codecs import Codec, Context, make_codec
from paceline.codecs.kernels.spread import compiled

NUMEL = 11_175_000
WORDS = {
    "int8": "quantize(8)",
    "int4": "quantize(4)",
    "int2": "quantize(2)",
    "sign": "sign",
    "topk": "topk(0.01)",
    "threshold": "threshold(density=0.01)",
    "ternary": "ternary",
    "stochastic": "quantize(8, stochastic=True)",
    "sampled_topk": "sampled_topk(0.01)",
    "bf16": "cast(bf16)",
    "nonzero": "nonzero",
}
GOALS = {
    **dict.fromkeys(("int8", "int4", "int2", "sign"), "<= 3"),
    **dict.fromkeys(("topk", "threshold", "ternary", "stochastic"), "<= 5"),
    "sampled_topk": "<= 6",
}


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(2)
    report = Report("bench.codecs")
    load, copies = os.getloadavg()[0], list[float]()
    if not compiled():
        report.note("no fused kernels here (pip install 'paceline[codecs]'): these are the torch forms")
    _measure(report, torch.device("cpu"), options.quick, copies)
    report.note(f"copies took {short(min(copies) * 1e3)} ms at best and {milliseconds(copies)} in the median")
    report.note(f"{short(load)} other processes ran in the minute before: with more than a few tenths, no ratio counts")
    if torch.cuda.is_available():
        _measure(report, torch.device("cuda"), options.quick, [])
    else:
        report.note("no CUDA device here: the _cuda figures are left out")
    report.finish(options.json)


def _measure(report: Report, device: torch.device, quick: bool, copies: list[float]) -> None:
    ratios = []
    cuda = device.type == "cuda"
    suffix = "_cuda" if cuda else ""
    for name, words in WORDS.items():
        side = _Side(make_codec(words), _rows(device) if name == "nonzero" else _noise(device))
        try:
            size = side.settle()
            for verb, block in {"encode": side.encode, "decode": side.decode}.items():
                figure = f"{name}_{verb}_over_copy{suffix}"
                repeats, block_s, limit_s = (7, 0.04, 0.8) if quick else (61, 0.06, 12.0)
                blocks = {"copy": side.timed(side.copy), verb: side.timed(block)}
                times = interleave(blocks, repeats=repeats, block_s=block_s, limit_s=limit_s)
                copies += times["copy"]
                report.extra[f"{figure}_at_best"] = min(times[verb]) / min(times["copy"])
                report.add(
                    compare(
                        figure,
                        times[verb],
                        times["copy"],
                        goal="" if cuda else GOALS.get(name, ""),
                        ratio=lambda ours, peer: ours / peer,
                    )
                )
            if cuda and not side.same_as_cpu():
                report.note(f"{words} writes other bytes on the CUDA device than on the CPU")
        except Exception as error:
            if not cuda:
                raise
            report.note(f"{words} does not work on the CUDA device: {type(error).__name__}: {error}")
            continue
        sizes = {"ours": f"{short(size / 1e6)} MB", "peer": f"{short(4 * NUMEL / 1e6)} MB"}
        ratios.append(Figure(name=f"{name}_ratio", value=4 * NUMEL / size, **sizes))
    if not cuda:
        report.figures += ratios


class _Side:
    """A codec with all that it reads and writes."""

    def __init__(self, codec: Codec, gradients: list[torch.Tensor]) -> None:
        self.codec, self.gradients, self.device = codec, gradients, gradients[0].device
        self.residual, self.y = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
        self.out = torch.zeros(codec.nbytes(NUMEL), dtype=torch.uint8, device=self.device)
        self.payload = self.out
        self.steps = itertools.count()

    def settle(self) -> int:
        """Take some steps, which also compile; how long the last payload was."""
        for _ in range(2 * len(self.gradients)):
            size = self.encode()
        self.payload = self.out[:size].clone()
        self.decode()
        return size

    def encode(self) -> int:
        step = next(self.steps)
        x = self.gradients[step % len(self.gradients)]
        return self.codec.encode_into(x, self.residual, self.out, Context(step=step, seed=1))

    def decode(self) -> None:
        self.codec.decode_add(self.payload, self.y, 0.5)

    def copy(self) -> None:
        self.y.copy_(self.gradients[0])

    def timed(self, call: Callable[[], object]) -> Callable[[int], float]:
        def block(iterations: int) -> float:
            self._wait()
            begin = time.perf_counter()
            for _ in range(iterations):
                call()
            self._wait()
            return time.perf_counter() - begin

        return block

    def same_as_cpu(self) -> bool:
        x = self.gradients[0][: 1 << 20]
        payloads = []
        for part in x, x.cpu():
            out = torch.zeros(self.codec.nbytes(part.numel()), dtype=torch.uint8, device=part.device)
            size = self.codec.encode_into(part, None, out, Context(seed=1))
            payloads.append(out[:size].cpu())
        return torch.equal(*payloads)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@functools.cache
def _noise(device: torch.device) -> list[torch.Tensor]:
    """Four gradients whose sum is zero: a residual neither grows without end nor repeats itself at once."""
    generator = torch.Generator().manual_seed(0)
    first, second = (1e-3 * torch.randn(NUMEL, generator=generator).to(device) for _ in range(2))
    return [first, second, -first, -second]


def _rows(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUMEL // 60, 60, generator=generator)
    rows *= torch.rand(len(rows), 1, generator=generator) < 0.05
    return [rows.view(-1).to(device)]


if __name__ == "__main__":
    main()
