"""Where am I: alone, under `paceline run`, or under torchrun. Starts and opens nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

from paceline.environment import alone, paceline, torchrun
from paceline.environment.place import Place, this_host

__all__ = ["Place", "detect", "this_host"]


def detect(env: Mapping[str, str] = os.environ) -> Place:
    """The place that the environment describes; our own launcher comes before torchrun, torchrun before none.

    >>> detect({}).kind
    'alone'
    """
    return paceline.detect(env) or torchrun.detect(env) or alone.detect(env)
