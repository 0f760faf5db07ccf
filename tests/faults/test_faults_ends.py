"""The ends of runs that can lose members: killed in the report, drained all at once."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import msgspec
import pytest
from _carried import Kept
from _elastic import run_with

from paceline.core.settings import Settings
from paceline.launch.elastic import ElasticJob
from paceline.launch.local import Local
from paceline.launch.spec import Elastic, JobSpec, Replacing
from paceline.testing.cluster import Cluster, leftovers
from paceline.testing.ledger import Ledger
from paceline.testing.plan import FaultPlan

KILLED = """
import os, signal

import torch

import paceline
import paceline.train.report

run = paceline.join()
model = torch.nn.Linear(4, 1)
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = run.loader(torch.randn(32, 4), batch_size=4)
for epoch in run.epochs(1):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
if run.is_first:
    paceline.train.report.write_report = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_in_the_report_the_run_has_finished_all_the_same(tmp_path: Path) -> None:
    settings = Settings(root=str(tmp_path), name="x", progress="off", checkpoint_keep=0)
    with Cluster(2, elastic=Elastic(least=2, most=2, standbys=0)).start(KILLED, settings=settings) as running:
        outcome = running.outcome(60.0)
        said = "\n".join(running.said)
    assert outcome.code == 0, said
    assert [e.code for e in outcome.lost] == [-9]
    assert "the first member was lost before it had written the report" in said
    assert '<span class="badge finished">' in (tmp_path / "x" / "report.html").read_text()
    assert msgspec.json.decode((tmp_path / "x" / "summary.json").read_bytes())["outcome"] == "finished"


@pytest.mark.parametrize(
    ("strategy", "replacing"),
    [("async", Replacing()), pytest.param("async", None, marks=pytest.mark.slow)],
)
def test_with_servers_too(strategy: str, replacing: Replacing | None, tmp_path: Path) -> None:
    kept, script = Kept(), tmp_path / "train.py"
    script.write_text(KILLED)
    spec = JobSpec(
        script=str(script),
        num_members=2,
        num_servers=1,
        forgives=True,
        replacing=replacing,
        settings=Settings(root=str(tmp_path), name="x", progress="off", checkpoint_keep=0, strategy=strategy),
        threads=1,
    )
    outcome = Local(kept, notice_s=60.0, say=kept.say).start(spec).wait(120.0)
    assert outcome is not None
    assert outcome.code == 0, kept.text
    assert [e.code for e in outcome.lost] == [-9]
    assert "the first member was lost before it had written the report" in kept.text
    assert '<span class="badge finished">' in (tmp_path / "x" / "report.html").read_text()
    summary = msgspec.json.decode((tmp_path / "x" / "summary.json").read_bytes())
    assert (summary["outcome"], summary["samples"]) == ("finished", 32.0)


def job(tmp_path: Path, kept: Kept, members: int) -> ElasticJob:
    """Without checkpoints but those at the ends of epochs, of which the first is far away."""
    elastic = Elastic(least=1, most=members, standbys=0)
    spec = JobSpec(
        script="paceline.testing.train_counted",
        module=True,
        args=("--ledger", str(tmp_path / "ledger"), "--epochs", "1", "--samples", "1200", "--step-s", "0.03"),
        num_members=members,
        settings=Settings(root=str(tmp_path / "runs"), name="it", progress="off", checkpoint_every_s=0.0),
        threads=1,
        elastic=elastic,
    )
    return ElasticJob(spec, elastic, kept, say=kept.say)


def committed(ledger: Path) -> int:
    if not ledger.exists() or not any(ledger.iterdir()):
        return 0
    return max((line.step for w in Ledger.read(ledger).written for line in w.steps), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 3])
def test_who_are_drained_all_at_once_save_before_they_leave(members: int, tmp_path: Path) -> None:
    kept, ledger = Kept(), tmp_path / "ledger"
    first = job(tmp_path, kept, members)
    try:
        deadline = time.monotonic() + 60.0
        while committed(ledger) < 10:
            assert time.monotonic() < deadline, kept.text
            time.sleep(0.05)
        first.stop(signal.SIGTERM)
        outcome = first.wait(30.0)
    finally:
        first.stop(signal.SIGKILL)
    assert outcome is not None, kept.text
    assert outcome.code == 128 + signal.SIGTERM
    assert not any(e.failed for e in outcome.ended), f"{outcome}\n{kept.text}"
    before = committed(ledger)
    second = job(tmp_path, kept, members)
    outcome = second.wait(90.0)
    assert outcome is not None, kept.text
    assert outcome.code == 0, kept.text
    events = [msgspec.json.decode(line) for line in (second.dir / "events" / "rank-0.jsonl").read_bytes().splitlines()]
    resumed = [event["resumed_step"] for event in events if event["kind"] == "start"]
    assert resumed == [None, before]  # not one step is done again
    found = Ledger.read(ledger).check()
    assert found.clean, f"{found}\n{kept.text}"
    assert not leftovers(first.token) | leftovers(second.token)


@pytest.mark.slow
def test_a_first_member_that_was_away_leaves_the_report_to_the_one_that_took_over(tmp_path: Path) -> None:
    plan = FaultPlan().pause(member=0, step=8, for_s=2.5)
    result = run_with(tmp_path, plan, epochs=12)
    result.must_be_clean()
    assert "member 0 is here" in result.output, result.output  # before the end
    assert result.output.count("report: ") == 1, result.output
    assert "[1] report: " in result.output


FAILS = """
import os, sys, time
import atexit
atexit.register(lambda: time.sleep(3.0 if failed else 0.0))  # after the run has been left
import torch, paceline
failed = False
run = paceline.join()
model = torch.nn.Linear(4, 1)
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = run.loader(torch.randn(64, 4), batch_size=4)
for epoch in run.epochs(1):
    for x in loader:
        if os.environ["PACELINE_RANK"] == "1" and run.step == 2:
            failed = True
            raise ValueError("why")
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


def test_one_that_failed_and_ends_only_after_the_run_has_finished_was_lost_on_the_way(tmp_path: Path) -> None:
    settings = Settings(root=str(tmp_path), name="x", progress="off", checkpoint_keep=0)
    elastic = Elastic(least=1, most=2, standbys=0, replacements=0)
    with Cluster(2, elastic=elastic).start(FAILS, settings=settings) as running:
        outcome = running.outcome(60.0)
    assert outcome.code == 0
    assert [(e.rank, e.error) for e in outcome.lost] == [(1, "ValueError: why")]
