"""What a guest carries besides its model: the weights that it started from, and what it has not said of its work.

    anchor     the weights of the round that it started from, as the code in which they came: 1 to 4 bytes a parameter
    residual   what its codec has left unsaid, 4 bytes a parameter; none where the codec leaves nothing
    sent       the bytes of the last difference, until the run has said whether it took them

Differences are made, encoded and decoded parameter by parameter: there is no second copy of the model.

A difference is the codec's word for anchor − weights + residual. When it is made and no new weights come, the weights
themselves become the anchor, and what their code leaves out of them goes to the residual: training goes on, and the
next difference says what is new since. If the run turns out not to have taken the last one, it goes back to the
residual. Where a difference is refused for good, the residual, which is older still, goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.codecs import Codec, Context
from paceline.server.outside.calls import take_apart
from paceline.server.outside.shelf import wrap


class Sent:
    """A difference that the run may have."""

    def __init__(self, number: int, sizes: list[int], data: torch.Tensor, samples: float, tokens: float) -> None:
        self.number, self.sizes, self.data = number, sizes, data
        self.samples, self.tokens = samples, tokens


class Luggage:
    """Of one guest, for these parameters. `codec`: of differences, `code`: of weights."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], codec: Codec, code: Codec) -> None:
        self.parameters = list(parameters)
        self.numels = [p.numel() for p in self.parameters]
        self.codec, self.code = codec, code
        self.round = -1  # of the anchor; -1: there is none, and nothing to bring
        self.number = 0  # of the last difference
        self.samples = self.tokens = 0.0  # of differences that came back
        self.sent: Sent | None = None
        self._anchor = torch.empty(0, dtype=torch.uint8)
        self._sizes: list[int] = []
        self._residuals: dict[int, torch.Tensor] = {}

    @property
    def up_bytes(self) -> int:
        return sum(self.codec.nbytes(numel) for numel in self.numels)

    @property
    def down_bytes(self) -> int:
        return sum(self.code.nbytes(numel) for numel in self.numels)

    @property
    @torch.no_grad()
    def sound(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.parameters)

    @torch.no_grad()
    def make(self, samples: float, tokens: float, seed: int) -> Sent:
        """What the run is to be told, of so many samples and those that came back."""
        data = torch.empty(self.up_bytes, dtype=torch.uint8)
        sizes: list[int] = []
        for i, (p, anchor) in enumerate(zip(self.parameters, take_apart(self._anchor, self._sizes))):
            difference = self._begun_at(anchor, p).sub_(_flat(p))
            if not self.codec.unbiased:
                self._residual(i)
            context = Context(step=self.number, seed=seed * 1009 + i)
            sizes.append(self.codec.encode_into(difference, self._residuals.get(i), data[sum(sizes) :], context))
        self.number += 1
        self.sent = Sent(self.number, sizes, data[: sum(sizes)], samples + self.samples, tokens + self.tokens)
        self.samples = self.tokens = 0.0
        return self.sent

    def settle(self, taken: bool) -> None:
        """What became of the last difference."""
        sent, self.sent = self.sent, None
        if sent is None or taken:
            return
        for i, payload in enumerate(take_apart(sent.data, sent.sizes)):
            self.codec.decode_add(payload, self._residual(i))
        self.samples += sent.samples
        self.tokens += sent.tokens

    @torch.no_grad()
    def anchor_here(self) -> None:
        """A difference was made, and no weights came: the next one begins with the weights of now."""
        made = wrap(self.round, self.parameters, self.code)
        self._anchor, self._sizes = made.data, made.sizes
        for i, (p, anchor) in enumerate(zip(self.parameters, take_apart(self._anchor, self._sizes))):
            left = _flat(p) - self._begun_at(anchor, p)
            if bool(left.any()):
                self._residual(i).add_(left)

    @torch.no_grad()
    def arrive(self, round: int, sizes: list[int], data: torch.Tensor) -> None:
        """Go on from weights that came."""
        self.round, self._sizes, self._anchor = round, sizes, data
        for p, anchor in zip(self.parameters, take_apart(data, sizes)):
            values = torch.zeros(p.numel())
            self.code.decode_add(anchor, values)
            p.copy_(values.view(p.shape))

    def drop(self) -> None:
        """Nothing of what there is will be brought."""
        self.round, self.sent = -1, None
        self.samples = self.tokens = 0.0
        self._residuals.clear()

    def _begun_at(self, anchor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """What a weight becomes that takes its anchor's place: half precision cannot hold all of it."""
        values = torch.zeros(p.numel())
        self.code.decode_add(anchor, values)
        return values.to(p.dtype).float()

    def _residual(self, i: int) -> torch.Tensor:
        if i not in self._residuals:
            self._residuals[i] = torch.zeros(self.codec.rows * self.numels[i])
        return self._residuals[i]

    # ---- state

    def state(self) -> dict[str, Any]:
        sent = self.sent
        return {
            "codes": [self.codec.words, self.code.words],
            "place": [self.round, self.number],
            "seen": [self.samples, self.tokens],
            "sizes": list(self._sizes),
            "anchor": self._anchor,
            "residuals": {str(i): residual for i, residual in self._residuals.items()},
            "sent": [sent.number, list(sent.sizes), sent.data, sent.samples, sent.tokens] if sent else [],
        }

    def load(self, state: dict[str, Any], tell: Callable[[str], object]) -> None:
        self.round, self.number = (int(n) for n in state["place"])
        if state["codes"] != [self.codec.words, self.code.words]:
            tell(f"what was not brought before the checkpoint is left out: it is in other codes ({state['codes']})")
            self.drop()
            return
        self.samples, self.tokens = state["seen"]
        self._sizes, self._anchor = list(state["sizes"]), state["anchor"].clone()
        self._residuals = {int(i): residual.clone() for i, residual in state["residuals"].items()}
        self.sent = Sent(*state["sent"]) if state["sent"] else None


def _flat(p: torch.Tensor) -> torch.Tensor:
    return p.detach().to("cpu", torch.float32).reshape(-1)
