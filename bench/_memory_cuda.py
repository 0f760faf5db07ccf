"""The part of bench.memory for one GPU: how large a GPT trains, and how fast, with parts in host memory and without.

Each try is a process of its own, which may run out of memory, and tells one line of JSON. The GPU's memory is limited
to 12 GB, as on a small GPU, so that host memory is the larger one; all sides have the same limit, bf16 autocast, AdamW
and batches of 4 x 1024 tokens. A model is one layer of 78.7M parameters several times, and embeddings of 82M.

    plain     PyTorch alone, all on the GPU
    ours      run.model(make, offload="parameters") with --mesh shard=1
    fsdp2     fully_shard with CPUOffloadPolicy
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import Figure, Report, short

LIMIT_BYTES = 12_000_000_000
_TRY_S, _ALL_S = 100.0, 230.0
_LADDER = {"plain": (4, 6, 8, 10), "ours": (8, 16, 32), "fsdp2": (8,)}  # layers
_BATCH, _CONTEXT, _VOCABULARY, _WIDTH = 4, 1024, 32_000, 2560


def measure(report: Report, *, quick: bool) -> None:
    """Climb each side's ladder until something does not fit."""
    began = time.monotonic()
    found: dict[str, dict[int, dict[str, Any]]] = {side: {} for side in _LADDER}
    for side, ladder in _LADDER.items():
        for layers in ladder[:2] if quick else ladder:
            if time.monotonic() - began > _ALL_S:
                report.note(f"{side} with {layers} layers and more: not tried, for want of time")
                break
            done = _try(side, layers)
            print(f"{side}, {layers} layers: {json.dumps(done)}", flush=True)
            if "error" in done:
                report.note(f"{side} with {layers} layers: {done['error']}")
                break
            found[side][layers] = done
    for side, sizes in found.items():
        if sizes:
            top = sizes[max(sizes)]
            told = f"{short(top['tokens_s'])} tokens/s, {top['peak'] / 1e9:.1f} GB"
            report.add(Figure(name=f"largest_{side}_parameters_m", value=top["parameters"] / 1e6, ours=told))
    if found["plain"] and found["ours"]:
        largest = [max(one["parameters"] for one in found[side].values()) for side in ("ours", "plain")]
        report.add(Figure(name="offload_larger_than_plain", value=largest[0] / largest[1], goal=">= 2"))
    for peer in "fsdp2", "plain":
        both = sorted(set(found["ours"]) & set(found[peer]))
        for layers in both[-1:]:
            ours, theirs = found["ours"][layers]["tokens_s"], found[peer][layers]["tokens_s"]
            told = {"ours": f"{short(ours)} tokens/s", "peer": f"{short(theirs)} tokens/s"}
            report.add(Figure(name=f"offload_speed_over_{peer}", value=ours / theirs, **told))
    report.note(f"GPU memory limited to {LIMIT_BYTES / 1e9:g} GB; host memory and its speed limit what is offloaded")


def _try(side: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench._memory_cuda", side, str(layers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRY_S)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {_TRY_S:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    tail = done.stderr.strip().splitlines()[-1:] or ["no output"]
    return {"error": f"ended with {done.returncode}: {tail[0][:300]}"}


# ---- in a process of its own


def _train(side: str, layers: int) -> dict[str, Any]:
    import torch
    from torch.nn import functional as F

    from bench.models import GPT

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT_BYTES / total))

    def make() -> torch.nn.Module:
        return GPT(vocabulary=_VOCABULARY, context=_CONTEXT, width=_WIDTH, heads=20, layers=layers)

    sides: dict[str, Callable[..., Any]] = {"plain": _plain, "ours": _ours, "fsdp2": _fsdp2}
    model, optimizer = sides[side](make)
    x = torch.randint(_VOCABULARY, (_BATCH, _CONTEXT), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=side != "ours"):
            logits = model(x)
        F.cross_entropy(logits.flatten(0, 1).float(), x.flatten()).backward()
        del logits
        optimizer.step()

    step()
    torch.cuda.synchronize()
    steps, began = 0, time.perf_counter()
    while steps < 2 or (time.perf_counter() - began < 5 and steps < 20):
        step()
        torch.cuda.synchronize()
        steps += 1
    took = time.perf_counter() - began
    return {
        "tokens_s": steps * _BATCH * _CONTEXT / took,
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak": torch.cuda.max_memory_allocated(),
    }


def _plain(make: Callable[[], Any]) -> tuple[Any, Any]:
    import torch

    with torch.device("cuda"):
        model = make()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _ours(make: Callable[[], Any]) -> tuple[Any, Any]:
    import torch

    import paceline

    root = tempfile.mkdtemp(prefix="bench-")
    run = paceline.join(
        mesh="shard=1", precision="bf16", device="cuda", progress="off", checkpoint_keep=0, name="memory", root=root
    )
    model = run.model(make, offload="parameters")
    return model, run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)


def _fsdp2(make: Callable[[], Any]) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    store = Path(tempfile.mkdtemp(prefix="bench-")) / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    with torch.device("meta"):
        model = make()
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().normal_(0, 0.02)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=tuple(_LADDER))
    parser.add_argument("layers", type=int)
    given = parser.parse_args()
    try:
        answer = _train(given.side, given.layers)
    except Exception as error:
        kind = "out of memory" if "out of memory" in str(error).lower() else type(error).__name__
        answer = {"error": f"{kind}: {str(error).splitlines()[0][:300]}"}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # what is in host memory need not be taken down in order


if __name__ == "__main__":
    _main()
