"""Events as TensorBoard reads them, where it is installed.

Importing TensorBoard takes from a tenth of a second (alone) to several (beside TensorFlow), and a scalar
costs about 80 µs; both happen on a thread of their own, the import while the script prepares, so that the training
does not see them. Only the first member makes this sink. A disk that is full ends the writing, not the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from paceline.core.events import Event
from paceline.train.figures import value

_CLOSE_S = 10.0  # how long closing may wait for what is still to be written
_QUEUE = 10_000  # events kept while the writer is behind; later ones are left out


def tensorboard_sink(directory: Path) -> TensorBoard | None:
    """A sink that writes into `directory`, or None where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    return TensorBoard(directory)


class TensorBoard:
    """Takes events; a thread turns them into scalars."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pid = os.getpid()
        self._events: queue.Queue[Event | None] = queue.Queue(_QUEUE)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="paceline-tensorboard", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if not self._closed and os.getpid() == self._pid:
            with contextlib.suppress(queue.Full):
                self._events.put_nowait(event)

    def close(self) -> None:
        """Writes what is left."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._events.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        writer: Any = None
        try:
            import torch.utils.tensorboard  # noqa: F401  # now, while the script prepares, and not in its first turns

            while (event := self._events.get()) is not None:
                if writer is None:
                    writer = self._open(event)
                for tag, x in scalars(event):
                    writer.add_scalar(tag, x, int(event.get("step") or 0), walltime=event.get("time"))
        except Exception as error:
            self._closed = True
            print(f"paceline: TensorBoard files are no longer written: {error}", file=sys.stderr)
        finally:
            if writer is not None:
                with contextlib.suppress(Exception):
                    writer.close()

    def _open(self, first: Event) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run does the steps after its checkpoint again: TensorBoard forgets the old ones.
        resumed = first.get("resumed_step")
        purge = None if resumed is None else int(resumed) + 1
        return SummaryWriter(str(self._directory), purge_step=purge, flush_secs=10)


def scalars(event: Event) -> list[tuple[str, float]]:
    """Tags and values of an event.

    >>> scalars({"kind": "metric", "name": "accuracy", "value": 0.5})
    [('metric/accuracy', 0.5)]
    """
    kind = event.get("kind")
    if kind == "metric":
        return [(f"metric/{event.get('name')}", value(event.get("value")))]
    if kind != "step":
        return []
    found = [(f"train/{name}", value(x)) for name, x in (event.get("scalars") or {}).items()]
    times = {name: value(event.get(f"{name}_s") or 0.0) for name in ("data", "compute", "wait")}
    whole = sum(times.values())
    if whole > 0 and math.isfinite(whole):
        found.append(("speed/samples_per_s", value(event.get("samples") or 0) / whole))
        found += [(f"time/{name}", x / whole) for name, x in times.items()]
    return found
