"""How gradients are to travel, as a user says it: a codec, perhaps another one for the way back, or something else.

>>> Method.of("sign").words
'sign(block=1024)'
>>> Method.of("quantize(4)", back="quantize(8)").words
'quantize(bits=4, block=256), back=quantize(bits=8, block=256)'
>>> Method.of("sign, back=quantize(8)").back.words
'quantize(bits=8, block=256)'
>>> Method.of("lowrank(4)").words
'lowrank(rank=4)'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.codecs import CODECS, Codec, check_codec, make_codec
from paceline.core.errors import ConfigError, nearest
from paceline.core.words import build, split

FIDELITIES = ("exact", "high", "low")


@dataclass(frozen=True)
class LowRank:
    """Gradients of matrices as products of two thin ones (PowerSGD); see `low_rank`.

    Args:
        rank: columns of the thin matrices.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"lowrank(rank={self.rank!r}): a whole number of at least 1 is needed")

    @property
    def words(self) -> str:
        return f"lowrank(rank={self.rank})"


@dataclass(frozen=True)
class Auto:
    """Whatever is expected to be the fastest, measured in the first steps; see `auto`.

    Args:
        fidelity: exact: what gives the same sums; high: also what is within a hundredth of the largest gradient of a
            block; low: anything that trains with error feedback.
    """

    fidelity: str = "low"

    def __post_init__(self) -> None:
        if self.fidelity not in FIDELITIES:
            raise ConfigError(f"auto(fidelity={self.fidelity!r}): {nearest(str(self.fidelity), FIDELITIES)}")

    @property
    def words(self) -> str:
        return f"auto(fidelity={self.fidelity})"


OTHERS: dict[str, Callable[..., Any]] = {"auto": Auto, "lowrank": LowRank}
KNOWN: Mapping[str, Callable[..., Any]] = {**CODECS, **OTHERS}


@dataclass(frozen=True)
class Method:
    """A codec, and the one in which sums are sent back; None: gradients as they are."""

    codec: Codec | LowRank | Auto | None = None
    back: Codec | None = None

    @classmethod
    def of(cls, codec: Codec | LowRank | Auto | str | None, back: Codec | str | None = None) -> Method:
        """From objects or words; "none" and "" are None. Words may name both: "sign, back=sign"."""
        if isinstance(codec, str):
            codec, said = split(codec, ("back",), "codec")
            if back is not None and said:
                raise ConfigError(f"back={back!r} and back={said['back']} behind the codec: say it once")
            back = said.get("back", back)
        chosen: Any = codec
        if isinstance(codec, str) and codec not in ("", "none"):
            chosen = build(codec, KNOWN, "codec")
        elif codec in (None, "", "none"):
            chosen = None
        elif not isinstance(codec, LowRank | Auto):
            chosen = check_codec(codec)
        method = cls(chosen, None if back in (None, "", "none") else make_codec(back))
        if method.back and (method.codec is None or isinstance(method.codec, LowRank | Auto)):
            name = method.codec.words if method.codec else "none"
            raise ConfigError(f"back={method.back.words}: with codec={name} nothing is encoded on the way back")
        if method.back and method.back.rows > 1:
            raise ConfigError(f"back={method.back.words}: it is for gradients, not for their sums")
        return method

    @property
    def words(self) -> str:
        if self.codec is None:
            return "none"
        return self.codec.words + (f", back={self.back.words}" if self.back else "")

    def feeds(self, feedback: bool | None) -> bool:
        """Whether what it leaves unsaid is kept; `feedback` None: where the codec is biased."""
        if self.codec is None or isinstance(self.codec, Auto):
            return False
        biased = isinstance(self.codec, LowRank) or not self.codec.unbiased
        return biased if feedback is None else feedback


_EXACT = (Method(), Method.of("nonzero"))
_HIGH = (Method.of("cast(bf16)"), Method.of("quantize(8)"), Method.of("quantize(8)", back="quantize(8)"))
_LOW = (
    Method.of("quantize(4)", back="quantize(4)"),
    Method.of("sign"),
    Method.of("sign", back="sign"),
    Method.of("topk(0.01, values=int8)"),
    Method.of("topk(0.01, values=int8)", back="topk(0.02, values=int8)"),
    Method.of("lowrank(2)"),
)
CANDIDATES = {"exact": _EXACT, "high": (*_EXACT, *_HIGH), "low": (*_EXACT, *_HIGH, *_LOW)}
