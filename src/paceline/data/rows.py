"""Datasets of Ray Data as input.

A `ray.data.Dataset` becomes a dataset with a length: it is executed once for all members, by an actor of the run, and
stays in Ray's object store (which spills to disk). Members draw its rows by number, so that whose turn it is, what an
epoch leaves behind and how the run resumes are the loader's, exact as for any other dataset, also when members come and
go. What Ray does in an order of its own (a shuffle without a seed) is then another one after a restart of the run.

A share that Ray Train gives a worker (`ray.train.get_dataset_shard`) is a stream of the worker's own, read as a file
that only this member opens (`files`).

What passes between members and that actor goes over Ray's own channels.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.on_ray import HOLDER, NAMESPACE, SCHEDULER
from paceline.data.files import Files
from paceline.data.partition import ByFile

_KEPT = 8  # blocks at hand
_LOOK_S = 5.0
_CORE_S = 20.0  # for a core to become free
Part = tuple[Any, int]  # a block's reference, and its rows


def is_dataset(dataset: Any) -> bool:
    return _is(dataset, "Dataset")


def is_share(dataset: Any) -> bool:
    return _is(dataset, "DataIterator")


def taken(
    dataset: Any, options: Mapping[str, Any], number: int, size: int, environ: Mapping[str, str] = os.environ
) -> tuple[Any, dict[str, Any]]:
    """What a loader is to read instead, and its options.

    Args:
        number: which of the run's datasets of Ray it is, in the order of the script.
    """
    if options.get("workers"):
        raise ConfigError("workers= does not go with a dataset of Ray Data, which Ray's own processes prepare")
    if is_share(dataset):
        return _stream(dataset, options, size)
    namespace = environ.get(NAMESPACE, "")
    if size > 1 and not namespace:
        raise ConfigError(
            "a ray.data.Dataset in a run of several members is shared out by the ray engine: start the run with "
            "paceline run --on ray; in a worker of Ray Train, give ray.train.get_dataset_shard(NAME) instead"
        )
    parts = _held(dataset, number, namespace) if namespace else executed(dataset)
    return Rows(parts), dict(options)


class Rows:
    """The rows of a dataset that was executed, each a dict of its columns."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [part for part in parts if part[1]]
        self._ends = list(accumulate(rows for _, rows in self._parts))
        self._at_hand: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Rows by number; blocks that are not at hand come in one call."""
        places = [self._place(index) for index in indices]
        blocks = self._blocks({block for block, _ in places})
        return [{name: column[row] for name, column in blocks[block].items()} for block, row in places]

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        block = bisect.bisect_right(self._ends, index)
        return block, index - (self._ends[block - 1] if block else 0)

    def _blocks(self, wanted: set[int]) -> dict[int, Mapping[str, Any]]:
        with self._lock:
            found = {block: self._at_hand[block] for block in wanted if block in self._at_hand}
        if missing := sorted(wanted - set(found)):
            found |= dict(zip(missing, _get([self._parts[block][0] for block in missing])))
        with self._lock:
            for block in wanted:
                self._at_hand[block] = found[block]
                self._at_hand.move_to_end(block)
            while len(self._at_hand) > _KEPT:
                self._at_hand.popitem(last=False)
        return found


def executed(dataset: Any) -> list[Part]:
    """Execute it, into blocks of columns."""
    import ray

    blocks = dataset.materialize().to_numpy_refs()
    count = ray.remote(num_cpus=0)(_rows)
    return list(zip(blocks, ray.get([count.remote(block) for block in blocks])))


class Holder:
    """The actor that executes datasets, once each, and holds their blocks. It ends with the run."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._lock = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._held: dict[int, list[Part]] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def parts(self, number: int, pickled: Sequence[Any]) -> list[Part]:
        """The blocks of a dataset; `pickled` has it, as a member made it."""
        with self._lock:
            lock = self._locks.setdefault(number, threading.Lock())
        with lock:
            if number not in self._held:
                _await_core()
                self._held[number] = executed(pickled[0])
            return self._held[number]

    def _watch(self) -> None:
        """Nobody owns it, since the member that made it may be lost; so it looks for who keeps the run."""
        import ray

        while True:
            time.sleep(_LOOK_S)
            try:
                ray.get_actor(SCHEDULER, namespace=self._namespace)
            except ValueError:
                os._exit(0)


def _held(dataset: Any, number: int, namespace: str) -> list[Part]:
    import ray

    made = ray.remote(Holder).options(
        name=HOLDER, namespace=namespace, lifetime="detached", get_if_exists=True, num_cpus=0, max_concurrency=32
    )
    try:
        parts: list[Part] = ray.get(made.remote(namespace).parts.remote(number, [dataset]))
    except ray.exceptions.RayTaskError as error:
        raise ConfigError(str(error.cause)) if isinstance(error.cause, ConfigError) else error from None
    return parts


def _await_core() -> None:
    """A run that has all cores of the cluster would wait for itself."""
    import ray

    deadline = time.monotonic() + _CORE_S
    while ray.available_resources().get("CPU", 0.0) < 1:
        if time.monotonic() > deadline:
            raise ConfigError(
                "a dataset of Ray Data is executed by the cluster, which has no core left beside the members: start "
                "fewer of them (-n), or give each less (--cpus 0.5)"
            )
        time.sleep(0.5)


def _stream(share: Any, options: Mapping[str, Any], size: int) -> tuple[Files, dict[str, Any]]:
    if options.get("partition") is not None:
        raise ConfigError("partition= does not go with a share of Ray Train, which says who gets what; leave it out")
    # One file for each member, of which each opens its own: what it reads there is its share.
    return Files(range(size), lambda member: _opened(share)), {**options, "partition": ByFile()}


def _opened(share: Any) -> Iterator[Any]:
    yield from share.iter_rows()


def _get(references: list[Any]) -> list[Mapping[str, Any]]:
    import ray

    blocks: list[Mapping[str, Any]] = ray.get(references)
    return blocks


def _rows(block: Mapping[str, Any]) -> int:
    return len(next(iter(block.values()), ()))


def _is(dataset: Any, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith("ray.data.") for kind in type(dataset).__mro__)
