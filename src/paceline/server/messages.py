"""What workers and servers say to each other: typed headers, behind some of them bare bytes.

    worker → server   Open       this table of parameters, with this optimizer      → Opened, or Refused
                      Store      values of a chunk, or of its optimizer's state       (first member, before training)
                      Push       gradients: one Part and its bytes for each chunk    → Weights for each chunk
                      Pull       the weights, or the optimizer's state, as they are  → Weights or State for each chunk
                      Turn       from now on another gate
                      Rest       no push will come for a while
                      Leave      this worker is done
    server → worker   Opened, Weights, State, Dropped, Refused
    server → first    Standing   of a round with backups: who is here, and whose push is whole
                      Account    of a worker that is gone: how far its pushes have come
    first → servers   Closed     this round, with these workers' pushes
                      Lost       this worker is lost: its account, please

Every connection begins with Open, which has the protocol's version. Bytes that do not decode to exactly these, or do
not fit the table, are refused by name, and nothing of them is applied; of a push, chunks that had come before may have
been, and the refusal says which. Nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.core.errors import ConfigError, Interrupted, PacelineError
from paceline.server.placement import Tensor

PROTOCOL = 6  # raised with every change that an older member would not understand
MAX_HEADER_BYTES = 1 << 26  # a table of a million parameters
UPLOADS = "uploads/"  # how courses begin that are of samples which outsiders upload

Options = dict[str, Any]  # of a parameter group: numbers, booleans, words, None and lists of them


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How a table is trained: the same on all members."""

    optimizer: str  # a class of torch.optim, or of paceline.optim
    groups: list[Options]
    gate: str  # in words
    correct: str = ""  # corrections, in words
    codec: str = ""  # of pushes, and behind back= of weights, that do not go through shared memory, in words


class Open(msgspec.Struct, frozen=True, tag="open", kw_only=True):
    """This worker takes part in a table; servers make it when they first hear of it."""

    protocol: int = PROTOCOL
    rank: int
    table: int
    tensors: tuple[Tensor, ...]
    servers: int
    server: int  # which of them this is
    cut: bool
    rule: Rule
    shared: bool  # payloads go through shared memory


class Store(msgspec.Struct, frozen=True, tag="store", kw_only=True):
    """Values for a chunk: its weights, or with `key` one tensor of its optimizer's state; behind it the bytes."""

    table: int
    chunk: int  # of this server
    key: str = ""
    piece: int = -1  # of the chunk, for a state
    scalar: float | None = None  # a state that is one number has no bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()  # where it is not the piece's
    nbytes: int = 0


class Push(msgspec.Struct, frozen=True, tag="push", kw_only=True):
    """Gradients of a step; a Part for each chunk follows, in the order of the table."""

    table: int
    view: int
    step: int  # the worker's clock: how many steps it has begun
    read: int  # the shard's version that the gradients were computed with
    weight: float  # of the batch: the share of real samples in it
    groups: list[Options]
    wish: bool = False  # see World.wish
    round: int = 0  # with backups: the one that it is meant for; of several servers', the oldest
    life: int = 0  # of the worker: who takes the place of a lost one, with its rank, has another
    thread: int = 0  # of the worker: to corrections, each is a worker
    leases: dict[str, tuple[int, ...]] = {}  # by course: the batches that it is made of
    samples: float = 0.0  # that it was made of, as the first server counts them


class Part(msgspec.Struct, frozen=True, tag="part", kw_only=True):
    """The gradients of one chunk; behind it the bytes, unless they are in shared memory."""

    chunk: int
    nbytes: int
    missing: tuple[int, ...] = ()  # pieces without a gradient
    sizes: tuple[int, ...] = ()  # of codes: bytes of each piece


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """The weights as they are; or the optimizer's state."""

    table: int
    state: bool = False


class Turn(msgspec.Struct, frozen=True, tag="turn"):
    """From now on another gate."""

    table: int
    gate: str


class Rest(msgspec.Struct, frozen=True, tag="rest"):
    """This worker will not push for a while: nobody is to wait for it. Its next push ends that."""

    table: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """This worker is done."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    table: int
    version: int
    step: int  # the clock at which this worker begins


class Weights(msgspec.Struct, frozen=True, tag="weights", kw_only=True):
    """The weights of a chunk; behind it the bytes, unless they are in shared memory."""

    table: int
    chunk: int
    nbytes: int
    version: int  # that the worker is to name when it pushes what it computes with these
    wishes: int  # how often anybody has wished for a pause
    round: int = 0  # with backups: the one under way
    age: int = 0  # of the push that is answered
    sizes: tuple[int, ...] = ()  # of codes, which say what is to be added: bytes of each piece


class State(msgspec.Struct, frozen=True, tag="state", kw_only=True):
    """One tensor of the optimizer's state, of one piece; behind it the bytes. chunk -1: there is no more."""

    table: int
    chunk: int
    piece: int = 0
    key: str = ""
    scalar: float | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()  # where it is not the piece's
    nbytes: int = 0


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """A push was not applied; the weights follow as after any other."""

    table: int
    step: int
    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """What was said is wrong, and was not done but for what the message names; the connection ends here."""

    kind: str  # config, left
    message: str

    def error(self) -> PacelineError:
        return (ConfigError if self.kind == "config" else Interrupted)(self.message)


class Standing(msgspec.Struct, frozen=True, tag="standing", kw_only=True):
    """Where a server stands in a round that is agreed on; the first server puts all of them together."""

    table: int
    servers: int  # that hold a part of the table
    round: int
    backups: int | None  # None: the gate has turned, and rounds are not agreed on any more
    here: tuple[int, ...]  # ranks
    resting: tuple[int, ...]
    whole: tuple[tuple[int, int], ...]  # ranks and lives whose push for this round is here


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """A round is closed with these workers' pushes, on all servers."""

    table: int
    round: int
    contributors: tuple[tuple[int, int], ...]  # ranks and lives


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """A worker is lost at the first server, which wants to know what the others have of it."""

    rank: int
    life: int  # as it was shown with the connection


class Taken(msgspec.Struct, frozen=True):
    """How much one server has taken of a batch, for one table."""

    course: str
    number: int
    parts: int  # chunks; of several pushes, all of them
    samples: float = 0.0  # that the first server has counted for it


class Last(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker that is gone has come with its pushes to one table of a server, by their numbers."""

    table: int
    begun: int  # of this one, chunks were taken
    whole: int
    again: bool = False  # all that it is made of can be dealt again
    taken: tuple[Taken, ...] = ()


class Account(msgspec.Struct, frozen=True, tag="account"):
    """All that one server has of a worker that is gone: of each table that it holds a part of."""

    rank: int
    life: int
    lasts: tuple[Last, ...] = ()


ToServer = Open | Store | Push | Part | Pull | Turn | Rest | Leave
ToWorker = Opened | Weights | State | Dropped | Refused
BetweenServers = Standing | Closed | Lost | Account

encode = msgspec.msgpack.Encoder().encode
_to_server = msgspec.msgpack.Decoder(ToServer)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_between_servers = msgspec.msgpack.Decoder(BetweenServers)


class _Head(msgspec.Struct):
    type: str = ""
    protocol: int = -1


def decode_to_server(data: bytes | bytearray) -> ToServer:
    """A worker's words; ConfigError where they are none, or of another protocol."""
    try:
        message: ToServer = _to_server.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            head = msgspec.msgpack.decode(data, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError):
            head = _Head()
        if head.type == "open" and head.protocol != PROTOCOL:
            raise other_protocol(head.protocol) from None
        raise ConfigError(f"a worker sent what cannot be read: {error}") from None


def other_protocol(protocol: int) -> ConfigError:
    return ConfigError(
        f"this worker speaks protocol {protocol}, the server {PROTOCOL}: install the same version of paceline "
        "everywhere"
    )


def decode_to_worker(data: bytes | bytearray) -> ToWorker:
    try:
        message: ToWorker = _to_worker.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Interrupted(f"a server sent what cannot be read: {error}") from None


def decode_between_servers(data: bytes | bytearray) -> BetweenServers:
    try:
        message: BetweenServers = _between_servers.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"a server sent what cannot be read: {error}") from None
