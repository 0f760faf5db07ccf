"""Members that an engine started, with no launcher of ours: member 0 keeps the rendezvous, and all know the token.

The token is the one in PACELINE_TOKEN; else, under Slurm and MPI, it follows from the job and from a secret in the
user's home, which is made when it is first needed: who can read that file is the user. In Ray Train it is made by
member 0 and handed on with the address (`board`). In pods it is demanded by `environment.kubernetes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import time
from pathlib import Path

import msgspec

from paceline.core.directory import write_private
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.environment.place import Place
from paceline.membership.rendezvous import Rendezvous
from paceline.transport.address import is_loopback, join_address, split_address
from paceline.transport.wires import own_address

_LOOK_S = 0.5
_kept: dict[str, Rendezvous] = {}  # for the life of the process: who comes twice is told so


def settle(place: Place, settings: Settings) -> Place:
    """The place with the address and the token by which the members meet; with member 0 the rendezvous is open then."""
    if not place.keeps:
        return place
    if place.kind == "ray" and not place.rendezvous:
        from paceline.membership import board

        if place.rank:
            address, token = board.read(place, settings.join_limit_s)
            return msgspec.structs.replace(place, rendezvous=address, token=token)
        place = msgspec.structs.replace(place, token=place.token or secrets.token_hex(32))
        place = _opened(place, settings, board.here(place), 0)
        board.write(place)
        return place
    place = msgspec.structs.replace(place, token=place.token or token_of(place.job))
    if place.rank == 0:
        host, port = split_address(place.rendezvous)
        return _opened(place, settings, _interface(place, host), port)
    if place.kind == "kubernetes":
        _await_name(split_address(place.rendezvous)[0], settings.join_limit_s)
    return place


def token_of(job: str, home: Path | None = None) -> str:
    """The token that follows from the job and from the user's secret."""
    path = (home or _home()) / "secret"
    try:
        secret = _read(path) or _make(path)
    except OSError as error:
        raise ConfigError(
            f"the members of {job} need a token, which would follow from the secret in {path}: {error.strerror}; set "
            "PACELINE_TOKEN to the same long random text for all members (openssl rand -hex 32)"
        ) from None
    return hmac.digest(secret, f"paceline run of {job}".encode(), hashlib.sha256).hex()


def _home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "paceline"


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        info = path.stat()
        if info.st_uid != os.getuid() or info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{path} must belong to you alone, as runs are entered with it: chmod 600 {path}")
        return path.read_bytes()
    return b""


def _make(path: Path) -> bytes:
    """Made by one process, whichever is first; the others read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f"secret.{socket.gethostname()}.{os.getpid()}")
    write_private(own, secrets.token_bytes(32))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink()
    return _read(path)


def _opened(place: Place, settings: Settings, host: str, port: int) -> Place:
    if place.rendezvous not in _kept:
        try:
            _kept[place.rendezvous] = Rendezvous(place.size, settings, place.token, host, port=port)
        except ConfigError as error:
            raise ConfigError(
                f"member 0 of {place.job} keeps the rendezvous at {place.rendezvous}, and {error}: set MASTER_ADDR to "
                "an address of its host and MASTER_PORT to a free port, for all members"
            ) from None
    bound, port = split_address(_kept[place.rendezvous].address)
    mine = "127.0.0.1" if bound == "0.0.0.0" else bound
    return msgspec.structs.replace(place, rendezvous=join_address(mine, port))


def _interface(place: Place, host: str) -> str:
    """Where member 0 listens: as the others are told, on all interfaces only where that name leads back to itself."""
    if place.local_size == place.size:
        return "127.0.0.1"
    if place.kind == "kubernetes" and place.other_host:  # its own name may not be known yet
        return own_address(place.other_host)
    try:
        found = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise ConfigError(
            f"member 0 of {place.job} keeps the rendezvous on the host {host!r}, whose name is not known "
            f"({error.strerror}): set MASTER_ADDR to its address and MASTER_PORT to a free port, for all members"
        ) from None
    return "0.0.0.0" if is_loopback(found) else found


def _await_name(host: str, limit_s: float) -> None:
    """A pod's name is known once the pod has an address."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(host, 0)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the name of the first pod, {host!r}, was not known within {limit_s:g} s ({error.strerror}): is "
                    "there a headless service with publishNotReadyAddresses, and has the pod started?"
                ) from None
        time.sleep(_LOOK_S)
