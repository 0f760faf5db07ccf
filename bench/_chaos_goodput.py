"""The goodput of bench.chaos: what is left of the steps at one fault a minute, for ours and for peers.

    goodput = committed steps x time of a step before the first fault / wall time from the first step to the last

A step sleeps 50 ms, as if the compute were on other cores: what a fault costs is then not the time that two cores need
for what four hosts would do. All sides have four members, one thread each, and lose one member at a time, by SIGKILL.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench._chaos_runs import ROOT, Result, Setup, carry_out, epochs_for
from bench.harness import Figure, Report, middle, short
from bench.team import ROOT as REPOSITORY
from paceline.testing.ledger import Ledger
from paceline.testing.plan import FaultPlan

MEMBERS = 4
STEP_S = 0.05
_STEP_GUESS_S = 0.06  # with what an all-reduce adds
_SAVE_S = 1.0  # between checkpoints under torchrun: near sqrt(2 · 60 s · the 10 ms that one takes)
_LOOK_S = 0.05


@dataclass
class Track:
    """What a side has done."""

    commits: list[tuple[float, int, int]] = field(default_factory=list)  # when, step, process
    kills: list[tuple[float, int]] = field(default_factory=list)  # when, process

    @property
    def step_s(self) -> float:
        """Before the first fault."""
        until = min((at for at, _ in self.kills), default=float("inf"))
        seen = [(at, step) for at, step, _ in sorted(self.commits) if at < until]
        (first, low), (last, high) = seen[0], max(seen, key=lambda each: each[1])
        return (last - first) / (high - low)

    @property
    def goodput(self) -> float:
        commits = sorted(self.commits)
        steps = max(step for _, step, _ in commits) - min(step for _, step, _ in commits)
        return steps * self.step_s / (commits[-1][0] - commits[0][0])

    def recoveries(self, after: Callable[[float, int], list[float]]) -> list[float]:
        """Per kill, seconds until the last of the survivors has gone on, by when each of them did."""
        return [max(found) - at for at, pid in self.kills if (found := after(at, pid))]

    def next_commits(self, at: float, killed: int) -> list[float]:
        """Of each survivor, when it next committed a step; where nobody survived, of whoever came."""
        survivors = {pid for when, _, pid in self.commits if when < at and pid != killed}
        later = [(when, pid) for when, _, pid in sorted(self.commits) if when > at and pid != killed]
        found = {pid: when for when, pid in reversed(later) if pid in survivors}
        return list(found.values()) or [when for when, _ in later[:1]]


def add_figures(report: Report, options: argparse.Namespace) -> None:
    minutes = options.minutes or (0.25 if options.quick else 10.0)
    every_s = 6.0 if options.quick else 60.0
    faults = max(1, round(60 * minutes / every_s) - (1 if options.quick else 0))
    if options.quick:
        _add_ours(report, *_ours(options.seed, faults, every_s))
        report.note("goodput of so short a run says nothing; peers are left out")
        return
    steps = round((faults + 1) * every_s / _STEP_GUESS_S)
    with ThreadPoolExecutor(options.jobs) as pool:
        ours = pool.submit(_ours, options.seed, faults, every_s)
        tracks = {
            name: pool.submit(_peer, name, start, options.seed, faults, every_s)
            for name, start in _peers(options, steps).items()
        }
    _add_ours(report, *ours.result())
    for name, track in tracks.items():
        try:
            _add_peer(report, name, track.result())
        except (OSError, RuntimeError) as error:
            report.note(f"{name} is left out: {error}")
    report.note(f"goodput: sides at a time: {options.jobs}")
    report.note(
        f"goodput: {MEMBERS} members whose steps sleep {STEP_S * 1e3:g} ms, {faults} kills, one every {every_s:g} s; "
        f"torchrun saves every {_SAVE_S:g} s, and its recover_s is until any worker's next step"
    )


# ---- ours


def _ours(seed: int, faults: int, every_s: float) -> tuple[Result, FaultPlan]:
    dice, plan, gap = Random(seed), FaultPlan(), every_s / _STEP_GUESS_S
    for n in range(faults):
        plan = plan.kill(member=dice.randrange(MEMBERS), step=round(gap * (n + 1)))
    setup = Setup(
        name="goodput",
        strategy="allreduce",
        members=MEMBERS,
        least=2,
        epochs=epochs_for(round(gap * (faults + 1)), MEMBERS),
        step_s=STEP_S,
        heard=True,
        limit_s=120.0 + 3 * every_s * (faults + 2),
    )
    return carry_out(setup, plan), plan


def _add_ours(report: Report, result: Result, plan: FaultPlan) -> None:
    setup = result.setup
    if result.problems or result.found is None or not result.found.clean:
        report.note(f"the run of goodput failed: {result.problems}, {result.found}, {plan!r}; files in {setup.dir}")
        return
    track, views = _track(result)
    detect_s = _detected(result, track)
    recover_s = track.recoveries(lambda at, pid: _in_new_view(track, views, at, pid))
    report.add(_ratio("goodput", track, goal=">= 0.95"))
    report.add(_seconds("detect_s", detect_s, goal="<= 1", of=max))
    report.add(_seconds("recover_s", recover_s, goal="<= 3"))
    samples = result.found.samples / (MEMBERS * 8) / (track.commits[-1][0] - track.commits[0][0])
    report.add(Figure(name="goodput_samples", value=samples * track.step_s))


def _track(result: Result) -> tuple[Track, dict[tuple[int, int], int]]:
    """And the view of each commit, by process and step."""
    track, views = Track(kills=[(i.monotonic, i.pids[0]) for i in result.hit]), {}
    for written in Ledger.read(result.setup.dir / "ledger").written:
        for line in written.steps:
            track.commits.append((line.at, line.step, written.pid))
            views[written.pid, line.step] = line.view
    track.commits.sort()
    return track, views


def _in_new_view(track: Track, views: dict[tuple[int, int], int], at: float, killed: int) -> list[float]:
    """Of each survivor, when it committed its first step in a view without the killed one."""
    old = max((views[pid, step] for when, step, pid in track.commits if when < at), default=0)
    found: dict[int, float] = {}
    survivors = {pid for when, _, pid in track.commits if when < at and pid != killed}
    for when, step, pid in track.commits:
        if when > at and pid in survivors and views[pid, step] > old:
            found.setdefault(pid, when)
    return list(found.values())


def _detected(result: Result, track: Track) -> list[float]:
    heard: list[tuple[float, int, int]] = []
    for file in (result.setup.dir / "ledger").glob("heard-*.jsonl"):
        *lines, _ = file.read_text().split("\n")
        heard += [(said["at"], said["view"], said["pid"]) for said in map(json.loads, lines)]

    def after(at: float, killed: int) -> list[float]:
        survivors = {pid for when, _, pid in track.commits if when < at and pid != killed}
        found: dict[int, float] = {}
        for when, _, pid in sorted(heard):
            if when > at and pid in survivors:
                found.setdefault(pid, when)
        return list(found.values())

    return track.recoveries(after)


# ---- peers


def _peers(options: argparse.Namespace, steps: int) -> dict[str, Callable[[Path], _Peer]]:
    sides: dict[str, Callable[[Path], _Peer]] = {"torchrun": lambda folder: _Torchrun(folder, steps)}
    if options.torchft_python:
        sides["torchft"] = lambda folder: _Torchft(folder, steps, Path(options.torchft_python))
    return sides


class _Peer:
    """Processes of a peer; `tend` starts again what it lets others start again."""

    def __init__(self, folder: Path, steps: int, python: str) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        self._output = (folder / "output").open("wb")
        script = [str(REPOSITORY / "bench" / "_chaos_peer.py"), "--dir", str(folder), "--steps", str(steps)]
        self._script = [*script, "--step-s", str(STEP_S), "--save-every-s", str(_SAVE_S)]
        self._python = python

    def start(self, command: list[str], **env: str) -> subprocess.Popen[bytes]:
        ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", **env}
        process = subprocess.Popen(
            command,
            env=os.environ | ours,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # it does not outlive a killed benchmark
        )
        self.processes.append(process)
        return process

    def tend(self) -> bool:
        """Whether it still trains."""
        raise NotImplementedError

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._output.close()


class _Torchrun(_Peer):
    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder, steps, sys.executable)
        command = [self._python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={MEMBERS}"]
        self._agent = self.start([*command, "--max-restarts=1000", *self._script, "--side", "torchrun"])

    def tend(self) -> bool:
        return self._agent.poll() is None


class _Torchft(_Peer):
    def __init__(self, folder: Path, steps: int, python: Path) -> None:
        super().__init__(folder, steps, str(python))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        lighthouse = [str(python.parent / "torchft_lighthouse"), "--min_replicas", "2", "--quorum_tick_ms", "100"]
        self.start([*lighthouse, "--join_timeout_ms", "10000", "--bind", f"[::]:{port}"])
        self._env = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._replicas = [self._replica(i) for i in range(MEMBERS)]

    def _replica(self, number: int) -> subprocess.Popen[bytes]:
        command = [self._python, *self._script, "--side", "torchft", "--replica", str(number)]
        return self.start(command, **self._env)

    def tend(self) -> bool:
        for number, replica in enumerate(self._replicas):
            if replica.poll() not in (None, 0):  # started again at once, as its own launchers do
                self._replicas[number] = self._replica(number)
        return not any(replica.poll() == 0 for replica in self._replicas)


@contextmanager
def _started(start: Callable[[Path], _Peer], folder: Path) -> Iterator[_Peer]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    peer = start(folder.absolute())
    try:
        yield peer
    finally:
        peer.close()


def _peer(name: str, start: Callable[[Path], _Peer], seed: int, faults: int, every_s: float) -> Track:
    dice, track, folder = Random(seed), Track(), ROOT / name
    limit = time.monotonic() + 120.0 + 3 * every_s * (faults + 2)
    with _started(start, folder) as peer:
        next_at = float("inf")
        while peer.tend():
            now = time.monotonic()
            if now > limit:
                raise RuntimeError(f"it did not end in time: see {folder / 'output'}")
            if next_at == float("inf") and any(f.stat().st_size for f in folder.glob("steps-*")):
                next_at = now + every_s
            if now >= next_at and len(track.kills) < faults:
                next_at += every_s
                alive = sorted(pid for f in folder.glob("steps-*") if _alive(pid := int(f.name[6:])))
                if alive:
                    victim = dice.choice(alive)
                    os.kill(victim, signal.SIGKILL)
                    track.kills.append((time.monotonic(), victim))
            time.sleep(_LOOK_S)
    for file in folder.glob("steps-*"):
        *lines, _ = file.read_text().split("\n")
        said = [line.split() for line in lines]
        track.commits += [(float(at), int(step), int(file.name[6:])) for step, at in said]
    if not track.commits or not track.kills:
        raise RuntimeError(f"it made {len(track.commits)} steps: see {folder / 'output'}")
    track.commits.sort()
    return track


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _add_peer(report: Report, name: str, track: Track) -> None:
    report.add(_ratio(f"goodput_{name}", track))
    report.add(_seconds(f"recover_s_{name}", track.recoveries(track.next_commits)))


def _ratio(name: str, track: Track, goal: str = "") -> Figure:
    step = f"{track.step_s * 1e3:.1f} ms a step"
    return Figure(name=name, value=track.goodput, ours=f"{step}, {len(track.kills)} kills", goal=goal)


def _seconds(
    name: str, found: list[float], goal: str = "", of: Callable[[list[float]], float] = statistics.median
) -> Figure:
    if not found:
        return Figure(name=name, value=float("nan"), ours="nobody survived")
    low, high = middle(found)
    return Figure(
        name=name, value=of(found), ours=f"{short(of(found))} s", spread=f"{short(low)} .. {short(high)}", goal=goal
    )
