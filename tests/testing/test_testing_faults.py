"""Faults happen to real processes when and to whom the plan says, are noted, and are undone whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.core import status
from paceline.core.errors import ConfigError, PacelineError, TimedOut
from paceline.core.settings import Settings
from paceline.testing.clocks import Clocks
from paceline.testing.cluster import Cluster, Finished, Running
from paceline.testing.disk import SmallDisk
from paceline.testing.faults import FaultPlan, Faults
from paceline.testing.hosts import Hosts
from paceline.testing.processes import Members, Process

needs_hosts = pytest.mark.skipif(bool(Hosts.missing(delay=True)), reason=Hosts.missing(delay=True))
needs_mount = pytest.mark.skipif(bool(SmallDisk.missing()), reason=SmallDisk.missing())

STEPS = 60
# What a member of a run shows of itself, and no more.
SCRIPT = """
import os, sys, time
from pathlib import Path
from paceline.core.status import Status
rank = int(os.environ.get("PACELINE_RANK") or os.environ["HOSTS_RANK"])
status = Status(Path(sys.argv[1]) / "status" / f"rank-{rank}")
size = int(os.environ.get("PACELINE_SIZE") or os.environ.get("HOSTS_SIZE", "1"))
while not all((Path(sys.argv[1]) / "status" / f"rank-{i}").exists() for i in range(size)):
    time.sleep(0.01)
last, longest = time.monotonic(), 0.0
for step in range(1, int(sys.argv[2]) + 1):
    time.sleep(0.01)
    status.at(step, 0)
    if step == 30:
        status.set("saving things")
    now = time.monotonic()
    last, longest = now, max(longest, now - last)
print("done", longest, time.time(), flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Running]:
    def started(members: int, steps: int = STEPS, **more: object) -> Running:
        root = more.pop("root", tmp_path)
        settings = Settings(root=str(root), name="run")
        args = [str(Path(str(root)) / "run"), str(steps)]
        return Cluster(members, notice_s=30.0).start(SCRIPT, args, settings=settings, **more)  # type: ignore[arg-type]

    return started


def ended(running: Running) -> list[Finished]:
    return running.wait(30.0)


def test_members_die_at_their_step_two_at_once(start: Callable[..., Running]) -> None:
    plan = FaultPlan().kill(member=2, step=20).kill(member=1, step=20).kill("first", step=40).kill(member=2, step=45)
    with start(4) as running, Faults(plan, running) as faults:
        pids = [running.pid(i) for i in range(4)]
        codes = [f.code for f in ended(running)]
        injected = faults.wait(5.0)
    assert codes == [-9, -9, -9, 0]
    assert [i.pids for i in injected] == [(pids[2],), (pids[1],), (pids[0],), ()]
    assert [i.missed for i in injected] == ["", "", "", "there was no member 2"]
    for each in injected[:3]:
        assert each.fault.step is not None
        assert each.fault.step <= each.step <= each.fault.step + 10  # the machine may be busy
        doing = status.read(running.dir / "status" / f"rank-{pids.index(each.pids[0])}", 0)
        assert doing is not None
        assert each.step <= doing.step <= each.step + 3  # it was dead from then on
    assert injected[1].monotonic - injected[0].monotonic < 0.1


def test_a_pause_lasts_as_long_as_it_was_asked_for(start: Callable[..., Running]) -> None:
    plan = FaultPlan().pause(member=1, step=10, for_s=0.8)
    with start(2) as running, Faults(plan, running) as faults:
        done = ended(running)
        faults.wait(5.0)
    longest = [float(f.output.split()[1]) for f in done]
    assert longest[1] >= 0.8
    assert [f.code for f in done] == [0, 0]


def test_what_is_paused_goes_on_when_the_test_fails(start: Callable[..., Running]) -> None:
    with start(1) as running:
        with pytest.raises(KeyError):
            with Faults(FaultPlan().pause(member=0, step=5, for_s=1000), running) as faults:
                while faults.pending:
                    time.sleep(0.01)
                raise KeyError
        assert [f.code for f in ended(running)] == [0]


def test_a_time_instead_of_a_step(start: Callable[..., Running]) -> None:
    with start(2, 1000) as running:
        running.pid(0)
        with Faults(FaultPlan().kill(member=0, at_s=0.5).kill(member=1, at_s=0.7), running) as faults:
            began = time.monotonic()
            injected = faults.wait(10.0)
        assert [i.monotonic - began >= i.fault.at_s - 0.05 for i in injected if i.fault.at_s] == [True, True]
        assert [f.code for f in ended(running)] == [-9, -9]


def test_a_moment_within_a_step_and_what_a_member_does(start: Callable[..., Running]) -> None:
    plan = FaultPlan().pause(member=1, step=10, for_s=0.0).kill(member=0, step=10, after_s=0.1)
    plan = plan.kill(member=1, step=5, doing="saving", after_s=0.01)
    with start(2) as running, Faults(plan, running) as faults:
        assert [f.code for f in ended(running)] == [-9, -9]
    at_once, later, saving = faults.injected
    assert later.monotonic - at_once.monotonic >= 0.1
    assert saving.step >= 30  # where it saves


def test_a_step_that_never_comes_is_left_and_said(start: Callable[..., Running]) -> None:
    plan = FaultPlan().kill(member=0, step=STEPS + 1)
    with start(1, 5) as running, Faults(plan, running) as faults:
        assert [f.code for f in ended(running)] == [0]
        with pytest.raises(TimedOut, match=r"at step 5 there is left: FaultPlan\(\).kill\(member=0, step=61\)"):
            faults.wait(0.05)
    assert faults.injected == []


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    """Processes that run modules of these names, which only sleep."""
    begun = []

    def begin(module: str, rank: str = "") -> subprocess.Popen[bytes]:
        module, *words = module.split()
        place = tmp_path / "modules" / Path(*module.split("."), *(["__main__"] if words else []))
        place.parent.mkdir(parents=True, exist_ok=True)
        for package in [place.parent, *place.parent.parents][: module.count(".")]:
            (package / "__init__.py").touch()
        place.with_suffix(".py").write_text("import time; print(flush=True); time.sleep(100)")
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "modules"), "PACELINE_TOKEN": "t", "PACELINE_RANK": rank}
        argv = [sys.executable, "-m", module, *words]
        begun.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE))
        assert begun[-1].stdout is not None
        begun[-1].stdout.readline()
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def test_schedulers_agents_and_servers_are_found(
    others: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    second, first = others("paceline.server", "3"), others("paceline.server", "2")
    agents = [others("paceline agent") for _ in range(2)]
    scheduler = others("paceline.membership.scheduler")
    job = SimpleNamespace(dir=tmp_path, token="t")
    plan = FaultPlan().kill("server 1").kill("agent 1").kill("scheduler").kill("server 4")
    with Faults(plan, job) as faults:
        injected = faults.wait(5.0)
    assert [i.pids for i in injected] == [(second.pid,), (agents[1].pid,), (scheduler.pid,), ()]
    assert [p.wait(5) for p in (second, agents[1], scheduler)] == [-9, -9, -9]
    assert [p.poll() for p in (first, agents[0])] == [None, None]
    with Faults(FaultPlan().kill("host 0"), job, places=[0, 0]) as faults:
        assert [i.pids for i in faults.wait(5.0)] == [(agents[0].pid,)]


def test_a_host_is_all_of_its_members(start: Callable[..., Running]) -> None:
    with start(4) as running, Faults(FaultPlan().kill("host 1", step=5), running, places=[0, 1, 0, 1]) as faults:
        assert [f.code for f in ended(running)] == [0, -9, 0, -9]
    assert len(faults.injected[0].pids) == 2


def test_a_replaced_member_is_the_one_that_lives(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SCRIPT, str(tmp_path), "10000"]
    one = subprocess.Popen(argv, env={**os.environ, "PACELINE_RANK": "0"}, start_new_session=True)
    two = other = None
    try:
        members = Members(tmp_path)
        _until(lambda: _looked(members).process(0) is not None)
        old = members.process(0)
        two = subprocess.Popen(argv, env={**os.environ, "PACELINE_RANK": "1"}, start_new_session=True)
        _until(lambda: _looked(members).process(1) is not None)
        assert members.first == 0
        one.kill()
        one.wait()
        assert _looked(members).alive == [1]
        assert members.first == 1
        other = subprocess.Popen(argv, env={**os.environ, "PACELINE_RANK": "0"}, start_new_session=True)
        _until(lambda: _looked(members).process(0) is not None)
        assert members.process(0) != old
        assert members.first == 1  # who comes later comes last
        assert old is not None
        assert not old.signal(9)
    finally:
        for process in filter(None, (one, two, other)):
            process.kill()
            process.wait()


def test_a_number_that_was_given_to_another_process_is_not_hit() -> None:
    own = Process.of(os.getpid())
    assert own is not None
    assert own.alive
    assert not Process(os.getpid(), own.started - 1).signal(9)


@needs_mount
def test_the_disk_is_full_for_a_while(start: Callable[..., Running]) -> None:
    with SmallDisk(8 << 20) as disk:
        plan = FaultPlan().fill_disk(step=5, for_s=0.3)
        with start(1, root=disk.dir) as running, Faults(plan, running, disk=disk) as faults:
            _until(lambda: bool(faults.injected))
            with pytest.raises(OSError):
                (disk.dir / "more").write_bytes(b"x" * 100_000)
            faults.wait(5.0)
            (disk.dir / "more").write_bytes(b"x" * 100_000)
            assert [f.code for f in ended(running)] == [0]


def test_a_members_clock_jumps(start: Callable[..., Running]) -> None:
    with Clocks() as clocks:
        with start(2, env=clocks.env) as running:
            with Faults(FaultPlan().jump_clock(-3600, member=1, step=5), running, clocks=clocks) as faults:
                done = ended(running)
                faults.wait(5.0)
        off = [time.time() - float(f.output.split()[2]) for f in done]
    assert off[0] < 1000
    assert off[1] > 3000


@needs_hosts
def test_the_network_fails_and_is_mended(tmp_path: Path) -> None:
    plan = FaultPlan().partition([0], step=3, for_s=1000).slow(1, "1mbit", step=3, for_s=0.1)
    plan = plan.reset(1, step=3).corrupt(member=1, step=3).kill("host 1", step=30)
    with Hosts(2, rate="1gbit", delay_ms=0.1) as hosts:
        argv = [sys.executable, "-c", SCRIPT, str(tmp_path), str(STEPS)]
        programs = [hosts.popen(i, argv, stdout=subprocess.DEVNULL) for i in range(2)]
        with Faults(plan, SimpleNamespace(dir=tmp_path), hosts=hosts, places=[0, 1]) as faults:
            _until(lambda: len(faults.injected) >= 4)
            assert hosts._parted == {(0, 1), (1, 0)}
            _until(lambda: hosts.rate(1) == "1gbit")
            assert [p.wait(20) for p in programs] == [0, -9]
        assert hosts._parted == set()
    assert [i.missed for i in faults.injected] == [""] * 5


def test_what_a_plan_needs_is_said_at_the_start(tmp_path: Path) -> None:
    job = SimpleNamespace(dir=tmp_path)
    wants = {
        r"\.partition\(hosts=\(0,\), for_s=1\): the network can only fail between hosts": FaultPlan().partition(
            [0], for_s=1
        ),
        r"give Faults\(..., disk=disk\)": FaultPlan().fill_disk(for_s=1),
        r"give Faults\(..., clocks=clocks\)": FaultPlan().jump_clock(1),
        r"the host of each member": FaultPlan().kill("host 0"),
    }
    for message, plan in wants.items():
        with pytest.raises(ConfigError, match=message):
            Faults(plan, job)
    with pytest.raises(ConfigError, match="on which host is that"):
        Faults(FaultPlan().corrupt(member=1), job, hosts=Hosts(2, delay_ms=1))
    with pytest.raises(ConfigError, match="needs hosts with a delay"):
        Faults(FaultPlan().corrupt(member=1), job, hosts=Hosts(2), places=[0, 1])


def test_an_error_while_injecting_is_raised(tmp_path: Path) -> None:
    hosts = Hosts(2)  # not entered: there is no such network
    with pytest.raises(PacelineError, match="tc "):
        with Faults(FaultPlan().partition([0], for_s=1), SimpleNamespace(dir=tmp_path), hosts=hosts) as faults:
            faults.wait(5.0)


def _looked(members: Members) -> Members:
    members.look()
    return members


def _until(ready: Callable[[], bool], limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)
