"""An elastic run of the counted training over several hosts (network namespaces), an agent on each, with faults."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.testing.cluster import leftovers
from paceline.testing.faults import Injected
from paceline.testing.hosts import Hosts
from paceline.testing.ledger import Findings, Ledger
from paceline.testing.outing import Outing
from paceline.testing.plan import FaultPlan


class CountedOuting(Outing):
    """Of the counted training, whose ledger lies in the scratch folder."""

    @classmethod
    def of(
        cls,
        scratch: Path,
        hosts: Hosts,
        *,
        epochs: int = 3,
        step_s: float = 0.01,
        args: Sequence[str] = (),
        **options: object,
    ) -> CountedOuting:
        script = ["-m", "paceline.testing.train_counted", "--ledger", str(scratch / "ledger")]
        script += ["--epochs", str(epochs), "--step-s", str(step_s), *args]
        return cls(scratch, hosts, script, **options)  # type: ignore[arg-type]

    @property
    def steps(self) -> int:
        """That any process has written down."""
        files = (self.scratch / "ledger").glob("member-*.jsonl")
        return max((file.read_bytes().count(b'"step"') for file in files), default=0)

    def check(self, epochs: int | None = None) -> Findings:
        found = Ledger.read(self.scratch / "ledger").check(epochs)
        assert found.clean, f"{found}\n{self.output}"
        return found


@contextlib.contextmanager
def outing(
    tmp_path: Path,
    count: int = 3,
    *,
    delay_ms: float = 0.0,
    rate: str | Sequence[str | None] | None = None,
    **options: object,
) -> Iterator[CountedOuting]:
    """Started; nothing may be left behind at the end."""
    with Hosts(count, rate=rate, delay_ms=delay_ms) as hosts:
        out = CountedOuting.of(tmp_path, hosts, **options)  # type: ignore[arg-type]
        out.start()
        token = out.token
        yield out
        if out.programs["run"].poll() is not None:
            deadline = time.monotonic() + 20.0
            while left := leftovers(token):
                assert time.monotonic() < deadline, f"left behind: {left}\n{out.output}"
                time.sleep(0.1)


def run_with(
    tmp_path: Path, plan: FaultPlan, count: int = 3, **options: object
) -> tuple[CountedOuting, list[Injected]]:
    """Train to the end while the plan is carried out; the ledger must be clean."""
    with outing(tmp_path, count, **options) as out:  # type: ignore[arg-type]
        with out.faults(plan) as faults:
            code = out.code("run")
        assert code == 0, out.output
        assert not faults.pending, f"not every fault happened: {faults.pending}\n{out.output}"
        for name in out.programs:
            out.code(name, 60.0)
        out.check()
    return out, faults.injected
