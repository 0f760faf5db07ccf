"""What a guest and a run say to each other, on a connection that the guest has made; behind a Bring and a Parcel bare
bytes follow.

    guest → run   Call     the first word: who calls, with which model, from which round   → Reply, or Refused
                  Bring    a difference, as many bytes as it says                          → Thanks
                  Fetch    the newest weights, in this code                                → Parcel

A guest numbers its differences, and a Reply says which one the run has taken last: where a connection broke, neither is
one lost nor counted twice. What does not decode to exactly these ends the connection, and nothing else.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch

from paceline.codecs import Cast, Codec, Quantize, make_codec
from paceline.codecs.as_is import AsIs
from paceline.core.errors import ConfigError, Interrupted
from paceline.server.outside.visits import Refused

PROTOCOL = 2  # raised with every change that an older guest would not understand
MAX_CALL_BYTES = 1 << 20  # of one message; sizes of some hundred thousand tensors
TOKEN = "PACELINE_GUEST_TOKEN"  # the environment variable, on both sides
T = TypeVar("T")


class Call(msgspec.Struct, frozen=True, tag="call", kw_only=True):
    guest: str  # a name by chance, which it keeps
    model: str  # a digest of names and shapes
    round: int  # whose weights it has trained from; -1: it has none
    protocol: int = PROTOCOL


class Bring(msgspec.Struct, frozen=True, tag="bring", kw_only=True):
    number: int  # from 1, of this guest's
    round: int
    samples: float
    tokens: float
    codec: str
    sizes: list[int]  # bytes of each parameter


class Fetch(msgspec.Struct, frozen=True, tag="fetch", kw_only=True):
    code: str
    newer_than: int = -1
    wait_s: float = 0.0  # for such a round


class Reply(msgspec.Struct, frozen=True, tag="reply", kw_only=True):
    name: str  # of the run
    round: int
    taken: int  # the number of this guest's last difference that was; 0: none
    takes: bool  # whether it may bring one now
    stale: bool = False  # never will it: what it has is of too old a round
    why: str = ""


class Thanks(msgspec.Struct, frozen=True, tag="thanks", kw_only=True):
    taken: bool
    stale: bool = False  # not taken, and never will be
    why: str = ""


class Parcel(msgspec.Struct, frozen=True, tag="parcel", kw_only=True):
    """Weights of a round; without sizes: there is nothing newer, or nothing yet."""

    round: int
    sizes: list[int] = []


ToRun = Call | Bring | Fetch
FromRun = Reply | Thanks | Parcel | Refused

encode = msgspec.msgpack.Encoder().encode
_to_run = msgspec.msgpack.Decoder(ToRun)
_from_run = msgspec.msgpack.Decoder(FromRun)


def decode_to_run(data: bytes | bytearray) -> ToRun:
    try:
        message: ToRun = _to_run.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"what was sent cannot be read: {error}; is it another version of paceline?") from None


def decode_from_run(data: bytes | bytearray, kind: type[T]) -> T:
    """An answer of this kind; what the run refused is raised."""
    try:
        message: FromRun = _from_run.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Interrupted(f"the run said what cannot be read: {error}; is it another version of paceline?") from None
    if isinstance(message, Refused):
        raise message.error()
    if not isinstance(message, kind):
        raise Interrupted(f"the run said {type(message).__name__} instead of {kind.__name__}")
    return message


def make_code(words: str) -> Codec:
    """For differences: a codec without momentum, or "none"."""
    codec = AsIs() if words.strip() == "none" else make_codec(words)
    if getattr(codec, "momentum", 0.0):
        raise ConfigError(f"codec {codec.words} is for gradients, whose momentum it keeps: use topk for differences")
    return codec


def make_weights_code(words: str) -> Codec:
    """For weights: one that says all elements, by itself."""
    code = make_code({"bf16": "cast(bf16)"}.get(words.strip(), words))
    if not isinstance(code, AsIs | Cast | Quantize) or getattr(code, "shared", False) or code.words not in _WEIGHTS:
        raise ConfigError(f"weights={words!r}: bf16, quantize(8) or none")
    return code


_WEIGHTS = ("none", Cast("bf16").words, Quantize(8).words)


def take_apart(data: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """The bytes of each parameter, within those of all."""
    return list(torch.split(data, sizes))
