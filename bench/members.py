"""What a scheduler costs: 10 to 300 light members of one machine join, beat for a while and leave.

Light: each member is a real line to a real scheduler process, held by a thread and not by a training process; for every
ten members an agent beats twice a second, as the agent of a host does. The figures are the scheduler process's own: the
share of a core that it uses while members are in, its resident memory, and the seconds from the first arrival to the
view that has all. Nobody fails here, so every suspicion is a false one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.harness import Figure, Report, arguments, short
from paceline.core.view import Member
from paceline.membership.agent_line import AgentLine, look
from paceline.membership.line import Line
from paceline.membership.orders import Arrive, Host

_TOKEN = "bench"
_PER_AGENT = 10
_PER_PROCESS = 50
_LIMIT_S = 120.0


def main() -> None:
    options = arguments(__doc__)
    if options.worker:
        hold(**json.loads(sys.stdin.readline()))
        return
    report = Report("bench.members")
    suspicions = 0
    for count in (10, 30) if options.quick else (10, 30, 100, 300):
        cpu, rss_mb, join_s, suspected = measure(count, 3.0 if options.quick else 10.0)
        suspicions += suspected
        report.add(Figure(name=f"scheduler_cpu_{count}", value=cpu, ours=f"{cpu * 100:.1f} % of a core"))
        report.add(Figure(name=f"scheduler_rss_mb_{count}", value=rss_mb, ours=f"{rss_mb:.0f} MB"))
        report.add(Figure(name=f"join_s_{count}", value=join_s, ours=f"{short(join_s)} s"))
    report.add(Figure(name="false_suspicions", value=float(suspicions), ours=str(suspicions), goal="<= 0"))
    report.note("join_s is of all members at once; the processes that hold them share the machine with the scheduler")
    report.finish(options.json)


def measure(count: int, seconds: float) -> tuple[float, float, float, int]:
    """Share of a core, resident megabytes, seconds to join, and false suspicions."""
    with tempfile.TemporaryDirectory() as folder:
        told = {"journal": f"{folder}/journal.sqlite", "least": 1, "target": count, "most": count, "token": _TOKEN}
        scheduler = _start([sys.executable, "-m", "paceline.membership.scheduler"], told)
        holders = []
        try:
            address = json.loads(_answer(scheduler))["address"]
            parts = [range(i, min(count, i + _PER_PROCESS)) for i in range(0, count, _PER_PROCESS)]
            command = [sys.executable, "-m", "bench.members", "--worker"]
            holders = [_start(command, {"address": address, "first": p.start, "last": p.stop}) for p in parts]
            for holder in holders:
                _answer(holder)  # it has imported what it needs
            began = time.monotonic()
            for holder in holders:
                _tell(holder, "join")
            for holder in holders:
                _answer(holder)
            join_s = time.monotonic() - began
            cpu, at = _cpu_s(scheduler.pid), time.monotonic()
            time.sleep(seconds)
            share = (_cpu_s(scheduler.pid) - cpu) / (time.monotonic() - at)
            picture = look(address, _TOKEN)
            suspected = sum(m.state != "in" or bool(m.why) for m in picture.members)
            suspected += 0 if picture.view and picture.view.number == 1 else 1
            rss_mb = _rss_mb(scheduler.pid)
            for holder in holders:
                _tell(holder, "leave")
            for holder in holders:
                _answer(holder)
            return share, rss_mb, join_s, suspected
        finally:
            for process in (*holders, scheduler):
                process.terminate()
                process.communicate(timeout=30)


def hold(address: str, first: int, last: int) -> None:
    """Hold the lines of some members, and of the agents that beat for them; in a process of its own."""
    ids = range(first, last)
    with ThreadPoolExecutor(16) as pool:
        print("here", flush=True)
        sys.stdin.readline()
        agents = [_agent(address, ids[k : k + _PER_AGENT]) for k in range(0, len(ids), _PER_AGENT)]
        lines = list(pool.map(lambda id: _arrive(address, id), ids))
        for line in lines:
            line.newer(0, _LIMIT_S)
        if first == 0:
            lines[0].formed(1, 0)
        print("joined", flush=True)
        sys.stdin.readline()
        list(pool.map(lambda line: line.leave("finished"), lines))
        print("left", flush=True)
    for held in (*lines, *agents):
        held.close()


def _agent(address: str, ids: range) -> AgentLine:
    host = Host(name=f"host-{ids.start}", slots=_PER_AGENT, running=tuple(ids))
    return AgentLine(address, _TOKEN, host, _LIMIT_S)


def _arrive(address: str, id: int) -> Line:
    member = Member(rank=id, host="bench", pid=os.getpid() * 1000 + id, address=f"127.0.0.1:{10_000 + id}")
    return Line(address, _TOKEN, Arrive(id=id, member=member), limit_s=_LIMIT_S)


def _start(command: list[str], told: dict[str, object]) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _tell(process, json.dumps(told))
    return process


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} ended with code {process.wait()}; see what it printed above")
    return line


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
