"""Lost workers of a run with servers, started again: how often, when, and what is said of it.

The rules are those of elastic runs (`membership.staff`): at most `replacements` times each, after a pause that doubles
with each loss in a row that did not lead to training. There is no scheduler: a worker keeps its rank, the servers hold
what counts, and whoever comes in its place joins at theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from paceline.core import status
from paceline.core.lost import how
from paceline.launch.spec import Replacing
from paceline.launch.story import gone
from paceline.membership.books import back_off_s


class Replacements:
    """Those of one run, in the agent's thread.

    Args:
        directory: of the run, where members say what they do.
        num_workers: their ranks come before those of the servers.
    """

    def __init__(self, rules: Replacing, directory: Path, num_workers: int, say: Callable[[str], None]) -> None:
        self._rules = rules
        self._directory = directory
        self._num_workers = num_workers
        self._say = say
        self._server = directory / "status" / f"rank-{num_workers}"  # the first one's
        self._server.unlink(missing_ok=True)  # of one that is gone
        self._times = dict.fromkeys(range(num_workers), 0)  # each was started again
        self._fails = dict.fromkeys(range(num_workers), 0)  # losses in a row without training
        self._joining: dict[int, int] = {}  # rank and process of those who were started again
        self._gone: set[int] = set()
        self._begun = False
        self.reason = ""  # why the run cannot go on

    @property
    def begun(self) -> bool:
        """Whether the first epoch has begun: before that an end is the script's own, and would come again."""
        if not self._begun:
            doing = status.read(self._server, self._num_workers)
            self._begun = doing is not None and doing.what.startswith(status.SERVING)
        return self._begun

    @property
    def joining(self) -> Collection[int]:
        return list(self._joining)

    def lost(self, rank: int, pid: int, code: int) -> float | None:
        """A worker is lost: in how many seconds it is started again; None: not any more."""
        doing = status.read(self._directory / "status" / f"rank-{rank}", rank)
        trained = doing is not None and doing.pid == pid and rank not in self._joining
        self._fails[rank] = 0 if trained else self._fails[rank] + 1
        self._joining.pop(rank, None)
        what, times, most = f"member {rank} {_was(code)}", self._times[rank], self._rules.replacements
        if times >= most:
            self._gone.add(rank)
            left = self._num_workers - len(self._gone)
            if left < self._rules.least:
                self.reason = (
                    f"fewer than {self._rules.least} members can go on: member {rank} {_was(code)} (each is started "
                    f"again at most {most} times)"
                )
                return None
            self._say(gone(what, times, most, None))
            return None
        self._times[rank] += 1
        wait_s = back_off_s(self._fails[rank])
        self._say(gone(what, times, most, wait_s))
        return wait_s

    def replaces(self, rank: int) -> bool:
        """Whether a worker that was lost is started again."""
        return rank not in self._gone

    def started(self, rank: int, pid: int) -> None:
        """Its next process runs."""
        self._joining[rank] = pid

    def look(self) -> None:
        """See who of those who were started again takes part."""
        if not self.begun:
            return
        for rank, pid in list(self._joining.items()):
            doing = status.read(self._directory / "status" / f"rank-{rank}", rank)
            if doing is not None and doing.pid == pid and doing.what != status.STARTING and doing.epoch >= 0:
                del self._joining[rank]
                here = self._num_workers - len(self._gone) - len(self._joining)
                self._say(f"member {rank} joined: {here} member{'s train' if here > 1 else ' trains'} now")


def _was(code: int) -> str:
    return f"was {how(code)}" if code < 0 else f"ended with {how(code)}"
