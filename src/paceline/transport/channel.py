"""A channel: a two-way stream between two members, over TCP; TLS 1.3 as soon as an address is not loopback.

The lowest part of the room; `mesh` makes channels between members, `ring` and the rendezvous use them. A
channel carries framed messages (`send`, `recv`) and bare bytes whose number both sides know (`send_raw`,
`recv_raw_into`). One thread may send while another receives; two threads must not do the same thing at
once.

Closing is the abort: whoever is blocked in the channel, on this side or the other, gets `Interrupted`.
Every wait has a limit. A framed `recv` that reached its limit may be called again and goes on where it
stopped; bare bytes and sends that stopped midway leave the stream out of step, so they close the channel.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from paceline.core.errors import AuthError, ConfigError, Interrupted, PacelineError, TimedOut
from paceline.transport import auth, tls
from paceline.transport.address import is_loopback, join_address, split_address
from paceline.transport.traffic import Traffic
from paceline.transport.wire import Wire

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_MESSAGE_BYTES = 1 << 28
_HEAD = struct.Struct("<Q")
_SILENCE_S = 10.0  # after which a listener looks whether its channel is still open
_UNHEARD_S = 3.0  # without an acknowledgement
_PROBES = {socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}  # seconds, times; how soon they begin: see Wire
_ONE_RECORD = 1 << 14  # what TLS puts in one record


class Channel:
    """One connection. `name` says who is at the other end and stands in every error.

    >>> listener = Listener("127.0.0.1", token="t")
    >>> here = connect(listener.address, token="t", limit_s=5)
    >>> there = listener.accept(5)
    >>> here.send(b"pace", b"line")
    >>> bytes(there.recv(limit_s=5))
    b'paceline'
    >>> for each in here, there, listener: each.close()
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        send_limit_s: float = 300.0,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self.send_limit_s = send_limit_s  # how long the other side may take nothing
        self.sent_bytes = 0
        self.received_bytes = 0
        self._wire = Wire(sock, name)
        self._head = bytearray(_HEAD.size)
        self._body: bytearray | None = None  # None: the head is still to come
        self._have = 0  # bytes of the head or body that have arrived

    @property
    def name(self) -> str:
        return self._wire.name

    @name.setter
    def name(self, name: str) -> None:
        self._wire.name = name

    @property
    def encrypted(self) -> bool:
        return self._wire.tls

    @property
    def closed(self) -> bool:
        return self._wire.closed

    def traffic(self) -> Traffic:
        """What has gone out and arrived, and how long that took."""
        return self._wire.traffic()

    def notice_silence(self) -> None:
        """Break when what was sent is not acknowledged for a few seconds, as when a cable is cut.

        Only for channels that carry little: one whose reader is so far behind that its buffers are full breaks too.
        """
        self._wire.option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * _UNHEARD_S))

    def send(self, *buffers: Buffer) -> None:
        """Send one framed message, gathered from `buffers`."""
        views = [memoryview(b).cast("B") for b in buffers]
        size = sum(len(v) for v in views)
        if size > self.max_message_bytes:
            raise ConfigError(
                f"a message of {size} bytes to {self.name} is longer than max_message_bytes="
                f"{self.max_message_bytes}: send it in parts, or as bare bytes with send_raw"
            )
        views.insert(0, memoryview(_HEAD.pack(size)))
        if self.encrypted and size <= _ONE_RECORD:
            views = [memoryview(b"".join(views))]
        self._send_all([v for v in views if v])

    def recv(self, limit_s: float) -> bytearray:
        """The next framed message. After TimedOut, call again: nothing that arrived is lost."""
        deadline = time.monotonic() + limit_s
        if self._body is None:
            self._fill(memoryview(self._head), limit_s, deadline)
            (size,) = _HEAD.unpack(self._head)
            if size > self.max_message_bytes:
                self.close()
                raise Interrupted(
                    f"{self.name} announced a message of {size} bytes, more than max_message_bytes="
                    f"{self.max_message_bytes}: the channel was closed"
                )
            self._body, self._have = bytearray(size), 0
        self._fill(memoryview(self._body), limit_s, deadline)
        message, self._body, self._have = self._body, None, 0
        return message

    def listen(self) -> bytearray:
        """The next framed message, however long the other side is silent: Interrupted when the channel closes."""
        while True:
            with contextlib.suppress(TimedOut):
                return self.recv(_SILENCE_S)

    def send_raw(self, view: memoryview) -> None:
        """Send bytes without a frame; the other side must know their number."""
        if view:
            self._send_all([view])

    def try_send_raw(self, view: memoryview) -> int:
        """Send without a frame what the socket takes at once; the number of bytes that it took."""
        with self._wire:
            sent = self._wire.write([view], 0.0)
        self.sent_bytes += sent
        return sent

    def recv_raw_into(self, view: memoryview, limit_s: float) -> None:
        """Fill `view` with bare bytes. The limit is for a silence: a link that is slow is not a fault."""
        got = 0
        with self._wire:
            while got < len(view):
                count = self._wire.read(view[got:], limit_s)
                got += count
                self.received_bytes += count
                if not count:
                    if got:
                        self.close()
                    raise TimedOut(f"{self.name} sent nothing for {limit_s:g} s ({got} of {len(view)} bytes had come)")

    def drain(self, limit_s: float) -> None:
        """Drop what comes until the other side closes, or for so long. Closing over bytes that nobody has read takes
        back what was sent last."""
        deadline = time.monotonic() + limit_s
        rest = memoryview(bytearray(1 << 16))
        with contextlib.suppress(Interrupted), self._wire:
            while (left := deadline - time.monotonic()) > 0:
                self._wire.read(rest, min(left, 0.1))

    def close(self) -> None:
        """Close, from any thread and as often as you like; those blocked in the channel get Interrupted."""
        self._wire.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send_all(self, views: list[memoryview]) -> None:
        any_sent = False
        with self._wire:
            while views:
                sent = self._wire.write(views, self.send_limit_s)
                self.sent_bytes += sent
                any_sent = any_sent or sent > 0
                if not sent:
                    if any_sent:
                        self.close()
                    raise TimedOut(f"{self.name} took no data for {self.send_limit_s:g} s")
                while sent:
                    first = views.pop(0)
                    if sent < len(first):
                        views.insert(0, first[sent:])
                    sent -= min(sent, len(first))

    def _fill(self, view: memoryview, limit_s: float, deadline: float) -> None:
        with self._wire:
            while self._have < len(view):
                count = self._wire.read(view[self._have :], deadline - time.monotonic())
                self._have += count
                self.received_bytes += count
                if not count:
                    raise TimedOut(f"no message from {self.name} within {limit_s:g} s")


class Listener:
    """Takes connections from members that hold the token, and from nobody else.

    Each newcomer proves itself in a short thread of its own, so that one that is silent, slow or speaks
    garbage delays nobody; `refused` counts those. `encrypt` None: TLS for connections that are not loopback;
    False is for measurements, and the other side must say the same.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        token: str = "",
        *,
        port: int = 0,
        encrypt: bool | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        auth_limit_s: float = 10.0,
        max_newcomers: int = 256,
    ) -> None:
        self.refused = 0
        self._token = _checked(token)
        self._encrypt = encrypt
        self._max_message_bytes = max_message_bytes
        self._auth_limit_s = auth_limit_s
        self._max_newcomers = max_newcomers
        self._newcomers: dict[socket.socket, None] = {}  # in order of arrival
        self._ready: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
        self._taker: Callable[[Channel], None] | None = None
        self._lock = threading.Lock()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise ConfigError(f"cannot listen on host={host!r} port={port}: {error.strerror or error}") from None
        _tune(self._sock)
        self.address = join_address(*self._sock.getsockname()[:2])
        self._thread = threading.Thread(target=self._take, name="paceline-listener", daemon=True)
        self._thread.start()

    def accept(self, limit_s: float) -> Channel:
        """The next proven channel. TimedOut after `limit_s`, Interrupted when the listener is closed."""
        try:
            channel = self._ready.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            raise TimedOut(f"nobody connected to {self.address} within {limit_s:g} s") from None
        if channel is None:
            self._ready.put(None)  # for the next one who asks
            raise Interrupted(f"the listener at {self.address} was closed")
        return channel

    def hand_to(self, taker: Callable[[Channel], None]) -> None:
        """From now on give each channel to `taker`, in a short thread of its own, and none to `accept`."""
        with self._lock:
            self._taker = taker
            waiting = []
            with contextlib.suppress(queue.Empty):
                while channel := self._ready.get_nowait():
                    waiting.append(channel)
            if self._closed:
                self._ready.put(None)
        for channel in waiting:
            threading.Thread(target=taker, args=(channel,), name="paceline-newcomer", daemon=True).start()

    def close(self) -> None:
        """Stop listening; channels that nobody has accepted are closed with it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sock in self._newcomers:
                _hang_up(sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._sock.close()
        with contextlib.suppress(queue.Empty):
            while channel := self._ready.get_nowait():
                channel.close()
        self._ready.put(None)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # closed; or out of descriptors, until some newcomers have failed
                time.sleep(0.01)
                continue
            with self._lock:
                self._newcomers[sock] = None
                if len(self._newcomers) > self._max_newcomers:
                    # A flood must not keep members out, and a member proves itself within a moment.
                    oldest = next(iter(self._newcomers))
                    del self._newcomers[oldest]
                    _hang_up(oldest)
            try:
                threading.Thread(target=self._prove, args=(sock,), name="paceline-newcomer", daemon=True).start()
            except RuntimeError:  # no room for a thread now: who is hung up on tries again
                with self._lock:
                    self._newcomers.pop(sock, None)
                sock.close()
                time.sleep(0.01)

    def _prove(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + self._auth_limit_s
        channel: Channel | None = None
        secured = sock
        try:
            sock.setblocking(False)
            encrypted = self._encrypt
            if encrypted is None:
                encrypted = not is_loopback(sock.getsockname()[0])
            name = join_address(*sock.getpeername()[:2])
            auth.answer(sock, self._token, encrypted, deadline)
            if encrypted:
                secured = tls.secure(sock, self._token, True, deadline)
            _tune(secured)
            channel = Channel(secured, name, max_message_bytes=self._max_message_bytes)
        except (PacelineError, OSError):
            with self._lock:
                self.refused += 1
        with self._lock:
            self._newcomers.pop(sock, None)
            wanted, taker = channel is not None and not self._closed, self._taker
            if wanted and taker is None:
                self._ready.put(channel)
        if not wanted:
            sock.close()  # does nothing where TLS has taken the descriptor over
            secured.close()
        elif taker is not None and channel is not None:
            taker(channel)


def connect(address: str, token: str, limit_s: float, *, encrypt: bool | None = None, patient: bool = True) -> Channel:
    """Connect to the listener at `address` ("ip:port"), trying again while nobody listens, until the limit.

    AuthError where the other side does not hold the token; TimedOut at the limit. Not patient: Interrupted at once
    where nobody listens.
    """
    host, port = split_address(address)
    _checked(token)
    deadline = time.monotonic() + limit_s
    pause_s = 0.01
    refused: AuthError | None = None
    while True:
        sock: socket.socket | None = None
        try:
            left = max(0.001, deadline - time.monotonic())
            sock = socket.create_connection((host, port), timeout=left)
            if sock.getsockname() == sock.getpeername():
                # Nobody listens on this port of our own host, and the system lent it to us as the source.
                raise ConnectionRefusedError("connected to itself")
            sock.setblocking(False)
            encrypted = not is_loopback(sock.getpeername()[0]) if encrypt is None else encrypt
            auth.ask(sock, token, encrypted, deadline, address)
            if encrypted:
                sock = tls.secure(sock, token, False, deadline)
            _tune(sock)
            return Channel(sock, address)
        except socket.gaierror as error:
            raise ConfigError(f"address {address!r}: the host name is not known ({error.strerror})") from None
        except (OSError, Interrupted) as error:  # not listening yet, or going down: a later try may find it
            if sock is not None:
                sock.close()
            if not patient and not isinstance(error, TimeoutError):
                raise Interrupted(f"nobody listens at {address}: {error}") from None
            if time.monotonic() + pause_s >= deadline:
                raise refused or TimedOut(f"could not connect to {address} within {limit_s:g} s: {error}") from None
        except AuthError as error:
            assert sock is not None
            sock.close()
            if refused:
                raise
            refused = error  # once it may have been a byte that was altered on its way, before TLS could notice it
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)


def _checked(token: str) -> str:
    if not token:
        raise ConfigError("token='': a channel needs the run's token; the launcher makes one (PACELINE_TOKEN)")
    return token


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Whoever waits for one who is cut off learns it within seconds: the kernel asks the other side's kernel.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    # Some systems default to bbr, which costs a bulk stream on a local network 1.4 to 2.8 times the time.
    # Buffer sizes are left to the kernel: setting one stops its own tuning of that buffer.
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            break


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
