"""Buffers of members that train apart: what a model changes in its forward passes (batch-norm statistics, counters).

At each round, of the buffers that have changed on some member since the last one,

    floats    are averaged, with the same weights as the parameters
    others    follow the first member: nothing good comes of the mean of counters

Buffers that nobody has changed (masks, tables) do not travel. They travel as they are, whatever the codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.strategies.averaging import Combine, combine_rows
from paceline.transport.group import Group


class Movers:
    """The buffers of a run's models."""

    def __init__(self) -> None:
        self._places: list[tuple[str, torch.nn.Module, str]] = []
        self._agreed: list[torch.Tensor] = []
        self._sent: list[torch.Tensor] = []  # values as of when they were noted
        self._came: dict[int, torch.Tensor] = {}  # to be mixed in
        self._own: list[torch.Tensor] = []

    def add(self, model: torch.nn.Module, number: int) -> None:
        """Those of a model, which all members have alike now."""
        known = {id(b) for b in self.now}
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in known:
                    known.add(id(buffer))
                    self._places.append((f"{number}.{prefix}.{name}", module, name))
                    self._agreed.append(buffer.detach().clone())

    @property
    def now(self) -> list[torch.Tensor]:
        """Looked up each time: a module may put another tensor in the place of a buffer."""
        found = [module._buffers[name] for _, module, name in self._places]
        return [b if b is not None else a for b, a in zip(found, self._agreed)]

    def note(self) -> list[bool]:
        """Keep what is to be sent; which have changed since the last round."""
        changed = [not _same(b, a) for b, a in zip(self.now, self._agreed)]
        self._sent = [b.detach().clone() if moved else a for b, a, moved in zip(self.now, self._agreed, changed)]
        return changed

    @property
    def sound(self) -> bool:
        """Whether all that was noted is finite, or was not before either (a mask)."""
        pairs = [(b, a) for b, a in zip(self._sent, self._agreed) if b is not a and b.is_floating_point()]
        return all(bool(torch.isfinite(b).all()) or not bool(torch.isfinite(a).all()) for b, a in pairs)

    def carry(self, group: Group, changed: Sequence[bool], weights: Sequence[float], combine: Combine | None) -> None:
        """Exchange those that have changed on some member."""
        chosen = [i for i, moved in enumerate(changed) if moved]
        floats = [i for i in chosen if self._agreed[i].is_floating_point()]
        if floats:
            wide = any(self._agreed[i].dtype == torch.float64 for i in floats)
            mine = torch.cat(
                [self._sent[i].reshape(-1).to("cpu", torch.float64 if wide else torch.float32) for i in floats]
            )
            if combine:
                mine = combine_rows(torch.stack(group.all_gather(mine)), combine, weights)
            else:
                weight = weights[group.rank]
                mine = group.all_reduce(mine * weight if weight else torch.zeros_like(mine))
            self._keep(floats, torch.split(mine, [self._agreed[i].numel() for i in floats]))
        others = [i for i in chosen if not self._agreed[i].is_floating_point()]
        if others:
            data = torch.cat([self._sent[i].reshape(-1).to("cpu").view(torch.uint8) for i in others])
            group.broadcast(data)
            pieces = torch.split(data, [self._agreed[i].nbytes for i in others])
            self._keep(others, [p.clone().view(self._agreed[i].dtype) for p, i in zip(pieces, others)])

    def _keep(self, chosen: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        for i, value in zip(chosen, values):
            self._came[i] = value.view(self._agreed[i].shape).to(self._agreed[i])

    def alone(self) -> None:
        """There is one member: what it has is what all have."""
        self._came = {i: b.detach().clone() for i, b in enumerate(self.now)}

    def apply(self) -> None:
        """What came is what the run has agreed on."""
        for i, value in self._came.items():
            self._agreed[i] = value

    @torch.no_grad()
    def mix(self, merge: float) -> None:
        """As parameters are mixed; counters become the first member's, with what was counted since they were sent."""
        for i, (b, agreed) in enumerate(zip(self.now, self._agreed)):
            if _same(b, agreed):
                continue
            sent = self._sent[i] if i < len(self._sent) else b
            if merge == 1.0:
                b.copy_(agreed)
            elif i in self._came and not b.is_floating_point():
                b.copy_(agreed if b.dtype == torch.bool else agreed + (b - sent))
            elif i in self._came:
                b.add_(agreed - b, alpha=merge)
        self._came.clear()

    def reset(self) -> None:
        """All members' buffers are equal."""
        self._agreed = [b.detach().clone() for b in self.now]
        self._came.clear()

    @torch.no_grad()
    def show(self) -> None:
        self._own = [b.detach().clone() for b in self.now]
        for b, agreed in zip(self.now, self._agreed):
            if not _same(b, agreed):
                b.copy_(agreed)

    @torch.no_grad()
    def hide(self) -> None:
        for b, own in zip(self.now, self._own):
            if not _same(b, own):
                b.copy_(own)
        self._own = []

    def state(self) -> dict[str, torch.Tensor]:
        """This member's own, where they are not what the run has agreed on; and what is still to be mixed in."""
        own = {
            name: b.detach()
            for (name, _, _), b, agreed in zip(self._places, self._own or self.now, self._agreed)
            if not _same(b, agreed)
        }
        sent = {f"sent {self._places[i][0]}": self._sent[i] for i in self._came if i < len(self._sent)}
        return {**own, **sent, "coming": torch.tensor(sorted(self._came), dtype=torch.int64)}

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        for (name, _, _), b in zip(self._places, self.now):
            if name in state:
                b.copy_(state[name])
        self._came = {i: self._agreed[i] for i in state["coming"].tolist() if i < len(self._agreed)}
        self._sent = [state.get(f"sent {name}", b) for (name, _, _), b in zip(self._places, self.now)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A buffer that a module has replaced by one of another shape (a table that grew) is each member's own."""
    return a is b or a.shape != b.shape or torch.equal(a, b)
