"""Meeting in torch.distributed's store, as torchrun's members do. Forms no process group.

torchrun's own agent keeps the store, stops the members when one dies, and gives restarted ones a fresh
prefix. Where the store lives in member 0 instead, member 0 stays until the others have read everything.
"""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Callable

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from paceline.core.errors import ConfigError, TimedOut
from paceline.core.settings import Settings
from paceline.core.view import Member, View
from paceline.environment.place import Place
from paceline.membership.messages import Hello, decode_hello, encode
from paceline.membership.rendezvous import missing_message

_opened: list[Store] = []  # one per process, kept: it may serve the others
_round = 0


class _Opening(msgspec.Struct, frozen=True):
    """What member 0 lays down for all."""

    token: str
    settings: Settings


def meet(place: Place, describe: Callable[[str], Member], settings: Settings) -> tuple[View, Settings, str]:
    """The view, member 0's settings, and the token that member 0 made."""
    global _round
    _round += 1
    deadline = time.monotonic() + settings.join_limit_s
    store = PrefixStore(f"paceline/{_round}", _open(settings.join_limit_s))
    if place.rank == 0:
        store.set("opening", msgspec.json.encode(_Opening(secrets.token_hex(32), settings)).decode())
    _wait(store, {0: "opening"}, deadline, place.size, settings)
    opening = msgspec.json.decode(store.get("opening"), type=_Opening)

    me = describe(opening.token)
    if store.add(f"taken/{me.rank}", 1) > 1:
        raise ConfigError(
            f"rank {me.rank} is taken: a program that a member starts inherits its place; clear RANK for it"
        )
    store.set(f"member/{me.rank}", encode(Hello(size=place.size, member=me)).hex())
    keys = {rank: f"member/{rank}" for rank in range(place.size)}
    _wait(store, keys, deadline, place.size, settings)
    members = tuple(decode_hello(bytes.fromhex(store.get(key).decode())).member for key in keys.values())

    store.add("read", 1)
    if place.rank == 0:
        while store.add("read", 0) < place.size and time.monotonic() < deadline:
            time.sleep(0.01)
    return View(number=_round, members=members), opening.settings, opening.token


def _open(limit_s: float) -> Store:
    if not _opened:
        try:
            store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=limit_s)))
        except (RuntimeError, ValueError) as error:  # torch's own errors of the store are RuntimeErrors
            reason = str(error).splitlines()[0]
            raise TimedOut(
                f"the members did not meet in torchrun's store within {limit_s:g} s: {reason} "
                f"Check MASTER_ADDR and MASTER_PORT, and that all members were started"
            ) from None
        _opened.append(store)
    return _opened[0]


def _wait(store: Store, keys: dict[int, str], deadline: float, size: int, settings: Settings) -> None:
    left = max(0.01, deadline - time.monotonic())
    try:
        store.wait(list(keys.values()), datetime.timedelta(seconds=left))
    except RuntimeError:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        raise TimedOut(missing_message(missing, settings.join_limit_s, size)) from None
