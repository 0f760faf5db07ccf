"""Runs of one that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    runs: list[Any] = []

    def made(precision: str, name: str = "run", **settings: Any) -> Any:
        runs.append(paceline.join(precision=precision, root=str(tmp_path), name=name, progress="off", **settings))
        return runs[-1]

    yield made
    for run in runs:
        run.close()
