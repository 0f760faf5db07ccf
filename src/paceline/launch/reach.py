"""Where the scheduler of an elastic run is reached: scheduler.json in the run's directory.

Written by the launcher, read by `paceline scale` and `paceline status`, and only by whoever owns the run: the token is
in it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.core.directory import write_private
from paceline.core.errors import ConfigError

FILE = "scheduler.json"


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What scheduler.json holds."""

    address: str  # "ip:port"
    token: str


def write(directory: Path, reach: Reach) -> None:
    write_private(directory / FILE, msgspec.json.encode(reach))


def remove(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)


def read(directory: Path) -> Reach | None:
    """None where no scheduler runs; ConfigError where it is somebody else's."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Reach)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise ConfigError(
            f"{directory / FILE} is readable by its owner only, since the run's token is in it: run this as whoever "
            "started the run"
        ) from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{directory / FILE} cannot be read: {error}") from None
