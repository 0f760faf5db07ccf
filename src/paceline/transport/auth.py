"""The first words on a new connection: each side proves that it holds the run's token, without showing it.

    listener   → connecter    mark, mode, nonce
    connecter  → listener     mark, mode, nonce, HMAC(token, "connecter" …)
    listener   → connecter    verdict, HMAC(token, "listener" …)

Both codes cover the mode (plain or TLS) and both nonces, so nothing can be replayed, reflected or talked down
to plain. This runs on the bare socket, before TLS: whatever is not a member costs one small read and never
reaches the TLS library. It assumes that the token is long and random, as the launcher makes it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import time

from paceline.core.errors import AuthError, Interrupted, TimedOut

_MARK = b"paceln1\n"
_NONCE = 32
_CODE = 32
_OPENING = struct.Struct(f"<{len(_MARK)}sB{_NONCE}s")
_ACCEPTED, _WRONG_TOKEN, _WRONG_MODE = 1, 2, 3
_MODES = {0: "plain TCP", 1: "TLS"}


def answer(sock: socket.socket, token: str, encrypted: bool, deadline: float) -> None:
    """The listener's side. AuthError: refused; Interrupted: the other side went away or was too slow."""
    nonce = secrets.token_bytes(_NONCE)
    _write(sock, _OPENING.pack(_MARK, encrypted, nonce), deadline)
    mark, mode, theirs = _OPENING.unpack(_read(sock, _OPENING.size, deadline))
    if mark != _MARK:
        raise AuthError("what connected does not speak Paceline's protocol")
    code = _read(sock, _CODE, deadline)
    if not hmac.compare_digest(code, _code(token, b"connecter", mode, nonce, theirs)):
        _write(sock, bytes([_WRONG_TOKEN]) + bytes(_CODE), deadline)
        raise AuthError("what connected does not hold this run's token")
    if mode != encrypted:
        _write(sock, bytes([_WRONG_MODE]) + bytes(_CODE), deadline)
        raise AuthError(f"what connected wants {_MODES.get(mode)}, this side {_MODES[encrypted]}")
    _write(sock, bytes([_ACCEPTED]) + _code(token, b"listener", encrypted, nonce, theirs), deadline)


def ask(sock: socket.socket, token: str, encrypted: bool, deadline: float, where: str) -> None:
    """The connecter's side. AuthError says which of the two does not hold the token."""
    mark, mode, theirs = _OPENING.unpack(_read(sock, _OPENING.size, deadline))
    if mark != _MARK:
        raise AuthError(f"what answers at {where} is not a Paceline listener: check the address and port")
    nonce = secrets.token_bytes(_NONCE)
    code = _code(token, b"connecter", encrypted, theirs, nonce)
    _write(sock, _OPENING.pack(_MARK, encrypted, nonce) + code, deadline)
    reply = _read(sock, 1 + _CODE, deadline)
    if reply[0] == _WRONG_MODE:
        raise AuthError(
            f"{where} wants {_MODES.get(mode)}, this side {_MODES[encrypted]}: give the same encrypt= on both sides"
        )
    expected = _code(token, b"listener", encrypted, theirs, nonce)
    if reply[0] != _ACCEPTED or not hmac.compare_digest(reply[1:], expected):
        raise AuthError(
            f"the listener at {where} does not hold the same token as this member: they belong to "
            "different runs; start both with one launcher, or give both the same PACELINE_TOKEN"
        )


def _code(token: str, side: bytes, mode: int, listener_nonce: bytes, connecter_nonce: bytes) -> bytes:
    words = b"|".join((_MARK, side, bytes([mode])))
    return hmac.digest(token.encode(), words + listener_nonce + connecter_nonce, hashlib.sha256)


# The socket is non-blocking. The deadline is for the whole exchange, against one that sends a byte at a time.


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(size - len(data))
        except BlockingIOError:
            _wait(sock, select.POLLIN, deadline)
            continue
        except OSError as error:
            raise Interrupted(f"the connection broke while proving the token: {error}") from None
        if not part:
            raise Interrupted("the other side closed the connection while proving the token")
        data += part
    return bytes(data)


def _write(sock: socket.socket, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            _wait(sock, select.POLLOUT, deadline)
        except OSError as error:
            raise Interrupted(f"the connection broke while proving the token: {error}") from None


def _wait(sock: socket.socket, what: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(sock, what)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1e3):
        raise TimedOut("the other side did not prove the token in time")
