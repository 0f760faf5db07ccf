"""Gradients laid out in flat buckets inside an arena: one layout on all members.

Parameters stand in the order in which the first member's gradients arrived in its first backward pass, so that buckets
fill one after the other and travel while the rest of the backward pass runs. The last bucket ends with the control
block: this member's weight, notes to the others, one mark per parameter that says whether it has a gradient, how long
each member's last turn took, and its samples; it holds float32 numbers that add up like gradients do. Float buffers
that change in training (batch-norm statistics) follow: the first member writes its own, the others zeros, so the sum is
the first member's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.strategies.reducers import Coder, Piece, Reducer
from paceline.transport.arena import Arena, Kept
from paceline.transport.group import Group

WEIGHT, LATE, BAD, WISH, MOVE, MARKS = range(6)  # places in the control block
PACE = 10  # numbers of each member, behind the marks: how long its last turn took it, and as the last of them
SAMPLES = PACE - 1  # what it has drawn for this step
_ALIGN_BYTES = 64
_WORTH_KEEPING = 16384  # elements: for fewer, one more call costs more than the copy
_TOO_LARGE_TO_KEEP = 40_000_000  # bytes: a gradient that is kept takes memory until its bucket is summed


class Slot:
    """Where one parameter's gradient lies."""

    __slots__ = ("arrived", "bucket", "index", "mean", "name", "own", "parameter", "start", "view")

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.arrived = False
        self.mean = False  # the parameter's gradient is the members' mean of an earlier pass
        self.bucket: Bucket
        self.view: torch.Tensor
        self.start = 0  # in the bucket
        self.own = slice(0, 0)  # of the bucket: what of this slot the arena takes from where it lies

    @property
    def place(self) -> slice:
        """In the bucket."""
        return slice(self.start, self.start + self.parameter.numel())

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """Its view of the bucket's memory, which may be given as another tensor."""
        return _like(flat, self.start, self.parameter)


class Bucket:
    """A run of slots that travel together."""

    __slots__ = ("arena", "flat", "kept", "missing", "slots")

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.missing = 0
        self.kept: list[Kept] = []
        self.flat: torch.Tensor
        self.arena: Arena


class Layout:
    """All buckets of one model, the control block, and the buffers that follow the first member."""

    def __init__(
        self,
        group: Group,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        buffers: Sequence[torch.Tensor],
        bucket_bytes: int,
        coder: Coder | None = None,
    ) -> None:
        self.slots = [Slot(i, name, p) for i, (name, p) in enumerate(named)]
        self.buckets = _fill(self.slots, bucket_bytes)
        self.launched = 0
        self.paces = MARKS + len(self.slots)  # where they begin
        num_control = self.paces + PACE * group.size
        self._shapes = [b.shape for b in buffers]
        num_buffered = sum(b.numel() for b in buffers)

        # One arena per device; the control block and the buffers lie behind the last float32 bucket on the CPU or the
        # device that holds it, and travel with it.
        last = self.buckets[-1]
        rides = last.slots[0].parameter.dtype == torch.float32
        self.tail = last if rides else Bucket()
        if not rides:
            self.buckets.append(self.tail)
        tail_device = last.slots[0].parameter.device
        devices = list(dict.fromkeys(s.parameter.device for s in self.slots))
        self.arenas: list[Arena] = []
        for device in devices:
            mine = [b for b in self.buckets if (b.slots[0].parameter.device if b.slots else tail_device) == device]
            sizes = [self._nbytes(b, num_control + num_buffered) for b in mine]
            reducer = Reducer(coder, alone=len(devices) == 1) if coder else None
            apart = bool(coder and coder.combine)
            arena = group.arena(sum(sizes), device, reducer.through if reducer else None, apart=apart)
            self.arenas.append(arena)
            offset = 0
            for bucket, nbytes in zip(mine, sizes):
                self._place(bucket, arena, offset, num_control, num_buffered)
                if reducer:
                    pieces = [Piece(s.name, s.place, id(s.parameter), rows_of(s.parameter)) for s in bucket.slots]
                    reducer.add(offset, bucket.flat.dtype, bucket.flat.numel(), pieces)
                offset += nbytes
        self.start()

    def _nbytes(self, bucket: Bucket, tail: int) -> int:
        itemsize = bucket.slots[0].parameter.element_size() if bucket.slots else 4
        numel = sum(_padded(s.parameter.numel()) for s in bucket.slots) + (tail if bucket is self.tail else 0)
        return -(-numel * itemsize // _ALIGN_BYTES) * _ALIGN_BYTES

    def _place(self, bucket: Bucket, arena: Arena, offset: int, num_control: int, num_buffered: int) -> None:
        dtype = bucket.slots[0].parameter.dtype if bucket.slots else torch.float32
        bucket.arena = arena
        numel = sum(_padded(s.parameter.numel()) for s in bucket.slots)
        total = numel + (num_control + num_buffered if bucket is self.tail else 0)
        bucket.flat = arena.memory[offset : offset + total * dtype.itemsize].view(dtype)
        at = 0
        own = arena.own(bucket.flat)
        for slot in bucket.slots:
            slot.bucket = bucket
            slot.start = at
            first, last = max(own.start, at), min(own.stop, at + slot.parameter.numel())
            worth = last - first >= _WORTH_KEEPING and slot.parameter.nbytes <= _TOO_LARGE_TO_KEEP
            if worth and slot.parameter.is_contiguous():
                slot.own = slice(first, last)
            slot.view = slot.within(bucket.flat)
            at += _padded(slot.parameter.numel())
        if bucket is self.tail:
            self.control = bucket.flat[numel : numel + num_control]
            self.buffered = bucket.flat[numel + num_control :]
            pieces = torch.split(self.buffered, [shape.numel() for shape in self._shapes])
            self.buffer_views = [piece.view(shape) for piece, shape in zip(pieces, self._shapes)]

    def start(self) -> None:
        """Before each backward pass: nothing has arrived."""
        self.launched = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
        for slot in self.slots:
            slot.arrived = False

    def launch(self, *, end: bool = False) -> None:
        """Post every bucket that is full and whose turn it is; the last one only at the end."""
        last = len(self.buckets) - 1
        while self.launched <= last:
            bucket = self.buckets[self.launched]
            if bucket.missing or (self.launched == last and not end):
                break
            bucket.arena.post(bucket.flat, sorted(bucket.kept, key=lambda k: k[0].start))
            bucket.kept = []
            self.launched += 1


def _fill(slots: Sequence[Slot], bucket_bytes: int) -> list[Bucket]:
    """Cut the slots into buckets of one device and dtype each; float32 ones last where there are several kinds.

    A bucket is full when it has reached its size: a large parameter takes along the small ones before it.
    """
    buckets: list[Bucket] = []
    kinds = dict.fromkeys((s.parameter.device, s.parameter.dtype) for s in slots)
    for kind in sorted(kinds, key=lambda k: k[1] == torch.float32):
        bucket, size = Bucket(), 0
        for slot in slots:
            if (slot.parameter.device, slot.parameter.dtype) != kind:
                continue
            bucket.slots.append(slot)
            size += slot.parameter.nbytes
            if size >= bucket_bytes:
                buckets.append(bucket)
                bucket, size = Bucket(), 0
        if bucket.slots:
            buckets.append(bucket)
    return buckets


def _padded(numel: int) -> int:
    """Slots begin at multiples of 16 elements, so that vector instructions find them aligned."""
    return -(-numel // 16) * 16


def rows_of(parameter: torch.nn.Parameter) -> int:
    """Of the matrix that the memory of its gradient holds: the size of the dimension that varies slowest."""
    if parameter.dim() < 2 or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return int(parameter.shape[0]) if parameter.dim() > 1 else 1
    slowest = max(range(parameter.dim()), key=lambda i: (parameter.stride(i), parameter.shape[i]))
    return int(parameter.shape[slowest])


def _like(flat: torch.Tensor, start: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A view with the strides of the parameter where it is dense, so that optimizers keep their fast paths."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + start)
    return flat[start : start + parameter.numel()].view(parameter.shape)
