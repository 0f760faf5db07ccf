"""What a strategy is: how replicas agree. The training loop knows nothing else about it.

Two moments matter. `loss.backward()` returns: a strategy that exchanges gradients has put the mean into `p.grad`.
`optimizer.step()`: the strategy decides whether the step counts, and installs the next weights before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Never, Protocol, TypeVar

import torch

from paceline.core.errors import Interrupted
from paceline.core.status import Status
from paceline.data.leases import Counted
from paceline.transport.group import Group
from paceline.transport.wires import Wires

T = TypeVar("T")


class Tally:
    """Counts the samples that this member drew, and how many it should have drawn, since the run began."""

    def __init__(self) -> None:
        self.drawn = 0.0
        self.nominal = 0.0
        self.pending = 0.0  # of them, those that no step has taken yet
        self._kept = 0.0  # of these, those that are not drawn again where a step is dropped
        self.weight = 1.0  # of the batch drawn last
        self.idle = False  # this member takes part, but nothing of what it draws counts
        self.listeners: list[Callable[[float], None]] = []  # told when it changes
        self.passed_over = False  # a batch that was not full was drawn under torch.no_grad(), where none is counted
        self._since: set[float] = set()  # weights of the batches drawn since the last backward pass
        self._doubted: set[str] = set()

    def add(self, drawn: int, nominal: int) -> None:
        drawn = 0 if self.idle else drawn
        self.drawn += drawn
        self.pending += drawn
        self.nominal += nominal
        self._since.add(drawn / nominal)
        self.weigh(drawn / nominal)

    def commit(self, taken: float = 0.0) -> None:
        """A step was taken, of so many samples: what was drawn stays drawn."""
        self.pending = max(self.pending - taken, 0.0)
        self._kept = self.pending

    def drop(self) -> None:
        """What was drawn since the last commit counts for nothing, and is drawn again."""
        self.drawn -= self.pending - self._kept
        self.pending = self._kept

    def rest(self, idle: bool) -> None:
        """From now on nothing counts that this member draws, or again all."""
        self.idle = idle
        self._since.clear()
        self.weigh(0.0 if idle else 1.0)

    def weigh(self, weight: float) -> None:
        """What is drawn next has this weight."""
        if weight != self.weight:
            self.weight = weight
            for listener in self.listeners:
                listener(weight)

    def take(self) -> tuple[float, str]:
        """A backward pass begins: its weight, and why that may be the wrong one; each reason is given once."""
        since, self._since = self._since, set()
        doubt = _SEVERAL if len(since) > 1 else _PASSED_OVER if self.passed_over and not self.nominal else ""
        if doubt in self._doubted:
            return self.weight, ""
        self._doubted.add(doubt)
        return self.weight, doubt


_SEVERAL = (
    "batches with unlike shares of real samples were drawn since the last backward pass, and gradients are weighed by "
    "the one drawn last. Call backward() before the next batch is drawn, put loops that only look at data under "
    "torch.no_grad(), or leave short batches out with drop_last=True"
)
_PASSED_OVER = (
    "a batch that is not full was drawn under torch.no_grad(), where batches are taken to be only looked at, so its "
    "gradients are weighed as if it were full. Draw the batches of training outside torch.no_grad(), or leave short "
    "ones out with drop_last=True"
)


class Pass(NamedTuple):
    """One of several passes that are under way at once, in threads; see `paceline.train.pool`."""

    thread: int
    weight: float  # of its batch
    read: Mapping[int, Sequence[int]]  # what `Strategy.reading` said when it began
    leases: Mapping[str, Sequence[int]] = {}  # see World.leases


BEFORE, AFTER = 1, 2
SPENT = 5  # numbers


class Stand(NamedTuple):
    """Where a member stands in the run, where members come and go."""

    step: int = 0
    move: int = 0  # it has heard of a view that all are to go to: BEFORE this round, or AFTER it; 0: it has not
    out: bool = False  # it has no more batches, as the epoch is divided now
    seat: int = -1  # its place in that division; -1: none
    drawn: tuple[int, ...] = ()  # batches since then, of each loader
    spent: tuple[float, ...] = (0.0,) * SPENT  # since the last round: see `paceline.train.apart`


class Commits(Protocol):
    """What a run does around rounds, where members that train apart come and go: see `paceline.train.apart`."""

    def gather(self, count: int) -> bool:
        """This member comes to round `count`; False: the others go on without it."""

    @property
    def short(self) -> bool:
        """Whether there are too few members to hold a round."""

    def muster(self) -> None:
        """Wait until there are enough."""

    def stand(self) -> Stand:
        """Where this member stands."""

    def go(self) -> None:
        """All have agreed to go to another view before they hold this round."""

    def mend(self, error: Interrupted) -> None:
        """The group broke in a round: form the next one. Where others had ended the round, this member has its outcome
        then."""

    def committed(self, stands: Sequence[Stand]) -> None:
        """A round is held: what these members have drawn counts."""


class World:
    """What a strategy may know of the run it serves."""

    def __init__(
        self,
        group: Group,
        *,
        status: Status | None = None,
        tally: Tally | None = None,
        check_finite: bool = False,
        seed: int = 0,
        tell: Callable[[str], object] = lambda line: None,
        tell_own: Callable[[str], object] = lambda line: None,
        wires: Wires | None = None,
        servers: Sequence[int] = (),
        limit_s: float = 300.0,
        replaces: bool = False,
        late: bool = False,
        site: str = "",
    ) -> None:
        self.group = group
        self.replaces = replaces  # with servers: lost workers are started again, and come while the others train
        self.late = late  # this one was
        self.site = site  # those of one site are near each other; see `paceline.strategies.sites`
        self.wires = wires  # to all of the run's processes; None in a run of one
        self.servers = tuple(servers)  # ranks of the run's server processes, which are in no group
        self.limit_s = limit_s
        self.tell = tell  # a line to the person who watches, which all members have alike
        self.tell_own = tell_own  # the same, of this member alone
        self.directory: Path | None = None  # of the run
        self.seed = seed
        self.status = status or Status(None)
        self.tally = tally or Tally()
        self.check_finite = check_finite
        self.accumulating = False  # inside run.accumulate(): gradients stay here
        self.sent_bytes = 0  # by the strategy, besides what the group counts
        self.waited_s = 0.0  # in the strategy, besides what the group counts
        self.wish = False  # this member would like a pause between two steps, for a checkpoint
        self.granted = False  # some member wished, and all know it
        self.pace: tuple[float, ...] = ()  # this member's last turn, as `paceline.train.stragglers` tells it
        self.paces: list[float] = []  # everyone's, one after another, where the strategy tells them
        self.passing: Pass | None = None  # whose gradients the step under way has, where passes overlap
        # By course: the batches whose gradients a step of now has, where they are dealt out
        self.leases: Callable[[], Mapping[str, Sequence[int]]] = dict
        # By course and number: which chunks have a batch already that a lost worker had begun
        self.counted: Mapping[tuple[str, int], Counted] = {}
        self.owed: Callable[[], bool] = lambda: (
            False
        )  # whether what was learnt from earlier batches is still to be pushed
        self.listen: Callable[[Mapping[str, Any]], object] | None = None  # to what the script logs, by name
        self.together: Callable[[Callable[[Group], Any]], Any] | None = None
        # Where members come and go (`paceline.train.team`):
        self.elastic = False
        self.commits: Commits | None = None  # with a strategy whose members train apart
        self.mend: Callable[[Interrupted], object] = _raise  # the group broke in a pass: form the next one
        self.dropped = False  # what the loop does until it asks for its next batch counts for nothing
        self.move = False  # this member has heard of a view that all are to go to between two steps
        self.moving = False  # some member has, and all know it
        self.passed = 0  # passes since the last step
        self.weighed = 0.0  # the weights of the members' last pass, added up, where gradients are

    @property
    def waited(self) -> float:
        """Seconds that this member has waited for others, since the run began."""
        return self.waited_s + self.group.waited_s

    def do(self, operation: Callable[[Group], T]) -> T:
        """Something that all members do together, with the group they have then."""
        return self.together(operation) if self.together else operation(self.group)


class Inside(World):
    """The run as some of its members see it, in a group of their own. Checkpoints and paces are the whole run's."""

    def __init__(self, world: World, group: Group, **own: Any) -> None:
        self._run = world
        shared = {
            name: getattr(world, name)
            for name in ("status", "tally", "check_finite", "seed", "tell", "tell_own", "limit_s")
        }
        super().__init__(group, **(shared | own))

    @property
    def accumulating(self) -> bool:
        return self._run.accumulating

    @accumulating.setter
    def accumulating(self, accumulating: bool) -> None:
        pass  # the run says so


def _raise(error: Interrupted) -> Never:
    raise error


class Strategy(Protocol):
    """The contract of all strategies."""

    @property
    def forgives(self) -> bool:
        """Whether the run goes on when a member is lost."""

    @property
    def owes(self) -> bool:
        """Whether what this member has learnt from batches behind it is still to be brought to the others, by a push
        that will settle them."""

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        """Take over the gradients of a model. Called by all members; more than once where a run has several models."""

    def reduced(self) -> None:
        """Make sure that `p.grad` holds the members' mean, where backward has not done so."""

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        """The user calls `optimizer.step()`: whether the optimizer's own step is to run."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The user's `optimizer.step()` is done: the optimizer's own step has run, or `finish` was against it."""

    def reading(self) -> Mapping[int, Sequence[int]]:
        """The versions that a pass which begins now will have read, by table and server.

        Raises:
            ConfigError: passes cannot overlap here, and why.
        """

    def rest(self) -> None:
        """This member waits for work that others may leave to it."""

    def wake(self) -> None:
        """This member has got a batch, and is about to compute with it."""

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        """All members are between two steps, and wait for each other: at the end of an epoch, before an evaluation, and
        (`keep`) before a checkpoint, for which the first member's model and optimizer are to hold all there is; or
        (`end`) the last epoch is over, and nothing that a member has learnt is to stay with it alone."""

    def showing(self) -> AbstractContextManager[None]:
        """Within it, models hold what the run has agreed on: what is evaluated, and what checkpoints hold."""

    def cleared(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The user calls `optimizer.zero_grad()`, or (None) asks for a batch: no backward pass may be half done."""

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters were added to an optimizer."""

    def regroup(self) -> None:
        """The world has another group: a pass that is under way counts for nothing, and the next one goes to these."""

    def state_dict(self) -> dict[str, Any]:
        """What all members have alike."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def readings(self) -> dict[str, Any]:
        """What the summary is to tell of it, as plain numbers and words; empty: nothing."""

    def own_state(self) -> dict[str, Any]:
        """What this member alone has, such as what its codec has left unsaid."""

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over own states: that of this member, and those of members that the run has no more."""

    def close(self, *, failed: bool = False) -> None:
        """The run is over on this member; `failed`: not because its script is done."""
