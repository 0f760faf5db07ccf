"""Precisions in words, and what is refused before anything starts."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.launch import beforehand, names
from paceline.parallel import precision
from paceline.parallel.precision import make_precision


def test_the_command_line_knows_them_all() -> None:
    assert tuple(precision._KNOWN) == names.PRECISIONS


@pytest.mark.parametrize("words", ["fp32", "bf16", "bf16(weights)", "fp16", "fp16(scale=8)", "fp16(every=5)", "fp8"])
def test_words_say_what_was_made(words: str) -> None:
    assert make_precision(words).words == words
    assert make_precision(make_precision(words).words) == make_precision(words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("float16", "unknown precision 'float16'"),
        ("bf16(masters)", r"bf16\(weights\)"),
        ("fp16(weights)", r"use bf16\(weights\)"),
        ("fp16(scale=0)", "more than 0"),
        ("fp16(every=1.5)", "whole number"),
        ("fp32(weights)", "too many"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_precision(words)


def test_mixes_that_cannot_be_right_are_refused(join) -> None:
    with pytest.raises(ConfigError, match="check_finite"):
        make_precision("fp16").check(Settings(check_finite=True))
    with pytest.raises(ConfigError, match="skip steps"):
        beforehand.check(Settings(precision="fp16", strategy="zero(stage=1)"))
    with pytest.raises(ConfigError, match="mesh shard=2"):
        beforehand.check(Settings(precision="bf16(weights)", mesh="shard=2"))
    with pytest.raises(ConfigError, match="small gradients would be lost"):
        beforehand.check(Settings(precision="fp16", mesh="stage=2"))
    for strategy in "async", "sync", "diloco":
        with pytest.raises(ConfigError, match="masters"):
            beforehand.check(Settings(precision="bf16(weights)", strategy=strategy))
        beforehand.check(Settings(precision="bf16", strategy=strategy))
    beforehand.check(Settings(precision="bf16(weights)", strategy="allreduce(bucket_mb=8)"))
    with pytest.raises(ConfigError, match="masters"):
        join("bf16(weights)", strategy=paceline.Async())
    run, model = join("fp16"), torch.nn.Linear(2, 2).half()
    with pytest.raises(ConfigError, match="float16"):
        run.optimizer(torch.optim.SGD(model.parameters()), model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which may have fp8")
def test_fp8_says_which_devices_have_it(join) -> None:
    with pytest.raises(ConfigError, match=r"8\.9 or later .*this run computes on cpu"):
        join("fp8")
