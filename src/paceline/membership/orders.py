"""What a scheduler, the agents of its hosts and the members of an elastic run say to each other.

    member     → scheduler   Arrive, then Ready, Broken, Formed, Slow, Here, Going, Leave
    scheduler  → member      Standing or Refused, then NewView, Come, Drain; Noted answers Leave
    agent      → scheduler   Host, then Beat, Started, Ended, DrainHost; EndRun from the launcher's
    scheduler  → agent       Start, Stop, Over
    tool       → scheduler   Look, Scale, Halt or Fetch, which Picture, Done, Work or Refused answers

Every order carries the scheduler's term, which rises each time that a scheduler starts: what an older one says, or
what is said of an older view, counts no more. Bytes that do not decode to exactly these are refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.core.view import Member, View
from paceline.membership.messages import Refused

PROTOCOL = 5  # raised with every change that an older one would not understand


class Arrive(msgspec.Struct, frozen=True, tag="arrive", kw_only=True):
    """A member's first word on a line, also on one that it opens again."""

    protocol: int = PROTOCOL
    id: int
    member: Member
    view: int = 0  # the number of the view it holds


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """I stand where I can be taken into a view: before a first batch (0), or left out of a later one."""

    view: int = 0


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The group of a view broke here."""

    view: int
    blamed: int = -1  # id of the member that seems to be the cause
    reason: str = ""


class Formed(msgspec.Struct, frozen=True, tag="formed"):
    """All members of a view have met, and go on from a step; said once more when this one has taken its first."""

    view: int
    step: int


class Slow(msgspec.Struct, frozen=True, tag="slow"):
    """This member holds the others up, and should leave."""

    id: int
    why: str


class Here(msgspec.Struct, frozen=True, tag="here", kw_only=True):
    """Members train apart, and I am at this round: once `quorum` are, wait no longer than `grace_s` for the others."""

    view: int
    round: int
    quorum: int
    grace_s: float


class Going(msgspec.Struct, frozen=True, tag="going"):
    """We go to this planned view now."""

    view: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Do not wait for me."""

    reason: str  # finished, drained, left (the script has ended before the run did), failed


class Standing(msgspec.Struct, frozen=True, tag="standing", kw_only=True):
    """You are counted in. `view`: the present one, where training is under way."""

    term: int
    settings: Settings
    least: int  # with fewer members nobody takes a step
    view: View | None = None
    begun: bool = False  # there were views before, although all of their members may be lost


class NewView(msgspec.Struct, frozen=True, tag="view", kw_only=True):
    """These are the members now; `planned`: from the end of a step on that they agree on."""

    term: int
    view: View
    planned: bool
    left: tuple[int, ...] = ()  # ids of those that are not in it and were not lost: they were asked to go, or went
    late: tuple[int, ...] = ()  # ids of those that were left out because they did not come to a round in time
    instead: tuple[int, ...] = ()  # ids of those in it that were lost and came back, or came in a lost one's place


class Come(msgspec.Struct, frozen=True, tag="come"):
    """The others of this view are on their way to it: do not let them wait."""

    term: int
    view: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish the step under way, then leave."""

    term: int


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """Your Leave is in the journal."""

    term: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A member's process has ended; a negative code is the signal that killed it."""

    id: int
    code: int
    error: str = ""  # what it ended by, if that would come again


class Host(msgspec.Struct, frozen=True, tag="host", kw_only=True):
    """An agent's first word on a line."""

    protocol: int = PROTOCOL
    name: str
    slots: int
    running: tuple[int, ...] = ()  # ids
    ended: tuple[Ended, ...] = ()  # how those did that ran: who was told of it may be gone, and had not read it
    agent: str = ""  # another one for each agent, so that two of one name are told apart


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """This host lives; the processes of these ids are stopped."""

    paused: tuple[int, ...] = ()


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A member's process runs."""

    id: int
    pid: int


class DrainHost(msgspec.Struct, frozen=True, tag="drain_host"):
    """This host must go: let its members leave first."""


class EndRun(msgspec.Struct, frozen=True, tag="end_run"):
    """The launcher goes, and the run with it: on all hosts at once, or (`drain`) when all members have left."""

    drain: bool


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start this member."""

    term: int
    id: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End this member's process."""

    term: int
    id: int


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Nothing more will be started; without a reason, because the run has finished."""

    term: int
    reason: str = ""


class Look(msgspec.Struct, frozen=True, tag="look", kw_only=True):
    """Show me the run."""

    protocol: int = PROTOCOL


class Scale(msgspec.Struct, frozen=True, tag="scale", kw_only=True):
    """Let there be so many members."""

    protocol: int = PROTOCOL
    size: int


class Halt(msgspec.Struct, frozen=True, tag="halt", kw_only=True):
    """Let the run end, as its launcher would with EndRun."""

    protocol: int = PROTOCOL
    drain: bool = True


class Fetch(msgspec.Struct, frozen=True, tag="fetch", kw_only=True):
    """Tell me what members are made of, so that I can start some."""

    protocol: int = PROTOCOL


class Work(msgspec.Struct, frozen=True, tag="work", kw_only=True):
    """What an agent on another host needs to start members. Paths are the same there."""

    script: str  # a file, or a module's name
    args: tuple[str, ...] = ()
    module: bool = False
    cwd: str
    env: dict[str, str] = {}  # besides what there is on the host
    threads: int | None = None  # per member; None: its share of the host's cores
    most: int  # members of the run
    standbys: int = 0  # per host
    settings: Settings


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A host as the scheduler sees it."""

    name: str
    slots: int
    running: int  # members
    state: str  # up, silent, leaving, quarantined


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A member as the scheduler sees it."""

    id: int
    host: str
    pid: int
    state: str  # starting, arrived, ready, in, draining, leaving, drained, lost, finished
    since: float  # time.time()
    replaced: int = 0  # times that it was started again
    why: str = ""  # how it was lost last
    again_at: float = 0.0  # time.time() from which it may be started again; 0: it is not
    unsure: bool = False  # of one that is lost: how it ended may yet end the run instead


class Picture(msgspec.Struct, frozen=True, tag="picture", kw_only=True):
    """The run as the scheduler sees it."""

    term: int
    view: View | None
    least: int
    target: int
    most: int
    members: tuple[Seen, ...]
    hosts: tuple[Site, ...] = ()
    over: str | None = None  # why the run has ended; "": it finished

    @property
    def quarantined(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.hosts if site.state == "quarantined")


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What will be done about a wish."""

    text: str


FromMember = Arrive | Ready | Broken | Formed | Slow | Here | Going | Leave
FromAgent = Host | Beat | Started | Ended | DrainHost | EndRun
FromTool = Look | Scale | Halt | Fetch
ToScheduler = FromMember | FromAgent | FromTool
ToMember = Standing | NewView | Come | Drain | Noted | Refused
ToAgent = Start | Stop | Over | Refused
ToTool = Picture | Done | Work | Refused
Message = ToScheduler | ToMember | ToAgent | ToTool

_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    return _encode(message)


def decode(data: bytes | bytearray, kind: Any) -> Any:
    """The message in `data`, which must be one of a union of the above.

    >>> decode(encode(Ended(2, -9)), ToScheduler)
    Ended(id=2, code=-9, error='')
    """
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"malformed message ({error}): install the same version of paceline everywhere") from None
    protocol = getattr(message, "protocol", PROTOCOL)
    if protocol != PROTOCOL:
        raise ConfigError(
            f"this message speaks protocol {protocol}, the scheduler {PROTOCOL}: install the same version of paceline "
            "everywhere"
        )
    return message
