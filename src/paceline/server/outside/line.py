"""One outsider's connection to one desk, made again where it was lost."""

from __future__ import annotations

import time
from typing import TypeVar

import torch

from paceline.core.errors import Interrupted
from paceline.server.connection import bytes_of
from paceline.server.outside import visits as v
from paceline.transport.channel import Channel
from paceline.transport.mesh import visit

_CONNECT_S = 10.0
_ANSWER_S = 40.0  # a desk bounds its own waits below this
_FRESH_S = 30.0  # after which a connection is tried before something is said that must not be said twice
T = TypeVar("T")


class Line:
    """A connection. `say` and `hear` raise Interrupted where it is lost; the next `say` makes it again."""

    def __init__(self, address: str, token: str, limit_s: float) -> None:
        self.address = address
        self._token = token
        self._limit_s = min(limit_s, _CONNECT_S)
        self._used = 0.0
        self._channel = self._connect()

    def _connect(self) -> Channel:
        channel = visit(self.address, self._token, self._limit_s)
        try:
            channel.name = f"the desk at {self.address}"
            channel.send(v.encode(v.Visit()))
            self.welcome = expect(v.decode_from_desk(channel.recv(_ANSWER_S)), v.Welcome)
        except BaseException:
            channel.close()
            raise
        self._used = time.monotonic()
        return channel

    def say(self, message: v.ToDesk) -> None:
        if self._channel.closed:
            self._channel = self._connect()
        elif time.monotonic() - self._used > _FRESH_S:  # a desk may have given the place to another
            try:
                self._channel.send(v.encode(v.Look()))
                self.hear()
            except Interrupted:
                self._channel.close()
                self._channel = self._connect()
        try:
            self._channel.send(v.encode(message))
        except Interrupted:
            self._channel.close()
            raise

    def hear(self) -> v.FromDesk:
        answer = v.decode_from_desk(self._channel.recv(_ANSWER_S))
        self._used = time.monotonic()
        return answer

    def fill(self, body: torch.Tensor) -> None:
        if body.numel():
            self._channel.recv_raw_into(bytes_of(body), _ANSWER_S)
        self._used = time.monotonic()

    def close(self) -> None:
        self._channel.close()


def expect(answer: v.FromDesk, kind: type[T]) -> T:
    """An answer of this kind; what the desk refused is raised."""
    if isinstance(answer, v.Refused):
        raise answer.error()
    if not isinstance(answer, kind):
        raise Interrupted(f"the run said {type(answer).__name__} instead of {kind.__name__}")
    return answer
