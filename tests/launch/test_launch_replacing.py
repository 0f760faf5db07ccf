"""How often lost workers are started again, when, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.status import BEFORE, SERVING, STARTING, Status
from paceline.launch.replacing import Replacements
from paceline.launch.spec import JobSpec, Replacing


class Told:
    def __init__(self, tmp_path: Path, workers: int = 2, **rules: int) -> None:
        self.lines: list[str] = []
        self.dir = tmp_path
        self.replacements = Replacements(Replacing(**rules), tmp_path, workers, self.lines.append)

    def does(self, rank: int, what: str) -> Status:
        status = Status(self.dir / "status" / f"rank-{rank}")
        status.set(what)
        return status


def test_the_pause_doubles_until_one_trains(tmp_path: Path) -> None:
    told = Told(tmp_path, replacements=9)
    told.does(1, "training")
    waits = [told.replacements.lost(1, "killed by signal 9")]
    for _ in range(3):  # each ends before it takes part
        told.replacements.started(1)
        waits.append(told.replacements.lost(1, "exit code 1"))
    assert waits == [0.5, 1.0, 2.0, 4.0]
    told.replacements.started(1)
    told.does(2, SERVING)
    coming = told.does(1, STARTING)
    coming.epoch = BEFORE
    coming.set("ready")
    told.replacements.look()
    assert list(told.replacements.joining) == [1]
    coming.epoch = 0
    coming.set("waiting for the other members at the hub")  # it may have trained nothing
    told.replacements.look()
    assert told.lines[-1] == "member 1 joined: 2 members train now"
    assert told.replacements.lost(1, "killed by signal 9") == 0.5


def test_what_the_lost_one_has_said_does_not_count_for_the_next(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.does(2, SERVING)
    lost = told.does(1, "training")
    told.replacements.lost(1, "killed by signal 9")
    told.replacements.started(1)
    lost.set("training")  # it may live on for a moment, on a host that is not reached
    told.replacements.look()
    assert list(told.replacements.joining) == [1]
    told.does(1, "training")
    told.replacements.look()
    assert list(told.replacements.joining) == []


def test_the_budget_and_the_least(tmp_path: Path) -> None:
    told = Told(tmp_path, workers=3, least=2, replacements=1)
    assert told.replacements.lost(2, "killed by signal 9") is not None
    assert told.replacements.lost(2, "killed by signal 9") is None
    assert told.lines[-1] == (
        "member 2 was killed by signal 9; the others go on without it: it was started again once already"
    )
    assert not told.replacements.reason
    told.replacements.lost(0, "exit code 1")
    assert told.replacements.lost(0, "exit code 1") is None
    assert told.replacements.reason == (
        "fewer than 2 members can go on: member 0 ended with exit code 1 (each is started again at most 1 times)"
    )


def test_it_begins_with_the_first_epoch(tmp_path: Path) -> None:
    told = Told(tmp_path)
    assert not told.replacements.begun
    told.does(2, "waiting for the first epoch to begin")
    assert not told.replacements.begun
    server = told.does(2, f"{SERVING}: 3 pushes applied")
    assert told.replacements.begun
    server.set("finished")
    assert told.replacements.begun
    assert not Told(tmp_path).replacements.begun  # the next one's server is another


def test_it_takes_servers() -> None:
    with pytest.raises(ConfigError, match="where there are server processes"):
        JobSpec(script="train.py", num_members=2, replacing=Replacing())
    with pytest.raises(ConfigError, match="least=3 of 2 members"):
        JobSpec(script="train.py", num_members=2, num_servers=1, replacing=Replacing(least=3))


def test_an_error_that_would_come_again_ends_the_run(tmp_path: Path) -> None:
    told = Told(tmp_path, workers=3, replacements=9)
    assert told.replacements.lost(1, 1, "lr=-1: give more") is None
    assert told.replacements.reason == "member 1 ended with an error that would come again: lr=-1: give more"
    assert told.lines == []
