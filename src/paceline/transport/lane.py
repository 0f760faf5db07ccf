"""A lane among some members of the mesh: what a collective needs to send, to receive, and to fail well.

The ring's collectives are written on this. Each collective begins with a short head to everyone it sends
to, by which members notice that they are not in the same one. Between two members there is one channel for
each direction, so that with TLS the sending thread and the receiving one never share a connection.

A fault breaks the lane for good. Who fails finds out which member is behind it, tells the others, and
closes its channels; so all members raise, and name the same one.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence

from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.transport.channel import Channel
from paceline.transport.mesh import Fault, Mesh
from paceline.transport.sender import Sender
from paceline.transport.traffic import Traffic

_HEAD = struct.Struct("<16sQQ")  # which collective, how many came before, bytes
HEAD_BYTES = _HEAD.size


class Lane:
    """Members are addressed by their position in `ranks`. One collective at a time."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int], name: str) -> None:
        if len(set(ranks)) != len(ranks) or len(ranks) < 2 or mesh.rank not in ranks:
            raise ConfigError(
                f"ranks={list(ranks)}: needed are two or more, each once, with member {mesh.rank} among them"
            )
        self.ranks = tuple(ranks)
        self.position = self.ranks.index(mesh.rank)
        self._mesh = mesh
        self._name = name
        self._channels: dict[tuple[int, bool], Channel] = {}  # by position and whether it sends
        self._sender = Sender(self._send_failed)
        self._send_failure: tuple[int, Interrupted] | None = None
        self._suspect = mesh.rank  # who is at fault if something fails now
        self._fault: Fault | None = None
        self._closed = False
        self._kind = ""
        self._count = 0
        self._nbytes = 0

    @property
    def sent_bytes(self) -> int:
        """By this member since the lane was made, as counted before encryption."""
        return sum(channel.sent_bytes for (_, sends), channel in list(self._channels.items()) if sends)

    def traffic(self) -> dict[int, Traffic]:
        """By rank: what this member has sent there."""
        ways = [(self.ranks[at], channel) for (at, sends), channel in list(self._channels.items()) if sends]
        return {rank: channel.traffic() for rank, channel in ways if not channel.closed}

    @contextlib.contextmanager
    def collective(self, kind: str, nbytes: int) -> Iterator[None]:
        """Around everything that one collective sends and receives; all is sent when it ends."""
        if self._fault is not None:
            raise self._fault.error(f"{kind} after a fault")
        if self._closed:
            raise Interrupted(f"{kind}: closed on this side")
        self._kind, self._count, self._nbytes = kind, self._count + 1, nbytes
        try:
            yield
            self._sender.drain()
            if self._send_failure is not None:
                raise self._send_failure[1]
        except (Interrupted, _OutOfStepError) as error:
            raise self._broken(error) from None
        except BaseException:  # such as Ctrl-C: the streams are out of step
            self._fault = Fault(self._mesh.rank, "stopped in the middle of a collective", timed_out=False)
            self.close()
            raise
        finally:
            self._mesh.waiting.pop(self._name, None)

    def send_head(self, position: int) -> None:
        self.post(position, memoryview(_HEAD.pack(self._kind.encode(), self._count, self._nbytes)))

    def receive_head(self, position: int) -> None:
        head = bytearray(_HEAD.size)
        self.receive(position, memoryview(head))
        name, count, nbytes = _HEAD.unpack(head)
        kind = name.rstrip(b"\0").decode(errors="replace")
        if (kind, count, nbytes) != (self._kind, self._count, self._nbytes):
            raise _OutOfStepError(
                f"is in {kind} of {nbytes} bytes, its collective {count} in this lane, while member "
                f"{self._mesh.rank} is in {self._kind} of {self._nbytes} bytes, its collective {self._count}: "
                "all members must call the same collectives in the same order"
            )

    def post(self, position: int, data: memoryview) -> None:
        """Send when all that was posted before is sent; `data` must stay as it is until then."""
        channel = self._channel(position, sends=True)
        self._suspect = self.ranks[position]
        self._sender.post(self._suspect, channel, data)

    def receive(self, position: int, data: memoryview) -> None:
        channel = self._channel(position, sends=False)
        self._suspect = self._mesh.waiting[self._name] = self.ranks[position]
        channel.recv_raw_into(data, self._mesh.limit_s)

    def drain(self) -> None:
        """Wait until all that was posted is sent."""
        self._sender.drain()

    def close(self) -> None:
        """Close the channels: the abort, from any thread."""
        self._closed = True
        self._hang_up()
        self._sender.close()

    def _channel(self, position: int, sends: bool) -> Channel:
        channel = self._channels.get((position, sends))
        if channel is None:
            rank = self._suspect = self._mesh.waiting[self._name] = self.ranks[position]
            sender = self._mesh.rank if sends else rank
            channel = self._channels[position, sends] = self._mesh.channel(rank, self._name, sender)
        return channel

    def _hang_up(self) -> None:
        for channel in list(self._channels.values()):
            channel.close()

    def _send_failed(self, rank: int, error: Interrupted) -> None:
        """In the sender's thread. Hanging up wakes the caller, who waits for another member."""
        self._send_failure = (rank, error)
        self._hang_up()

    def _broken(self, error: Interrupted | _OutOfStepError) -> Interrupted:
        if self._closed or self._mesh.closed:
            self.close()
            return Interrupted(f"{self._kind}: closed on this side")
        self._fault = self._mesh.fault(self._name)
        if self._fault is None:
            self._fault = self._mesh.tell(self._name, self._explain(error), self.ranks)
        self.close()
        return self._fault.error(self._kind)

    def _explain(self, error: Interrupted | _OutOfStepError) -> Fault:
        if isinstance(error, _OutOfStepError):
            return Fault(self._suspect, str(error), timed_out=False)
        rank = self._suspect
        if self._send_failure is not None:
            rank, error = self._send_failure
        if isinstance(error, TimedOut):
            fault = Fault(rank, f"did not take part for {self._mesh.limit_s:g} s", timed_out=True)
        else:
            fault = Fault(rank, "died or closed its channels", timed_out=False)
        return self._mesh.trace(self._name, fault)


class _OutOfStepError(Exception):
    """Another member is in another collective."""
