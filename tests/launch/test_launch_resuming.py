"""A lost server: whether the run goes on, from where, and what is said to be lost."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.core.status import Status
from paceline.launch.resuming import Resuming, newest
from paceline.membership.agent import Ended, Outcome

WORKERS = 2


def ended(rank: int, code: int, at: float = 1.0, tail: tuple[str, ...] = ()) -> Ended:
    return Ended(rank=rank, code=code, seconds=at, tail=tail, asked=False, at=at)


def lost(server: int) -> Outcome:
    followed = ended(0, 1, at=0.5, tail=("paceline.core.errors.Interrupted: server 1 hung up",))
    return Outcome((followed, ended(WORKERS + server, -9)))


def save(directory: Path, number: int, step: int, versions: list[int]) -> None:
    place = directory / "checkpoints" / f"step-{step:08}"
    place.mkdir(parents=True, exist_ok=True)
    told = {"number": number, "step": step, "meta": {"epoch": 1, "versions": versions}, "files": []}
    (place / "manifest.json").write_text(json.dumps(told))


def at(directory: Path, server: int, version: int) -> None:
    Status(directory / "status" / f"rank-{WORKERS + server}").at(version, 0)


def test_what_was_lost_is_counted_from_the_checkpoint(tmp_path: Path) -> None:
    resuming = Resuming(tmp_path, WORKERS)
    assert resuming.after(lost(1)) == ""  # there is nothing to go on from
    save(tmp_path, 1, 460, [1800, 1840])
    at(tmp_path, 1, 1903)
    assert resuming.after(lost(1)) == (
        "server 1 was lost (killed by signal 9): versions 1841 to 1903 of its shard are lost; all members go on from "
        "the checkpoint at step 460 (time 1 of at most 3)"
    )
    at(tmp_path, 0, 7)  # of processes that began at that checkpoint
    assert "server 0 was lost (killed by signal 9): versions 1 to 7 of" in resuming.after(lost(0))
    save(tmp_path, 2, 465, [20, 20])
    at(tmp_path, 0, 20)
    assert "no version of it is lost; all members go on from the checkpoint at step 465" in resuming.after(lost(0))
    assert resuming.after(lost(0)) == ""  # three times are enough


def test_a_run_that_was_resumed_counts_from_where_it_began(tmp_path: Path) -> None:
    save(tmp_path, 1, 460, [1840])
    at(tmp_path, 0, 12)
    assert "versions 1 to 12 of its shard are lost" in Resuming(tmp_path, WORKERS).after(lost(0))


def test_only_a_server_is_a_reason(tmp_path: Path) -> None:
    save(tmp_path, 1, 460, [1840])
    resuming = Resuming(tmp_path, WORKERS)
    assert resuming.after(Outcome((ended(0, 1), ended(2, -9, at=2.0)))) == ""  # a worker failed before it
    assert resuming.after(Outcome((ended(0, 0), ended(2, 0)))) == ""
    assert resuming.after(Outcome((ended(2, -9),), stopped_by=15)) == ""


def test_the_checkpoint_written_last_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 4, 900, [])
    save(tmp_path, 5, 460, [3])
    (tmp_path / "checkpoints" / "step-00001000").mkdir()
    (tmp_path / "checkpoints" / "step-00001000" / "manifest.json").write_bytes(b"\xff{")
    found = newest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.step, found.versions) == (460, [3])
    assert newest(tmp_path / "nothing") is None
