"""What AllReduce is told of codecs, in words and as objects, and what it does with them before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.codecs import Context, Sign
from paceline.core.errors import ConfigError
from paceline.strategies import AllReduce, World, make_strategy
from paceline.testing.together import together
from paceline.transport.group import Group


def test_feedback_and_warmup_can_be_said_in_words() -> None:
    def body(group: Group) -> list[tuple[float, torch.Tensor]]:
        done = []
        for settings in {"codec": "sign,feedback=False , warmup=2"}, {"codec": "sign", "feedback": False, "warmup": 2}:
            model, strategy = nn.Linear(100, 30, bias=False), AllReduce(**settings)  # type: ignore[arg-type]
            torch.nn.init.ones_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            strategy.attach(model, optimizer, World(group))
            for step in range(4):
                optimizer.zero_grad()
                model(torch.arange(100.0) * (step + group.rank)).square().sum().mul(1e-6).backward()
                optimizer.step()
            done.append((float(strategy.readings()["residual_norm"]), model.weight.detach()))
        return done

    for (norm, said), (_, given) in together(2, body, hosts=["a", "b"]):
        assert norm == 0
        assert torch.equal(said, given)
    strategy = make_strategy(AllReduce(codec="topk(0.01)", warmup=5), "sign, feedback=True")
    assert isinstance(strategy, AllReduce)
    assert (strategy.method.words, strategy._feedback, strategy._warmup) == ("sign(block=1024)", True, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codec": 42}, 'give words such as "topk'),
        ({"codec": Sign}, r"that is a class; write Sign\(\)"),
        ({"codec": "sign", "back": Sign}, r"that is a class; write Sign\(\)"),
        ({"codec": "sign", "back": 3}, 'give words such as "topk'),
        ({"codec": "sign, back=sign", "back": "sign"}, "say it once"),
        ({"warmup": "a"}, "a whole number"),
        ({"warmup": 1.5}, "a whole number"),
        ({"warmup": True}, "a whole number"),
        ({"feedback": "no"}, "True, False, or None"),
        ({"feedback": 0}, "True, False, or None"),
        ({"bucket_mb": "x"}, "more than 0"),
        ({"bucket_mb": True}, "more than 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AllReduce(**settings)


class Noted(Sign):
    """Notes how many elements it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        self.given.append(x.numel())
        return super().encode_into(x, residual, out, context)


def test_kernels_are_loaded_before_anything_is_counted() -> None:
    def body(group: Group) -> tuple[list[int], list[int], dict[str, Any]]:
        codec, back, model = Noted(), Noted(), nn.Linear(100, 30)
        strategy = AllReduce(codec=codec, back=back)
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        return codec.given, back.given, strategy.readings()

    for there, home, readings in together(2, body, hosts=["a", "b"]):
        assert there
        assert home
        assert readings["encode_s"] == readings["decode_s"] == readings["residual_norm"] == 0
