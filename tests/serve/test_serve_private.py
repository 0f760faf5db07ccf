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
        lives.with_name(f"{lives.name}y").symlink_to(elsewhere)
        with private_folder() as second:
            assert not left.exists()
            assert elsewhere.exists()
            assert {path.name for path in tmp_path.glob("paceline-*[!y]")} >= {lives.name, second.name}
        remove_left(lives)
        assert (lives / "weights").exists()
        assert not second.exists()
    assert not lives.exists()


@pytest.mark.slow
def test_a_killed_server_leaves_no_weights(tmp_path: Path) -> None:
    """Its replicas put its folder away; if they are killed too, the next server does."""
    place = tmp_path / "place"
    place.mkdir()
    env = {"TMPDIR": str(place)}

    def folders() -> set[Path]:
        return set(place.glob("*paceline-*"))

    with Served(tmp_path, "--replicas", "2", env=env) as alone:
        alone.wait()
        assert len(folders()) == 1
        alone.process.kill()
        until(lambda: not folders(), "replicas that put the folder away")
    with Served(tmp_path, "--replicas", "1", env=env) as lives:
        lives.wait()
        kept = folders()
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
        left = folders() - kept
        assert len(left) == 1
        with Served(tmp_path, "--replicas", "1", env=env) as after:
            after.wait()
            assert not left & folders()
            assert kept < folders()
            assert after.stop() == 0
        assert folders() == kept
        assert lives.predict([[[1, 2, 3], [4, 5, 6]]])[0] == 200
        assert lives.stop() == 0
    assert not folders()
