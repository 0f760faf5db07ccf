"""The precision that a run's models compute in, in words: fp32, bf16, bf16(weights), fp16, fp8.

Known without torch, so that `paceline run` can refuse a typing error before anything is started. What the words do to
a model is in `autocast`, `scaling`, `masters` and `fp8`, put together by `precise`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.core.words import build, finite, whole

Kind = Literal["fp32", "bf16", "fp16", "fp8"]
SCALE = 65536.0
EVERY = 2000


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What a model computes in, and what its parameters are."""

    kind: Kind
    weights: bool = False  # parameters are bf16 too, and the optimizer has float32 masters of them
    scale: float = SCALE  # of fp16, to begin with
    every: int = EVERY  # of fp16: after so many good steps the scale is doubled

    @property
    def words(self) -> str:
        """As in the settings.

        >>> make_precision("bf16( weights )").words, make_precision("fp16(1024)").words
        ('bf16(weights)', 'fp16(scale=1024)')
        """
        said = ["weights"] * self.weights
        said += [f"scale={self.scale:g}"] * (self.scale != SCALE) + [f"every={self.every}"] * (self.every != EVERY)
        return f"{self.kind}({', '.join(said)})" if said else self.kind

    @property
    def scales(self) -> bool:
        return self.kind == "fp16"

    def check(self, settings: Settings) -> None:
        """Refuse settings that cannot be right with it."""
        if self.scales and settings.check_finite:
            raise ConfigError(
                "precision fp16 and check_finite: with a loss scale a gradient that is not finite is ordinary, and its "
                "step is skipped; leave check_finite out, or use bf16"
            )
        if self.scales and settings.strategy.partition("(")[0].strip() == "zero":
            raise ConfigError(
                f"precision {self.words} and strategy {settings.strategy}: zero steps parts by itself, and does not "
                "skip steps yet whose gradients are not finite: use bf16, or the strategy allreduce"
            )
        if (self.weights or self.scales or self.kind == "fp8") and any(
            cut in settings.mesh for cut in ("shard", "split")
        ):
            raise ConfigError(
                f"precision {self.words} and mesh {settings.mesh}: parts of parameters are kept and summed in float32, "
                "and models compute in fp32 or bf16: use one of these"
            )
        if self.scales and "stage" in settings.mesh:
            raise ConfigError(
                f"precision {self.words} and mesh {settings.mesh}: losses are scaled where a whole model is called, "
                "and stages are not, so that small gradients would be lost: use bf16"
            )
        if self.weights and settings.strategy.partition("(")[0].strip() != "allreduce":
            raise ConfigError(
                f"precision {self.words} and strategy {settings.strategy}: float32 masters are with the member whose "
                "optimizer steps, while here the parameters themselves are what members agree on, and in bf16 small "
                f"changes of them would be lost. Use {self.kind}, or the strategy allreduce"
            )


def make_precision(text: str) -> Precision:
    """The precision that `text` names.

    >>> make_precision("bf16").words
    'bf16'
    >>> make_precision("bf61")
    Traceback (most recent call last):
      ...
    paceline.core.errors.ConfigError: unknown precision 'bf61': did you mean 'bf16'?
    """
    return build(text, _KNOWN, "precision")


def _fp32() -> Precision:
    return Precision(kind="fp32")


def _with_weights(kind: Kind) -> Callable[..., Precision]:
    def make(what: str = "") -> Precision:
        if what not in ("", "weights"):
            raise ConfigError(f"precision {kind}({what}): write {kind}, or {kind}(weights) for parameters in bf16 too")
        return Precision(kind=kind, weights=what == "weights")

    return make


def _fp16(scale: Any = SCALE, every: int = EVERY) -> Precision:
    if scale == "weights":
        raise ConfigError(
            "precision fp16(weights): parameters in fp16 would lose small gradients for good; use bf16(weights)"
        )
    if not finite(scale) or not scale > 0:
        raise ConfigError(f"precision fp16(scale={scale!r}): must be more than 0, such as {SCALE:g}")
    if not whole(every) or every < 1:
        raise ConfigError(f"precision fp16(every={every!r}): a whole number of steps is needed, such as {EVERY}")
    return Precision(kind="fp16", scale=float(scale), every=every)


_KNOWN: dict[str, Callable[..., Precision]] = {
    "fp32": _fp32,
    "bf16": _with_weights("bf16"),
    "fp16": _fp16,
    "fp8": _with_weights("fp8"),
}
