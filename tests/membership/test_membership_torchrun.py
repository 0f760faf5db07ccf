"""Members that torchrun started meet in its store."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from torch.distributed import TCPStore

SCRIPT = """
    import os
    from paceline.core.settings import Settings
    from paceline.core.view import Member
    from paceline.environment import detect
    from paceline.membership import meet
    import torch.distributed as dist

    place = detect()
    for round in (1, 2):
        settings = Settings(seed=10 * round + place.rank, join_limit_s=30)
        meeting = meet(
            place,
            lambda token: Member(rank=place.rank, host=place.host, pid=os.getpid(), address=token),
            settings,
        )
        assert meeting.view.number == round
        assert meeting.view.size == place.size == 2
        assert [m.rank for m in meeting.view.members] == [0, 1]
        assert meeting.view.members[place.rank].pid == os.getpid()
        assert {m.address for m in meeting.view.members} == {meeting.token}
        assert meeting.settings.seed == 10 * round, meeting.settings  # member 0's
    assert not dist.is_initialized()
    print(f"{place.kind} {place.rank} met\\n", end="", flush=True)
"""


def clean_environment():
    return {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "MASTER_", "RANK", "WORLD_"))}


def test_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "torchrun 0 met", "torchrun 1 met"]


def test_a_member_that_does_not_arrive_is_named(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).replace("join_limit_s=30", "join_limit_s=1"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent keeps it
    env = clean_environment() | {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1
    assert "TimedOut: member 1 of 2 did not arrive within 1 s" in done.stderr, done.stderr
