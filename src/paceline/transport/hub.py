"""A group around a hub: collectives that go on when a member is lost.

Everyone hands its part of a collective to the hub, which lives with the first server; when all who are still here have
done so, everyone gets all parts. A member whose connection ends is simply not there any more: what the others wait for
comes without its part. So results are over those who are here, in the order of ranks, the same bits for all of them.
Who takes part when, and when one who replaces a lost member comes in, is in `meetings`.

For what workers say to each other now and then, such as metrics at the end of an epoch. Gradients go another way.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.transport.arena import Arena, Through
from paceline.transport.channel import Channel
from paceline.transport.group import OPERATIONS, Group, flat_of, restore
from paceline.transport.meetings import FINISHED, Enter, Finished, Meetings, Over, Say, Stand
from paceline.transport.wires import Wires

LANE = "hub"
_NUMBER = struct.Struct("<Q")  # of a collective; 0: a word about coming and going
_PART_BYTES = 64 << 20  # of a broadcast; a message must not be longer than a channel allows
_parts = msgspec.msgpack.Decoder(dict[int, bytes])
_to_hub = msgspec.msgpack.Decoder(Stand | Enter | Finished)
_from_hub = msgspec.msgpack.Decoder(Stand | Over)


class TooLate(Interrupted):
    """The others have come to the end while this one was on its way."""


class Hub:
    """The place in the middle. Serves until closed.

    Args:
        begun: called when the first epoch has begun.
    """

    def __init__(self, wires: Wires, ranks: Sequence[int], begun: Callable[[], None] = lambda: None) -> None:
        self._changed = threading.Condition()
        self._begun = begun
        self._meetings = Meetings(ranks)
        self._channels = {rank: wires.mesh.channel(rank, LANE) for rank in ranks}
        for rank, channel in list(self._channels.items()):
            self._start(rank, channel)

    def admit(self, rank: int, channel: Channel, limit_s: float) -> None:
        """Let one who replaces a lost member ask to come in; when that one is gone."""
        with self._changed:
            if not self._changed.wait_for(lambda: rank not in self._channels, limit_s):
                raise TimedOut(f"member {rank} is not gone after {limit_s:g} s")
            self._channels[rank] = channel
        self._start(rank, channel)

    def close(self) -> None:
        with self._changed:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _start(self, rank: int, channel: Channel) -> None:
        threading.Thread(target=self._listen, args=(rank, channel), name="paceline-hub", daemon=True).start()

    def _listen(self, rank: int, channel: Channel) -> None:
        with contextlib.suppress(PacelineError, struct.error, msgspec.DecodeError):
            while True:
                message = channel.listen()
                (number,) = _NUMBER.unpack_from(message)
                body = memoryview(message)[_NUMBER.size :]
                with self._changed:
                    if number:
                        self._say(self._meetings.hand(rank, number, bytes(body)))
                    else:
                        self._take(rank, _to_hub.decode(body))
        channel.close()
        with self._changed:
            self._channels.pop(rank, None)
            self._say(self._meetings.leave(rank))
            self._changed.notify_all()

    def _take(self, rank: int, word: Stand | Enter | Finished) -> None:
        if isinstance(word, Stand):
            self._say(self._meetings.stands(rank, word))
            self._begun()
        else:
            self._say(self._meetings.enter(rank) if isinstance(word, Enter) else self._meetings.finish(rank))

    def _say(self, said: list[Say]) -> None:
        answers: dict[int, bytes] = {}  # by number: the same for all
        for rank, word in said:
            number = word[0] if isinstance(word, tuple) else 0
            if isinstance(word, tuple) and number not in answers:
                answers[number] = msgspec.msgpack.encode(word[1])
            body = answers[number] if number else msgspec.msgpack.encode(word)
            if channel := self._channels.get(rank):
                with contextlib.suppress(PacelineError):  # its own thread will notice
                    channel.send(_NUMBER.pack(number), body)


class HubGroup(Group):
    """The members of a run that has servers. Lists hold those who are here; `ranks_here` says who that was.

    Args:
        replaces: lost members are started again. Where the first one is away, the first who is here stands in for it.
        late: this one replaces a lost member. Until it has come in (`enter`), it is alone.
    """

    def __init__(
        self, wires: Wires, ranks: Sequence[int], hub: int, *, replaces: bool = False, late: bool = False
    ) -> None:
        super().__init__(None, ranks)
        self._wires = wires
        self.rank = self.ranks.index(wires.rank)
        self.ranks_here = (self.rank,) if late else tuple(range(self.size))
        self._channel = wires.mesh.channel(hub, LANE)
        self._number = 0
        self._waited_s = 0.0
        self._replaces = replaces
        self._alone = late

    @property
    def leads(self) -> bool:
        """Whether this is the first of those who came to the last collective."""
        return self.ranks_here[:1] == (self.rank,)

    def stand(self, epoch: int, step: int, state: Callable[[], bytes]) -> None:
        """An epoch begins: newcomers can begin it too, with this state. Told by the first who is here."""
        if self._replaces and self.leads:
            self._tell(Stand(epoch, step, self._number, _within(state(), self._channel.max_message_bytes)))

    def enter(self, take: Callable[[Stand], object]) -> None:
        """Wait to be let in, and take over what `take` is told; from then on all collectives are with the others.

        Interrupted where there is nobody to come in to.
        """
        wires = self._need_wires()
        self._tell(Enter())
        wires.status.set("waiting to be let in: at the latest when the next epoch begins")
        message = memoryview(self._channel.listen())
        word = _from_hub.decode(message[_NUMBER.size :])
        if isinstance(word, Over):
            raise TooLate(word.reason) if word.reason == FINISHED else Interrupted(word.reason)
        take(word)
        self._number, self._alone, self.ranks_here = word.number, False, ()

    def leave(self) -> None:
        """This member has come to the end of the script."""
        with contextlib.suppress(PacelineError):  # the hub is gone before us
            if self._replaces and not self._alone:
                self._tell(Finished())

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
            if self._alone:
                return tensor
            rows = self._meet(_raw(part) if self.rank == root else b"")
            while root not in rows:
                if not self._replaces:
                    raise Interrupted(f"member {root} left before it could broadcast")
                root = next(iter(rows))
                rows = self._meet(_raw(part) if self.rank == root else b"")
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

    def _tell(self, word: Stand | Enter | Finished) -> None:
        self._channel.send(_NUMBER.pack(0), msgspec.msgpack.encode(word))

    def _meet(self, data: bytes) -> dict[int, bytes]:
        """Hand in a part; everyone's part, by rank, in the order of ranks."""
        wires = self._need_wires()
        if self._alone:
            return {self.rank: data}
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


def _within(state: bytes, most: int) -> bytes:
    if len(state) > most - (1 << 16):
        raise ConfigError(
            f"what run.track holds, with the models' buffers, is {len(state)} bytes: one who replaces a lost member "
            f"gets it in one message of at most {most}; track less, or leave --replacements out"
        )
    return state


def _raw(flat: torch.Tensor) -> bytes:
    return flat.view(torch.uint8).numpy().tobytes()


def _tensor(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def _unpacked(row: bytes) -> torch.Tensor:
    (length,) = _NUMBER.unpack_from(row)
    body = row[_NUMBER.size :]
    name, shape = msgspec.msgpack.decode(body[:length], type=tuple[str, list[int]])
    return _tensor(body[length:], getattr(torch, name)).view(shape)
