"""What a codec costs: encode and decode of a gradient of 44.7 MB on two threads, in copies of the same tensor.

  NAME_encode_over_copy   `encode_into` with a residual: its time / that of `y.copy_(x)` into memory in use
  NAME_decode_over_copy   `decode_add` of that payload to a tensor: the same
  NAME_ratio              bytes of the tensor / bytes of the payload
and where there is a CUDA device, on it (with `--device cuda` nothing else):
  NAME_encode_over_copy_cuda, NAME_decode_over_copy_cuda
                          the same, of the codecs that have no kernels of their own there
  NAME_encode_share_of_copy_cuda, NAME_decode_share_of_copy_cuda
                          of the others: the bytes that they must move per second (encode: x, the residual twice and
                          the payload; decode: the payload and the tensor twice) / those of `y.copy_(x)`, read and
                          written. Whatever else a codec moves only takes time. Calls follow each other, timed by
                          events of the device: where the host is too slow, that counts
  ..._share_of_large_copy_cuda
                          the same / those of a copy of 1 GiB, of which no cache holds a part
  ..._share_of_copy_1gib_cuda
                          both with a tensor of 1 GiB
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

import argparse
import functools
import itertools
import os
import time
from collections.abc import Callable

import torch

from bench.harness import Figure, Report, arguments, compare, interleave, milliseconds, short
from paceline.codecs import Codec, Context, make_codec
from paceline.codecs.kernels import dense
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
FUSED_ON_CUDA = ("int8", "int4", "int2", "sign", "ternary", "stochastic")
GOALS_ON_CUDA = dict.fromkeys(("int8", "sign"), ">= 0.6")
GIB = 1 << 28  # elements


def main() -> None:
    options = arguments(__doc__, _own_arguments)
    torch.set_num_threads(2)
    report = Report("bench.codecs")
    load, copies = os.getloadavg()[0], list[float]()
    if options.device != "cuda":
        if not compiled():
            report.note("no fused kernels here (pip install 'paceline[codecs]'): these are the torch forms")
        _measure(report, torch.device("cpu"), list(WORDS), options.quick, copies)
        report.note(f"copies took {short(min(copies) * 1e3)} ms at best and {milliseconds(copies)} in the median")
        report.note(
            f"{short(load)} other processes ran in the minute before: with more than a few tenths, no ratio counts"
        )
    if options.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        fused = dense.on_cuda(torch.empty(1, device=device))
        if fused:
            _measure_shares(report, device, options.quick)
        else:
            report.note("no fused kernels on the CUDA device (Triton is missing): these are the torch forms")
        names = [name for name in WORDS if not (fused and name in FUSED_ON_CUDA)]
        _measure(report, device, names, options.quick, [])
    else:
        report.note("no CUDA device here, or none wanted: the _cuda figures are left out")
    report.finish(options.json)


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="measure there alone; both, if not said")


def _measure_shares(report: Report, device: torch.device, quick: bool) -> None:
    large = torch.randn(GIB, device=device), torch.empty(GIB, device=device)
    small = _noise(device)
    repeats, block_s, limit_s = (9, 0.01, 1.0) if quick else (61, 0.02, 5.0)
    for name in FUSED_ON_CUDA:
        side = _Side(make_codec(WORDS[name]), small)
        moved = _moved(side)
        for verb, call in {"encode": side.encode, "decode": side.decode}.items():
            blocks = {
                "copy": _by_events(side.copy),
                verb: _by_events(call),
                "large": _by_events(functools.partial(large[1].copy_, large[0])),
            }
            times = interleave(blocks, repeats=repeats, block_s=block_s, limit_s=limit_s)
            for peer, numel in {"copy": NUMEL, "large": GIB}.items():
                report.add(
                    compare(
                        f"{name}_{verb}_share_of_{'large_' if peer == 'large' else ''}copy_cuda",
                        times[verb],
                        times[peer],
                        goal=GOALS_ON_CUDA.get(name, ""),
                        ratio=_share(moved[verb], 8 * numel),
                    )
                )
        if not side.same_as_cpu():
            report.note(f"{WORDS[name]} writes other bytes on the CUDA device than on the CPU")
    for name in GOALS_ON_CUDA:
        side = _Side(make_codec(WORDS[name]), [large[0]])
        moved = _moved(side)
        for verb, call in {"encode": side.encode, "decode": side.decode}.items():
            blocks = {"copy": _by_events(side.copy), verb: _by_events(call)}
            times = interleave(blocks, repeats=repeats, block_s=block_s, limit_s=limit_s)
            share = _share(moved[verb], 8 * GIB)
            figure = f"{name}_{verb}_share_of_copy_1gib_cuda"
            report.add(compare(figure, times[verb], times["copy"], goal=GOALS_ON_CUDA[name], ratio=share))


def _moved(side: _Side) -> dict[str, int]:
    """The bytes that an encode and a decode of this side must move."""
    size, numel = side.settle(), side.gradients[0].numel()
    return {"encode": 12 * numel + size, "decode": 8 * numel + size}


def _share(bytes_ours: int, bytes_peer: int) -> Callable[[float, float], float]:
    return lambda ours, peer: (bytes_ours / ours) / (bytes_peer / peer)


def _by_events(call: Callable[[], object]) -> Callable[[int], float]:
    def block(iterations: int) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(iterations):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return block


def _measure(report: Report, device: torch.device, names: list[str], quick: bool, copies: list[float]) -> None:
    ratios = []
    cuda = device.type == "cuda"
    suffix = "_cuda" if cuda else ""
    for name in names:
        words = WORDS[name]
        side = _Side(make_codec(words), _rows(device) if name == "nonzero" else _noise(device))
        try:
            size = side.settle()
            for verb, block in {"encode": side.encode, "decode": side.decode}.items():
                figure = f"{name}_{verb}_over_copy{suffix}"
                repeats, block_s, limit_s = (7, 0.04, 0.8) if quick else (61, 0.06, 2.0 if cuda else 12.0)
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
        self.out = torch.zeros(codec.nbytes(len(self.y)), dtype=torch.uint8, device=self.device)
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
