"""Values that pass between stages: sent behind, while the member computes on; taken by name, in any order.

    expect(source, n)        n messages will come from a member; they are read behind, as they arrive
    send(to, key, values)    returns at once
    take(key)                waits until what has this name is there

Tensors travel as bytes over the run's own connections, between hosts too; what is around them (tuples, numbers) as
plain data, so nothing that arrives is ever run. Every wait is limited, and a member that is lost ends it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.transport.group import Group

_PART_BYTES = 1 << 26
Key = tuple[str, int, int, int]  # what it is, from which stage, to which, and of which micro-batch


class Post:
    """Between the members of one group, which is used for nothing else."""

    def __init__(self, group: Group, limit_s: float, device: torch.device) -> None:
        self._group, self._limit_s, self._device = group, limit_s, device
        self._here: defaultdict[Key, deque[list[Any]]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._lanes: dict[tuple[str, int], queue.SimpleQueue[Callable[[], None]]] = {}
        self._unsent = 0
        self.waited_s = 0.0
        self.sent_bytes = 0

    def send(self, to: int, key: Key, values: Sequence[Any]) -> None:
        """Values must not change until they are gone; see `flush`."""
        if to == self._group.rank:
            self._arrived(key, list(values))
            return
        tensors: list[torch.Tensor] = []
        body = [_plain(value, tensors) for value in values]
        kinds = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
        head = msgspec.msgpack.encode((key, body, kinds))
        with self._changed:
            self._unsent += 1
        self._behind("to", to, lambda: self._write(to, head, tensors))

    def expect(self, source: int, count: int) -> None:
        for _ in range(count if source != self._group.rank else 0):
            self._behind("from", source, lambda: self._read(source))

    def take(self, key: Key) -> list[Any]:
        began = time.monotonic()
        with self._changed:
            there = self._changed.wait_for(lambda: self._here[key] or self._error, self._limit_s)
            self.waited_s += time.monotonic() - began
            if not there:
                raise TimedOut(f"stage {key[1]} sent nothing to stage {key[2]} for {self._limit_s:g} s")
            if not self._here[key]:
                assert self._error
                raise self._error
            values = self._here[key].popleft()
            if not self._here[key]:
                del self._here[key]
            return values

    def flush(self) -> None:
        """Return when all is sent."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._unsent or self._error, self._limit_s):
                raise TimedOut(f"another stage took nothing for {self._limit_s:g} s")
            if self._error:
                raise self._error

    def _behind(self, direction: str, peer: int, task: Callable[[], None]) -> None:
        lane = self._lanes.get((direction, peer))
        if lane is None:
            lane = self._lanes[direction, peer] = queue.SimpleQueue()
            name = f"paceline-post-{direction}-{peer}"
            threading.Thread(target=self._work, args=(lane,), name=name, daemon=True).start()
        lane.put(task)

    def _work(self, lane: queue.SimpleQueue[Callable[[], None]]) -> None:
        while self._error is None:
            try:
                lane.get()()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()

    def _write(self, to: int, head: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self._group.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), to)
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1)
            step = _PART_BYTES // flat.element_size()
            for begin in range(0, flat.numel(), step):
                self._group.send(flat[begin : begin + step], to)
        with self._changed:
            self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
            self._unsent -= 1
            self._changed.notify_all()

    def _read(self, source: int) -> None:
        head = self._group.recv(source).numpy().tobytes()
        try:
            kind = tuple[Key, list[Any], list[tuple[str, list[int]]]]
            key, body, kinds = msgspec.msgpack.decode(head, type=kind)
            shapes = [(_dtype(name), shape) for name, shape in kinds]
        except (msgspec.DecodeError, ValueError) as error:
            raise Interrupted(f"a stage sent something that cannot be read: {error}") from None
        tensors = []
        for dtype, shape in shapes:
            due, parts = math.prod(shape), []
            while due > 0:
                parts.append(self._group.recv(source))
                due -= parts[-1].numel()
                if due < 0 or parts[-1].dtype != dtype:
                    raise Interrupted("a stage sent another tensor than it had announced")
            flat = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
            tensors.append(flat.view(shape).to(self._device))
        self._arrived(key, [_value(plain, tensors, self._device) for plain in body])

    def _arrived(self, key: Key, values: list[Any]) -> None:
        with self._changed:
            self._here[key].append(values)
            self._changed.notify_all()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no such dtype: {name!r}")
    return dtype


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """As msgpack has it; tensors are put aside.

    >>> put: list[torch.Tensor] = []
    >>> _plain((torch.ones(1), {"n": 2}), put)
    ['tuple', [['tensor', 0], ['dict', [['n', ['is', 2]]]]]]
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if value is None or isinstance(value, bool | int | float | str):
        return ["is", value]
    if isinstance(value, dict):
        return ["dict", [[key, _plain(part, tensors)] for key, part in value.items()]]
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return ["list" if isinstance(value, list) else "tuple", [_plain(part, tensors) for part in value]]
    if isinstance(value, slice):
        return ["slice", [_plain(part, tensors) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", None]
    raise ConfigError(
        f"a {type(value).__name__} would pass from one stage to another: tensors, numbers, strings and tuples, lists "
        "and dicts of them can. Cut the model elsewhere (run.model(cut=[...])), or let layers return tensors"
    )


def _value(plain: Any, tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
    kind, body = plain
    if kind == "tensor":
        return tensors[body]
    if kind == "is":
        return body
    if kind == "dict":
        return {key: _value(part, tensors, device) for key, part in body}
    if kind == "dtype":
        return _dtype(body)
    if kind == "device":
        return device
    parts = [_value(part, tensors, device) for part in body]
    return slice(*parts) if kind == "slice" else parts if kind == "list" else tuple(parts)
