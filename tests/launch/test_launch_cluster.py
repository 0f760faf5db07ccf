"""The cluster that other tests stand on: it runs, it limits, and it tells when something is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError, TimedOut
from paceline.core.settings import Settings
from paceline.launch import record
from paceline.testing.cluster import Cluster, LeftoverError, leftovers

MEET = """
    import os
    from paceline.core.view import Member
    from paceline.environment import detect
    from paceline.membership import meet

    def join():
        place = detect()
        return meet(place, Member(rank=place.rank, host=place.host, pid=os.getpid()))
"""


def in_a_function():
    import sys

    print("args", sys.argv[1:])


def test_source_file_and_function(tmp_path):
    (tmp_path / "script.py").write_text("import os; print('rank', os.environ['PACELINE_RANK'])")
    for script in (tmp_path / "script.py", str(tmp_path / "script.py")):
        assert [f.output for f in Cluster(2).run(script)] == ["rank 0\n", "rank 1\n"]
    assert Cluster(1).run(in_a_function, args=["a", "b"])[0].output == "args ['a', 'b']\n"


def test_members_meet_and_get_the_settings():
    script = (
        MEET
        + """
    meeting = join()
    print(meeting.view.size, meeting.settings.seed)
    """
    )
    finished = Cluster(3).run(script, settings=Settings(seed=5))
    assert [(f.rank, f.code, f.output) for f in finished] == [(r, 0, "3 5\n") for r in range(3)]


def test_codes_and_outputs_of_failing_members():
    first, second = Cluster(2, notice_s=0.1).run("""
        import os, sys, time
        if os.environ["PACELINE_RANK"] == "1":
            sys.exit("no")
        time.sleep(60)
    """)
    assert (first.code, second.code, second.output) == (-signal.SIGTERM, 1, "no\n")


def test_at_the_limit_members_say_where_they_hang():
    with pytest.raises(TimedOut, match=r"did not end within 0\.5 s(.|\n)*in here_it_hangs"):
        Cluster(1).run(
            """
            import time
            def here_it_hangs():
                time.sleep(60)
            here_it_hangs()
        """,
            limit_s=0.5,
        )


def test_what_is_left_behind_is_killed_and_told():
    with pytest.raises(LeftoverError, match="sleep 60"):
        Cluster(1).run("import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)")


def test_leaving_the_block_ends_the_members():
    with Cluster(2).start("print('up', flush=True); import time; time.sleep(60)") as running:
        for rank in range(2):
            running.wait_for(rank, "up")
        token, pid = running.token, running.pid(1)
        assert len(leftovers(token)) == 2
    assert leftovers(token) == {}
    assert not Path(f"/proc/{pid}").exists()


def test_faults():
    with Cluster(2, notice_s=0.1).start("print('up'); import time; time.sleep(60)") as running:
        running.wait_for(1, "up")
        running.kill(1, signal.SIGKILL)
        outcome = running.outcome(10)
    assert outcome.first_failed.rank == 1
    assert outcome.code == 137


def test_waiting_for_words_that_never_come():
    with Cluster(1).start("print('something else')") as running:
        with pytest.raises(PacelineError, match="ended without printing 'up':\n--- member 0\nsomething else"):
            running.wait_for(0, "up")


def test_nothing_is_littered_and_a_named_root_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Cluster(1).run("pass")
    assert os.listdir(tmp_path) == []
    Cluster(1).run("print('kept')", settings=Settings(root=str(tmp_path / "r"), name="x"))
    assert (tmp_path / "r/x/logs/rank-0.log").read_text() == "kept\n"
    assert record.read(tmp_path / "r/x").exit_code == 0


def test_a_member_that_never_arrives_is_named():
    script = (
        MEET
        + """
    import time
    if os.environ["PACELINE_RANK"] == "1":
        time.sleep(60)
    join()
    """
    )
    with Cluster(2, notice_s=0.1).start(script, settings=Settings(join_limit_s=0.5)) as running:
        outcome = running.outcome(20)
        assert "TimedOut: member 1 of 2 did not arrive within 0.5 s" in running.output(0)
    assert outcome.first_failed.rank == 0


@pytest.mark.parametrize("how", ["raise SystemExit(4)", "os.kill(os.getpid(), 9)", "pass"])
def test_a_member_that_ends_before_it_joins_is_told_at_once(how):
    script = (
        MEET
        + f"""
    if os.environ["PACELINE_RANK"] == "1":
        {how}
    else:
        join()
    """
    )
    began = time.monotonic()
    with Cluster(2).start(script, settings=Settings(join_limit_s=60)) as running:
        outcome = running.outcome(20)
        assert "Interrupted: member 1 " in running.output(0)
    assert time.monotonic() - began < 10
    assert outcome.first_failed.rank == (0 if how == "pass" else 1)


def test_a_wrong_token_and_a_taken_rank():
    script = (
        MEET
        + """
    from paceline.core.errors import AuthError, ConfigError
    import msgspec

    place = detect()
    me = Member(rank=place.rank, host=place.host, pid=os.getpid())
    try:
        meet(msgspec.structs.replace(place, token="guess"), me)
    except AuthError as error:
        print("AuthError:", error)
    meet(place, me)
    try:
        meet(place, Member(rank=place.rank, host=place.host, pid=1))
    except ConfigError as error:
        print("ConfigError:", error)
    """
    )
    for finished in Cluster(2).run(script):
        assert finished.code == 0
        assert "AuthError: " in finished.output
        assert f"ConfigError: rank {finished.rank} is taken" in finished.output
