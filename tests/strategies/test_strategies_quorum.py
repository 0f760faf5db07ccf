"""Rounds where members come and go: what becomes of the work of one that is late, and of a round that breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline.checkpoint import pack, unpack
from paceline.core.errors import ConfigError, Interrupted
from paceline.strategies import DiLoCo, Local, make_strategy, words_of
from paceline.strategies.strategy import Stand
from paceline.testing.together import together
from paceline.transport.group import Group, solo
from tests.strategies._apart import Member, Normed, closing

H = 4


class Door:
    """What a run does around rounds, as far as these tests need it."""

    def __init__(self) -> None:
        self.late = False  # the others go on without this member
        self.stands: list[Sequence[Stand]] = []
        self.mended: Callable[[Interrupted], None] | None = None

    short = False

    def gather(self, count: int) -> bool:
        return not self.late

    def muster(self) -> None:
        pass

    def stand(self) -> Stand:
        return Stand()

    def go(self) -> None:
        raise AssertionError("nobody comes")

    def mend(self, error: Interrupted) -> None:
        if self.mended is None:
            raise error
        self.mended(error)

    def committed(self, stands: Sequence[Stand]) -> None:
        self.stands.append(stands)


class Counting(Member):
    """One whose samples are counted."""

    def __init__(self, group: Group, words: str) -> None:
        self.door, self.whole = Door(), group
        super().__init__(group, make_strategy(words), Normed(), commits=self.door)
        assert isinstance(self.strategy, Local)
        self.local = self.strategy

    def batch(self) -> torch.Tensor:
        self.world.tally.add(8, 8)
        return super().batch()

    def turn_to(self, group: Group) -> None:
        self.world.group = group
        self.local.regroup()

    @property
    def agreed(self) -> torch.Tensor:
        with self.local.showing():
            return self.weights

    @property
    def unsaid(self) -> dict[str, torch.Tensor]:
        coders = self.local.own_state()["rounds"]["coders"]
        return {name: r.clone() for coder in coders for name, r in coder["residuals"].items()}

    def tell(self) -> list[bytes]:
        with self.local.showing():
            state = {"strategy": self.local.state_dict(), "model": self.model.state_dict()}
            return self.whole.exchange(pack(state))

    def hear(self, *, included: bool) -> None:
        """Take over what the first member has."""
        work: Any = None if included else self.local.work()
        state = unpack(self.tell()[0])
        self.local.load_state_dict(state["strategy"])
        self.model.load_state_dict(state["model"])
        self.local.take_over(work, included=included)


@pytest.mark.parametrize("average", ["mean", "tokens", "samples"])
def test_who_was_late_is_merged_into_the_next_round_by_what_it_has_trained(average: str) -> None:
    def body(group: Group) -> tuple[torch.Tensor, ...]:
        with closing(Counting(group, f"local(every={H}, average={average})")) as member:
            assert isinstance(member, Counting)
            member.train(H)
            if group.rank == 0:  # holds the next one alone
                member.turn_to(solo())
                member.train(H)
                member.tell()
            else:
                before = member.agreed
                member.door.late = True
                member.train(H + 2)  # comes to the round when the other has held it, and trains on
                learnt = before - member.weights
                assert bool(learnt.any())
                member.hear(included=False)
                torch.testing.assert_close(member.agreed - member.weights, learnt)
                member.door.late = False
            agreed = member.agreed
            member.turn_to(group)
            if group.rank == 0:
                member.train(H - 1)
            own = member.weights
            member.local.attend()
            assert len(member.door.stands) == (3 if group.rank == 0 else 2)
            return agreed, own, member.weights, member.agreed

    (agreed, first, ended, shown), (same, late, again, _) = together(2, body)
    assert torch.equal(agreed, same)
    assert torch.equal(ended, again)
    assert torch.equal(ended, shown)
    share = (H - 1) / (H - 1 + H + 2)  # of steps, whose batches are all as large
    torch.testing.assert_close(ended, share * first + (1 - share) * late)


def test_a_round_that_breaks_leaves_nothing_said_and_is_held_by_those_who_are_left() -> None:
    def body(group: Group) -> None:
        with closing(Counting(group, f"local(every={H}, codec=topk(0.1))")) as member:
            assert isinstance(member, Counting)
            member.train(H)
            unsaid, agreed = member.unsaid, member.agreed
            assert any(bool(r.any()) for r in unsaid.values())
            part = member.local._rounds.parts[0]  # type: ignore[union-attr]
            carry = part.carry

            def lost(*args: Any) -> None:
                carry(*args)  # all is said, and then
                raise Interrupted("a member is lost")

            part.carry = lost  # type: ignore[method-assign]

            def mended(error: Interrupted) -> None:
                assert torch.equal(member.agreed, agreed), "nothing has moved yet"
                assert any(not torch.equal(member.unsaid[name], r) for name, r in unsaid.items())
                group.barrier()
                part.carry = carry  # type: ignore[method-assign]
                member.turn_to(solo())

            member.door.mended = mended
            member.train(H - 1)
            member.optimizer.zero_grad()
            member.model(member.batch()).square().mean().backward()
            member.optimizer.step()
            own = member.own[-1]
            torch.testing.assert_close(member.weights, own)  # alone, its own weights are the average
            assert all(torch.equal(member.unsaid[name], r) for name, r in unsaid.items())
            assert len(member.door.stands) == 2

    together(2, body)


@pytest.mark.parametrize("words", [f"diloco(every={H}, codec=topk(0.1))", f"sparseloco(every={H})"])
def test_who_missed_the_end_of_a_round_has_its_outcome_and_said_its_part(words: str) -> None:
    def body(group: Group, breaks: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with closing(Counting(group, words)) as member:
            assert isinstance(member, Counting)
            member.train(H)
            if breaks and group.rank == 1:
                movers = member.local._rounds.movers  # type: ignore[union-attr]
                carry = movers.carry  # the last that is exchanged in a round

                def lost(*args: Any) -> None:
                    carry(*args)
                    raise Interrupted("the first member is lost, but had ended the round")

                def mended(error: Interrupted) -> None:
                    movers.carry = carry  # type: ignore[method-assign]
                    member.hear(included=True)
                    member.turn_to(group)

                movers.carry, member.door.mended = lost, mended  # type: ignore[method-assign]
            member.train(H)
            if breaks and group.rank == 0:
                member.tell()
                member.turn_to(group)
            member.train(H)
            return member.weights, member.unsaid

    plain, broken = together(2, lambda g: body(g, False)), together(2, lambda g: body(g, True))
    for (weights, unsaid), (others, theirs) in zip(plain, broken):
        assert torch.equal(weights, others)
        assert unsaid.keys() == theirs.keys()
        assert all(torch.equal(unsaid[name], theirs[name]) for name in unsaid)


@pytest.mark.parametrize(("size", "average"), [(2, "mean"), (1, "loss"), (2, "tokens")])
def test_members_that_only_meet_move_nothing(size: int, average: str) -> None:
    def body(group: Group) -> None:
        with closing(Counting(group, f"diloco(every={H}, average={average})")) as member:
            assert isinstance(member, Counting)
            member.train(H)
            agreed = member.agreed
            member.local.attend()  # a momentum would carry the anchors on
            assert torch.equal(member.agreed, agreed)
            assert len(member.door.stands) == 2
            assert member.local.readings()["rounds"] == 1

    together(size, body)


def test_the_options_in_words() -> None:
    assert words_of(DiLoCo(every=50, quorum=3, grace_s=5)) == (
        "local(every=50, outer='nesterov(lr=0.7, momentum=0.9)', quorum=3, grace_s=5.0)"
    )
    with pytest.raises(ConfigError, match="quorum=-1: a whole number of members"):
        make_strategy("local(quorum=-1)")
    with pytest.raises(ConfigError, match="grace_s=nan: seconds are needed"):
        Local(grace_s=float("nan"))
    with pytest.raises(ConfigError, match="quorum=1 with -n 2:4: from 2"):
        Local(quorum=1).refuse_elastic(2, 4)
    Local(quorum=3).refuse_elastic(2, 4)
