"""Where workers of Ray Train learn member 0's address and token: a small actor that it owns, and that ends with it.

Ray's own traffic carries the token, encrypted only where the cluster is told to (RAY_USE_TLS).
"""

from __future__ import annotations

import sys
import time
from typing import Any

from paceline.core.errors import TimedOut
from paceline.environment.place import Place

_LOOK_S = 0.2
_ASK_S = 10.0
_written: list[Any] = []  # kept: an actor ends with its last handle


class Board:
    def __init__(self, address: str, token: str) -> None:
        self._written = (address, token)

    def read(self) -> tuple[str, str]:
        return self._written


def here(place: Place) -> str:
    """On which address member 0 listens."""
    return "127.0.0.1" if place.local_size == place.size else str(_ray().util.get_node_ip_address())


def write(place: Place) -> None:
    actor = _ray().remote(num_cpus=0)(Board)
    _written.append(actor.options(name=_name(place)).remote(place.rendezvous, place.token))


def read(place: Place, limit_s: float) -> tuple[str, str]:
    ray, deadline = _ray(), time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            address, token = ray.get(ray.get_actor(_name(place)).read.remote(), timeout=_ASK_S)
            return address, token
        except (ValueError, ray.exceptions.RayError):  # not there yet; or that of an attempt that has just ended
            time.sleep(_LOOK_S)
    raise TimedOut(f"member 0 of {place.job} has not said within {limit_s:g} s where it is: does it call join()?")


def _name(place: Place) -> str:
    return f"paceline {place.job}"


def _ray() -> Any:
    return sys.modules["ray"]
