"""What the tests of several files share: one Slurm, since it takes long to start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.testing.slurm import Slurm
from tests.launch._slurm import Site, started


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with contextlib.closing(started(tmp_path_factory.mktemp("slurm"), *Slurm.PREEMPTS)) as running:
        yield running


@pytest.fixture
def site(slurm: Slurm, tmp_path: Path) -> Iterator[Site]:
    yield Site(tmp_path / "work", slurm)
    slurm.cancel_all()
