"""The sending half of a lane: one thread that works off a queue of views, while the caller receives and adds.

The memory of a posted view must stay as it is until `drain` returns, or until the other side is known to
have it. Sending copies into the kernel with Python's lock released, so it overlaps with the caller's
additions.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from paceline.core.errors import Interrupted
from paceline.transport.channel import Channel

_INLINE_BYTES = 1 << 16  # up to this, waking the thread costs more than the copy


class Sender:
    """`failed` is called once, in the thread, with the rank that could not be sent to."""

    def __init__(self, failed: Callable[[int, Interrupted], None]) -> None:
        self._failed = failed
        self._posts: queue.SimpleQueue[tuple[int, Channel, memoryview] | str] = queue.SimpleQueue()
        self._drained: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._posted = 0  # counted by the caller's thread
        self._done = 0  # counted by ours
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-sender", daemon=True)
        self._thread.start()

    def post(self, rank: int, channel: Channel, view: memoryview) -> None:
        """Send after everything posted before; a short view right now, as far as the socket takes it."""
        if self._posted == self._done and 0 < len(view) <= _INLINE_BYTES:
            view = view[channel.try_send_raw(view) :]
        if view:
            self._posted += 1
            self._posts.put((rank, channel, view))

    def drain(self) -> None:
        """Wait until all is sent. The wait ends: each send is limited, and after a failed one none is tried."""
        if self._posted != self._done and not self._closed:
            self._posts.put("drain")
            self._drained.get()

    def close(self) -> None:
        """End the thread. The channels must have been closed before, so that it is not in one."""
        self._closed = True
        self._posts.put("close")
        self._thread.join()

    def _run(self) -> None:
        broken = False
        while (post := self._posts.get()) != "close":
            if isinstance(post, str):
                self._drained.put(None)
                continue
            rank, channel, view = post
            if not broken:
                try:
                    channel.send_raw(view)
                except Interrupted as error:
                    broken = True
                    self._failed(rank, error)
            self._done += 1
        self._drained.put(None)  # for one who asked meanwhile
