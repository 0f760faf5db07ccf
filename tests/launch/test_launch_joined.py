"""Agents that join an elastic run, on loopback: started by hand, and by the launcher from a list of hosts.

The members do not train, as in test_launch_elastic; hosts that are apart are in tests/faults/test_faults_hosts.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch_elastic import MEMBER, start  # noqa: F401

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.launch import elastic, posts, reach
from paceline.launch.kit import Kit, spec_of, work_of
from paceline.launch.spec import Elastic, JobSpec
from paceline.membership.agent_line import look

LOCAL = {"listen": "127.0.0.1"}


class Agent:
    """`paceline agent` as a process."""

    def __init__(self, run, name, slots=2, env=None, join=None, more=()):
        words = ["--join", join or str(run.job.dir.absolute() / reach.FILE), "--name", name, "--slots", str(slots)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "agent", *words, *more],
            stdin=subprocess.PIPE if join == "-" else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            text=True,
        )

    def end(self, limit_s=30.0):
        output, _ = self.process.communicate(timeout=limit_s)
        return self.process.returncode, output


@pytest.fixture
def join():
    agents = []

    def make(*args, **options):
        agents.append(Agent(*args, **options))
        return agents[-1]

    yield make
    for agent in agents:
        agent.process.kill()
        with contextlib.suppress(ValueError):
            agent.process.communicate()


def sites(stage):
    return {site.name: (site.state, site.running) for site in look(*stage.reach).hosts}


def in_view(stage, *ids):
    if not has_run(stage):
        return False
    view = look(*stage.reach).view
    return view is not None and sorted(m.id for m in view.members) == sorted(ids)


def has_run(stage):
    return (stage.job.dir / reach.FILE).exists()


def test_a_host_joins_and_its_members_are_started_there(start, join):  # noqa: F811
    s = start(MEMBER, 3, 1, 3, slots=1, **LOCAL)
    told = f"other hosts join with: paceline agent --join {s.job.dir.absolute()}/scheduler.json"
    s.until(lambda: told in s.said)
    waits = (
        "waiting for a host with free slots (needs at least 1 member, and has room for 1 of 3; begins without after "
    )
    s.until(lambda: any(line.startswith(waits) for line in s.said))
    agent = join(s, "b")
    s.until(lambda: in_view(s, 0, 1, 2))
    assert sites(s)["b"] == ("up", 2)
    assert s.finish().code == 0
    code, output = agent.end()
    assert code == 0, output
    assert output.count("done") == 2
    assert re.search(r"^paceline: joined the run at 127.0.0.1:\d+ with 2 slots; logs in ", output)


def test_a_launcher_without_members_waits_for_a_host_as_long_as_the_scheduler(start, join, monkeypatch):  # noqa: F811
    monkeypatch.setattr(elastic, "_IDLE_S", 2.0)  # beyond the join limit
    s = start(MEMBER, 1, 1, 1, slots=0, **LOCAL)
    s.until(lambda: any(line.startswith("waiting for a host with free slots") for line in s.said))  # said after 3 s
    agent = join(s, "b")
    s.until(lambda: in_view(s, 0))
    assert s.finish().code == 0
    assert agent.end()[0] == 0


@pytest.mark.slow
def test_an_agent_drains_on_sigterm_and_its_members_start_elsewhere(start, join):  # noqa: F811
    s = start(MEMBER, 2, 1, 2, slots=0, **LOCAL)
    s.until(lambda: has_run(s))
    one = join(s, "b")
    s.until(lambda: in_view(s, 0, 1))
    two = join(s, "c")
    s.until(lambda: "c" in sites(s))
    one.process.send_signal(signal.SIGTERM)
    code, output = one.end()
    assert (code, output.count("drained")) == (143, 2), output
    s.until(lambda: in_view(s, 0, 1) and sites(s)["c"] == ("up", 2))
    one = join(s, "b")  # a host of that name may come back
    s.until(lambda: sites(s)["b"] == ("up", 0))
    assert s.finish().code == 0
    assert [agent.end()[0] for agent in (one, two)] == [0, 0]


def test_the_end_of_the_input_drains_one_host_where_a_signal_is_for_all(start, join):  # noqa: F811
    s = start(MEMBER, 2, 1, 2, slots=0, **LOCAL)
    s.until(lambda: has_run(s))
    agents = [join(s, name, slots=1, join="-", more=["--together"]) for name in "bc"]
    for agent in agents:
        agent.process.stdin.write((s.job.dir / reach.FILE).read_text().strip() + "\n")
        agent.process.stdin.flush()
    s.until(lambda: in_view(s, 0, 1))
    code, output = agents[0].end()  # it closes the input
    assert (code, output.count("drained")) == (143, 1), output
    s.until(lambda: sites(s)["c"] == ("up", 1) and look(*s.reach).over is None)
    assert s.job.poll() is None
    assert s.finish().code == 0
    assert agents[1].end()[0] == 0


@pytest.mark.slow
def test_a_killed_agent_takes_its_members_along_and_another_takes_its_place(start, join):  # noqa: F811
    s = start(MEMBER, 2, 1, 2, slots=0, **LOCAL)
    s.until(lambda: has_run(s))
    one = join(s, "b")
    s.until(lambda: in_view(s, 0, 1))
    pids = [seen.pid for seen in look(*s.reach).members]
    one.process.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    join(s, "b")
    s.until(lambda: in_view(s, 0, 1) and not {seen.pid for seen in look(*s.reach).members} & set(pids))
    assert s.finish().code == 0


@pytest.mark.slow
def test_two_agents_of_one_name_are_refused_by_name(start, join):  # noqa: F811
    s = start(MEMBER, 1, 1, 2, slots=1, **LOCAL)
    s.until(lambda: in_view(s, 0))
    join(s, "b")
    s.until(lambda: "b" in sites(s))
    code, output = join(s, "b").end()
    assert code == 1
    assert "host 'b' has an agent already: give this one another --name" in output
    assert sites(s)["b"] == ("up", 0)


def test_the_end_of_the_launcher_is_the_end_of_all(start, join):  # noqa: F811
    s = start(MEMBER, 2, 1, 2, slots=1, **LOCAL)
    s.until(lambda: has_run(s))
    agent = join(s, "b", slots=1)
    s.until(lambda: in_view(s, 0, 1))
    s.job.stop(signal.SIGTERM)
    code, output = agent.end()
    assert "drained" in output
    assert (code, "over: the run was stopped" in output) == (1, True), output
    assert s.job.wait(10.0).stopped_by == signal.SIGTERM
    assert "drained" in s.kept.of(0) or "drained" in s.kept.of(1)


@pytest.mark.slow
def test_ctrl_c_ends_all_at_once(start, join):  # noqa: F811
    s = start(MEMBER, 2, 1, 2, slots=1, **LOCAL)
    s.until(lambda: has_run(s))
    agent = join(s, "b", slots=1)
    s.until(lambda: in_view(s, 0, 1))
    s.job.stop(signal.SIGINT)
    code, output = agent.end()
    assert (code, "over: the run was stopped" in output) == (1, True), output
    assert s.job.wait(10.0).stopped_by == signal.SIGINT


def test_the_token_comes_from_the_environment(start, join):  # noqa: F811
    s = start(MEMBER, 1, 1, 2, slots=1, **LOCAL)
    s.until(lambda: in_view(s, 0))
    address, token = s.reach
    join(s, "b", join=address, env={"PACELINE_TOKEN": token})
    s.until(lambda: "b" in sites(s))
    code, output = join(s, "c", join=address, env={"PACELINE_TOKEN": ""}).end()
    assert (code, "PACELINE_TOKEN is not set: put the run's token there" in output) == (2, True)
    code, output = join(s, "c", join=address, env={"PACELINE_TOKEN": "another"}).end()
    assert code == 2
    code, output = join(s, "c", join="nowhere").end()
    assert "--join 'nowhere': there is no run; give its scheduler.json" in output


def test_a_run_that_does_not_listen_takes_no_other_hosts(start, join):  # noqa: F811
    s = start(MEMBER, 1, 1, 2)
    s.until(lambda: in_view(s, 0))
    code, output = join(s, "b").end()
    assert (code, "this run takes no members on other hosts: start it with --listen" in output) == (2, True), output


def test_hosts_of_a_list_are_used_and_drained_when_they_vanish(start, monkeypatch):  # noqa: F811
    monkeypatch.setattr(posts, "_LOOK_S", 0.2)
    Path("hosts").write_text("b 1\nc 1\n")
    s = start(MEMBER, 2, 1, 2, hosts="hosts", start_on="env HOST={host}", **LOCAL)
    s.until(lambda: has_run(s) and in_view(s, 0, 1))
    there = {name: state for name, state in sites(s).items() if name in "bc"}
    assert there == {"b": ("up", 1), "c": ("up", 1)}
    Path("hosts").write_text("b 2\n")  # c is gone, and b has grown
    s.until(lambda: sites(s)["b"] == ("up", 2) and in_view(s, 0, 1))
    assert any("host c is not in hosts as before: it is drained" in line for line in s.said), s.told()
    Path("hosts").write_text("b two\n")
    s.until(lambda: any("is not a host's name, slots and labels" in line for line in s.said))
    assert s.finish().code == 0
    assert [s.kept.of(id)[-1] for id in (0, 1)] == ["done", "done"]


def test_what_an_agent_that_never_starts_says_is_told_once(start):  # noqa: F811
    s = start(MEMBER, 2, 1, 2, slots=1, hosts="b", start_on="sh -c 'echo no way there; exit 255' {host}", **LOCAL)
    s.until(lambda: any("host b ended" in line and "started again in 4 s" in line for line in s.said))
    assert s.said.count("host b: no way there") == 1, s.told()
    assert sum(line.startswith("waiting for host b (reached 0 of 1; needs") for line in s.said) == 1, s.told()
    s.job.stop()


def test_members_of_a_host_have_places_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    elastic = Elastic(least=1, most=4, listen="10.0.0.1")
    spec = JobSpec(script="train.py", args=("--lr", "1"), num_members=4, elastic=elastic, env={"A": "b"})
    kit = Kit(spec_of(work_of(spec, Settings(name="x")), ("gpu", "large:3")), "t", 2)
    kit.reach("10.0.0.1:5")
    running: list[int] = []
    kit.running = lambda: running
    member = kit.means(tmp_path).start

    def place(id):
        env = member(id, True).env
        running.append(id)
        return env["PACELINE_RANK"], env["PACELINE_LOCAL_RANK"], env["PACELINE_LOCAL_SIZE"], env["PACELINE_SIZE"]

    assert place(3) == ("3", "0", "2", "4")
    assert place(1) == ("1", "1", "2", "4")
    running.remove(3)
    assert place(2) == ("2", "0", "2", "4")
    two = member(2, True)
    assert (two.command, two.cwd, two.env["A"]) == ((sys.executable, "train.py", "--lr", "1"), str(tmp_path), "b")
    assert two.env["PACELINE_SCHEDULER"] == "10.0.0.1:5"
    assert [member(id, True).env["PACELINE_LABELS"] for id in (2, 3)] == ["gpu", "gpu,large"]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"listen='0.0.0.0': name the one address"):
        Elastic(least=1, most=2, listen="0.0.0.0")
    with pytest.raises(ConfigError, match=r"start_on='ssh': write where the host's name goes"):
        Elastic(least=1, most=2, start_on="ssh")
    with pytest.raises(ConfigError, match="slots=-1"):
        Elastic(least=1, most=2, slots=-1)
