"""What members would tell each other in a step, for `bench.grace`: many rows of gradients at once, on one device.

A codec of `paceline.codecs` takes one piece of one member after another, and some ask the device for lengths. The forms
here take all pieces of all rows in the same few operations and give what a reader of the payloads would decode, bit for
bit, without the payloads; how long those would be is counted. `check` compares them with the codec itself.

    Blocks    the pieces cut in blocks
    Form      rows of gradients → rows of what is decoded; keeps the residuals
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bench._grace_pieces import HEAD_BYTES, LENGTH_BYTES, Pieces
from paceline.codecs import DGC, Cast, Codec, Context, Quantize, Sign, Ternary, Threshold, TopK
from paceline.codecs.kernels import dense
from paceline.codecs.records import BLOCK, HEADER_BYTES, SCALE_BYTES, VALUES, index_bytes, share

_MAGNITUDE = 0x7FFFFFFF
_TINY = 64  # elements: blocks that are not longer stand in a matrix of their own


class Blocks:
    """The pieces cut in blocks, as matrices that have the places of a row: the long blocks, and the tiny ones."""

    def __init__(self, pieces: Pieces, size: int, device: torch.device) -> None:
        starts, lengths, of = [], [], []
        for i, at in enumerate(pieces.at):
            for start in range(at.start, at.stop, size):
                starts.append(start)
                lengths.append(min(size, at.stop - start))
                of.append(i)
        tiny = np.array(lengths) <= min(_TINY, size)
        self.parts: list[tuple[Tensor, Tensor]] = []  # places, and which of these there are
        self.part_lengths: list[list[int]] = []
        back, at_back = torch.full((pieces.numel,), -1), 0
        for which, width in ((~tiny, size), (tiny, min(_TINY, size))):
            if not which.any():
                continue
            places = torch.tensor(np.array(starts)[which])[:, None] + torch.arange(width)
            there = torch.arange(width) < torch.tensor(np.array(lengths)[which])[:, None]
            back[places[there]] = at_back + torch.arange(places.numel()).view_as(places)[there]
            at_back += places.numel()
            self.part_lengths.append([int(n) for n in np.array(lengths)[which]])
            places = torch.where(there, places, pieces.numel)
            self.parts.append((places.to(device), there.to(device)))
        order = [int(block) for which in (~tiny, tiny) for block in which.nonzero()[0]]
        self.pieces = torch.zeros(len(of), len(pieces.at), dtype=torch.float64)  # by block, in the matrices' order
        self.pieces[torch.arange(len(of)), torch.tensor(of)[order]] = 1
        self.pieces = self.pieces.to(device)
        self._coded = (back >= 0).to(device)
        self._back = back.clamp(min=0).to(device)

    def take(self, rows: Tensor) -> list[Tensor]:
        """[row, block, element] of each matrix, zeros behind short blocks."""
        longer = torch.cat((rows, rows.new_zeros(len(rows), 1)), 1)
        return [longer.index_select(1, places.view(-1)).view(len(rows), *places.shape) for places, _ in self.parts]

    def put(self, matrices: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Rows made of the blocks' elements; what is in no block is as in `rows`."""
        flat = torch.cat([m.flatten(1) for m in matrices], 1).index_select(1, self._back)
        return torch.where(self._coded, flat, rows)


Said = Callable[[Tensor, Tensor], Tensor]  # rows and the pass (from 1 on) → what is decoded


class Form:
    """One codec over all rows; `rows` of them, each a member of a run.

    Args:
        codec: None: gradients as they are.
        feedback: whether there are residuals; None: where the codec is biased.
    """

    def __init__(
        self, codec: Codec | None, pieces: Pieces, rows: int, device: torch.device, feedback: bool | None = None
    ) -> None:
        self.codec, self.pieces, self.device, self.rows = codec, pieces, device, rows
        self.feeds = codec is not None and ((not codec.unbiased) if feedback is None else feedback)
        self.residual = torch.zeros(rows, pieces.numel if self.feeds else 0, device=device)
        self.momentum = torch.zeros(rows, pieces.numel if isinstance(codec, DGC) else 0, device=device)
        self.coded = pieces.of_elements(device) < len(pieces.at)
        self.rest: Form | None = None
        if pieces.rest:
            assert not pieces.rest.varies
            self.rest = Form(pieces.rest, Pieces(pieces.rest_sizes, 1), rows, device)
            self.places = torch.tensor(pieces.places, device=device)
        self.seeds = torch.arange(rows * max(1, len(pieces.at)), device=device).view(rows, -1) * 7919 + 17
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)  # of the last messages
        self.whole = torch.zeros((), dtype=torch.bool, device=device)  # some piece would have travelled whole
        self.varies = bool(codec and codec.varies)
        if codec is None:
            fixed = 4 * pieces.numel
        elif codec.adds_as:
            fixed = pieces.plain_bytes + sum(codec.nbytes(n) for n in pieces.sizes)
        else:
            fixed = pieces.message([codec.nbytes(n) for n in pieces.sizes])
        self.lengths.fill_(0 if self.varies else fixed)
        self._constants: dict[tuple[int, ...], Tensor] = {}
        self._sizes: Tensor | None = None  # of positions, by the length of a block and its records
        self._said = self._choose()

    def step(self, gradients: Tensor, ratio: Tensor, count: Tensor) -> Tensor:
        """What is decoded of every row's message.

        Args:
            ratio: the learning rate of the last pass over that of this one, by which residuals are scaled; not those
                of small parameters, for which the optimizer has momentum.
            count: of passes, from 1 on.
        """
        said = self._step(gradients, ratio, count)
        if self.rest:
            rest = self.rest.step(gradients.index_select(1, self.places), torch.ones_like(ratio), count)
            said = said.index_copy(1, self.places, rest)
        return said

    def _step(self, gradients: Tensor, ratio: Tensor, count: Tensor) -> Tensor:
        if not self.feeds:
            return self._said(gradients, count)
        self.residual.mul_(ratio)
        fresh = gradients
        if isinstance(self.codec, DGC):
            u = self.momentum * float(np.float32(self.codec.momentum)) + gradients
            fresh = torch.where(self.coded, u, gradients)
        p = self.residual + fresh if isinstance(self.codec, DGC) else gradients + self.residual
        said = self._said(p, count)
        torch.sub(p, said, out=self.residual)
        if isinstance(self.codec, DGC):
            self.momentum.copy_(torch.where(self._sent | ~self.coded, 0.0, fresh))
        return said

    @property
    def state(self) -> list[Tensor]:
        """All that is kept from step to step."""
        return [self.residual, self.momentum, *(self.rest.state if self.rest else [])]

    # ---- the codecs

    def _choose(self) -> Said:
        codec, pieces, device = self.codec, self.pieces, self.device
        if codec is None:
            return lambda rows, count: rows
        if isinstance(codec, Cast) and codec.adds_as:
            return self._cast
        if isinstance(codec, Quantize | Ternary | Sign):
            self._blocks = Blocks(pieces, codec.block, device)
            self._piece_of = pieces.of_elements(device).clamp(max=len(pieces.at) - 1)
            self._index = torch.arange(pieces.numel, device=device)
            for at in pieces.at:
                self._index[at] -= at.start
            return self._signs if isinstance(codec, Sign) else self._codes
        if isinstance(codec, TopK | DGC):
            if isinstance(codec, DGC) and (codec.clip or codec.ramp):
                raise ValueError(f"{codec.words}: without clip and ramp only")
            self._blocks = Blocks(pieces, codec.chunk if isinstance(codec, TopK) else BLOCK, device)
            return self._top
        if isinstance(codec, Threshold) and codec.density is not None:
            self._blocks = Blocks(pieces, BLOCK, device)
            self._piece_of = pieces.of_elements(device)
            self._groups = []
            for n in sorted(set(pieces.sizes)):
                if n > 2 * max(256 / codec.density, 1 << 14):
                    raise ValueError(f"{codec.words}: {n} elements, of which only a sample would be looked at")
                which = torch.tensor([i for i, size in enumerate(pieces.sizes) if size == n], device=device)
                starts = torch.tensor([at.start for at, size in zip(pieces.at, pieces.sizes) if size == n])
                places = (starts[:, None] + torch.arange(n)).to(device)
                self._groups.append((which, places, share(codec.density, n)))
            return self._above
        raise ValueError(f"{codec.words}: there is no form of this codec here")

    def _cast(self, rows: Tensor, count: Tensor) -> Tensor:
        assert isinstance(self.codec, Cast)
        largest = torch.finfo(self.codec.dtype).max
        return torch.where(self.coded, rows.clamp(-largest, largest).to(self.codec.dtype).float(), rows)

    def _codes(self, rows: Tensor, count: Tensor) -> Tensor:
        codec, said = self.codec, []
        assert isinstance(codec, Quantize | Ternary)
        bits = codec.bits if isinstance(codec, Quantize) else 2
        uniform = None
        if isinstance(codec, Ternary) or codec.stochastic:
            uniform = self._blocks.take(self._draws(count))
        for k, blocks in enumerate(self._blocks.take(rows)):
            magnitudes = blocks.abs()
            largest = magnitudes.amax(2)
            if isinstance(codec, Ternary) and codec.clip:
                mean = _sums(blocks.double().square()) / self._lengths(k)
                largest = torch.minimum(largest.double(), codec.clip * mean.sqrt()).float()
            highest = torch.full_like(largest, 2 ** (bits - 1) - 1)
            live = largest >= dense.SMALLEST
            limited = torch.where(live, largest.clamp(max=dense.LARGEST), highest)
            scale, inverse = limited / highest * live, highest / limited * live
            steps = torch.minimum(magnitudes * inverse[..., None], highest[..., None])
            if uniform is None:
                steps = steps.round()
            else:
                down = steps.trunc()
                steps = down + (uniform[k] < steps - down)
            said.append(torch.where(blocks < 0, -steps, steps) * scale[..., None])
        return self._blocks.put(said, rows)

    def _signs(self, rows: Tensor, count: Tensor) -> Tensor:
        said = []
        for k, blocks in enumerate(self._blocks.take(rows)):
            scale = (_sums(blocks.double().abs()) / self._lengths(k)).float()[..., None]
            said.append(torch.where(blocks < 0, -scale, scale))
        return self._blocks.put(said, rows)

    def _top(self, rows: Tensor, count: Tensor) -> Tensor:
        assert isinstance(self.codec, TopK | DGC)
        said, sent = [], []
        parts = zip(self._blocks.parts, self._blocks.part_lengths, self._blocks.take(rows))
        for (places, there), lengths, blocks in parts:
            width = places.shape[1]
            counts = [share(self.codec.density, n) for n in lengths]
            keys = (blocks.view(torch.int32) & _MAGNITUDE).long() << 20
            keys = torch.where(there, keys | (width - 1 - torch.arange(width, device=self.device)), -1)
            most = max(counts)
            found = keys.topk(most, dim=2).indices
            chosen = torch.arange(most, device=self.device) < self._constant(counts)[:, None]
            marks = torch.zeros_like(blocks, dtype=torch.bool).scatter_(2, found, chosen.expand_as(found))
            said.append(_values(blocks, marks, self.codec.values))
            sent.append(marks)
        if isinstance(self.codec, DGC):
            self._sent = self._blocks.put(sent, torch.zeros_like(rows, dtype=torch.bool))
        return self._blocks.put(said, rows)

    def _above(self, rows: Tensor, count: Tensor) -> Tensor:
        assert isinstance(self.codec, Threshold)
        magnitudes = rows.view(torch.int32) & _MAGNITUDE
        cuts = torch.zeros(len(rows), len(self.pieces.at) + 1, dtype=torch.int32, device=self.device)
        for which, places, most in self._groups:
            group = magnitudes.index_select(1, places.view(-1)).view(len(rows), *places.shape)
            cuts[:, which] = group.topk(most, dim=2).values[..., -1].clamp(min=1)
        above = magnitudes >= cuts.index_select(1, self._piece_of)
        marks = self._blocks.take(above & self.coded)
        self._count(torch.cat([lit.sum(2) for lit in marks], 1))
        said = [_values(blocks, lit, self.codec.values) for blocks, lit in zip(self._blocks.take(rows), marks)]
        return self._blocks.put(said, rows)

    def _count(self, counts: Tensor) -> None:
        """The lengths of messages whose blocks have so many records."""
        assert isinstance(self.codec, Threshold)
        rooms = [n for part in self._blocks.part_lengths for n in part]
        nbytes = self._index_bytes(rooms, counts) + (counts * VALUES[self.codec.values] + 7) // 8 + 2
        nbytes += SCALE_BYTES.get(self.codec.values, 0) * (counts > 0)
        sums = HEADER_BYTES + (nbytes.double() @ self._blocks.pieces).long()
        self.whole |= (sums > self._constant([HEADER_BYTES + 4 * n for n in self.pieces.sizes])).any()
        messages = (LENGTH_BYTES + (sums + 3) // 4 * 4).sum(1)
        self.lengths.copy_(messages + HEAD_BYTES + self.pieces.plain_bytes)

    def _index_bytes(self, rooms: Sequence[int], counts: Tensor) -> Tensor:
        """Looked up, since they depend on a block's length and its number of records alone."""
        kinds = sorted(set(rooms))
        if self._sizes is None:
            each = np.arange(BLOCK + 1)
            rows = [index_bytes(np.full_like(each, n), np.minimum(each, n)) for n in kinds]
            self._sizes = torch.from_numpy(np.concatenate(rows)).to(self.device)
        first = self._constant([kinds.index(n) * (BLOCK + 1) for n in rooms])
        return self._sizes[first + counts]

    # ---- what they share

    def _lengths(self, k: int) -> Tensor:
        return self._constant(self._blocks.part_lengths[k]).double()

    def _constant(self, numbers: Sequence[int]) -> Tensor:
        """On the device, made once: a graph that is recorded cannot wait for the host."""
        key = tuple(numbers)
        if key not in self._constants:
            self._constants[key] = torch.tensor(numbers, device=self.device)
        return self._constants[key]

    def _draws(self, count: Tensor) -> Tensor:
        """As paceline.codecs.kernels.random: the numbers of all elements, each row and piece with a seed of its own."""
        first, second = keys_of(self.seeds, count)
        word = self._index ^ first.index_select(1, self._piece_of)
        word = word ^ word >> 16
        word = (word * 0x7FEB352D & 0xFFFFFFFF) ^ second.index_select(1, self._piece_of)
        word = word ^ word >> 15
        word = word * 0x846CA68B & 0xFFFFFFFF
        word = word ^ word >> 16
        return (word >> 8).float() * 2.0**-24


def keys_of(seeds: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """As paceline.codecs.kernels.random.keys, of many seeds."""

    def logical(word: Tensor, by: int) -> Tensor:
        return word >> by & (1 << (64 - by)) - 1

    def spread_bits(word: Tensor) -> Tensor:
        word = word + (0x9E3779B97F4A7C15 - (1 << 64))
        word = (word ^ logical(word, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
        word = (word ^ logical(word, 27)) * (0x94D049BB133111EB - (1 << 64))
        return word ^ logical(word, 31)

    word = spread_bits(spread_bits(seeds) + count)
    return word & 0xFFFFFFFF, logical(word, 32)


def _values(blocks: Tensor, marks: Tensor, values: str) -> Tensor:
    """What readers take the marked elements for; zeros in the place of others."""
    chosen = torch.where(marks, blocks, 0.0)
    if values == "float32":
        return chosen
    if values == "int8":
        scale = chosen.abs().amax(2, keepdim=True).clamp(2.0**-100, 3.4e38)
        scale = scale / torch.full_like(scale, 127.0)
        return (chosen / scale).round().clamp(-127, 127) * scale
    dtype = torch.bfloat16 if values == "bf16" else torch.float16
    return chosen.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float()


def _sums(terms: Tensor) -> Tensor:
    """Halves added to halves."""
    while (width := terms.shape[-1]) > 1:
        terms = terms[..., : width // 2] + terms[..., width // 2 :]
    return terms[..., 0]


def check(form: Form, row: int, gradients: Tensor, ratio: float, count: int, size: int) -> tuple[Tensor, str]:
    """Take a step: what is decoded, and how one row of it differs from what the codecs themselves make of it on the
    CPU; "" where bits and lengths agree."""
    before = [s[row].cpu().clone() * (ratio if i == 0 else 1.0) for i, s in enumerate(form.state)]
    said = form.step(gradients, torch.tensor(ratio, device=form.device), torch.tensor(count, device=form.device))
    differs = _compare(form, row, gradients, before, said, Context(step=count, size=size))
    if form.rest and not differs:
        x, decoded = (rows.index_select(1, form.places) for rows in (gradients, said))
        differs = _compare(form.rest, row, x, before[2:], decoded, Context(step=count, size=size))
    return said, differs


def _compare(form: Form, row: int, gradients: Tensor, before: list[Tensor], said: Tensor, context: Context) -> str:
    codec, pieces = form.codec, form.pieces
    if codec is None:
        return ""
    x, lengths = gradients[row].cpu(), []
    kept = [s[row].cpu() for s in form.state[:2] if s.numel()]
    for i, at in enumerate(pieces.at):
        residual = torch.cat([s[at] for s in before[:2] if len(s)]) if form.feeds else None
        out = torch.zeros(codec.nbytes(pieces.sizes[i]), dtype=torch.uint8)
        n = codec.encode_into(x[at].clone(), residual, out, replace(context, seed=int(form.seeds[row, i])))
        lengths.append(n)
        decoded = torch.zeros(pieces.sizes[i])
        codec.decode_add(out[:n], decoded)
        if not torch.equal(decoded, said[row, at].cpu()):
            return f"piece {i} of {codec.words} is decoded to something else"
        if residual is not None and not torch.equal(residual, torch.cat([s[at] for s in kept])):
            return f"piece {i} of {codec.words} leaves another residual"
    expected = pieces.plain_bytes + sum(lengths) if codec.adds_as else pieces.message(lengths)
    if expected != int(form.lengths[row]):
        return f"{codec.words} has messages of {expected} bytes, not {int(form.lengths[row])}"
    return ""
