"""Lost workers of a run with servers, started again: how often, when, and what is said of it.

The rules are those of elastic runs (`membership.staff`): at most `replacements` times each, after a pause that doubles
with each loss in a row that did not lead to training. There is no scheduler: a worker keeps its rank, the servers hold
what counts, and whoever comes in its place joins at theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from paceline.core import status
from paceline.core.lost import was
from paceline.launch.spec import Replacing
from paceline.launch.story import gone
from paceline.membership.books import back_off_s


class Beginning:
    """Whether training has begun, as the first server says it; what that of an earlier start has said is taken away."""

    def __init__(self, directory: Path, num_workers: int) -> None:
        self._server = directory / "status" / f"rank-{num_workers}"
        self._server.unlink(missing_ok=True)
        self._num_workers = num_workers
        self._over = False

    @property
    def over(self) -> bool:
        if not self._over:
            doing = status.read(self._server, self._num_workers)
            self._over = doing is not None and doing.what.startswith(status.SERVING)
        return self._over


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
        self._beginning = Beginning(directory, num_workers)
        self._times = dict.fromkeys(range(num_workers), 0)  # each was started again
        self._fails = dict.fromkeys(range(num_workers), 0)  # losses in a row without training
        self._joining: set[int] = set()  # those who were started again and do not take part yet
        self._gone: set[int] = set()
        self.reason = ""  # why the run cannot go on

    @property
    def begun(self) -> bool:
        """Whether the first epoch has begun: before that an end is the script's own, and would come again."""
        return self._beginning.over

    @property
    def joining(self) -> Collection[int]:
        return sorted(self._joining)

    def lost(self, rank: int, how: str, error: str = "") -> float | None:
        """A worker is lost (`how`: see `core.lost`): in how many seconds it is started again; None: not any more, as
        when it ended by an `error` that would come again."""
        if error:
            self._gone.add(rank)
            self.reason = f"member {rank} ended with an error that would come again: {error}"
            return None
        trained = status.read(self._said(rank), rank) is not None and rank not in self._joining
        self._fails[rank] = 0 if trained else self._fails[rank] + 1
        self._joining.discard(rank)
        what, times, most = f"member {rank} {was(how)}", self._times[rank], self._rules.replacements
        if times >= most:
            self._gone.add(rank)
            left = self._num_workers - len(self._gone)
            if left < self._rules.least:
                self.reason = (
                    f"fewer than {self._rules.least} members can go on: {what} (each is started again at most {most} "
                    "times)"
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

    def started(self, rank: int) -> None:
        """Its next process runs. What the last one has said is taken away, as it cannot be told by its process number:
        the process here may be only the way to a member on another host."""
        self._joining.add(rank)
        self._said(rank).unlink(missing_ok=True)

    def look(self) -> None:
        """See who of those who were started again takes part."""
        if not self.begun:
            return
        for rank in sorted(self._joining):
            doing = status.read(self._said(rank), rank)
            if doing is not None and doing.what != status.STARTING and doing.epoch >= 0:
                self._joining.remove(rank)
                here = self._num_workers - len(self._gone) - len(self._joining)
                self._say(f"member {rank} joined: {here} member{'s train' if here > 1 else ' trains'} now")

    def _said(self, rank: int) -> Path:
        return self._directory / "status" / f"rank-{rank}"
