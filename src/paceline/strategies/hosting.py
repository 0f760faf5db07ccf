"""Guests of a run whose members train apart: small or unreliable machines that call now and then, and are no members.

    a guest calls   it brings anchor − weights of its own training, and fetches the weights of the last round
    at a round      the first member tells the others, in its note, what the guests' sum weighs; all give up that share
                    of the average, and the first one adds the sum to its own difference before it is encoded

So a round needs no word more than before, and its outcome is the same on all members, bit for bit. A guest weighs what
it has trained, by samples (or tokens), against what the members have in that round, less for each round that its
weights were old, and never more than a member does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import build, whole
from paceline.server.outside.lobby import Lobby
from paceline.server.outside.offers import Mass, Offers
from paceline.server.outside.shelf import Shelf
from paceline.strategies.anchors import Anchors
from paceline.strategies.averaging import Averaging
from paceline.strategies.exchange import Note
from paceline.strategies.strategy import World

if TYPE_CHECKING:
    from paceline.strategies.schedule import Overlap

Add = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Guests:
    """Whether guests may call, and where.

    Args:
        most: at a time, and in a round; 0: none.
        at: the address that the first member listens on; port 0: any that is free.
        oldest: rounds that a guest's weights may be old.
    """

    most: int = 8
    at: str = "127.0.0.1:0"
    oldest: int = 4

    def __post_init__(self) -> None:
        if not whole(self.most) or not 0 <= self.most <= 256:
            raise ConfigError(f"guests={self.most!r}: how many at a time, from 0 (none) to 256")
        fits = isinstance(self.at, str) and re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):\d{1,5}", self.at)
        if not fits or int(self.at.rpartition(":")[2]) > 65535:
            raise ConfigError(f"guests(at={self.at!r}): an address of this host, such as '10.0.0.1:7000'")
        if not whole(self.oldest) or self.oldest < 0:
            raise ConfigError(f"guests(oldest={self.oldest!r}): a whole number of rounds is needed, such as 4")

    @property
    def words(self) -> int | str:
        if (self.at, self.oldest) == (Guests.at, Guests.oldest):
            return self.most
        return f"guests(most={self.most}, at={self.at!r}, oldest={self.oldest})"

    def check(self, average: Averaging, overlap: Overlap) -> None:
        if not self.most:
            return
        if average.words not in ("mean", "samples", "tokens"):
            raise ConfigError(
                f"average={average.words} has no place for guests, who bring one sum: use mean, samples or tokens"
            )
        if overlap.steps:
            raise ConfigError(f"overlap={overlap.words} does not go with guests, whose sum is in one exchange")


def make_guests(words: Guests | int | str) -> Guests:
    """
    >>> make_guests(8).words, make_guests("guests(2, at='10.0.0.1:7000')").at
    (8, '10.0.0.1:7000')
    """
    if isinstance(words, Guests):
        return words
    return build(words, {"guests": Guests}, "guests") if isinstance(words, str) else Guests(words)


class Hosting:
    """The first member's part in it. The lobby is opened at the first step, when all parameters are known."""

    def __init__(self, guests: Guests, world: World, average: Averaging) -> None:
        self._guests, self._world = guests, world
        self._tokens = average.words == "tokens"
        self._parts: list[Anchors] = []
        self._frozen: dict[str, torch.Tensor] = {}
        self._lobby: Lobby | None = None
        self._offers = Offers([], most=guests.most, oldest=guests.oldest, tokens=self._tokens)
        self._shelf = Shelf(self._weights)

    def adopt(self, part: Anchors) -> None:
        if self._lobby:
            raise ConfigError("parameters cannot be added while guests call: give them to run.optimizer at once")
        for name, anchor in zip(part.names, part.agreed):
            if anchor.is_complex():
                raise ConfigError(f"guests bring real numbers, and parameter {name!r} is complex")
        self._parts.append(part)

    def keep_frozen(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._frozen.update(parameters)

    # ---- in the training thread

    def look(self, round: int) -> None:
        """Between two steps."""
        if self._lobby is None:
            self._open(round)
        self._shelf.look(round)
        for line in self._lobby.said() if self._lobby else ():
            self._world.tell(line)

    def close_round(self, squares: float) -> Mass:
        """What the guests' sum weighs, which does not change until `settle`."""
        return self._offers.close(squares)

    def settle(self, round: int, notes: Sequence[Note] | None) -> None:
        """The exchange is over, after which the run is in this round; None: nothing was averaged."""
        sound = [note for note in notes or () if note.seen.sound]
        seen = _mean_seen(sound, self._tokens)
        self._offers.settle(round, bool(notes), seen, max((note.squares for note in sound), default=0.0))

    def add(self, part: int, share: float) -> Add:
        """Adds the guests' part of a parameter to its difference."""
        before = sum(len(p.names) for p in self._parts[:part])
        return lambda index, view: self._offers.add_to(before + index, view, share)

    def readings(self) -> dict[str, Any]:
        story = self._offers.story
        return {
            "guests": story.guests,
            "guest_differences": story.brought,
            "guest_samples": story.samples,
            "guest_rounds": story.rounds,
            "guest_refusals": dict(story.refused),
        }

    def state(self) -> dict[str, Any]:
        return self._offers.state()

    def load(self, state: dict[str, Any]) -> None:
        self._offers.load(state)

    def close(self) -> None:
        if self._lobby:
            self._lobby.close()
            if late := self._offers.waiting:
                self._world.tell(f"what {late} guest{'s' * (late > 1)} brought came after the last round")

    # ---- inside

    @property
    def address(self) -> str:
        """Where guests call; empty: nowhere yet."""
        return self._lobby.address if self._lobby else ""

    def _weights(self) -> list[torch.Tensor]:
        return [anchor for part in self._parts for anchor in part.agreed]

    def _open(self, round: int) -> None:
        named = [(name, a) for part in self._parts for name, a in zip(part.names, part.agreed)]
        trained = {id(p) for part in self._parts for p in part.parameters}
        frozen = {name: p for name, p in self._frozen.items() if id(p) not in trained}
        numels, before = [a.numel() for _, a in named], self._offers
        self._offers = Offers(numels, most=self._guests.most, oldest=self._guests.oldest, tokens=self._tokens)
        self._offers.load(before.state())
        self._offers.settle(round, False)
        self._lobby = Lobby(
            self._guests.at,
            self._guests.most,
            self._offers,
            self._shelf,
            model=digest(named, frozen),
            numels=numels,
            directory=self._world.directory,
        )
        self._world.tell(self._lobby.line)


def make_hosting(guests: Guests, world: World, average: Averaging) -> Hosting | None:
    """The first member's; None on the others, and where there are no guests."""
    return Hosting(guests, world, average) if guests.most and not world.group.rank else None


def share_of(notes: Sequence[Note], tokens: bool) -> float:
    """The guests' share of a round's average.

    >>> from paceline.strategies.averaging import Seen
    >>> share_of([Note(0, Seen(samples=30.0), guests=(20.0, 1.0)), Note(0, Seen(samples=10.0))], tokens=False)
    0.3333333333333333
    >>> share_of([Note(0, Seen(samples=10.0), guests=(90.0, 2.0))], tokens=False)  # each counts as one member at most
    0.6666666666666666
    """
    weight, guests = (float(sum(column)) for column in zip(*(note.guests for note in notes)))
    sound = [note for note in notes if note.seen.sound]
    if not weight or not sound:
        return 0.0
    seen = _mean_seen(sound, tokens)
    members = min(weight / seen, guests) if seen > 0 else guests
    return members / (len(sound) + members)


def _mean_seen(notes: Sequence[Note], tokens: bool) -> float:
    seen = [note.seen.tokens if tokens else note.seen.samples for note in notes]
    return sum(seen) / len(seen) if seen else 0.0


def digest(named: Iterable[tuple[str, torch.Tensor]], frozen: Mapping[str, torch.Tensor]) -> str:
    """The same where the same is trained, whatever its types, from the same frozen weights."""
    told = hashlib.sha256()
    for name, tensor in named:
        told.update(f"{name} {list(tensor.shape)};".encode())
    for name, tensor in sorted(frozen.items()):
        told.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode())
        told.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return told.hexdigest()
