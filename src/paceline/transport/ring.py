"""Collectives between hosts, on flat CPU tensors, over the mesh's channels.

Large tensors go around a ring: scatter-reduce, then all-gather [1], in pieces, each added and passed on
while later ones are still on the wire. Small ones go by recursive doubling, and broadcasts by a tree, which
take fewer steps. `cost` says which is expected to be faster, from the link that was measured when the ring was
formed. What needs no sums goes straight from member to member, while these are few.

The result is the same on all members, bit for bit: around the ring each sum is made once and copied; in
doubling every member adds the same operands in the same order.

All members must call the same collectives in the same order, one at a time. Every wait is limited by the
mesh's `limit_s`; `lane` says what happens when one fails.

[1] P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from paceline.core.errors import ConfigError
from paceline.transport.lane import HEAD_BYTES, Lane
from paceline.transport.link import Link, doubling_rounds
from paceline.transport.mesh import Mesh
from paceline.transport.traffic import Traffic

_MEASURE_BYTES = 1 << 23  # at most, in one transfer
_FEW = 16  # members: so many may have channels to everyone
_UNKNOWN = Link(latency_s=1.0, bytes_per_s=1e9)  # before it is measured: everything small goes by doubling


class Ring:
    """The collectives of the members `ranks`, in that order. A lane serves one ring in the life of a view.

    `link` None: it is measured. One that is given must be the same on all members.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], lane: str, *, link: Link | None = None) -> None:
        self.lane = lane
        self._lane = Lane(mesh, ranks, lane)
        self.ranks = self._lane.ranks
        self.size = len(self.ranks)
        self.position = self._lane.position
        self._left = (self.position - 1) % self.size
        self._right = (self.position + 1) % self.size
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.link = _UNKNOWN
        self.link = link or self._measured()

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Replace `flat` by its sum over the members."""
        _check("all_reduce", flat)
        _check_adds("all_reduce", flat)
        if not flat.numel():
            return
        with self._lane.collective("all_reduce", flat.nbytes):
            if self._doubles(flat.nbytes):
                self._double(flat)
            else:
                bounds = self._bounds(flat)
                self._scatter_reduce(flat, bounds, into=None)
                self._gather(flat, bounds)

    def all_reduce_bytes(self, nbytes: int) -> int:
        """About how many bytes leave this member in an all-reduce of so many."""
        if not self._doubles(nbytes):
            return 2 * nbytes - 2 * nbytes // self.size + HEAD_BYTES
        core = 1 << (self.size.bit_length() - 1)
        rounds = 1 if self.position >= core else core.bit_length() - 1 + (self.position + core < self.size)
        return rounds * (nbytes + HEAD_BYTES)

    def _doubles(self, nbytes: int) -> bool:
        costs = self.cost(nbytes)
        return costs["doubling"] <= costs["ring"]

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Put this member's share of the sum of `flat` into `out`. `flat` is work space: it is overwritten."""
        self._check_shares("reduce_scatter", flat, out)
        _check_adds("reduce_scatter", flat)
        if not flat.numel():
            return
        ring_s = self.link.steps_s(self.size - 1, out.nbytes)
        with self._lane.collective("reduce_scatter", flat.nbytes):
            if self.link.doubling_s(self.size, flat.nbytes) <= ring_s:
                self._double(flat)
                out.copy_(flat[self.position * out.numel() :][: out.numel()])
            else:
                self._scatter_reduce(flat, self._bounds(flat), into=out)

    def all_gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Put the members' `flat` into `out`, one after another, in the order of `ranks`."""
        self._check_shares("all_gather", out, flat)
        if not flat.numel():
            return
        ring_s = self.link.steps_s(self.size - 1, flat.nbytes)
        with self._lane.collective("all_gather", out.nbytes):
            if self.size <= _FEW:
                self._direct([flat] * self.size, out)
            elif self.link.doubling_s(self.size, out.nbytes) <= ring_s:
                out.view(torch.uint8).zero_()  # adding bytes to zeros keeps them, whatever they mean
                out[self.position * flat.numel() :][: flat.numel()].copy_(flat)
                self._double(out.view(torch.uint8))
            else:
                out[self.position * flat.numel() :][: flat.numel()].copy_(flat)
                bounds, data = self._bounds(out), _bytes(out)
                self._lane.send_head(self._right)
                self._lane.post(self._right, data[self._chunk(bounds, self.position)])
                self._lane.receive_head(self._left)
                self._gather(out, bounds)

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Send row j of `flat` to the member at position j; row j of `out` is what that one sent."""
        self._check_shares("all_to_all", flat, out[: out.numel() // self.size])
        if flat.numel():
            with self._lane.collective("all_to_all", out.nbytes):
                self._direct(list(flat.view(self.size, -1)), out)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Replace `flat` by that of the member whose rank is `root`."""
        _check("broadcast", flat)
        if root not in self.ranks:
            raise ConfigError(f"broadcast: root={root} is not one of the ranks {list(self.ranks)}")
        if not flat.numel():
            return
        first = self.ranks.index(root)
        with self._lane.collective("broadcast", flat.nbytes):
            if self.link.tree_s(self.size, flat.nbytes) <= self.link.chain_s(self.size, flat.nbytes):
                self._tree(flat, first)
            else:
                self._chain(flat, first)

    def cost(self, nbytes: int) -> dict[str, float]:
        """The expected seconds of an all-reduce by each way; the lesser one is taken."""
        return {
            "ring": self.link.ring_s(self.size, nbytes),
            "doubling": self.link.doubling_s(self.size, nbytes),
        }

    @property
    def sent_bytes(self) -> int:
        """By this member since the ring was formed."""
        return self._lane.sent_bytes

    def traffic(self) -> dict[int, Traffic]:
        """By rank: what this member has sent there."""
        return self._lane.traffic()

    def close(self) -> None:
        """Close the channels: the abort."""
        self._lane.close()

    # ---- around the ring. Chunk c is what ends at position c.

    def _scatter_reduce(self, flat: torch.Tensor, bounds: list[int], into: torch.Tensor | None) -> None:
        """Sum chunk p at position p, into `into`; None: into `flat`, and post it for the gathering."""
        lane, data, item = self._lane, _bytes(flat), flat.element_size()
        lane.send_head(self._right)
        lane.post(self._right, data[self._chunk(bounds, self.position - 1)])
        lane.receive_head(self._left)
        room = self._room(self.link.piece_bytes)
        theirs, theirs_data = room.view(flat.dtype), _bytes(room)
        for step in range(self.size - 1):
            for piece in self._pieces(bounds, self.position - 2 - step):
                lane.receive(self._left, theirs_data[: piece.stop - piece.start])
                start, stop = piece.start // item, piece.stop // item
                mine = flat[start:stop]
                if into is not None and step == self.size - 2:
                    offset = bounds[self.position] // item
                    torch.add(theirs[: stop - start], mine, out=into[start - offset : stop - offset])
                else:
                    torch.add(theirs[: stop - start], mine, out=mine)
                    lane.post(self._right, data[piece])

    def _gather(self, flat: torch.Tensor, bounds: list[int]) -> None:
        """Pass the chunks around until everyone has all; this member's own has been posted."""
        # What is overwritten here may have been posted before, but is no longer in the sender's queue: the
        # value that arrives was made from it.
        data = _bytes(flat)
        for step in range(self.size - 1):
            for piece in self._pieces(bounds, self.position - 1 - step):
                self._lane.receive(self._left, data[piece])
                if step < self.size - 2:
                    self._lane.post(self._right, data[piece])

    def _chain(self, flat: torch.Tensor, first: int) -> None:
        """Pass `flat` on from member to member, beginning with the one at `first`."""
        data, p = _bytes(flat), (self.position - first) % self.size
        if p < self.size - 1:
            self._lane.send_head(self._right)
        if p > 0:
            self._lane.receive_head(self._left)
        for piece in self._pieces([0, len(data)], 0):
            if p > 0:
                self._lane.receive(self._left, data[piece])
            if p < self.size - 1:
                self._lane.post(self._right, data[piece])

    # ---- in few steps

    def _double(self, flat: torch.Tensor) -> None:
        """Add up with a partner at distance 1, 2, 4, …; those past the power of two fold into the others."""
        core = 1 << (self.size.bit_length() - 1)
        p, data = self.position, _bytes(flat)
        if p >= core:
            self._send(p - core, data)
            self._receive(p - core, data)  # not before it was sent: the sum was made from it
            return
        theirs = self._room(flat.nbytes)[: flat.nbytes].view(flat.dtype)
        if p + core < self.size:
            self._receive(p + core, _bytes(theirs))
            torch.add(flat, theirs, out=flat)
        distance = 1
        while distance < core:
            partner = p ^ distance
            self._send(partner, data)
            self._receive(partner, _bytes(theirs))
            self._lane.drain()  # before the sum goes where the sent values are
            lower, upper = (flat, theirs) if p < partner else (theirs, flat)
            torch.add(lower, upper, out=flat)
            distance *= 2
        if p + core < self.size:
            self._send(p + core, data)

    def _tree(self, flat: torch.Tensor, first: int) -> None:
        """Those who have it, 1, 2, 4, … of them, each pass it on to one more."""
        data, p, have = _bytes(flat), (self.position - first) % self.size, 1
        while have < self.size:
            if p < have and p + have < self.size:
                self._send((p + have + first) % self.size, data)
            elif have <= p < 2 * have:
                self._receive((p - have + first) % self.size, data)
            have *= 2

    def _send(self, position: int, data: memoryview) -> None:
        self._lane.send_head(position)
        self._lane.post(position, data)

    def _receive(self, position: int, data: memoryview) -> None:
        self._lane.receive_head(position)
        self._lane.receive(position, data)

    def _direct(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """A row to everyone, at once; each member begins with the next one, so that nobody is overrun."""
        theirs = list(out.view(self.size, -1))
        theirs[self.position].copy_(rows[self.position])
        for distance in range(1, self.size):
            self._send((self.position + distance) % self.size, _bytes(rows[(self.position + distance) % self.size]))
        for distance in range(1, self.size):
            self._receive(
                (self.position - distance) % self.size, _bytes(theirs[(self.position - distance) % self.size])
            )

    # ---- measuring

    def measure(self) -> None:
        """Measure the link again, since it may have changed: the median of three, since hosts may be busy."""
        links = [self._measured() for _ in range(3)]
        self.link = Link(*(statistics.median(getattr(x, name) for x in links) for name in ("latency_s", "bytes_per_s")))

    def _measured(self) -> Link:
        """The longest latency and the smallest bandwidth that any member sees; takes a fraction of a second."""
        word, times = torch.zeros(1), []
        for _ in range(8):
            start = time.perf_counter()
            self.all_reduce(word)
            times.append((time.perf_counter() - start) / doubling_rounds(self.size))
        latency_s = self._longest(statistics.median(times[2:]))
        nbytes, bytes_per_s = 1 << 17, 0.0
        while True:
            seconds = self._longest(self._shift_s(nbytes))
            before = bytes_per_s
            bytes_per_s = max(before, nbytes / max(seconds - latency_s, 0.1 * seconds))
            # A new connection sends slowly at first, so short transfers measure only that: go on to longer
            # ones while it gets faster. All members see the same seconds, and so stop together.
            long_enough = seconds > 0.05 or nbytes == _MEASURE_BYTES
            if seconds > 0.25 or (long_enough and bytes_per_s < 1.2 * before):
                return Link(latency_s, bytes_per_s)
            nbytes = min(2 * nbytes, _MEASURE_BYTES)

    def _shift_s(self, nbytes: int) -> float:
        """How long it takes when everyone sends so much to the right at once."""
        ours, theirs = (_bytes(torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(2))
        with self._lane.collective("measure", nbytes):
            start = time.perf_counter()
            self._send(self._right, ours)
            self._receive(self._left, theirs)
            return time.perf_counter() - start

    def _longest(self, seconds: float) -> float:
        of_all = torch.zeros(self.size, dtype=torch.float64)
        of_all[self.position] = seconds
        self.all_reduce(of_all)
        return float(of_all.max())

    # ---- cutting

    def _bounds(self, flat: torch.Tensor) -> list[int]:
        """Where each chunk begins and ends, in bytes."""
        return [flat.numel() * i // self.size * flat.element_size() for i in range(self.size + 1)]

    def _chunk(self, bounds: list[int], chunk: int) -> slice:
        chunk %= len(bounds) - 1
        return slice(bounds[chunk], bounds[chunk + 1])

    def _pieces(self, bounds: list[int], chunk: int) -> Iterator[slice]:
        """The parts in which a chunk travels; 16 bytes hold a whole number of any elements."""
        whole = self._chunk(bounds, chunk)
        step = self.link.piece(bounds[-1] // (len(bounds) - 1))
        for start in range(whole.start, whole.stop, step):
            yield slice(start, min(start + step, whole.stop))

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes + -nbytes % 16, dtype=torch.uint8)
        return self._scratch

    def _check_shares(self, kind: str, whole: torch.Tensor, share: torch.Tensor) -> None:
        _check(kind, whole)
        _check(kind, share)
        if whole.dtype != share.dtype or whole.numel() != self.size * share.numel():
            raise ConfigError(
                f"{kind}: {whole.numel()} elements of {whole.dtype} are not {self.size} shares of "
                f"{share.numel()} elements of {share.dtype}"
            )


def _bytes(flat: torch.Tensor) -> memoryview:
    return flat.detach().view(torch.uint8).numpy().data


def _check(kind: str, flat: torch.Tensor) -> None:
    if flat.device.type != "cpu" or flat.dim() != 1 or not flat.is_contiguous():
        raise ConfigError(
            f"{kind}: a tensor of shape {tuple(flat.shape)} and strides {flat.stride()} on {flat.device}; "
            "the ring moves flat, contiguous CPU tensors"
        )


def _check_adds(kind: str, flat: torch.Tensor) -> None:
    if not _adds(flat.dtype):
        raise ConfigError(f"{kind}: torch cannot add {flat.dtype}; convert to a wider type first")


@functools.lru_cache(maxsize=64)
def _adds(dtype: torch.dtype) -> bool:
    try:
        one = torch.zeros(16, dtype=torch.uint8).view(dtype)
        torch.add(one, one, out=one)
    except (RuntimeError, NotImplementedError):
        return False
    return True
