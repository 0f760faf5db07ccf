"""The words that the command line knows without importing anything are those of the objects themselves."""

from __future__ import annotations

from paceline.launch import names
from paceline.strategies import STRATEGIES
from paceline.strategies.reducers.method import KNOWN
from paceline.train.join import TRANSPORTS


def test_names_are_in_step():
    assert sorted(names.STRATEGIES) == sorted(STRATEGIES)
    assert sorted(names.CODECS) == sorted(["none", *KNOWN])
    assert sorted(names.TRANSPORTS) == sorted(TRANSPORTS)
