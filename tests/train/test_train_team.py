"""Teams over real sockets and a real scheduler: members as threads of this process, each with wires of its own."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from paceline.checkpoint import Coming, Lent, Pipe, pack, unpack
from paceline.core.errors import Interrupted, PacelineError
from paceline.core.settings import Settings
from paceline.core.status import Status
from paceline.membership.agent_line import AgentLine, look
from paceline.membership.line import Line
from paceline.membership.orders import Arrive, Host
from paceline.membership.scheduler import Scheduler
from paceline.membership.seats import Rules
from paceline.train.team import NEW, Healing, Team
from paceline.transport.group import Group, solo
from paceline.transport.wires import Wires

TOKEN = "the run's token"
SILENCE_S = 0.4
LIMIT_S = 20.0
Three: TypeAlias = "tuple[list[Someone], AgentLine, Scheduler]"


class Book:
    """A body whose state is a word; it is on its way until `arrive`."""

    apart = even = False

    def __init__(self, word: str) -> None:
        self.word, self.saving, self.step, self.busy, self.outdated = word, False, 0, False, False
        self.healing: Healing | None = None
        self.coming: Coming | None = None
        self.stepped = False

    @property
    def waits(self) -> bool:
        return self.coming is not None

    @property
    def healed(self) -> Healing | None:
        return self.healing if self.stepped else None

    def state(self) -> bytes:
        return pack({"word": self.word})

    def lend(self, pipes: list[Pipe]) -> bytes:
        letters = torch.tensor(list(self.word.encode()), dtype=torch.uint8)
        return pack({"late": Lent({"word": letters}, pipes).head})

    def regroup(self, group: Group, state: bytes | None, healing: Healing | None = None, *, even: bool = False) -> None:
        self.healing, self.coming, self.stepped = healing, None, False
        if state is not None and healing:
            assert healing.pipe is not None
            self.coming = Coming(unpack(memoryview(state))["late"], healing.pipe, LIMIT_S)
        elif state is not None:
            self.word = unpack(memoryview(state))["word"]

    def arrive(self) -> None:
        if self.coming:
            self.word, self.coming = bytes(self.coming.wait()["word"].tolist()).decode(), None

    def digest(self) -> bytes:
        return self.word.encode()

    def settled(self) -> None:
        self.healing = None


class Someone:
    """One member."""

    def __init__(self, address: str, id: int, host: str = "here") -> None:
        self.wires = Wires(TOKEN)
        arrive = Arrive(id=id, member=self.wires.describe(id, host))
        self.line = Line(address, TOKEN, arrive, limit_s=LIMIT_S)
        self.team = Team(self.line, self.wires, id, limit_s=LIMIT_S, status=Status(None))
        self.id = id
        self.book: Book | None = None
        self.error: BaseException | None = None

    def begin(self) -> None:
        """From joining to the first batch, as a run does it."""
        self.team.meet()
        self.prepare()
        self.team.begin(lambda: None)

    def prepare(self) -> None:
        self.book = self.team.body = Book(f"of {self.id}")
        self.team.do(lambda group: group.barrier())  # as parameters are made equal

    def die(self) -> None:
        """As the end of a process looks to the others."""
        self.wires.close()
        self.line.close()


def together(*calls: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), f"it hangs; others say {errors}"
    if errors:
        raise errors[0]


@pytest.fixture
def scheduler(tmp_path: Path):
    rules = Rules(least=1, target=2, most=2, silence_s=SILENCE_S, settings=Settings(join_limit_s=LIMIT_S))
    there = Scheduler(rules, TOKEN, tmp_path / "journal.sqlite")
    yield there
    there.close()


def test_those_who_came_before_and_after_all_state_was_lost_begin_together(scheduler: Scheduler) -> None:
    """One prepares alone, since training is under way; then all who train are lost, and another one comes."""
    agent = AgentLine(scheduler.address, TOKEN, Host(name="here", slots=2), LIMIT_S)
    old = [Someone(scheduler.address, id) for id in range(2)]
    together(*(one.begin for one in old))
    old[1].die()
    agent.ended(1, -9)
    early = _again(scheduler, 1)
    early.team.meet()
    assert early.team.outside
    old[0].die()
    agent.ended(0, -9)
    late = _again(scheduler, 0)
    assert late.line.standing.view is None
    early.prepare()
    together(lambda: early.team.begin(lambda: None), late.begin)
    assert early.book is not None
    assert late.book is not None
    assert early.book.word == late.book.word
    assert early.team.commits == late.team.commits == 1
    assert early.team.group.size == 2
    for one in (*old, early, late):
        one.die()
    agent.close()


def _again(scheduler: Scheduler, id: int) -> Someone:
    """The next process of a member, as soon as the scheduler wants it."""
    deadline = time.monotonic() + LIMIT_S
    while look(scheduler.address, TOKEN).members[id].state != "starting":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return Someone(scheduler.address, id, "there")  # by host and number a process is known, and the number is ours


def test_a_group_that_broke_is_gone_at_once_with_its_memory(scheduler: Scheduler) -> None:
    agent = AgentLine(scheduler.address, TOKEN, Host(name="here", slots=2), LIMIT_S)
    one, other = (Someone(scheduler.address, id) for id in range(2))
    together(one.begin, other.begin)
    gc.disable()
    try:
        before = weakref.ref(one.team.group)
        other.die()
        agent.ended(1, -9)
        one.team.do(lambda group: group.exchange(b"so far"))
        assert one.team.group.size == 1
        assert before() is None
    finally:
        gc.enable()
    one.die()
    agent.close()


def broken(one: Someone) -> None:
    one.team.mend(Interrupted("its connections broke"))


@pytest.fixture
def three(tmp_path: Path):
    """Two who have begun and one more, which is lost: the others have to form their group again."""
    patient = 5 * SILENCE_S  # who has merely little of a busy processor is not to be taken for lost
    rules = Rules(least=1, target=3, most=3, silence_s=patient, settings=Settings(join_limit_s=LIMIT_S))
    there = Scheduler(rules, TOKEN, tmp_path / "journal.sqlite")
    agent = AgentLine(there.address, TOKEN, Host(name="here", slots=3), LIMIT_S)
    members = [Someone(there.address, id) for id in range(3)]
    together(*(one.begin for one in members))
    yield members, agent, there
    for one in members:
        one.die()
    agent.close()
    there.close()


def lose(members: list[Someone], agent: AgentLine) -> None:
    members[2].die()
    agent.ended(2, -9)


def test_who_has_committed_a_step_less_gets_the_state_of_one_who_has(three: Three) -> None:
    members, agent, _ = three
    ahead, behind = members[:2]
    assert ahead.book
    assert behind.book
    ahead.book.word = "after step 2"
    ahead.team.committed(2)
    lose(members, agent)
    together(lambda: broken(ahead), lambda: broken(behind))
    assert behind.book.word == "after step 2"
    assert behind.team.commits == ahead.team.commits == 2


def test_who_was_left_out_and_did_not_know_it_gets_the_others_step_of_the_same_number(three: Three) -> None:
    """Its connections had brought all it needed for a step; the others took that step anew, without it."""
    members, agent, _ = three
    one, left_out, other = members
    for each in members:
        assert each.book
        each.book.word = "after step 1"
    left_out.team.committed(2)
    left_out.book.word = "step 2 of the old view"
    agent.beat([1])  # it is stopped
    together(lambda: broken(one), lambda: broken(other))
    assert one.team.view
    assert [member.id for member in one.team.view.members] == [0, 2]
    for each in (one, other):
        each.team.committed(2)
        each.book.word = "step 2"
    agent.beat([])

    def meet(each: Someone) -> None:
        deadline = time.monotonic() + LIMIT_S
        while each.team.group.size < 3:
            assert time.monotonic() < deadline
            if each is left_out or each.team.called:
                each.team.between(moving=True)
            time.sleep(0.01)

    left_out.team.group.close()
    left_out.team.group = solo()
    together(*(lambda each=each: meet(each) for each in members))
    assert [each.book.word for each in members] == ["step 2"] * 3


def test_who_missed_the_end_of_an_operation_gets_its_result(three: Three) -> None:
    members, agent, _ = three
    ahead, behind = members[:2]
    ahead.team.operations += 1
    ahead.team._result = {"accuracy": 0.5}
    lose(members, agent)
    results: list[object] = []

    def ask() -> None:
        results.append(behind.team.do(lambda group: group.exchange(b"never")))  # breaks, since the third is gone

    together(lambda: broken(ahead), ask)
    assert results == [{"accuracy": 0.5}]


def test_who_came_to_its_own_result_keeps_it_where_others_have_ended_the_operation(three: Three) -> None:
    """What each gets may be its own, as parts of a tensor are."""
    members, agent, _ = three
    ahead, behind = members[:2]
    ahead.team.operations += 1
    ahead.team._result = "part 0"
    results: list[object] = []

    def part(group: Group) -> str:
        lose(members, agent)  # before the barrier that ends it
        return "part 1"

    together(lambda: broken(ahead), lambda: results.append(behind.team.do(part)))
    assert results == ["part 1"]
    assert behind.team.operations == ahead.team.operations


@pytest.mark.parametrize("in_turn", [False, True])
def test_who_was_away_for_several_operations_gets_no_result_of_another_one(three: Three, in_turn: bool) -> None:
    """It was stopped within one; the others ended that, and then gathered something for a checkpoint. In a turn, which
    counts for nothing, it goes on; between epochs it would meet their gradients with its next operation."""
    members, agent, _ = three
    ahead, behind = members[:2]
    assert behind.book
    behind.book.busy = in_turn
    ahead.team.operations += 2
    ahead.team._result = [b"of a checkpoint"]
    lose(members, agent)
    results: list[object] = []

    def measure(group: Group) -> dict[str, int]:
        return {"members": len(group.exchange(b""))}  # breaks at first, since the third is gone

    def ask() -> None:
        if in_turn:
            results.append(behind.team.do(measure))
            return
        with pytest.raises(PacelineError, match="was away while the others"):
            behind.team.do(measure)

    together(lambda: broken(ahead), ask)
    assert results == ([{"members": 1}] if in_turn else [])


def test_who_has_begun_a_turn_less_takes_one_for_nothing(three: Three) -> None:
    members, agent, _ = three
    ahead, behind = members[:2]
    for one, turns in ((ahead, 5), (behind, 4)):
        for _ in range(turns):
            assert one.team.turn()
    lose(members, agent)
    together(lambda: broken(ahead), lambda: broken(behind))
    assert not behind.team.turn()
    assert ahead.team.turn()
    assert behind.team.turn()
    assert ahead.team.turns == behind.team.turns == 6


def test_a_turn_that_another_has_counted_and_not_begun_is_none_to_make_up_for(three: Three) -> None:
    """As one that waits for enough members has, while another one is still in the turn before."""
    members, agent, _ = three
    waits, busy = members[:2]
    for one, turns in ((waits, 5), (busy, 4)):
        for _ in range(turns):
            assert one.team.turn()
    waits.team._begins = True
    assert busy.book
    busy.book.busy = True
    lose(members, agent)
    together(lambda: broken(waits), lambda: broken(busy))
    assert busy.team.turn()
    assert waits.team.turns == busy.team.turns == 5


def test_a_checkpoint_that_was_due_is_due_for_all(three: Three) -> None:
    members, agent, _ = three
    ahead, behind = members[:2]
    assert ahead.book
    assert behind.book
    ahead.team.committed(2)
    ahead.book.saving = True
    lose(members, agent)
    together(lambda: broken(ahead), lambda: broken(behind))
    assert behind.book.saving


def test_one_that_is_left_out_while_it_prepares_ends(scheduler: Scheduler) -> None:
    """The others have prepared without it: it cannot take part in what they do together before their first batch."""
    one, other = (Someone(scheduler.address, id) for id in range(2))
    together(one.team.meet, other.team.meet)
    view = one.team.view
    assert view is not None
    one.team._number, one.team.own = 0, 2  # as if that view had been made without it
    with pytest.raises(PacelineError, match="left out of view 1 while it prepared"):
        one.team._next_view()
    one.die()
    other.die()


@pytest.mark.parametrize("outdated", [True, False], ids=["a newer checkpoint", "none"])
def test_one_that_was_away_and_outlives_the_others_goes_on_or_makes_way_for_a_checkpoint(
    three: Three, outdated: bool
) -> None:
    members, agent, scheduler = three
    one, away, other = members
    assert away.book
    away.book.word, away.book.outdated = "old", outdated
    agent.beat([1])  # it is stopped
    together(lambda: broken(one), lambda: broken(other))
    for each in (one, other):
        each.die()
        agent.ended(each.id, -9)
    newcomers = [_again(scheduler, id) for id in (0, 2)]
    for each in newcomers:
        each.team.meet()
        each.prepare()
    loaded: list[str] = []
    agent.beat([])

    def come_back() -> None:
        if not outdated:
            broken(away)
            return
        with pytest.raises(PacelineError, match="a checkpoint is newer"):
            broken(away)
        away.die()
        agent.ended(1, 1)

    def begin(each: Someone) -> None:
        each.team.begin(lambda: loaded.append("checkpoint"))
        assert each.book
        each.book.arrive()

    try:
        together(come_back, *(lambda each=each: begin(each) for each in newcomers))
        assert loaded == (["checkpoint"] if outdated else [])
        assert {each.team.group.size for each in newcomers} == {2 if outdated else 3}
        assert ("old" in {each.book.word for each in newcomers if each.book}) is not outdated
    finally:
        for each in newcomers:
            each.die()


def bring_back(members: list[Someone], agent: AgentLine, scheduler: Scheduler, *, busy: bool = False) -> Someone:
    """The third is lost, another one comes in its place and is taken in between two steps."""
    lose(members, agent)
    together(*(lambda one=one: broken(one) for one in members[:2]))
    newcomer = _again(scheduler, 2)
    newcomer.team.meet()
    newcomer.prepare()
    assert all(one.team.turn() for one in members[:2])
    for one in members[:2]:
        assert one.book
        one.book.word, one.book.busy = "after step 2", busy

    def called(one: Someone) -> None:
        deadline = time.monotonic() + LIMIT_S
        while one.team.group.size < 3:  # the view before may have been made anew
            assert time.monotonic() < deadline
            if one.team.called:
                one.team.between(moving=True)
            time.sleep(0.01)

    together(*(lambda one=one: called(one) for one in members[:2]), lambda: newcomer.team.begin(lambda: None))
    members.append(newcomer)
    return newcomer


def test_a_newcomer_is_in_the_group_before_its_state_is_there(three: Three) -> None:
    members, agent, scheduler = three
    newcomer = bring_back(members, agent, scheduler)
    book = newcomer.book
    assert book
    assert book.waits
    assert book.healing
    assert book.healing.idle == (2,)
    assert members[0].book
    assert members[0].book.healing == Healing(0, (2,))
    trained = [one.team for one in members if one.id != 2] + [newcomer.team]
    together(*(lambda team=team: team.do(lambda group: group.barrier()) for team in trained))  # for which it waits
    assert not book.waits
    assert book.word == "after step 2"


def test_who_comes_in_a_lost_ones_place_is_another_one_with_the_same_process_number(three: Three) -> None:
    members, agent, scheduler = three
    lost = members[2].team.me
    newcomer = bring_back(members, agent, scheduler)
    assert newcomer.team.view
    told = [(member.id, member.local) for member in newcomer.team.view.members]
    assert {member.pid for member in newcomer.team.view.members} == {os.getpid()}  # as in pods that start alike
    assert told[2] == newcomer.team.me != lost


@pytest.mark.parametrize("spoilt", [False, True])
def test_after_their_first_step_newcomers_must_be_equal_or_get_the_state_again(three: Three, spoilt: bool) -> None:
    members, agent, scheduler = three
    newcomer = bring_back(members, agent, scheduler)
    here = [members[0], members[1], newcomer]
    for one in here:
        assert one.book
        one.book.arrive()
        one.book.stepped = True
        one.team.commits += 1
    assert newcomer.book
    if spoilt:
        newcomer.book.word = "something else"
    equal: list[bool] = []
    together(*(lambda one=one: equal.append(one.team.settle()) for one in here))
    assert equal == [not spoilt] * 3
    assert newcomer.book.word == "after step 2"
    assert newcomer.book.healing is None
    assert [one.team.commits for one in here] == [2, 2, 2]


def test_one_whose_state_was_on_its_way_when_the_group_broke_is_still_new(three: Three) -> None:
    members, agent, scheduler = three
    newcomer = bring_back(members, agent, scheduler)
    assert newcomer.book
    newcomer.book.busy = True  # in its first turn
    assert newcomer.book.waits
    members[0].die()
    agent.ended(0, -9)
    together(lambda: broken(members[1]), lambda: broken(newcomer))
    assert newcomer.book.word == "after step 2"
    assert not newcomer.book.waits
    assert newcomer.team.commits == members[1].team.commits != NEW


def test_members_in_the_middle_of_a_turn_wait_for_the_state_to_be_sent(three: Three) -> None:
    members, agent, scheduler = three
    newcomer = bring_back(members, agent, scheduler, busy=True)
    assert newcomer.book
    assert newcomer.book.word == "after step 2"
    assert newcomer.book.healing is None


def test_a_newcomer_counts_the_same_turns_as_the_others(three: Three) -> None:
    members, agent, scheduler = three
    newcomer = bring_back(members, agent, scheduler)
    assert newcomer.team.turn()  # the one that the others have begun
    here = [*members[:2], newcomer]
    assert [one.team.turns for one in here] == [1, 1, 1]
    assert [one.team.lag for one in here] == [0, 0, 0]
