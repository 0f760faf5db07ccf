"""The parameters of members that train apart, and where they stood when members last agreed: their anchors.

    differ   anchor − weight, into the buckets of a fragment
    carry    times this member's weight, through the codec, to the average over the members; by a thread beside training
    apply    the average is the gradient of the outer optimizer, which moves the anchors: the same bits on all members
    mix      weights become the anchors, or go a part of the way

Anchors of weights in half precision are float32, so that a small outer step is not rounded away: how far weights have
gone is reckoned from what their anchors are in half precision, and what that leaves out stays in the anchors. The
buckets are those of all-reduce (`buckets.Layout`), laid out over the anchors, and so are the ways in which they are
summed (`reducers`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError, PacelineError
from paceline.strategies.buckets import Bucket, Layout
from paceline.strategies.outer import Outer
from paceline.strategies.reducers import Coder
from paceline.transport.arena import Arena
from paceline.transport.group import Group

_BUCKET_BYTES = 4_000_000
SKETCH = 64  # numbers: squares from so many are right within a fifth or so


class Anchors:
    """Some parameters that were adopted at one time, cut into fragments.

    Args:
        group: of those who exchange differences; None: there is one member, or another one does so for this one.
        near: those to whom the first of them hands on what came; None: there are no others.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        outer: Outer,
        fragments: int,
        group: Group | None,
        coder: Coder | None = None,
        decay: float = 1.0,
        near: Group | None = None,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.coder = coder
        self._decay = decay
        self._anchors = [torch.nn.Parameter(wide(p)) for p in self.parameters]
        try:
            self._outer, self._words = outer.make(self._anchors), outer.words
        except ValueError as error:  # such as Muon's, of what is no matrix
            raise ConfigError(f"outer={outer.words}: {error}") from None
        self._own: list[torch.Tensor] = []  # weights of this member, while the anchors are shown in their place
        self._cuts = fragments
        self.lay_out(group, near)

    def lay_out(self, group: Group | None, near: Group | None = None) -> None:
        """Make room for differences, by all members together; another group, another room."""
        fragments, coder = self._cuts, self.coder
        self._near = near
        self._views: list[torch.Tensor] = []  # differences, and what becomes of them
        self._buckets: list[list[Bucket]] = [[] for _ in range(fragments)]
        self._arenas: list[Arena] = []
        self._control = torch.zeros(0)
        if group is None:
            self._views = [torch.zeros_like(a) for a in self._anchors]
            self._fragments = _cut([[i] for i in range(len(self._anchors))], self._anchors, fragments)
            if near:  # cut as the first one has
                self._fragments = json.loads(near.exchange(b"")[0])
            return
        size = sum(a.nbytes for a in self._anchors)
        bucket_bytes = max(min(_BUCKET_BYTES, size // fragments), 1)
        layout = Layout(group, list(zip(self.names, self._anchors)), (), bucket_bytes, coder)
        buckets = [b for b in layout.buckets if b.slots]
        self._fragments = _cut([[s.index for s in b.slots] for b in buckets], self._anchors, fragments)
        for fragment, mine in enumerate(self._fragments):
            self._buckets[fragment] = [b for b in buckets if b.slots[0].index in mine]
        self._views = [slot.view for slot in layout.slots]
        self._arenas, self._control = layout.arenas, layout.control
        if near:
            near.exchange(json.dumps(self._fragments).encode())

    @property
    def agreed(self) -> list[torch.Tensor]:
        """What members agreed on last."""
        return [anchor.detach() for anchor in self._anchors]

    def let_go(self) -> None:
        """The group is gone, and its memory is to go too: now, not when cycles are found."""
        for bucket in (bucket for buckets in self._buckets for bucket in buckets):
            bucket.slots = []
        self._buckets, self._arenas, self._views = [[] for _ in self._buckets], [], []

    @torch.no_grad()
    def differ(self, fragment: int) -> float:
        """Note how far the weights have gone; the sum of squares, which is not finite where a weight is not."""
        mine = self._fragments[fragment]
        for i in mine:
            torch.sub(begun_at(self._anchors[i], self.parameters[i]), self.parameters[i].detach(), out=self._views[i])
        return _squares([self._views[i] for i in mine])

    @torch.no_grad()
    def sketch(self, fragment: int) -> torch.Tensor:
        """A few numbers of what was noted that add as it does, and whose squares add up to about as much: rows of
        `SKETCH` elements, each with a sign by chance, are added up. Members use the same signs."""
        total = torch.zeros(SKETCH, dtype=torch.float64)
        for i in self._fragments[fragment]:
            view = self._views[i].detach()
            flat = (torch.view_as_real(view) if view.is_complex() else view).reshape(-1)
            rows, rest = divmod(flat.numel(), SKETCH)
            generator = torch.Generator().manual_seed(i)
            signs = torch.randint(2, (rows + 1,), generator=generator).mul_(2).sub_(1).to(flat)
            total += (signs[:rows] @ flat[: rows * SKETCH].view(rows, SKETCH)).to("cpu", torch.float64)
            total[:rest] += (signs[rows] * flat[rows * SKETCH :]).to("cpu", torch.float64)
        return total

    @torch.no_grad()
    def carry(self, fragment: int, weight: float, add: Callable[[int, torch.Tensor], None] | None = None) -> None:
        """Exchange what was noted; a member of weight zero says nothing of its own. `add`: what others have given it to
        bring with its own."""
        if self._buckets[fragment]:
            self._exchange(fragment, weight, add)
        if self._near:
            for i in self._fragments[fragment]:
                self._near.broadcast(self._views[i])

    @torch.no_grad()
    def blend(self, weight: float, add: Callable[[int, torch.Tensor], None]) -> None:
        """The same, of a member that has nobody to exchange with."""
        for i, view in enumerate(self._views):
            add(i, view.mul_(weight))

    def _exchange(self, fragment: int, weight: float, add: Callable[[int, torch.Tensor], None] | None) -> None:
        coder, buckets = self.coder, self._buckets[fragment]
        apart = bool(coder and coder.combine)
        self._control.zero_()  # which is summed with the last bucket
        if coder:
            coder.begin({})
            for bucket in buckets if self._decay != 1.0 else ():
                for slot in bucket.slots:
                    if slot.name in coder.residuals:
                        coder.residuals[slot.name].mul_(self._decay)
        for bucket in buckets:
            if not weight:
                for slot in bucket.slots:
                    slot.view.fill_(math.nan if apart else 0.0)
            elif not apart:
                bucket.flat.mul_(weight)
            for slot in bucket.slots if add else ():
                add(slot.index, slot.view)  # type: ignore[misc]
            bucket.arena.post(bucket.flat)
        if coder:
            coder.launched()
        for arena in self._arenas:
            arena.wait()
            if arena.memory.is_cuda:  # the training thread may work in another stream
                torch.cuda.current_stream(arena.memory.device).synchronize()
        if coder:
            coder.end(coder.spoilt)

    @torch.no_grad()
    def apply(self, fragment: int) -> float:
        """Take the outer step; the sum of squares of the anchors before it."""
        mine = self._fragments[fragment]
        size = _squares([self._anchors[i] for i in mine])
        if not math.isfinite(_squares([self._views[i] for i in mine])):
            raise PacelineError(
                "what members have averaged is not finite: some member's weights have grown without bound. Lower the "
                "learning rate, clip gradients, or use average=median, and resume from the last checkpoint"
            )
        for i in mine:
            self._anchors[i].grad = self._views[i]
        self._outer.step()
        for i in mine:
            self._anchors[i].grad = None
        return size

    @torch.no_grad()
    def mix(self, fragment: int, merge: float) -> None:
        """Weights go so far towards their anchors; 1: all the way, whatever they are."""
        for i in self._fragments[fragment]:
            p, anchor = self.parameters[i], self._anchors[i].detach()
            if merge == 1.0:
                p.copy_(anchor)
            else:
                p.add_(anchor.to(p.dtype) - p, alpha=merge)

    @torch.no_grad()
    def reset(self) -> None:
        """All members' weights are equal: these are the anchors now."""
        for p, anchor in zip(self.parameters, self._anchors):
            anchor.copy_(p)

    @torch.no_grad()
    def show(self) -> None:
        """Put the anchors in the place of the weights."""
        self._own = [p.detach().clone() for p in self.parameters]
        for p, anchor in zip(self.parameters, self._anchors):
            p.copy_(anchor)

    @torch.no_grad()
    def hide(self) -> None:
        for p, own in zip(self.parameters, self._own):
            p.copy_(own)
        self._own = []

    @torch.no_grad()
    def work(self) -> list[torch.Tensor]:
        """What this member has learnt since the last round: anchor − weight."""
        return [begun_at(anchor, p) - p.detach() for p, anchor in zip(self.parameters, self._anchors)]

    @torch.no_grad()
    def put_work(self, work: Sequence[torch.Tensor]) -> None:
        """Weights become the anchors with this on top, which was learnt from others."""
        for p, anchor, difference in zip(self.parameters, self._anchors, work):
            p.copy_(begun_at(anchor, p) - difference)

    def unsaid(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """A copy of what the codec keeps, to go back to where a round comes to nothing."""
        if self.coder is None:
            return None
        own = self.coder.state()
        copies = {kind: {key: t.clone() for key, t in own[kind].items()} for kind in ("residuals", "returns")}
        return self.coder.common(), {**own, **copies, "rates": dict(own["rates"]), "largest": dict(own["largest"])}

    def put_unsaid(self, kept: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
        if self.coder and kept:
            self.coder.load_common(kept[0])
            self.coder.load([kept[1]])

    # ---- state: what all members have alike, and this member's own

    def common(self) -> dict[str, Any]:
        wider = {n: a.detach() for n, p, a in zip(self.names, self.parameters, self._anchors) if a.dtype != p.dtype}
        return {
            "outer": self._words,
            "state": self._outer.state_dict(),
            "anchors": wider,  # the others are in the checkpoint as the weights themselves
            "coder": self.coder.common() if self.coder else {},
        }

    @torch.no_grad()
    def load_common(self, state: dict[str, Any]) -> str:
        """After the weights have been loaded, which are the anchors; what is to be said of it."""
        self.reset()
        for name, anchor in zip(self.names, self._anchors):
            if name in state["anchors"]:
                anchor.copy_(state["anchors"][name])
        if self.coder and state["coder"]:
            self.coder.load_common(state["coder"])
        if state["outer"] != self._words:
            return f"what {state['outer']} has gathered is left out: this run's outer optimizer is {self._words}"
        try:
            self._outer.load_state_dict(state["state"])
        except ValueError:
            return f"the state of {self._words} is left out: it is that of other parameters"
        return ""

    def weights(self) -> dict[str, torch.Tensor]:
        """This member's own, by name, where they are not the anchors."""
        own = self._own or [p.detach() for p in self.parameters]
        found = zip(self.names, own, self._anchors)
        return {name: w for name, w, anchor in found if not torch.equal(w, anchor.detach().to(w.dtype))}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        for name, p in zip(self.names, self.parameters):
            if name in weights:
                p.copy_(weights[name])


def wide(p: torch.Tensor) -> torch.Tensor:
    """A copy of a weight that an anchor can be."""
    half = p.dtype in (torch.float16, torch.bfloat16)
    return p.detach().to(torch.float32 if half else p.dtype, copy=True)


def begun_at(anchor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """What a weight becomes that takes its anchor's place, in the anchor's precision."""
    return anchor.detach().to(p.dtype).to(anchor.dtype)


def _squares(tensors: Sequence[torch.Tensor]) -> float:
    if not tensors:
        return 0.0
    return sum(float(n) ** 2 for n in torch._foreach_norm([t.detach() for t in tensors]))


def _cut(units: list[list[int]], tensors: Sequence[torch.Tensor], parts: int) -> list[list[int]]:
    """Deal units out, in order, to parts of about equally many bytes."""
    sizes = [sum(tensors[i].nbytes for i in unit) for unit in units]
    total, before = max(sum(sizes), 1), 0
    fragments: list[list[int]] = [[] for _ in range(parts)]
    for unit, size in zip(units, sizes):
        fragments[min(parts - 1, (before + size // 2) * parts // total)] += unit
        before += size
    return fragments
