"""What a launcher makes good for when an elastic run has finished: a member that was killed while it wrote the report.

Training was over then, and the others are done: the run has finished, with a warning. What is missing is written here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.core import status
from paceline.membership.agent import Ended, Outcome


def made_good(outcome: Outcome, directory: Path, since: float, say: Callable[[str], None]) -> Outcome:
    """The outcome of a run that has finished; `since`: when it began (time.time())."""
    ended = tuple(replace(e, losable=e.losable or _ended_in_the_report(e, directory)) for e in outcome.ended)
    outcome = replace(outcome, ended=ended)
    if outcome.code == 0 and outcome.lost and (directory / "events").is_dir():
        from paceline.train import afterwards  # which takes longer to import than all that the launcher needs

        try:
            written = afterwards.write(directory, since)
        except OSError as error:
            say(f"warning: the report could not be written: {error}")
        else:
            if written:
                say(f"warning: the first member was lost before it had written the report; it is in {written}")
    return outcome


def _ended_in_the_report(ended: Ended, directory: Path) -> bool:
    """Whether it was killed between its last step and its end."""
    said = status.read(directory / "status" / f"rank-{ended.rank}", ended.rank)
    return ended.failed and ended.code < 0 and said is not None and said.what == "ending"
