"""One run of bench.chaos over several hosts: network namespaces, whose links, disk and clocks fail too.

Hosts whose agent was killed, with all that ran there or alone, come back after a second.
"""

from __future__ import annotations

import shutil
import time

from bench._chaos_runs import Result, Setup, judge
from paceline.core.errors import PacelineError
from paceline.membership.agent import Outcome
from paceline.testing.clocks import Clocks
from paceline.testing.cluster import leftovers
from paceline.testing.disk import SmallDisk
from paceline.testing.hosts import Hosts
from paceline.testing.outing import Outing
from paceline.testing.plan import FaultPlan

_DISK_BYTES = 64 << 20
_AWAY_S = 1.0  # of a host that died


def missing() -> str:
    """Why there can be no such runs on this machine; "" where there can."""
    return Hosts.missing(delay=True) or SmallDisk.missing()


def carry_out(setup: Setup, plan: FaultPlan) -> Result:
    """Train to the end while the plan is carried out; there are two members on each host but the first."""
    shutil.rmtree(setup.dir, ignore_errors=True)
    setup.dir.mkdir(parents=True)
    result, began = Result(setup, plan), time.monotonic()
    hosts = Hosts(setup.num_hosts, delay_ms=0.1)  # frames pass through a process of ours, which can corrupt them
    with hosts, SmallDisk(_DISK_BYTES) as disk, Clocks() as clocks:
        out = Outing(
            setup.dir.absolute(),
            hosts,
            ["-m", "bench._chaos_train", *setup.args()],
            slots=(1, *[2] * (setup.num_hosts - 1)),
            least=setup.least,
            silence_s=setup.silence_s,
            options=["--replacements", "100000", "--seed", str(setup.seed)],
            root=disk.dir,
            env={**clocks.env, "PYTHONFAULTHANDLER": "1"},
        )
        left: dict[int, str] = {}
        try:
            out.start()
            token = out.token
            with out.faults(plan, disk=disk, clocks=clocks) as faults:
                _wait(out, began + setup.limit_s, result)
                result.injected = list(faults.injected)
            left = _left(token) if result.outcome else {}
        except PacelineError as error:
            result.problems.append(f"{type(error).__name__}: {str(error)[:2000]}")
        shutil.copytree(out.dir, setup.dir / "it", dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints"))
    result.seconds = time.monotonic() - began
    judge(result, left)
    return result


def _wait(out: Outing, deadline: float, result: Result) -> None:
    """Until the run has ended, or should have; its outcome is then None. Hosts that died are started again."""
    ended: dict[str, float] = {}
    while time.monotonic() < deadline:
        if (code := out.programs["run"].poll()) is not None:
            result.outcome = Outcome(())
            if code:
                result.problems.append(f"it ended with code {code}")
            return
        for host in range(1, len(out.slots)):
            name = f"agent-{host}"
            if out.programs[name].poll() is None:
                ended.pop(name, None)
            elif time.monotonic() - ended.setdefault(name, time.monotonic()) > _AWAY_S:
                out.agent(host)
        time.sleep(0.05)


def _left(token: str) -> dict[int, str]:
    """What outlives the run by twenty seconds; an agent that came late may need a while to see that all is over."""
    deadline = time.monotonic() + 20.0
    while (left := leftovers(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
