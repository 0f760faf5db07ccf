"""Strategies that a test has attached are closed after it, as a run would.

torch's hooks keep what they call alive for good: the garbage collector does not see through them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.strategies import AllReduce


@pytest.fixture(autouse=True)
def closed_as_by_a_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    attached: list[AllReduce] = []
    attach = AllReduce.attach

    def noted(self: AllReduce, *args: object) -> None:
        attached.append(self)
        attach(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(AllReduce, "attach", noted)
    yield
    for strategy in attached:
        strategy.close()
