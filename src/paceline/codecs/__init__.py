"""Fewer bytes for a gradient: what travels between hosts instead of float32 numbers.

>>> make_codec("cast(to='fp16')").nbytes(100)
200
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.codecs.cast import Cast
from paceline.codecs.codec import Codec, Context, PayloadError
from paceline.codecs.dgc import DGC
from paceline.codecs.nonzero import NonZero
from paceline.codecs.quantize import Quantize
from paceline.codecs.sampled import SampledTopK
from paceline.codecs.sign import Sign
from paceline.codecs.ternary import Ternary
from paceline.codecs.threshold import Threshold
from paceline.codecs.topk import TopK
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
    return build(words, CODECS, "codec") if isinstance(words, str) else words


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
    "make_codec",
]
