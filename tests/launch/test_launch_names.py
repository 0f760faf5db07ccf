"""The words that the command line knows without importing anything are those of the objects themselves."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.launch import beforehand, names
from paceline.strategies import STRATEGIES, make_strategy
from paceline.strategies.reducers.method import KNOWN
from paceline.train import pacing, rates
from paceline.train.join import TRANSPORTS


def test_names_are_in_step():
    assert sorted(names.STRATEGIES) == sorted(STRATEGIES)
    assert sorted(names.CODECS) == sorted(["none", *KNOWN])
    assert sorted(names.TRANSPORTS) == sorted(TRANSPORTS)
    assert names.STRAGGLERS == pacing.RULES
    assert names.LR_RULES == rates.RULES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sign,back=topc", "did you mean 'topk'"),
        ("sign, warm=3", "did you mean 'warmup'"),
        ("sign, back", "behind the first name"),
        ("sign, back=", "behind the first name"),
        ("sign,back=sign,back=sign", "say back once"),
    ],
)
def test_what_is_said_behind_a_codec_is_read_without_torch(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names.codec(words)


@pytest.mark.parametrize("codec", ["sign,back=sign", "sign , back = topk(0.01, values=int8) , warmup=3", "nonzero"])
def test_blanks_do_not_matter(codec: str) -> None:
    assert names.codec(codec) == codec
    beforehand.check_strategy("allreduce", codec)


@pytest.mark.parametrize("codec", ["auto", "lowrank", "lowrank(2)", "sign,warmup=3"])
@pytest.mark.parametrize("strategy", ["sync", "bounded(staleness=2)", "async"])
def test_servers_refuse_what_is_for_all_reduce_before_anything_starts(strategy: str, codec: str) -> None:
    with pytest.raises(ConfigError, match="for all-reduce"):
        beforehand.check_strategy(strategy, codec)
    beforehand.check_strategy(strategy, "sign")
    beforehand.check_strategy(strategy, "none")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_that_lacks_an_option_is_refused_before_anything_starts(strategy: str) -> None:
    """In the words of whoever makes it; the others need none."""
    refused = ""
    try:
        make_strategy(strategy)
    except ConfigError as error:
        refused = str(error)
    assert bool(refused) == (strategy in names.INCOMPLETE)
    if refused:
        with pytest.raises(ConfigError) as said:
            beforehand.check_strategy(strategy)
        assert str(said.value) == refused


@pytest.mark.parametrize("codec", ["sign, warmup=x", "sign, warmup=-1", "sign, feedback=no"])
def test_what_cannot_be_said_of_a_codec_is_refused_before_anything_starts(codec: str) -> None:
    with pytest.raises(ConfigError, match=r"warmup|feedback"):
        beforehand.check_strategy("allreduce", codec)
