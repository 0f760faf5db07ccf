"""The buckets of one arena, by where they lie in it, and how they are summed.

    none       as they are, around the ring
    Total      codes that add: around the ring
    Gather     other codes: everyone's message to everyone
    TwoWay     codes there, sums encoded again on the way back
    Product    matrices as products of thin ones, in two rounds
    Rows       everyone's values to everyone, for averages that are no sums

Where a gradient is not finite, its member's message says so and everyone's gradients of that bucket become nan: a
GradScaler skips the step on all members, and `check_finite` names the parameter. What was said in that pass of the
parameters whose step is skipped counts for nothing then, so every member gives it back to its residuals. So it is with
a parameter for which nobody had a gradient: it gets none, whatever was said.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.codecs import warm_up
from paceline.strategies.reducers.auto import Chooser
from paceline.strategies.reducers.coder import Bucket, Coder, Piece, Watch, Way
from paceline.strategies.reducers.frame import FOR_SMALL, is_coarse
from paceline.strategies.reducers.gather import Gather
from paceline.strategies.reducers.low_rank import Product
from paceline.strategies.reducers.method import Auto, LowRank, Method
from paceline.strategies.reducers.rows import Rows
from paceline.strategies.reducers.total import Total
from paceline.strategies.reducers.two_way import TwoWay
from paceline.transport.arena import Collective, Reduce

_WEIGHED = 10  # passes, after which bytes are compared


class Plain:
    """A bucket that travels as it is."""

    def __init__(self, coder: Coder, bucket: Bucket) -> None:
        self._coder = coder
        self._bucket = bucket

    def reduce(self, flat: torch.Tensor, collective: Collective) -> None:
        watch, host = Watch(), flat.to("cpu")
        collective.all_reduce(host)
        if host is not flat:
            flat.copy_(host)
        if self._coder.owes:
            self._coder.note(self._bucket, host, not self._bucket.finite(host))
        self._coder.cost.add(0.0, watch.lap(), 0.0)


def make_way(method: Method, coder: Coder, bucket: Bucket, place: tuple[int, int]) -> Way:
    """`place`: this member's position among those that reduce, and how many they are."""
    codec = method.codec
    if coder.combine:
        assert not isinstance(codec, Auto | LowRank)
        return Rows(codec if bucket.pieces else None, coder, bucket, coder.combine)
    if codec is None or isinstance(codec, Auto) or not bucket.pieces:
        return Plain(coder, bucket)
    if isinstance(codec, LowRank):
        return Product(codec.rank, coder, bucket, method.feeds(coder.feedback))
    if method.back:
        return TwoWay(codec, method.back, coder, bucket, place)
    return Total(codec, coder, bucket) if codec.adds_as else Gather(codec, coder, bucket)


def load(method: Method, device: torch.device) -> None:
    """Load the kernels that its codecs need. What is chosen later is rehearsed first, and so loaded then."""
    codec = method.codec
    if codec is not None and not isinstance(codec, Auto | LowRank):
        small = FOR_SMALL if is_coarse(codec) or (method.back and is_coarse(method.back)) else None
        for each in codec, method.back, small:
            if each:
                warm_up(each, device)


class Reducer:
    """How the slices of one arena are summed.

    `alone`: no other arena has buckets of the same pass; only then can something be chosen from pass to pass.
    """

    def __init__(self, coder: Coder, *, alone: bool = True) -> None:
        self._coder = coder
        self._buckets: dict[int, Bucket] = {}
        self._ways: dict[tuple[str, int], Way] = {}
        self._since: tuple[int, int, int] | None = None  # the first pass with a codec, and bytes before and after then
        self._weighed = False
        chooses = isinstance(coder.asked.codec, Auto)
        self._chooser = Chooser(coder, make_way) if chooses and alone else None
        if chooses and not alone and coder.chosen is None:
            coder.method = coder.chosen = Method()
            coder.tell("codec auto: none, since the model lies on several devices; name a codec for it")

    def add(self, offset: int, dtype: torch.dtype, numel: int, pieces: Sequence[Piece]) -> None:
        """A bucket of `numel` elements that begins at byte `offset` of the arena."""
        self._buckets[offset] = Bucket.of(dtype, numel, pieces)

    def through(self, collective: Collective) -> Reduce:
        """How the arena's slices are summed."""
        place = (collective.position, collective.size)

        def reduce(flat: torch.Tensor) -> None:
            coder, offset = self._coder, int(flat.storage_offset()) * flat.element_size()
            bucket = self._buckets[offset]
            if self._chooser:
                self._chooser.before(flat, bucket, list(self._buckets.values()), collective)
            method = coder.method if coder.passes > coder.warmup else Method()
            if not method.back and coder.returns:
                coder.fold(bucket, ())
            if not method.feeds(coder.feedback):
                coder.flush(bucket, flat)
            if (method.words, offset) not in self._ways:
                self._ways[method.words, offset] = make_way(method, coder, bucket, place)
            if method.codec and not self._chooser:
                self._weigh_up(method, collective)
            sent = collective.sent_bytes
            self._ways[method.words, offset].reduce(flat, collective)
            coder.cost.bytes_before += collective.all_reduce_bytes(flat.nbytes)
            coder.cost.bytes_after += collective.sent_bytes - sent

        return reduce

    def _weigh_up(self, method: Method, collective: Collective) -> None:
        """After some passes, once: say where what was to save bytes costs more of them."""
        coder, cost = self._coder, self._coder.cost
        if self._since is None:
            self._since = (coder.passes, cost.bytes_before, cost.bytes_after)
        passes, before, after = self._since
        if self._weighed or coder.passes - passes < _WEIGHED:
            return
        self._weighed = True
        before, after = cost.bytes_before - before, cost.bytes_after - after
        if collective.link is not None and after > 1.01 * before:
            each = 1e6 * _WEIGHED
            coder.tell(
                f"codec {method.words} sends {after / each:.3g} MB a step between {collective.size} hosts, and "
                f"gradients as they are would take {before / each:.3g}: "
                + ("use none" if method.back else "have sums sent back encoded, with back=quantize(8), or use none")
            )
