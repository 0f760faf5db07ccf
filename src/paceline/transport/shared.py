"""Collectives between the members of one host, through blocks of shared memory.

A tensor passes in blocks through a few slots of each member's segment, so that the traffic between members stays in
the processor's caches; memory sees only the tensor itself. Each block of an all-reduce is cut into one part per member:

    stage   copy the others' parts into my slot                      POSTED
    reduce  add my part of everyone's slot, in the order of ranks    REDUCED
    gather  copy the other parts' sums out of the others' slots      DONE

Where members may read each other's memory, a large tensor needs no slots (`reach`): each member reads the others'
tensors directly, sums its part in place, and then reads the parts that the others have summed. So do the other
collectives: one copy instead of two, and slots whose memory is never touched cost none.

Stage of the next block comes before reduce of this one, and gather follows one block behind, so that members rarely
wait for each other. Every sum is made once, by one member, in the order of ranks: the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.core.errors import Interrupted
from paceline.core.status import Status
from paceline.transport import reach
from paceline.transport.local import Links
from paceline.transport.segment import DONE, POSTED, REDUCED, Lane

_SLOTS = 3
_BLOCK_BYTES = 2 << 20
_READ_BYTES = 4 << 20
_ROW_BYTES = 256 << 10
_TURN_BYTES = 16 << 20  # summed before others read it; what has just been written is slow to read from another core
_WORTH_READING = 256 << 10  # for less, system calls cost more than a second copy
_WORTH_TAKING = 16 << 10  # the same where nothing is summed in place
_ALIGN = 64


class Shared:
    """Collectives over one lane. Tensors are flat, contiguous and on the CPU."""

    link = None

    def __init__(
        self, links: Links, ranks: tuple[int, ...], pids: list[int], name: str, *, limit_s: float, status: Status
    ) -> None:
        self.size = len(ranks)
        self._pids = pids
        self._chunk = max(_BLOCK_BYTES // self.size // _ALIGN, 1) * _ALIGN
        self._slot = self._chunk * (self.size + 1)  # a part for every member, and my sum
        self._lane = Lane(links, ranks, name, _SLOTS * self._slot, limit_s=limit_s, status=status)
        self._me = self.position = self._lane.index
        self._round = 0
        self.sent_bytes = 0  # what the others read of mine
        self._room = torch.empty(2 * _READ_BYTES, dtype=torch.uint8)
        self._reaches = False  # until it is known
        self._reaches = reach.permitted(pids, self._gathered)

    @property
    def waited_s(self) -> float:
        return self._lane.waited_s

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Sum over the members, in place."""
        if not flat.numel():
            return
        if self._reaches and flat.nbytes >= _WORTH_READING:
            self._read_and_add(flat)
            return
        block = self._chunk // flat.element_size() * self.size
        blocks = [flat[i : i + block] for i in range(0, flat.numel(), block)]
        parts = [self._parts(b) for b in blocks]
        first = self._round
        self._stage(first, parts[0])
        for k, mine in enumerate(parts):
            if k + 1 < len(parts):
                self._stage(first + k + 1, parts[k + 1])
            self._reduce(first + k, mine)
            if k:
                self._gather(first + k - 1, parts[k - 1])
        self._gather(first + len(parts) - 1, parts[-1])
        self._round += len(parts)
        self.sent_bytes += self.all_reduce_bytes(flat.nbytes)

    def all_reduce_bytes(self, nbytes: int) -> int:
        """About how many bytes of this member's others read in an all-reduce of so many."""
        return nbytes - nbytes // self.size + nbytes // self.size * (self.size - 1)

    def _read_and_add(self, flat: torch.Tensor) -> None:
        """All-reduce without slots, in turns: read the others' tensors where they lie, sum a block of my part, then
        read the blocks that the others have summed meanwhile."""
        parts = self._parts(flat)
        step = _TURN_BYTES // flat.element_size()
        blocks = -(-parts[0].numel() // step)  # of the longest part
        first, self._round = self._round, self._round + blocks
        self._lane.own.note[0] = flat.data_ptr()
        self._lane.own.raise_to(POSTED, first + 1)
        self._lane.wait(POSTED, first + 1)
        bases = [segment.note[0] - flat.data_ptr() for segment in self._lane.segments]
        for i in range(blocks + 1):
            if i < blocks:
                self._sum_block(parts[self._me][i * step : (i + 1) * step], bases)
                self._lane.own.raise_to(REDUCED, first + i + 1)
            if i > 0:
                self._read_blocks([part[(i - 1) * step : i * step] for part in parts], bases, first + i)
        self._lane.own.raise_to(POSTED, self._round)
        self._lane.own.raise_to(DONE, self._round)
        self._lane.wait(DONE, self._round)  # until then others read what this member's caller may change
        self.sent_bytes += flat.nbytes - parts[self._me].nbytes + parts[self._me].nbytes * (self.size - 1)

    def _sum_block(self, block: torch.Tensor, bases: list[int]) -> None:
        """Add everyone's block in the order of ranks; with two members the order does not matter."""
        step = _READ_BYTES // block.element_size()
        for start in range(0, block.numel(), step):
            mine = block[start : start + step]
            theirs, total = self._room.view(block.dtype).view(2, -1)[:, : mine.numel()]
            for j, base in enumerate(bases):
                if j != self._me:
                    self._read(j, base + mine.data_ptr(), theirs)
                if self.size == 2:
                    if j != self._me:
                        mine.add_(theirs)
                elif j == 0:
                    total.copy_(mine if j == self._me else theirs)
                else:
                    total.add_(mine if j == self._me else theirs)
            if self.size > 2:
                mine.copy_(total)

    def _read_blocks(self, blocks: list[torch.Tensor], bases: list[int], summed: int) -> None:
        for j in self._others():
            if blocks[j].numel():
                self._lane.wait(REDUCED, summed, only=j)
                self._read(j, bases[j] + blocks[j].data_ptr(), blocks[j])

    def _read(self, index: int, address: int, into: torch.Tensor) -> None:
        try:
            reach.read(self._pids[index], address, into)
        except Interrupted as error:
            gone = Interrupted(f"member {self._lane.ranks[index]} left the run: {error}")
            gone.rank = self._lane.ranks[index]
            raise gone from None

    def _meet(self, flat: torch.Tensor, work: Callable[[list[int]], None]) -> None:
        """Let everyone read everyone's `flat`, whose addresses `work` is given, until all have done so."""
        self._round += 1
        self._lane.own.note[0] = flat.data_ptr()
        self._lane.own.raise_to(POSTED, self._round)
        self._lane.wait(POSTED, self._round)
        work([segment.note[0] for segment in self._lane.segments])
        self._lane.own.raise_to(REDUCED, self._round)
        self._lane.own.raise_to(DONE, self._round)
        self._lane.wait(DONE, self._round)

    def _others(self) -> list[int]:
        """The others, of whom each member begins with another one."""
        return [(self._me + j) % self.size for j in range(1, self.size)]

    def all_gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """`out`, of size times the elements, gets everyone's `flat` in the order of ranks."""
        rows = out.view(self.size, -1)
        self.sent_bytes += flat.nbytes * (self.size - 1)
        if self._reaches and flat.nbytes >= _WORTH_TAKING:

            def take(addresses: list[int]) -> None:
                for j in self._others():
                    self._read(j, addresses[j], rows[j])
                if rows[self._me].data_ptr() != flat.data_ptr():
                    rows[self._me].copy_(flat)

            self._meet(flat, take)
            return

        def read(i: int, at: slice, slots: Sequence[torch.Tensor]) -> None:
            for row, slot in zip(rows, slots):
                row[at].copy_(slot)

        self._rounds(flat.numel(), flat.dtype, lambda at, slot: slot.copy_(flat[at]), read)

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Row j of `out` gets my row of member j's `flat`."""
        rows, theirs = flat.view(self.size, -1), out.view(self.size, -1)
        for row in range(self.size):

            def write(at: slice, slot: torch.Tensor, row: int = row) -> None:
                slot.copy_(rows[row][at])

            def read(i: int, at: slice, slots: Sequence[torch.Tensor], row: int = row) -> None:
                if row == self._me:
                    for into, slot in zip(theirs, slots):
                        into[at].copy_(slot)

            self._rounds(rows.shape[1], flat.dtype, write, read)
        self.sent_bytes += flat.nbytes - rows[0].nbytes

    def measure(self) -> None:
        """There is no link to measure."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """`out` gets my row of the sum of everyone's `flat`, which holds one row per member."""
        rows = flat.view(self.size, -1)
        self.sent_bytes += flat.nbytes - out.nbytes
        if self._reaches and flat.nbytes >= _WORTH_TAKING:
            mine = rows[self._me]
            self._meet(flat, lambda addresses: self._sum_row(mine, addresses, out))
            return
        for row in range(self.size):

            def write(at: slice, slot: torch.Tensor, row: int = row) -> None:
                slot.copy_(rows[row][at])

            def read(i: int, at: slice, slots: Sequence[torch.Tensor], row: int = row) -> None:
                if row == self._me:
                    _sum(slots, out[at])

            self._rounds(out.numel(), flat.dtype, write, read)

    def _sum_row(self, mine: torch.Tensor, addresses: list[int], out: torch.Tensor) -> None:
        """Add everyone's row of mine, in the order of ranks, piece by piece; `out` may be where mine is."""
        step = _ROW_BYTES // mine.element_size()
        begins = [address - addresses[self._me] + mine.data_ptr() for address in addresses]
        for start in range(0, mine.numel(), step):
            own, into = mine[start : start + step], out[start : start + step]
            if self.size == 2 and own.data_ptr() != into.data_ptr():  # their order does not matter: no room is needed
                self._read(1 - self._me, begins[1 - self._me] + start * mine.element_size(), into)
                into.add_(own)
                continue
            theirs, total = self._room.view(mine.dtype).view(2, -1)[:, : own.numel()]
            for j in range(self.size):
                if j != self._me:
                    self._read(j, begins[j] + start * mine.element_size(), theirs)
                term = own if j == self._me else theirs
                if j == 0:
                    total.copy_(term)
                else:
                    torch.add(total, term, out=into if j == self.size - 1 else total)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Everyone's `flat` becomes the root's."""
        if self._me == root:
            self.sent_bytes += flat.nbytes * (self.size - 1)
        if self._reaches and flat.nbytes >= _WORTH_TAKING:

            def take(addresses: list[int]) -> None:
                if self._me != root:
                    self._read(root, addresses[root], flat)

            self._meet(flat, take)
            return

        def write(at: slice, slot: torch.Tensor) -> None:
            if self._me == root:
                slot.copy_(flat[at])

        def read(i: int, at: slice, slots: Sequence[torch.Tensor]) -> None:
            if self._me != root:
                flat[at].copy_(slots[root])

        self._rounds(flat.numel(), flat.dtype, write, read)

    def _stage(self, k: int, parts: list[torch.Tensor]) -> None:
        self._lane.wait(DONE, k + 1 - _SLOTS)
        slot = self._slot_of(self._me, k, parts[0].dtype)
        for j, part in enumerate(parts):
            if j != self._me and part.numel():
                slot[j, : part.numel()].copy_(part)
        self._lane.own.raise_to(POSTED, k + 1)

    def _reduce(self, k: int, parts: list[torch.Tensor]) -> None:
        mine = parts[self._me]
        self._lane.wait(POSTED, k + 1)
        if n := mine.numel():
            result = self._slot_of(self._me, k, mine.dtype)[self.size, :n]
            terms = [mine if j == self._me else self._slot_of(j, k, mine.dtype)[self._me, :n] for j in range(self.size)]
            _sum(terms, result)
        self._lane.own.raise_to(REDUCED, k + 1)
        if n:
            mine.copy_(result)

    def _gather(self, k: int, parts: list[torch.Tensor]) -> None:
        self._lane.wait(REDUCED, k + 1)
        for j, part in enumerate(parts):
            if j != self._me and part.numel():
                part.copy_(self._slot_of(j, k, part.dtype)[self.size, : part.numel()])
        self._lane.own.raise_to(DONE, k + 1)

    def _rounds(
        self,
        numel: int,
        dtype: torch.dtype,
        write: Callable[[slice, torch.Tensor], object],
        read: Callable[[int, slice, Sequence[torch.Tensor]], None],
    ) -> None:
        """Everyone writes a block into its slot, then reads the others'; the next write overlaps the others' reads."""
        step = self._slot // dtype.itemsize
        starts = range(0, numel, step)
        pending: list[tuple[int, int, slice]] = []

        def drain() -> None:
            i, k, at = pending.pop()
            self._lane.wait(POSTED, k + 1)
            slots = [self._slot_of(j, k, dtype).reshape(-1)[: at.stop - at.start] for j in range(self.size)]
            read(i, at, slots)
            self._lane.own.raise_to(REDUCED, k + 1)
            self._lane.own.raise_to(DONE, k + 1)

        for i, start in enumerate(starts):
            k = self._round + i
            at = slice(start, min(start + step, numel))
            self._lane.wait(DONE, k + 1 - _SLOTS)
            write(at, self._slot_of(self._me, k, dtype).reshape(-1)[: at.stop - at.start])
            self._lane.own.raise_to(POSTED, k + 1)
            if pending:
                drain()
            pending.append((i, k, at))
        if pending:
            drain()
        self._round += len(starts)

    def _gathered(self, note: torch.Tensor) -> list[torch.Tensor]:
        out = note.new_empty(self.size * note.numel())
        self.all_gather(note, out)
        return list(out.view(self.size, -1))

    def barrier(self) -> None:
        """Return when all members have come here."""
        self._round += 1
        for word in (POSTED, REDUCED, DONE):
            self._lane.own.raise_to(word, self._round)
        self._lane.wait(POSTED, self._round)

    def _slot_of(self, index: int, k: int, dtype: torch.dtype) -> torch.Tensor:
        start = k % _SLOTS * self._slot
        data = self._lane.segments[index].data[start : start + self._slot]
        return data.view(dtype).view(self.size + 1, -1)

    def _parts(self, block: torch.Tensor) -> list[torch.Tensor]:
        per = -(-block.numel() // self.size)
        return [block[min(j * per, block.numel()) : min((j + 1) * per, block.numel())] for j in range(self.size)]


def _sum(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add in the order given. `out` may be none of the terms but the first or, with two terms, either."""
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)
