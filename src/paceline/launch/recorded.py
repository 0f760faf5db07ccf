"""What jobs share: a run's record and directory, and its work on a thread of its own."""

from __future__ import annotations

from pathlib import Path

from paceline.launch.background import Background
from paceline.launch.record import Record
from paceline.launch.spec import JobSpec
from paceline.membership.agent import Outcome


class RecordedJob:
    """Base of jobs, which have a record before `_start`, and give `_work` and `_close`."""

    _spec: JobSpec
    _record: Record
    _background: Background

    @property
    def dir(self) -> Path:
        return self._record.dir

    def logs(self) -> dict[int, Path]:
        return {rank: self.dir / "logs" / f"rank-{rank}.log" for rank in range(self._spec.size)}

    def poll(self) -> int | None:
        outcome = self._background.poll()
        return outcome.code if outcome else None

    def wait(self, limit_s: float) -> Outcome | None:
        return self._background.wait(limit_s)

    def _start(self) -> None:
        self._background = Background(self._run)

    def _run(self) -> Outcome:
        code = 1
        with self._record:
            try:
                outcome = self._work()
                code = outcome.code
                return outcome
            finally:
                self._close()
                self._record.finish(code)

    def _work(self) -> Outcome:
        """In the job's thread: all of the run."""
        raise NotImplementedError

    def _close(self) -> None:
        """In the job's thread: what it had open, however it ended."""
        raise NotImplementedError
