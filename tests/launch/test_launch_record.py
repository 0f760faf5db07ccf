"""A run's record on a disk that has no room left."""

from __future__ import annotations

import os

import pytest

from paceline.cli.status import describe
from paceline.core.settings import Settings
from paceline.core.status import Status
from paceline.environment import this_host
from paceline.launch.record import Record, read
from paceline.testing.disk import SmallDisk

_BLOCK = 4096


@pytest.mark.skipif(bool(SmallDisk.missing()), reason=SmallDisk.missing())
@pytest.mark.parametrize("room", [True, False])
def test_how_a_run_ended_is_told_after_a_full_disk(room):
    with SmallDisk(1 << 20) as disk:
        settings = Settings().with_(root=str(disk.dir), name="x")
        with Record(settings, "train.py", 1) as kept:
            kept.run.command.append("")
            kept.started([os.getpid()])
            if not room:  # in the block that run.json has
                kept.run.command[-1] = "-" * (_BLOCK - (kept.dir / "run.json").stat().st_size)
                kept.started([os.getpid()])
            before = (kept.dir / "run.json").read_bytes()
            disk.fill()
            kept.finish(3 if room else 0)
            disk.free()
            assert not list(kept.dir.glob(".run.json.*"))
        if room:
            assert read(kept.dir) == kept.run
            assert "ended with exit code 3 after" in describe(kept.dir)[0]
            return
        assert (kept.dir / "run.json").read_bytes() == before
        assert "not running: its launcher was killed" in describe(kept.dir)[0]
        Status(kept.dir / "status" / "rank-0", this_host()).set("finished")
        assert "finished, as its members say" in describe(kept.dir)[0]
