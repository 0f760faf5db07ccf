"""What members and the rendezvous say to each other, typed, with the protocol's version in front.

    member      → rendezvous   Hello
    rendezvous  → member       Wait, then Welcome or Refused; or Refused at once

Bytes that do not decode to exactly these are refused by name. Nothing is unpickled.
"""

from __future__ import annotations

import msgspec

from paceline.core.errors import AuthError, ConfigError, Interrupted, PacelineError, TimedOut
from paceline.core.settings import Settings
from paceline.core.view import Member, View

PROTOCOL = 1  # raised with every change that an older member would not understand
MAX_MESSAGE_BYTES = 1 << 22  # a view of ten thousand members


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """I am here."""

    protocol: int = PROTOCOL
    size: int
    member: Member


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """You are counted; the rest of the answer comes within this time."""

    limit_s: float


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """All are here."""

    view: View
    settings: Settings
    replaces: bool = False  # lost members are started again, and come to the same view
    late: bool = False  # you are one of those


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """You cannot join; `kind` says which error this is on the member's side."""

    kind: str  # config, timeout, left
    message: str

    def error(self) -> PacelineError:
        kinds = {"config": ConfigError, "timeout": TimedOut, "left": Interrupted, "auth": AuthError}
        return kinds.get(self.kind, Interrupted)(self.message)


Answer = Wait | Welcome | Refused


class _Head(msgspec.Struct):
    protocol: int


def encode(message: Hello | Answer) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_hello(data: bytes | bytearray) -> Hello:
    """The Hello in `data`; ConfigError where it is none, or of another protocol.

    >>> member = Member(rank=0, host="a", pid=1)
    >>> decode_hello(encode(Hello(size=1, member=member))).member.rank
    0
    """
    try:
        protocol = msgspec.msgpack.decode(data, type=_Head).protocol
        if protocol != PROTOCOL:
            raise ConfigError(
                f"this member speaks protocol {protocol}, the others {PROTOCOL}: "
                f"install the same version of paceline everywhere"
            )
        return msgspec.msgpack.decode(data, type=Hello)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a ValidationError is a DecodeError
        raise ConfigError(f"malformed hello: {error}") from None


def decode_answer(data: bytes | bytearray) -> Answer:
    try:
        answer: Answer = msgspec.msgpack.decode(data, type=Answer)
        return answer
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"malformed answer from the rendezvous ({error}): install the same version of paceline everywhere"
        ) from None
