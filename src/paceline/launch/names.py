"""The words that settings may be, known without importing what they stand for, so that a typing error costs
no time.

A test holds each list against the objects themselves.
"""

from __future__ import annotations

import re

from paceline.core.errors import ConfigError, nearest
from paceline.core.words import split

STRATEGIES = (
    "allreduce",
    "sync",
    "bounded",
    "async",
    "local",
    "average",
    "post_local",
    "diloco",
    "sparseloco",
    "async_local",
    "guest",
    "zero",
)
INCOMPLETE = ("bounded", "post_local", "guest")  # strategies that cannot do without an option
CODECS = (
    "none",
    "auto",
    "cast",
    "dgc",
    "lowrank",
    "nonzero",
    "quantize",
    "sampled_topk",
    "sign",
    "ternary",
    "threshold",
    "topk",
)
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
TRANSPORTS = ("auto", "own", "gloo", "nccl")
DEVICES = ("auto", "cpu", "cuda")
PROGRESS = ("auto", "rich", "plain", "off")
LR_RULES = ("keep", "linear", "sqrt")
STRAGGLERS = ("tell", "less", "drop")

_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]*")


def strategy(text: str) -> str:
    """`text`, if it begins with the name of a strategy; for its options see `beforehand`.

    >>> strategy("allreduce")
    'allreduce'
    """
    return _called(text, STRATEGIES, "strategy")


def codec(text: str) -> str:
    """
    >>> codec("topk(0.01), back=sign")
    'topk(0.01), back=sign'
    """
    first, behind = split(text, ("back", "feedback", "warmup", "decay"), "codec")
    for part in first, behind.get("back", "none"):
        _called(part, CODECS, "codec")
    return text


def precision(text: str) -> str:
    """
    >>> precision("bf16(weights)")
    'bf16(weights)'
    """
    return _called(text, PRECISIONS, "precision")


def _called(text: str, known: tuple[str, ...], kind: str) -> str:
    word = text.partition("(")[0].strip()
    if word not in known:
        raise ConfigError(f"unknown {kind} {word!r}: {nearest(word, known)}")
    if "(" in text and not text.rstrip().endswith(")"):
        raise ConfigError(f"cannot read {kind} {text!r}: write it as name or name(key=value)")
    return text


def transport(text: str) -> str:
    return _one_of(text, TRANSPORTS, "transport")


def progress(text: str) -> str:
    return _one_of(text, PROGRESS, "progress")


def lr_rule(text: str) -> str:
    return _one_of(text, LR_RULES, "lr_rule")


def stragglers(text: str) -> str:
    return _one_of(text, STRAGGLERS, "stragglers")


def device(text: str) -> str:
    """
    >>> device("cuda:1")
    'cuda:1'
    """
    if re.fullmatch(r"cuda:\d+", text):
        return text
    return _one_of(text, DEVICES, "device")


def run(text: str) -> str:
    """A run's name becomes a directory's."""
    if not _RUN.fullmatch(text) or len(text) > 200:
        raise ConfigError(f"name {text!r}: use up to 200 letters, digits and _.-+=@, beginning with a letter or digit")
    return text


def _one_of(text: str, known: tuple[str, ...], kind: str) -> str:
    if text not in known:
        raise ConfigError(f"unknown {kind} {text!r}: {nearest(text, known)}")
    return text
