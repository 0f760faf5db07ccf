"""The token that follows from a user's secret, and where member 0 listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec
import pytest

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.environment.place import Place, this_host
from paceline.membership import kept, settle

JOB = "Slurm job 12, step 0"


def test_the_token_follows_from_job_and_secret(tmp_path):
    mine, again = kept.token_of(JOB, tmp_path / "a"), kept.token_of(JOB, tmp_path / "a")
    assert mine == again
    assert len(mine) == 64
    assert kept.token_of("Slurm job 12, step 1", tmp_path / "a") != mine
    assert kept.token_of(JOB, tmp_path / "b") != mine
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["secret"]
    assert (tmp_path / "a/secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_members_that_make_the_secret_at_once_agree(tmp_path):
    code = "import sys, pathlib; from paceline.membership import kept; input()\n"
    code += f"print(kept.token_of({JOB!r}, pathlib.Path(sys.argv[1])))"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(tmp_path / "home")]
    members = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for member in members:
        member.stdin.write("go\n")
        member.stdin.flush()
    tokens = {member.communicate(timeout=60)[0] for member in members}
    assert len(tokens) == 1
    assert tokens != {""}


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    kept.token_of(JOB, tmp_path)
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(ConfigError, match=r"must belong to you alone.*chmod 600"):
        kept.token_of(JOB, tmp_path)


def test_a_home_that_cannot_be_written_to_asks_for_a_token(tmp_path):
    (tmp_path / "home").touch()  # a file, where a directory would have to be
    with pytest.raises(ConfigError, match=rf"^the members of {JOB} need a token.*set PACELINE_TOKEN"):
        kept.token_of(JOB, tmp_path / "home")


def place(**more):
    values = {"kind": "slurm", "job": JOB, "size": 2, "local_size": 1, "host": this_host(), "keeps": True, "token": "t"}
    return Place(**(values | more))


@pytest.fixture
def opened(monkeypatch):
    """What settle opens, closed at the end."""
    made: dict[str, kept.Rendezvous] = {}
    monkeypatch.setattr(kept, "_kept", made)
    yield made
    for rendezvous in made.values():
        rendezvous.close()


def free_port():
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        return sock.getsockname()[1]


def test_member_0_of_one_host_listens_on_loopback(opened):
    port = free_port()
    settled = settle(place(local_size=2, rendezvous=f"127.0.0.1:{port}"), Settings())
    assert settled.rendezvous == f"127.0.0.1:{port}"
    (rendezvous,) = opened.values()
    assert rendezvous.address == f"127.0.0.1:{port}"


def test_a_name_that_leads_back_to_itself_is_no_address_for_others(opened):
    """As on Debian, where a host's own name is a loopback address."""
    port = free_port()
    settle(place(rendezvous=f"localhost:{port}"), Settings())
    (rendezvous,) = opened.values()
    assert rendezvous.address == f"0.0.0.0:{port}"


def test_the_others_open_nothing_and_get_the_token(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settled = settle(place(rank=1, rendezvous="n1:29400", token=""), Settings())
    assert settled.token == kept.token_of(JOB, tmp_path / "paceline")
    assert msgspec.structs.replace(settled, token="") == place(rank=1, rendezvous="n1:29400", token="")
    assert not opened


def test_what_is_not_kept_by_member_0_stays_as_it_is():
    ours = Place(kind="paceline", rendezvous="10.0.0.1:1", token="t", size=2)
    assert settle(ours, Settings()) is ours


def test_names_that_are_not_known():
    with pytest.raises(
        ConfigError, match=r"keeps the rendezvous on the host 'nowhere.invalid', whose name is not known"
    ):
        settle(place(rendezvous="nowhere.invalid:29400"), Settings())
    pod = place(kind="kubernetes", rank=1, rendezvous="nowhere.invalid:29400")
    with pytest.raises(
        ConfigError, match=r"first pod, 'nowhere.invalid', was not known within 0.01 s.*headless service"
    ):
        settle(pod, Settings(join_limit_s=0.01))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to own a file of another user")
def test_a_secret_of_another_user_is_refused(tmp_path):
    kept.token_of(JOB, tmp_path)
    os.chown(tmp_path / "secret", 12345, 12345)
    with pytest.raises(ConfigError, match="must belong to you alone"):
        kept.token_of(JOB, tmp_path)
