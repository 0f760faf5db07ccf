"""Local steps by their names in the literature: each is `Local` with other settings; see `local`."""

from __future__ import annotations

from paceline.codecs import Codec
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.averaging import Averaging
from paceline.strategies.hosting import Guests
from paceline.strategies.local import Local
from paceline.strategies.outer import Make, Outer
from paceline.strategies.reducers import LowRank
from paceline.strategies.schedule import Every, Overlap


def Average(  # noqa: N802
    every: Every | int | str = 500,
    average: Averaging | str = "mean",
    quorum: int = 0,
    grace_s: float = 10.0,
    guests: Guests | int | str = 0,
) -> Local:
    """Periodic parameter averaging: every so many steps, weights become the members' average.

    >>> Average(every=200, average="median").options["average"]
    'median'
    """
    return Local(every=every, average=average, quorum=quorum, grace_s=grace_s, guests=guests)


def PostLocal(  # noqa: N802
    warmup: int,
    every: Every | int | str = 50,
    average: Averaging | str = "mean",
    codec: Codec | LowRank | str | None = "none",
    overlap: Overlap | int | str = 0,
) -> Local:
    """All-reduce for the first `warmup` steps, while weights move fast; local SGD then."""
    return Local(every=every, average=average, codec=codec, overlap=overlap, warmup=warmup)


def DiLoCo(  # noqa: N802
    every: Every | int | str = 100,
    outer: Outer | Make | str | None = "nesterov",
    average: Averaging | str = "mean",
    codec: Codec | LowRank | str | None = "none",
    overlap: Overlap | int | str = 0,
    warmup: int = 0,
    inner: AllReduce | str | None = "none",
    quorum: int = 0,
    grace_s: float = 10.0,
    guests: Guests | int | str = 0,
) -> Local:
    """Many local steps, commonly of AdamW, and Nesterov's momentum (rate 0.7, momentum 0.9) at each round."""
    return Local(
        every=every,
        outer=outer,
        average=average,
        codec=codec,
        overlap=overlap,
        warmup=warmup,
        inner=inner,
        quorum=quorum,
        grace_s=grace_s,
        guests=guests,
    )


def SparseLoCo(  # noqa: N802
    every: Every | int | str = 50,
    density: float = 64 / 4096,
    average: Averaging | str = "mean",
    overlap: Overlap | int | str = 0,
    warmup: int = 0,
    inner: AllReduce | str | None = "none",
    quorum: int = 0,
    grace_s: float = 10.0,
    guests: Guests | int | str = 0,
) -> Local:
    """Of each 4096 differences the 64 largest travel, in two bits; what is unsaid decays, and takes the place of an
    outer momentum."""
    codec = f"topk({density}, values=2bit), decay=0.95"
    return Local(
        every=every,
        average=average,
        codec=codec,
        overlap=overlap,
        warmup=warmup,
        inner=inner,
        quorum=quorum,
        grace_s=grace_s,
        guests=guests,
    )
