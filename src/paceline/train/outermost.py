"""Which loader's loop is the outermost of an epoch: when it asks for a batch, the step before is over.

A loop within the loop (an evaluation) asks in the middle of a step. The loader that is asked first in an epoch is the
outermost for as long as its loop is under way. An iterator that the script keeps is under way too, and may never be
asked again; it looks like the loop around a long inner one. So a checkpoint that is due waits for it for a number of
steps, the same on all members, and is then taken between the batches of the loader that is asked.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.data import Loader

PATIENCE = 100  # steps


class Outermost:
    """Told of each asking; `warn` is called once, with what the user should know."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._loader: Loader | None = None
        self._step = 0  # at which it was asked last
        self._warned = False

    def enter_epoch(self) -> None:
        """Iterators from before the epoch count only once they are asked within it."""
        self._loader = None

    def asks(self, loader: Loader, step: int, *, due: bool) -> bool:
        """Whether this asking is between two steps; `due`: a checkpoint waits for one that is."""
        if self._loader is None or not self._loader.active:
            self._loader = loader
        elif due and loader is not self._loader and step - self._step >= PATIENCE:
            self._loader = loader
            if not self._warned:
                self._warned = True
                self._warn(
                    f"the first loader of this epoch was asked for nothing in {PATIENCE} steps, so checkpoints do not "
                    "wait for it any longer. If its loop is around another one, a resumed run begins with its next "
                    "batch: call run.checkpoint() in the outer loop instead, with checkpoint_every_s=0"
                )
        if loader is not self._loader:
            return False
        self._step = step
        return True
