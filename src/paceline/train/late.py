"""How one who replaces a lost worker of a run with servers takes part.

It runs the script alone up to `run.epochs`, and goes on in the epoch under way, or in the next one (`meetings`).
The weights are with the servers, and so are the batches that are left. What else the members have alike, the first of
them tells the hub as an epoch begins: the models' buffers, the options of optimizers (learning rates), what the user
tracks, and the gate, which may have turned.
"""

from __future__ import annotations

import sys
from typing import Any

from paceline.checkpoint import pack, seed_newcomer, unpack
from paceline.data import Loader
from paceline.server.gates import make_gate
from paceline.strategies.server import Served
from paceline.train import again
from paceline.train.light import load_light, split
from paceline.train.saving import Saver
from paceline.transport.hub import HubGroup, TooLate
from paceline.transport.meetings import Stand


class Late:
    """Both sides of it: the state that is told, and the way in."""

    def __init__(self, group: HubGroup, saver: Saver, strategy: Served, seed: int) -> None:
        self._group = group
        self._saver = saver
        self._strategy = strategy
        self._seed = seed

    def tell(self, epoch: int, step: int) -> None:
        """An epoch begins here."""
        self._group.stand(epoch, step, self._state)

    def enter(self) -> tuple[int, int, int]:
        """Take part in the epoch under way: step, epoch, and that epoch's first step.

        SystemExit where the others have come to the end meanwhile: there is nothing left to do.
        """
        place: list[Stand] = []

        def take(stand: Stand) -> None:
            place.append(stand)
            self._restore(unpack(memoryview(stand.state)))

        try:
            self._group.enter(take)
        except TooLate as error:
            print(f"paceline: {error}, and this member has come too late to take part", file=sys.stderr)
            raise SystemExit(0) from None
        epoch, step = place[0].epoch, place[0].step
        seed_newcomer(self._seed, step, self._group.rank)
        return step, epoch, step

    def _state(self) -> bytes:
        parts = {name: split(name, part, part.state_dict())[0] for name, part in self._parts().items()}
        return pack({"gate": self._strategy.gate.words, "parts": parts})

    def _restore(self, state: dict[str, Any]) -> None:
        parts = self._parts()
        again.check_same(state["parts"], parts)
        self._strategy.gate = make_gate(state["gate"])
        for name, part in parts.items():
            load_light(part, state["parts"][name])

    def _parts(self) -> dict[str, Any]:
        return {n: p for n, p in self._saver.parts.items() if not isinstance(p, Loader | Served)}
