"""What is said at the end of a run that failed."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.ending import failure
from paceline.membership.agent import Ended, Outcome


def said(*, code: int, tail: tuple[str, ...] = ()) -> str:
    first = Ended(rank=0, code=code, seconds=1.0, tail=tail, asked=False, at=0.0)
    return failure(Outcome(ended=(first,)), first, {0: Path("rank-0.log")}, workers=1, again=[])


def test_too_little_memory_names_what_says_the_mesh_that_would_do() -> None:
    assert "`paceline plan memory` says which mesh would do" in said(code=-9)
    device = said(code=1, tail=("  loss.backward()", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"))
    assert "(`paceline plan memory` says what each strategy and mesh needs, and the smallest that would do)" in device
    assert "plan memory" not in said(code=1, tail=("ValueError: no",))
