"""A member's side of the meeting: from the place where it stands to the view that it is part of.

Called once by `paceline.join()`, before any group is formed. Under our own launcher the members meet at its
rendezvous, under an engine at member 0's (`kept`), under torchrun in torch.distributed's store; alone there is nobody
to meet.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.core.settings import Settings
from paceline.core.view import Member, View
from paceline.environment.place import Place
from paceline.membership.messages import Hello, Refused, Wait, Welcome, decode_answer, encode
from paceline.transport.address import is_loopback, split_address
from paceline.transport.channel import connect

_ANSWER_LIMIT_S = 30.0  # beyond the time that the rendezvous announces for itself

# The sockets of a member need the token, on which torchrun's members agree only here: hence the function.
Me: TypeAlias = Member | Callable[[str], Member]


class Meeting(msgspec.Struct, frozen=True):
    """What a member knows once all are there."""

    view: View
    settings: Settings  # the launcher's, or under torchrun those of member 0
    token: str
    replaces: bool = False  # lost members are started again
    late: bool = False  # this one was: the others are under way


def meet(place: Place, me: Me, settings: Settings | None = None) -> Meeting:
    """Meet the other members; `me` is this one, or a function that describes it, given the run's token.

    TimedOut names the members that did not arrive within `join_limit_s`; Interrupted one that ended before.

    >>> from paceline.environment import detect
    >>> meet(detect({}), Member(rank=0, host="here", pid=1)).view.size
    1
    """
    settings = settings or Settings()
    if place.kind == "alone":
        token = secrets.token_hex(32)
        return Meeting(View(number=1, members=(describe(me, token),)), settings, token)
    if place.kind == "torchrun" and not place.rendezvous:
        from paceline.membership import store  # imports torch

        return Meeting(*store.meet(place, lambda token: describe(me, token), settings))
    return _at_rendezvous(place, describe(me, place.token), settings)


def describe(me: Me, token: str) -> Member:
    return me if isinstance(me, Member) else me(token)


def _at_rendezvous(place: Place, me: Member, settings: Settings) -> Meeting:
    if me.rank != place.rank:
        raise ConfigError(f"member says rank={me.rank}, but its place is rank {place.rank}")
    with contextlib.closing(connect(place.rendezvous, place.token, settings.join_limit_s)) as channel:
        channel.name = f"the rendezvous at {place.rendezvous}"
        try:
            channel.send(encode(Hello(size=place.size, member=me)))
            answer = decode_answer(channel.recv(_ANSWER_LIMIT_S))
            if isinstance(answer, Wait):
                answer = decode_answer(channel.recv(answer.limit_s + _ANSWER_LIMIT_S))
        except TimedOut:
            keeper = "member 0" if place.keeps else "the launcher"
            raise TimedOut(f"the rendezvous at {place.rendezvous} does not answer: is {keeper} stopped?") from None
        except Interrupted as error:
            keeper = "member 0" if place.keeps else "the launcher"
            raise Interrupted(f"{keeper} went away while member {place.rank} joined: {error}") from None
    if isinstance(answer, Refused):
        raise answer.error()
    if not isinstance(answer, Welcome):
        raise ConfigError(f"unexpected answer from the rendezvous: {type(answer).__name__}")
    _check_addresses(answer.view)
    return Meeting(answer.view, answer.settings, place.token, answer.replaces, answer.late)


def _check_addresses(view: View) -> None:
    """Refuse members that the others cannot reach, before anybody waits for them."""
    if len(view.hosts()) == 1:
        return
    for member in view.members:
        if member.address and is_loopback(split_address(member.address)[0]):
            raise ConfigError(
                f"member {member.rank} on {member.host} can be reached at {member.address} only from its own host: the "
                "name of the rendezvous leads back to itself there; set MASTER_ADDR to an address of rank 0's host "
                "and MASTER_PORT to a free port, for all members"
            )
