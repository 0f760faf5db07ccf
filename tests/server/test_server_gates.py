"""Gates in words: what makes no sense is refused in one sentence that says what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.server.gates import Together, Within, make_gate


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bounded", r"missing.*'staleness'. Write it as bounded\(staleness\)"),
        ("bounded(1.5)", r"bounded\(staleness=1.5\): a whole number"),
        ("bounded(-1)", r"bounded\(staleness=-1\): a whole number of steps is needed, 0 or more"),
        ("bounded(True)", r"bounded\(staleness=True\)"),
        ("bounded(nan)", r"bounded\(staleness='nan'\)"),
        ("bounded(4, 5)", r"too many.*bounded\(staleness\)"),
        ("sync(backups=1.5)", r"sync\(backups=1.5\): a whole number"),
        ("sync(True)", r"sync\(backups=True\)"),
        ("async(3)", "too many.*Write it as async$"),
        ("async(correct='dana')", "no option 'correct': it has none"),
        ("boundd(4)", "did you mean 'bounded'"),
    ],
)
def test_senseless_gates_are_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_gate(words)


@pytest.mark.parametrize("number", [1.5, -1, True, float("nan"), "4", None])
@pytest.mark.parametrize("kind", [Together, Within])
def test_so_are_senseless_objects(kind: Any, number: Any) -> None:
    with pytest.raises(ConfigError, match="a whole number of"):
        kind(number)


@pytest.mark.parametrize("words", ["sync(backups=0)", "sync(backups=2)", "bounded(staleness=0)", "async"])
def test_words_make_the_same_again(words: str) -> None:
    assert make_gate(words).words == words
