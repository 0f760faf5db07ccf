"""A group around a hub: collectives that go on when a member is lost.

Everyone hands its part of a collective to the hub, which lives with the first server; when all who are still here have
done so, everyone gets all parts. A member whose connection ends is simply not there any more: what the others wait for
comes without its part. So results are over those who are here, in the order of ranks, the same bits for all of them.

For what workers say to each other now and then, such as metrics at the end of an epoch. Gradients go another way.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Sequence

import msgspec
import torch

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.transport.arena import Arena, Through
from paceline.transport.channel import Channel
from paceline.transport.group import OPERATIONS, Group, flat_of, restore
from paceline.transport.wires import Wires

_LANE = "hub"
_NUMBER = struct.Struct("<Q")
_PART_BYTES = 64 << 20  # of a broadcast; a message must not be longer than a channel allows
_parts = msgspec.msgpack.Decoder(dict[int, bytes])


class Hub:
    """The place in the middle. Serves until closed."""

    def __init__(self, wires: Wires, ranks: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._channels: dict[int, Channel] = {}
        self._handed: dict[int, dict[int, bytes]] = {}  # by number of the collective, by rank
        for rank in ranks:
            self._channels[rank] = wires.mesh.channel(rank, _LANE)
        for rank, channel in list(self._channels.items()):
            thread = threading.Thread(target=self._listen, args=(rank, channel), name="paceline-hub", daemon=True)
            thread.start()

    def close(self) -> None:
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _listen(self, rank: int, channel: Channel) -> None:
        with contextlib.suppress(PacelineError, struct.error):
            while True:
                message = channel.listen()
                (number,) = _NUMBER.unpack_from(message)
                with self._lock:
                    self._handed.setdefault(number, {})[rank] = bytes(memoryview(message)[_NUMBER.size :])
                    self._look(number)
        channel.close()
        with self._lock:
            self._channels.pop(rank, None)
            for number in list(self._handed):
                self._handed[number].pop(rank, None)  # it is not here any more
                self._look(number)

    def _look(self, number: int) -> None:
        """Answer where all who are here have handed in their part."""
        if not self._channels.keys() <= self._handed[number].keys():
            return
        parts = self._handed.pop(number)
        answer = msgspec.msgpack.encode(dict(sorted(parts.items())))
        for channel in list(self._channels.values()):
            with contextlib.suppress(PacelineError):  # its own thread will notice
                channel.send(_NUMBER.pack(number), answer)


class HubGroup(Group):
    """The members of a run that has servers. Lists hold those who are here; `ranks_here` says who that was."""

    def __init__(self, wires: Wires, ranks: Sequence[int], hub: int) -> None:
        super().__init__(None, ranks)
        self._wires = wires
        self.rank = self.ranks.index(wires.rank)
        self.ranks_here = tuple(range(self.size))
        self._channel = wires.mesh.channel(hub, _LANE)
        self._number = 0
        self._waited_s = 0.0

    @property
    def sent_bytes(self) -> int:
        return self._channel.sent_bytes

    @property
    def waited_s(self) -> float:
        return self._waited_s

    def arena(
        self,
        nbytes: int,
        device: torch.device | None = None,
        through: Through | None = None,
        *,
        apart: bool = False,
    ) -> Arena:
        raise ConfigError("members of a run with servers do not exchange gradients: use --strategy allreduce for that")

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if op not in OPERATIONS:
            raise ConfigError(f"unknown operation {op!r}: known are {', '.join(OPERATIONS)}")
        stacked = torch.stack(self.all_gather(tensor.detach()))
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"the mean of {tensor.dtype} is no {tensor.dtype}: convert it first, or take the sum")
        if op in ("sum", "mean"):
            result = stacked.sum(0) if op == "sum" else stacked.mean(0)
        else:
            result = stacked.prod(0) if op == "product" else stacked.amax(0) if op == "max" else stacked.amin(0)
        with torch.no_grad():
            return tensor.copy_(result)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        flat = flat_of(tensor)
        rows = self._meet(_raw(flat))
        if any(len(row) != flat.nbytes for row in rows.values()):
            raise Interrupted("members called unlike collectives: tensors of unlike sizes met at the hub")
        return [_tensor(row, flat.dtype).view(tensor.shape).to(tensor.device) for row in rows.values()]

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] != (self.size,):
            raise ConfigError(f"reduce_scatter wants a first dimension of {self.size}, got shape {tuple(tensor.shape)}")
        return self.all_reduce(tensor.clone())[self.rank]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        self._check(root)
        flat = flat_of(tensor)
        step = max(1, _PART_BYTES // max(1, flat.element_size()))
        for start in range(0, max(1, flat.numel()), step):
            part = flat[start : start + step]
            rows = self._meet(_raw(part) if self.rank == root else b"")
            if root not in rows:
                raise Interrupted(f"member {root} left before it could broadcast")
            if self.rank != root:
                part.copy_(_tensor(rows[root], flat.dtype))
        return restore(tensor, flat)

    def gather(self, tensor: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        self._check(root)
        head = msgspec.msgpack.encode((str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        rows = self._meet(_NUMBER.pack(len(head)) + head + _raw(flat_of(tensor)))
        return [_unpacked(row).to(tensor.device) for row in rows.values()] if self.rank == root else None

    def scatter(self, tensors: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        self._check(root)
        mine = b""
        if self.rank == root:
            if tensors is None or len(tensors) != self.size:
                raise ConfigError(f"scatter wants {self.size} tensors on the root")
            packed = [
                (str(t.dtype).removeprefix("torch."), list(t.shape), _raw(flat_of(t))) for t in tensors
            ]  # fmt: skip
            mine = msgspec.msgpack.encode(packed)
        rows = self._meet(mine)
        if root not in rows:
            raise Interrupted(f"member {root} left before it could scatter")
        name, shape, raw = msgspec.msgpack.decode(rows[root], type=list[tuple[str, list[int], bytes]])[self.rank]
        return _tensor(raw, getattr(torch, name)).view(shape)

    def exchange(self, data: bytes) -> list[bytes]:
        return list(self._meet(data).values())

    def barrier(self) -> None:
        self._meet(b"")

    def abort(self, error: Interrupted) -> None:
        pass  # whoever is gone is gone; the others go on

    def close(self) -> None:
        super().close()
        self._channel.close()

    def _meet(self, data: bytes) -> dict[int, bytes]:
        """Hand in a part; everyone's part, by rank, in the order of ranks."""
        wires = self._need_wires()
        self._number += 1
        began = time.monotonic()
        before = wires.status.what
        try:
            self._channel.send(_NUMBER.pack(self._number), data)
            wires.status.set("waiting for the other members at the hub")
            message = self._channel.recv(wires.limit_s)
            (number,) = _NUMBER.unpack_from(message)
            if number != self._number:
                raise Interrupted(f"the hub answered collective {number} instead of {self._number}")
            rows = _parts.decode(memoryview(message)[_NUMBER.size :])
        except TimedOut:
            raise TimedOut(
                f"other members did not come to a collective within {wires.limit_s:g} s: `paceline status` shows what "
                "they do; raise --wait-limit-s where some are much slower than others"
            ) from None
        except (msgspec.DecodeError, struct.error) as error:
            raise Interrupted(f"the hub sent what cannot be read: {error}") from None
        finally:
            wires.status.set(before)
            self._waited_s += time.monotonic() - began
        self.ranks_here = tuple(rows)
        return rows


def _raw(flat: torch.Tensor) -> bytes:
    return flat.view(torch.uint8).numpy().tobytes()


def _tensor(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def _unpacked(row: bytes) -> torch.Tensor:
    (length,) = _NUMBER.unpack_from(row)
    body = row[_NUMBER.size :]
    name, shape = msgspec.msgpack.decode(body[:length], type=tuple[str, list[int]])
    return _tensor(body[length:], getattr(torch, name)).view(shape)
