"""The private folder: it is gone when its server is, also when that was killed, and no living one loses its own."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import pytest
from _serving import Served, until

from paceline.serve.private import private_folder, remove_left


def test_what_is_left_goes_and_what_lives_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_folder() as lives:
        (lives / "weights").write_text("w")
        assert lives.stat().st_mode & 0o077 == 0
        left = lives.with_name(f"{lives.name}x")
        left.mkdir()
        (left / "weights").write_text("w")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        lives.with_name(f"{lives.name}.link").symlink_to(elsewhere)
        with private_folder() as second:
            assert not left.exists()
            assert elsewhere.exists()
            assert {path.name for path in tmp_path.glob("paceline-*")} >= {lives.name, second.name}
        remove_left(lives)
        assert (lives / "weights").exists()
        assert not second.exists()
    assert not lives.exists()


def folders(place: Path) -> set[Path]:
    return set(place.glob("*paceline-*"))


@pytest.mark.slow
def test_replicas_put_the_folder_of_a_killed_server_away(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    with Served(tmp_path, "--replicas", "2", env={"TMPDIR": str(tmp_path / "place")}) as served:
        served.wait()
        assert len(folders(tmp_path / "place")) == 1
        served.process.kill()
        until(lambda: not folders(tmp_path / "place"), "replicas that put the folder away")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_next_server_puts_away_what_nobody_could(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    env = {"TMPDIR": str(place)}
    with Served(tmp_path, "--replicas", "1", env=env) as lives:
        lives.wait()
        kept = folders(place)
        with Served(tmp_path, "--replicas", "1", env=env) as killed:
            killed.wait()
            replicas = killed.replicas()
            for pid in replicas:
                os.kill(pid, signal.SIGSTOP)
            killed.process.kill()
            killed.process.wait()
            for pid in replicas:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        left = folders(place) - kept
        assert len(left) == 1
        with Served(tmp_path, "--replicas", "1", env=env) as after:
            after.wait()
            assert not left & folders(place)
            assert kept < folders(place)
            assert after.stop() == 0
        assert folders(place) == kept
        assert lives.predict([[[1, 2, 3], [4, 5, 6]]])[0] == 200
        assert lives.stop() == 0
    assert not folders(place)
