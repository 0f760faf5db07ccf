"""What outsiders and desks say to each other; weights follow as bare bytes.

    outsider → desk   Visit      the first word, with the protocol's version      → Welcome, or Refused
                      Look       how far the shards are, or when they are further → Standing
                      Pin        a copy of the weights, please                    → Pinned: what it is, if there is one
                      Read       the bytes of that copy                           → bare bytes, as many as Pinned said
                      Changes    of that copy, only what I do not have            → Changed, then the bare bytes of that
                      Watch      how the run is getting on                        → Progress
                      Upload     samples for the input queue                      → Taken: so many of them
                      Finish     no more samples will come                        → Taken
    worker → desk     Take       samples of the input queue                       → Given, or Soon
                      Done       so many batches are trained                      (no answer)

Bytes that do not decode to exactly these end the connection, and nothing else. Nothing is unpickled.
"""

from __future__ import annotations

import msgspec

from paceline.core.errors import AuthError, ConfigError, Interrupted, PacelineError, TimedOut
from paceline.server.placement import Tensor

PROTOCOL = 3  # raised with every change that an older outsider would not understand
MAX_VISIT_BYTES = 16 << 20  # of one message from outside
BLOCK_BYTES = 1 << 16  # of weights: what is compared, and sent or not
DIGEST_BYTES = 16  # of a block


class Visit(msgspec.Struct, frozen=True, tag="visit", kw_only=True):
    """The first word. `rank`: that of a member of the run, or -1."""

    protocol: int = PROTOCOL
    rank: int = -1


class Look(msgspec.Struct, frozen=True, tag="look", kw_only=True):
    """How far the shards are: as soon as they are further than `newer_than`, or in so many seconds."""

    newer_than: int = -1
    wait_s: float = 0.0


class Pin(msgspec.Struct, frozen=True, tag="pin", kw_only=True):
    """Copy the weights and keep the copy for me. `at`: exactly this version; `newer_than`: only if they are newer."""

    at: int = -1
    newer_than: int = -1
    limit_s: float = 5.0


class Read(msgspec.Struct, frozen=True, tag="read"):
    """The bytes of the copy that is kept for me; then it is kept no more."""


class Changes(msgspec.Struct, frozen=True, tag="changes", kw_only=True):
    """Of the copy that is kept for me, what I do not have; then it is kept no more.

    `have`: for each of its parts the digests of my blocks, one after another; without: I have nothing. `codec`: say it
    in this code, as a difference from what I have since the last such answer on this connection; the first is said as
    it is.
    """

    have: list[bytes] = []
    codec: str = ""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """How the run is getting on: in so many seconds, or at once when it ends."""

    wait_s: float = 0.0


class Upload(msgspec.Struct, frozen=True, tag="upload"):
    """Samples for the input queue, each by itself in bytes."""

    samples: list[bytes]


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """No more samples will come."""


class Take(msgspec.Struct, frozen=True, tag="take", kw_only=True):
    """Samples for the next batch of a course: a batch of this worker alone, or (`size` > 1) its part of a round."""

    course: str
    number: int  # of the batch or round, from 0
    batch_size: int
    size: int
    limit: int = 0  # samples that a course has at most; 0: as many as come
    like: bytes = b""  # a sample whose form all must have


class Done(msgspec.Struct, frozen=True, tag="done"):
    """So many batches of a course, counted from the first, are trained."""

    course: str
    count: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    name: str  # of the run
    strategy: str  # in words
    servers: bool  # whether any hold the weights
    desks: list[str]  # their addresses


class Standing(msgspec.Struct, frozen=True, tag="standing", kw_only=True):
    version: int
    sync: bool
    serves: bool = True  # whether there are shards here at all


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One server's part of a table."""

    table: int
    tensors: tuple[Tensor, ...]
    servers: int
    server: int
    cut: bool
    view: int
    nbytes: int


class Pinned(msgspec.Struct, frozen=True, tag="pinned", kw_only=True):
    """A copy is kept, of this version; without parts: none, since that version is over or nothing is new."""

    version: int
    mixed: bool = False  # pushes were half applied, as is usual where nobody waits
    parts: tuple[Part, ...] = ()
    made_at: float = 0.0  # time.time() of that host when this version was first seen


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What of one part follows: blocks as they are, or chunks in a code, of so many bytes each."""

    blocks: list[int] = []
    chunks: list[tuple[int, int]] = []
    coded: bool = False


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """What follows, part by part."""

    parts: list[Difference]


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """What one member does."""

    rank: int
    step: int
    epoch: int
    what: str


class Progress(msgspec.Struct, frozen=True, tag="progress", kw_only=True):
    """How a run is getting on."""

    state: str  # running; at the end finished, left early, failed, or gone where nobody could say
    epoch: int = 0  # from 0
    epochs: int | None = None
    step: int = 0
    loss: float | None = None  # where the script logs one
    scalars: dict[str, float] = {}  # what the script logged last
    samples_per_s: float | None = None
    members: tuple[Doing, ...] = ()
    version: int = 0  # of the first server
    applied: int = 0  # pushes
    dropped: int = 0
    uploads_waiting: int = 0  # samples in the input queue


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    count: int
    why: str = ""  # not all were
    asked: bool = True  # whether the script has ever asked for samples


class Given(msgspec.Struct, frozen=True, tag="given", kw_only=True):
    """Samples for a worker; `real` of them count, and `total` are in the round. None: the course is over."""

    samples: list[bytes]
    real: int = 0
    total: int = 0


class Soon(msgspec.Struct, frozen=True, tag="soon"):
    """There are not enough samples yet: ask again."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """What was said is wrong, or cannot be done; it was not done."""

    kind: str
    message: str

    def error(self) -> PacelineError:
        return _KINDS.get(self.kind, Interrupted)(self.message)


_KINDS: dict[str, type[PacelineError]] = {
    kind.__name__: kind for kind in (ConfigError, AuthError, TimedOut, Interrupted)
}

ToDesk = Visit | Look | Pin | Read | Changes | Watch | Upload | Finish | Take | Done
FromDesk = Welcome | Standing | Pinned | Changed | Progress | Taken | Given | Soon | Refused

encode = msgspec.msgpack.Encoder().encode
_to_desk = msgspec.msgpack.Decoder(ToDesk)
_from_desk = msgspec.msgpack.Decoder(FromDesk)


def decode_to_desk(data: bytes | bytearray) -> ToDesk:
    """An outsider's words; ConfigError where they are none."""
    try:
        message: ToDesk = _to_desk.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"what was sent cannot be read: {error}; is it another version of paceline?") from None


def decode_from_desk(data: bytes | bytearray) -> FromDesk:
    try:
        message: FromDesk = _from_desk.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Interrupted(f"the run said what cannot be read: {error}; is it another version of paceline?") from None


def refused(error: PacelineError) -> Refused:
    return Refused(type(error).__name__, str(error))
