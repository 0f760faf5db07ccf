"""Memory of a device whose slices a thread reduces where they lie, by a reduction that works on the device.

With a codec, gradients are encoded on the device and only their codes are copied to the host. The thread works on a
stream of its own, behind what had been queued when a slice was posted; `wait` has the stream of the caller wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from paceline.transport.arena import NOTHING, Courier, Kept, Reduce


class DeviceArena:
    """An arena on a CUDA device."""

    def __init__(self, reduce: Reduce, name: str, nbytes: int, device: torch.device) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.sent_bytes = 0  # counted by what carries them
        self._device = device
        self._reduce = reduce
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready: deque[torch.cuda.Event] = deque()
        self._courier = Courier(self._carry, name)

    @property
    def waited_s(self) -> float:
        return self._courier.waited_s

    def own(self, flat: torch.Tensor) -> slice:
        return NOTHING

    def post(self, flat: torch.Tensor, kept: Sequence[Kept] = ()) -> None:
        assert not kept
        self._ready.append(torch.cuda.current_stream(self._device).record_event())
        self._courier.post(flat)

    def progress(self) -> None:
        pass

    def wait(self) -> None:
        self._courier.wait()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        self._courier.close()

    def _carry(self, flat: torch.Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready.popleft())
            self._reduce(flat)
