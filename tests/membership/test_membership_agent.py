"""The agent with real processes: what they print arrives, how they end is known, and nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.membership.agent import Agent, Ended, Outcome
from paceline.membership.process import Start


class Kept:
    def __init__(self):
        self.lines = []

    def line(self, rank, stream, text):
        self.lines.append((rank, stream, text))

    def raw(self, data):
        raise AssertionError

    def of(self, rank, stream="out"):
        return [text for r, s, text in self.lines if (r, s) == (rank, stream)]


def run(*sources, logs=None, **options):
    """Run one member per source; the outcome and what they printed."""
    kept = Kept()
    starts = [
        Start(
            rank=rank,
            command=(sys.executable, "-u", "-c", textwrap.dedent(source)),
            env=os.environ | {"RANK_HERE": str(rank)},
        )
        for rank, source in enumerate(sources)
    ]
    return Agent(starts, kept, logs=logs, **options).run(), kept


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids, limit_s=3.0):
    deadline = time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def test_output_and_exit_codes(tmp_path):
    outcome, kept = run("print('a')", "import sys; print('b'); print('c', file=sys.stderr)", logs=tmp_path)
    assert [e.code for e in outcome.ended] == [0, 0]
    assert (outcome.code, outcome.first_failed) == (0, None)
    assert kept.of(0) == ["a"]
    assert (kept.of(1), kept.of(1, "err")) == (["b"], ["c"])
    assert (tmp_path / "rank-0.log").read_bytes() == b"a\n"


def test_what_was_printed_comes_before_the_trace_it_died_with():
    for _ in range(5):
        _, kept = run("print('last words'); raise ValueError('why')")
        assert kept.lines[0][2] == "last words"
        assert kept.lines[-1][2] == "ValueError: why"


def test_a_failure_stops_the_others():
    outcome, _ = run("import time; time.sleep(60)", "raise SystemExit(3)", notice_s=0.1)
    assert (outcome.code, outcome.first_failed.rank) == (3, 1)
    assert (outcome.ended[0].code, outcome.ended[0].asked) == (-signal.SIGTERM, True)


@pytest.mark.parametrize(
    "stubborn",
    [
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x'); time.sleep(60)",
        # SIGTERM wakes a stopped process, which then dies of it
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["ignores SIGTERM", "is stopped"],
)
def test_the_stubborn_are_killed(stubborn):
    began = time.monotonic()
    outcome, _ = run(stubborn, "import time; time.sleep(0.4); raise SystemExit(3)", notice_s=0.1, grace_s=0.3)
    assert (outcome.code, outcome.first_failed.rank) == (3, 1)
    assert outcome.ended[0].code in (-signal.SIGKILL, -signal.SIGTERM)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("serving", [(1,), ()])
def test_who_serves_ends_when_nobody_else_is_left(serving):
    asleep = f"import time; time.sleep({600 if serving else 1})"
    outcome, _ = run("print('joined, and never trained')", asleep, serving=serving, alone_s=0.5)
    assert outcome.code == 0
    assert [ended.asked for ended in outcome.ended] == [False, bool(serving)]


def test_the_others_may_end_by_themselves():
    outcome, kept = run(
        "import time; time.sleep(0.3); print('noticed'); raise SystemExit(0)", "raise SystemExit(3)", notice_s=2
    )
    assert kept.of(0) == ["noticed"]
    assert not outcome.ended[0].asked


def test_the_blame_falls_on_the_cause_not_on_who_noticed_it():
    follower = """
        from paceline.core.errors import Interrupted
        raise Interrupted("member 1 left the run")
    """
    cause = "import time; time.sleep(0.6); raise SystemExit(5)"  # slower to end than the one that it takes along
    outcome, _ = run(follower, cause, notice_s=3)
    assert outcome.ended[0].followed
    assert (outcome.first_failed.rank, outcome.code) == (1, 5)


def test_a_signal_as_exit_code():
    outcome, _ = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (outcome.ended[0].code, outcome.code) == (-9, 137)


def test_a_dead_process_is_known_soon():
    seen = {}
    source = "import time; print(time.monotonic()); import os; os._exit(1)"
    _, kept = run(source, on_ended=lambda rank, code: seen.update({rank: time.monotonic()}))
    assert seen[0] - float(kept.of(0)[0]) < 0.5


CHILDREN = """
    import os, subprocess, sys, time
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60"])
    time.sleep(0.3)
    print(child.pid)
    {then}
"""


@pytest.mark.parametrize("then", ["sys.exit(0)", "os._exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(60)"])
def test_what_a_member_started_is_gone_too(then):
    failing = "import time; time.sleep(1); raise SystemExit(1)"
    outcome, kept = run(CHILDREN.format(then=then), failing, notice_s=0.1, grace_s=0.2)
    assert outcome.code
    assert not alive(int(kept.of(0)[0]))


def test_a_child_that_left_the_group_does_not_hold_up_the_end():
    source = """
        import subprocess
        print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    """
    began = time.monotonic()
    _, kept = run(source)
    assert time.monotonic() - began < 5
    pid = int(kept.of(0)[0])
    assert alive(pid)  # its own session is its own wish
    os.kill(pid, signal.SIGKILL)


def test_much_output_from_all_at_once(tmp_path):
    source = """
        import os
        for i in range(100):
            os.write(1, b"x" * 99_999 + b"\\n")
            os.write(2, b"e" * 99 + b"\\n")
    """
    _, kept = run(source, source, logs=tmp_path)
    for rank in (0, 1):
        assert (tmp_path / f"rank-{rank}.log").stat().st_size == 100 * (100_000 + 100)
        assert sum(len(t) for t in kept.of(rank)) == 100 * 99_999
        assert kept.of(rank, "err") == ["e" * 99] * 100


def test_garbage_and_unfinished_output(tmp_path):
    _, kept = run("import os; os.write(1, bytes(range(256)) + b'end')", logs=tmp_path)
    assert (tmp_path / "rank-0.log").read_bytes() == bytes(range(256)) + b"end"
    assert kept.of(0)[-1].endswith("end")
    assert not any(ord(c) < 32 and c not in "\t" for _, _, text in kept.lines for c in text)


def test_a_command_that_does_not_exist():
    kept = Kept()
    outcome = Agent([Start(rank=0, command=("/no/such/python",), env={})], kept).run()
    assert outcome.code == 127
    assert "cannot start /no/such/python" in kept.of(0, "err")[0]


AGENT = """
    import os, resource, sys
    from pathlib import Path
    from paceline.membership.agent import Agent
    from paceline.membership.process import Start

    class Show:
        def line(self, rank, stream, text):
            print(text, flush=True)

    {before}
    member = sys.argv[1]
    starts = [Start(rank=r, command=(sys.executable, "-u", "-c", member), env=os.environ) for r in range(2)]
    print("code", Agent(starts, Show(), logs=Path(sys.argv[2])).run().code)
"""
MEMBER = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid)
time.sleep(60)
"""


def test_a_killed_agent_takes_all_along(tmp_path):
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(AGENT.format(before="")), MEMBER, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(word) for _ in range(2) for word in agent.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(alive, pids))
    agent.kill()
    agent.wait()
    assert gone(pids)
    agent.stdout.close()


def test_members_end_with_their_agent_even_if_its_guard_was_killed_first(tmp_path):
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(AGENT.format(before="")), MEMBER, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(agent.stdout.readline().split()[0]) for _ in range(2)]
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    (guard,) = [int(p) for p in children if b"tether.py\0guard" in Path(f"/proc/{p}/cmdline").read_bytes()]
    os.kill(guard, signal.SIGKILL)
    time.sleep(0.1)
    agent.kill()
    agent.wait()
    assert gone(pids)
    agent.stdout.close()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what they started, which nobody was left to end


def test_a_full_disk_stops_the_log_not_the_run(tmp_path):
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    member = "print('\\n'.join(f'line {i}' for i in range(100)))"  # in one piece, of which a part still fits
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AGENT.format(before=full)), member, tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("line 99\n") == 2
    assert "output is no longer kept in" in done.stdout
    assert done.stdout.endswith("code 0\n")


def test_what_a_member_leaves_behind_is_asked_to_end_first(tmp_path):
    source = f"""
        import subprocess, time
        subprocess.Popen(["sh", "-c", "trap 'echo asked > {tmp_path}/asked; exit' TERM; while :; do sleep 0.02; done"])
        time.sleep(0.3)
    """
    run(source)
    assert (tmp_path / "asked").exists()


def ended(rank: int, code: int, at: float, *, losable: bool = False, followed: bool = False) -> Ended:
    tail = ("paceline.core.errors.Interrupted: member 2 left the run",) if followed else ()
    return Ended(rank=rank, code=code, seconds=at, tail=tail, asked=False, losable=losable, at=at)


def test_who_is_blamed_is_decided_by_what_happened() -> None:
    lost = ended(2, -9, 5.0, losable=True)
    went_on = Outcome((ended(0, 0, 20.0), ended(1, 0, 20.0, losable=True), lost))
    assert (went_on.code, went_on.first_failed, went_on.lost) == (0, None, [lost])
    of_its_own = ended(0, 3, 20.0)
    later = Outcome((of_its_own, ended(1, 1, 21.0, losable=True, followed=True), lost))
    assert (later.code, later.first_failed, later.lost) == (3, of_its_own, [lost])
    needed = Outcome((ended(0, 1, 5.2, followed=True), ended(1, 1, 5.1, losable=True, followed=True), lost))
    assert (needed.code, needed.first_failed, needed.lost) == (137, lost, [])
    sooner = Outcome((ended(0, 1, 5.2, followed=True), ended(1, 1, 4.9, losable=True, followed=True), lost))
    assert (sooner.code, sooner.first_failed, sooner.lost) == (
        137,
        lost,
        [],
    )  # a large process takes a while to be gone


class Twice:
    """Starts each that is lost again, up to so many times in all."""

    begun = True

    def __init__(self, times):
        self.times, self.lost_ones, self.running, self.reason = times, [], [], ""
        self.joining = set()

    def lost(self, rank, how, error=""):
        self.lost_ones.append((rank, how))
        if len(self.lost_ones) <= self.times:
            return 0.05
        self.reason = "too few"
        return None

    def started(self, rank):
        self.running.append(rank)

    def look(self):
        pass


ONCE = """
    import os, pathlib, signal, time
    there = pathlib.Path(os.environ["THERE"])
    if not there.exists():
        there.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    print("again")
"""


def test_a_lost_member_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("THERE", str(tmp_path / "there"))
    again, pids, lost = Twice(3), [], []
    outcome, kept = run(
        "import os, time\nwhile not os.path.exists(os.environ['THERE']): time.sleep(0.01)\ntime.sleep(1)",
        ONCE,
        losable=[0, 1],
        again=again,
        on_started=pids.append,
        on_lost=lambda rank, how: lost.append((rank, how)),
    )
    assert (outcome.code, [e.code for e in outcome.ended]) == (0, [0, 0])
    assert [(e.rank, e.code) for e in outcome.replaced] == [(e.rank, e.code) for e in outcome.lost] == [(1, -9)]
    assert lost == again.lost_ones == [(1, "killed by signal 9")]
    assert kept.of(1) == ["again"]
    assert len(pids) == 2
    assert again.running == [1]
    assert pids[1][0] == pids[0][0]
    assert pids[1][1] != pids[0][1]


def test_without_enough_of_them_all_are_ended():
    outcome, _ = run("import time; time.sleep(60)", "raise SystemExit(3)", losable=[0, 1], again=Twice(1), notice_s=0.1)
    assert (outcome.code, outcome.first_failed.rank) == (3, 1)
    assert len(outcome.replaced) == 1


def test_what_fails_before_it_has_begun_is_not_started_again():
    again = Twice(9)
    again.begun = False
    outcome, _ = run("import time; time.sleep(60)", "raise SystemExit(3)", losable=[0, 1], again=again, notice_s=0.1)
    assert (outcome.code, again.lost_ones, outcome.replaced) == (3, [], ())


def test_one_that_joins_when_another_has_finished_has_nothing_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("THERE", str(tmp_path / "there"))
    again = Twice(3)
    again.joining.add(1)
    outcome, _ = run(
        "import os, time\nwhile not os.path.exists(os.environ['THERE']): time.sleep(0.01)\ntime.sleep(1)",
        ONCE.replace('print("again")', "time.sleep(60)"),
        losable=[0, 1],
        again=again,
    )
    assert outcome.code == 0
    assert outcome.ended[1].asked
