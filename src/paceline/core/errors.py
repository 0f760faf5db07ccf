"""What can go wrong, as one tree.

PacelineError
├── ConfigError        the user's input is wrong: names the field, the value, what is allowed, what to do
├── Interrupted        the view changed under an operation: drop it and go on in the next view
│   ├── TimedOut       a wait reached its limit; names the members that did not arrive
│   └── Dismissed      this member is told to end: the run is over, or goes on without it
├── Lost               state is gone: heal, then go on
│   └── CheckpointError  a checkpoint is torn, altered or does not fit
├── CheckpointFailed   a checkpoint could not be written; training goes on (checkpoint/files.py)
├── MemberFailed       a function that was launched has failed as this member (launch/calling.py)
└── AuthError          the other side does not hold this run's token
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Anything that Paceline raises on purpose."""


class ConfigError(PacelineError, ValueError):
    """The user's input is wrong."""


class Interrupted(PacelineError):
    """The view changed, or a channel was closed, while an operation was under way."""

    rank: int | None = None  # the member at fault, where it is known


class TimedOut(Interrupted, TimeoutError):
    """A wait reached its limit."""


class Dismissed(Interrupted):
    """This member is told to end: the run is over, or goes on without it. It says so in a line, not in a traceback."""


class Lost(PacelineError):
    """State that the run needs is gone."""


class CheckpointError(Lost):
    """A checkpoint is torn, altered, or does not fit the model that asks for it."""


class MemberFailed(PacelineError):
    """A member that `paceline.launch` started has failed: how, or with which traceback."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class AuthError(PacelineError):
    """The other side does not hold this run's token."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown word.

    >>> nearest("alreduce", ["allreduce", "local"])
    "did you mean 'allreduce'?"
    >>> nearest("xyz", ["b", "a"])
    "known: 'a', 'b'"
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(map(repr, known))
