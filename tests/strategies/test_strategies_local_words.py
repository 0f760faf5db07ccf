"""What local steps are called, and settings that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.strategies import DiLoCo, Local, make_strategy, words_of
from paceline.strategies import choose as choose_strategy
from paceline.testing.together import together
from paceline.transport.group import Group
from tests.strategies._apart import Member, closing, net


@pytest.mark.parametrize(
    "words",
    [
        "local",
        "local(every='50..400')",
        "local(every=100, outer='nesterov(lr=0.7, momentum=0.9)')",
        "local(every=8, overlap='overlap(steps=2, fragments=2, merge=0.5)', codec='sign(block=1024), feedback=False')",
    ],
)
def test_what_a_strategy_is_called_makes_it_again(words: str) -> None:
    called = words_of(make_strategy(words))
    assert words_of(make_strategy(called)) == called
    assert words_of(make_strategy("sparseloco")).count("decay=0.95") == 1


def test_a_name_on_the_command_line_goes_before_another_in_the_script() -> None:
    script = DiLoCo(every=200, codec="quantize(4)")
    assert choose_strategy(script, "diloco") == (script, "")
    chosen, told = choose_strategy(Local(every=200), "diloco")
    assert "nesterov" in words_of(chosen)
    assert told
    assert choose_strategy(Local(every=200), "local(every=100)")[0].options["every"] == 100  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "a whole number of steps"),
        ({"every": 1.5}, "a whole number of steps"),
        ({"every": "400..50"}, "from at least 1 step"),
        ({"every": "drift(0)"}, "more than 0"),
        ({"outer": "nesterof"}, "did you mean 'nesterov'"),
        ({"outer": "adam(lr=-1)"}, "lr"),
        ({"outer": 3}, "give words such as"),
        ({"outer": lambda p: 3}, "not a torch.optim.Optimizer"),
        ({"average": "medain"}, "did you mean 'median'"),
        ({"codec": "auto"}, "name a codec"),
        ({"codec": "dgc(0.01)"}, "use topk"),
        ({"codec": "sign, decay=2"}, "from 0 to 1"),
        ({"codec": "sign, back=sign", "average": "median"}, "only sums travel"),
        ({"overlap": -1}, "a whole number"),
        ({"codec": "none, decay=0.9"}, "nothing is left unsaid"),
        ({"outer": "nesterov(lr=nan)"}, "not of the kind"),
        ({"overlap": 30}, "at most overlap=25"),
        ({"every": 3, "overlap": 1}, "a larger every"),
        ({"overlap": "overlap(5, merge=0)"}, "more than 0"),
        ({"warmup": -1}, "a whole number"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Local(**settings)


def test_members_with_unlike_settings_are_told() -> None:
    with pytest.raises(ConfigError, match="trains by every="):
        together(2, lambda group: Member(group, Local(every=2 + group.rank), net()))


def test_an_outer_optimizer_for_matrices_takes_those_and_says_what_else_there_is() -> None:
    def body(group: Group) -> torch.Tensor:
        with closing(Member(group, Local(every=2, outer="muon(lr=0.1)"), nn.Linear(6, 3, bias=False))) as member:
            member.train(3)
            member.strategy.together(end=True)
            return member.weights

    first, second = together(2, body)
    assert torch.equal(first, second)
    with pytest.raises(ConfigError, match=r"outer=muon.*2D"):
        together(1, lambda group: Member(group, Local(every=2, outer="muon"), net()))
