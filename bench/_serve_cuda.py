"""A forward pass of GPT-2 small's size behind `paceline serve` on a GPU, against a bare loop over the same model.

A request is one row of 128 token numbers as safetensors, its answer the most likely next token. The bare loop has no
HTTP, no queue and no other process: a batch from host memory to the GPU, the same forward in inference mode and in
bfloat16, and the tokens back, one batch after another. The server decides by itself how many requests it puts into a
batch; /metrics says how many that were. `gpt_share_N`: requests a second over N connections, divided by the items a
second of the bare loop with batches of that mean size. (The time of a batch is nearly a constant and a part for each
item, and then batches of any sizes take as long as as many of their mean.) `gpt_share_of_full_N`, in the JSON: divided
by the bare loop with batches of N, which is what a server could reach that always has everybody in one batch.

With `--device cpu` a model of two layers, in fp32 and with one thread, to try it.
"""

from __future__ import annotations

import http.client
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import _serve_gpt as gpt
from bench._serve_load import Load, load
from bench._serve_sides import Side, headers_of
from bench.harness import Figure, Report, middle, short
from paceline.serve import forms

CONNECTIONS = (1, 8, 64)
_BARE_S = 1.0
_FEWEST = 5


class _Block(NamedTuple):
    """The server over some connections, and the bare loop right after it."""

    load: Load
    items: float  # in a batch of the server's, in the mean
    bare_s: float  # for a batch of so many
    full_s: float  # for a batch with all connections

    @property
    def bare_per_s(self) -> float:
        return _whole(self.items) / self.bare_s


def against_a_bare_loop(report: Report, directory: Path, device: str, form: str, rounds: int, seconds: float) -> None:
    from safetensors.torch import save, save_file

    model, tokens, vocabulary = (
        (gpt.make_small(), gpt.SMALL_TOKENS, gpt.SMALL_VOCABULARY)
        if device == "cpu"
        else (gpt.make(), gpt.TOKENS, gpt.VOCABULARY)
    )
    save_file(model.state_dict(), directory / "gpt.safetensors")
    rows = torch.randint(vocabulary, (CONNECTIONS[-1], tokens), generator=torch.Generator().manual_seed(0))
    (directory / "body.raw").write_bytes(save({"tokens": rows[:1].clone()}))
    side = _ours(directory, device, form, tokens)
    blocks: dict[int, list[_Block]] = {connections: [] for connections in CONNECTIONS}
    bare = _Bare(model, device, form, rows)
    try:
        side.start(directory)
        for number in range(rounds + 1):
            for connections in CONNECTIONS:
                block = _block(side, bare, directory, connections, seconds if number else 1.0)
                if number:  # the first round is to warm up
                    blocks[connections].append(block)
    finally:
        side.stop()
    report.note(f"{_said(directory)}; form {form}, {rounds} rounds of {seconds:g} s")
    _table(blocks)
    for connections, found in blocks.items():
        _add(report, connections, found)


def _ours(directory: Path, device: str, form: str, tokens: int) -> Side:
    make, more = ("make_small", ["--threads", "1"]) if device == "cpu" else ("make", ["--precision", "bf16"])
    words = ["-m", "paceline", "serve", str(directory / "gpt.safetensors"), "--model", f"bench._serve_gpt:{make}"]
    words += ["--input", f"{tokens}:int64", "--device", device, "--compile", form, "--replicas", "1", *more]
    words += ["--max-batch-size", str(CONNECTIONS[-1]), "--port", "PORT"]
    return Side("ours", [sys.executable, *words], "raw")


class _Bare:
    """The same model in this process."""

    def __init__(self, model: torch.nn.Module, device: str, form: str, rows: torch.Tensor) -> None:
        torch.set_num_threads(1)
        self._device, self._rows = torch.device(device), rows
        self._forward: Callable[..., Any] = model.to(self._device)
        if device != "cpu":
            model.to(torch.bfloat16)
        self._sizes = forms.sizes(form, len(rows))
        if form == "compile":
            self._forward = torch.compile(model, dynamic=False)

    def seconds(self, items: int) -> float:
        """For a batch of so many, in the median; a form that knows a few sizes only fills it up, as the server does."""
        rows = self._rows[: min((size for size in self._sizes if size >= items), default=items)]
        times: list[float] = []
        with torch.inference_mode():
            self._forward(rows.to(self._device)).cpu()
            end = time.perf_counter() + _BARE_S
            while len(times) < _FEWEST or time.perf_counter() < end:
                began = time.perf_counter()
                self._forward(rows.to(self._device)).cpu()
                times.append(time.perf_counter() - began)
        return statistics.median(times)


def _block(side: Side, bare: _Bare, directory: Path, connections: int, seconds: float) -> _Block:
    before = _batches(side.port)
    fields = {"Host": "localhost", **headers_of("raw", side.body), "Content-Length": str(len(side.body))}
    head = "\r\n".join([f"POST {side.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""])
    found = load(side.port, connections, seconds, head.encode(), side.body, directory)
    items, batches = (now - then for now, then in zip(_batches(side.port), before))
    mean = items / batches
    return _Block(found, mean, bare.seconds(_whole(mean)), bare.seconds(connections))


def _batches(port: int) -> tuple[float, float]:
    """Items and batches that the server has computed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        words = [line.split() for line in connection.getresponse().read().decode().splitlines()]
    finally:
        connection.close()
    told = {name: value for name, *_, value in words}
    return float(told["paceline_serve_batch_items_sum"]), float(told["paceline_serve_batch_items_count"])


def _whole(items: float) -> int:
    return max(1, round(items))


def _said(directory: Path) -> str:
    """The server's first line: how it computes."""
    lines = (directory / "ours.log").read_text().splitlines()
    return next((line.partition("(")[2].rstrip(")") for line in lines if "answers at" in line), "")


def _table(blocks: dict[int, list[_Block]]) -> None:
    print(
        "\nconnections   requests/s    p50 ms    p99 ms   items in a batch   bare loop: ms a batch   items/s   failed"
    )
    for connections, found in blocks.items():
        per_s, p50, p99, items, bare_ms, bare_per_s = (
            short(statistics.median(values)) for values in zip(*map(_numbers, found))
        )
        failed = sum(block.load.failed for block in found)
        print(
            f"{connections:>11} {per_s:>12} {p50:>9} {p99:>9} {items:>18} {bare_ms:>23} {bare_per_s:>9} {failed:>8}",
            flush=True,
        )


def _numbers(block: _Block) -> tuple[float, ...]:
    done = block.load
    return done.per_s, done.p50_ms, done.p99_ms, block.items, block.bare_s * 1e3, block.bare_per_s


def _add(report: Report, connections: int, found: list[_Block]) -> None:
    shares = [block.load.per_s / block.bare_per_s for block in found]
    names = ("per_s", "p50_ms", "p99_ms", "items", "bare_ms", "bare_per_s")
    told = {name: statistics.median(values) for name, values in zip(names, zip(*map(_numbers, found)))}
    low, high = middle(shares)
    report.add(
        Figure(
            name=f"gpt_share_{connections}",
            value=statistics.median(shares),
            ours=f"{short(told['per_s'])} /s, p99 {short(told['p99_ms'])} ms",
            peer=f"bare, {short(told['items'])} a batch: {short(told['bare_per_s'])} /s",
            spread=f"{short(low)} .. {short(high)}",
        )
    )
    report.extra |= {f"gpt_{connections}_{name}": value for name, value in told.items()}
    of_full = [block.load.per_s * block.full_s / connections for block in found]
    report.extra[f"gpt_share_of_full_{connections}"] = statistics.median(of_full)
    report.extra[f"gpt_{connections}_failed"] = float(sum(block.load.failed for block in found))
