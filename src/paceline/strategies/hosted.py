"""`offload="optimizer"`: the optimizer's state and its copy of the weights live in host memory.

    gradients   device → host, chunk by chunk, on a stream of their own
    step        the optimizer's fused CPU kernels where its class has them, while the next chunk is on its way
    weights     host → device, on that stream, while the next chunk is stepped

Copies of weights in half precision are float32, so small updates are not lost. Memory on the host is pinned where
weights lie on a CUDA device, without which copies do not overlap with anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.strategies.cuts import kind_of

if TYPE_CHECKING:
    from paceline.strategies.share import Own

Steps = Callable[[Sequence[tuple[torch.Tensor, torch.Tensor, int]]], None]
_HALVES = (torch.float16, torch.bfloat16)
_CHUNK_BYTES = 32 << 20  # of gradients


class Hosted:
    """Host memory for the pieces of one optimizer."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, view: torch.Tensor) -> torch.Tensor:
        """The tensor that is stepped in place of this one."""
        dtype = torch.float32 if view.dtype in _HALVES else view.dtype
        made = torch.empty_like(view, dtype=dtype, device="cpu", pin_memory=view.device.type == "cuda")
        return made.copy_(view)

    def state(self, value: torch.Tensor) -> torch.Tensor:
        """As it is kept."""
        return value.to("cpu", torch.float32 if value.dtype in _HALVES else value.dtype)

    def step(self, pairs: Sequence[tuple[Own, torch.Tensor, int]], step: Steps, cut: bool) -> None:
        """Step these with their gradients. `cut`: chunk by chunk."""
        chunks = _chunks(pairs) if cut else [list(pairs)]
        coming = [self._fetch(chunk) for chunk in chunks[:1]]
        for i, chunk in enumerate(chunks):
            if i + 1 < len(chunks):
                coming.append(self._fetch(chunks[i + 1]))
            grads, event = coming.pop(0)
            if event:
                event.synchronize()
            step([(own.tensor, grad, number) for (own, _, number), grad in zip(chunk, grads)])
            self._send_back([own for own, _, _ in chunk])
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _fetch(
        self, chunk: Sequence[tuple[Own, torch.Tensor, int]]
    ) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Gradients on their way to the host, in the dtype of what is stepped, and when they are there."""
        grads: list[torch.Tensor] = []
        event = None
        for own, grad, _ in chunk:
            if grad.device.type == "cpu":
                grads.append(grad.to(own.tensor.dtype))
                continue
            stream = self._stream(grad.device)
            stream.wait_stream(torch.cuda.current_stream(grad.device))
            with torch.cuda.stream(stream):
                host = torch.empty_like(own.tensor, dtype=own.tensor.dtype, pin_memory=True)
                host.copy_(grad, non_blocking=True)
                grad.record_stream(stream)
                event = stream.record_event()
            grads.append(host)
        return grads, event

    def _send_back(self, owns: Sequence[Own]) -> None:
        with torch.no_grad():
            for own in owns:
                view = own.view
                if view.device.type == "cpu":
                    view.copy_(own.tensor)
                    continue
                stream = self._stream(view.device)
                stream.wait_stream(torch.cuda.current_stream(view.device))
                with torch.cuda.stream(stream):
                    view.copy_(own.tensor, non_blocking=True)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def fused_on_cpu(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether its class has a fused step for tensors in host memory, which these options do not rule out."""
    known = kind_of(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    ruled_out = group.get("differentiable") or group.get("capturable") or group.get("fused") is False
    return known and "fused" in group and not ruled_out


def fuse(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Have the next step be fused where it can be; groups, with what to put back behind it."""
    found = [group for group in optimizer.param_groups if fused_on_cpu(optimizer, group) and not group["fused"]]
    before = [(group, {key: group[key] for key in ("fused", "foreach")}) for group in found]
    for group in found:
        group.update(fused=True, foreach=None)
    return before


def _chunks(pairs: Sequence[tuple[Own, torch.Tensor, int]]) -> list[list[tuple[Own, torch.Tensor, int]]]:
    chunks: list[list[tuple[Own, torch.Tensor, int]]] = []
    size = 0
    for pair in pairs:
        if not chunks or size >= _CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(pair)
        size += pair[1].nbytes
    return chunks
