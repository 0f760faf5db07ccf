"""A run's token that others were told of before the run was started."""

from __future__ import annotations

import os

from paceline.core.errors import ConfigError

_LEAST = 32  # characters of a token: 128 bits in hexadecimal digits


def told() -> str:
    """PACELINE_TOKEN of our environment; "": it is not set."""
    token = os.environ.get("PACELINE_TOKEN", "")
    if token and len(token) < _LEAST:
        raise ConfigError(
            f"PACELINE_TOKEN has {len(token)} characters, and whoever guesses it can take part: give at least {_LEAST} "
            "random ones (openssl rand -hex 32), or unset it to have one made"
        )
    return token
