"""Fewer bytes for a gradient: what travels between hosts instead of float32 numbers.

>>> make_codec("cast(to='fp16')").nbytes(100)
200
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.codecs.cast import Cast
from paceline.codecs.codec import Codec, Context, PayloadError, warm_up
from paceline.codecs.dgc import DGC
from paceline.codecs.nonzero import NonZero
from paceline.codecs.quantize import Quantize
from paceline.codecs.sampled import SampledTopK
from paceline.codecs.sign import Sign
from paceline.codecs.ternary import Ternary
from paceline.codecs.threshold import Threshold
from paceline.codecs.topk import TopK
from paceline.core.errors import ConfigError
from paceline.core.words import build

CODECS: dict[str, Callable[..., Codec]] = {
    "cast": Cast,
    "dgc": DGC,
    "nonzero": NonZero,
    "quantize": Quantize,
    "sampled_topk": SampledTopK,
    "sign": Sign,
    "ternary": Ternary,
    "threshold": Threshold,
    "topk": TopK,
}


def make_codec(words: Codec | str) -> Codec:
    """The codec that a user wrote as an object or in words."""
    return build(words, CODECS, "codec") if isinstance(words, str) else check_codec(words)


def check_codec(codec: Any) -> Any:
    """An object that can be one."""
    if isinstance(codec, type):
        raise ConfigError(f"codec={codec.__name__}: that is a class; write {codec.__name__}(), with its options")
    if not (hasattr(codec, "words") and hasattr(codec, "encode_into")):
        raise ConfigError(f'codec={codec!r}: give words such as "topk(0.01)", or an object such as Sign()')
    return codec


__all__ = [
    "CODECS",
    "DGC",
    "Cast",
    "Codec",
    "Context",
    "NonZero",
    "PayloadError",
    "Quantize",
    "SampledTopK",
    "Sign",
    "Ternary",
    "Threshold",
    "TopK",
    "check_codec",
    "make_codec",
    "warm_up",
]
