"""Runs whose members train apart, as real processes: evaluation, checkpoints, the end, and a kill in between."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster, Finished

SCRIPT = """
import hashlib, json, os, signal, sys, time
import torch, torch.nn.functional as F
import paceline

words, kill_rank, kill_at = json.loads(sys.argv[1])
skips = len(sys.argv) > 2  # as a GradScaler does, here and there
run = paceline.join(checkpoint_every_s=0.02, strategy=words)
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(101, 6, generator=g), torch.randint(3, (101,), generator=g))
torch.manual_seed(run.rank)
model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.2),
                            torch.nn.Linear(64, 32), torch.nn.Linear(32, 3))
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
run.track(scheduler=scheduler)
loader = run.loader(data, batch_size=6)

def digest():
    whole = hashlib.sha256()
    for value in model.state_dict().values(): whole.update(value.numpy().tobytes())
    return whole.hexdigest()[:12]

shown = []
def measure(x, y):
    shown.append(digest())
    return {"loss": F.cross_entropy(model(x), y)}

for epoch in run.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if not (skips and torch.rand(()) < 0.2):
            optimizer.step()
        scheduler.step()
        run.log(loss=loss, tokens=len(x))
        if (run.rank, run.step) == (kill_rank, kill_at): os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.004 * (1 + run.rank))
    own = digest()
    run.evaluate(measure, data, batch_size=50)
    assert skips or digest() == own, "an evaluation changes nothing, unless others have a round left"
    print("SHOWN", epoch, shown[-1])
    print("OWN", epoch, own)
print("END", digest(), run.step)
"""


def found(finished: list[Finished], key: str) -> list[list[str]]:
    """By member, what was printed behind a word."""
    for member in finished:
        assert member.code == 0, member.output
    return [re.findall(rf"^{key} (.+)$", member.output, re.M) for member in finished]


def test_a_run_whose_members_train_apart(tmp_path: Path) -> None:
    """Evaluations show the same weights to all, members have their own meanwhile, and the end makes them equal."""
    settings = Settings(root=str(tmp_path), name="run")
    done = Cluster(2).run(SCRIPT, [json.dumps(["diloco(every=7)", -1, -1]), "skips"], settings=settings)
    shown, own, end = found(done, "SHOWN"), found(done, "OWN"), found(done, "END")
    assert shown[0] == shown[1]
    assert len(set(shown[0])) == 3
    assert own[0][0] != own[1][0]
    assert end[0][0].split()[0] == end[1][0].split()[0]
    assert end[0] != end[1]  # by the numbers of their steps
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["apart"]["every"] == 7
    assert (
        "every=7, outer='nesterov(lr=0.7, momentum=0.9)'" in (tmp_path / "run" / "events" / "rank-0.jsonl").read_text()
    )


def test_the_last_round_is_in_what_was_sent(tmp_path: Path) -> None:
    """There is no other one here."""
    settings = Settings(root=str(tmp_path), name="run")
    found(Cluster(2).run(SCRIPT, [json.dumps(["local(every=1000)", -1, -1])], settings=settings), "END")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["apart"]["rounds"] == 1
    assert min(member["sent_bytes"] for member in summary["members"]) > 1000


SITES = """
import os
os.environ["PACELINE_LABELS"] = "site-" + "ab"[int(os.environ["PACELINE_RANK"]) // 2]
"""


@pytest.mark.slow
def test_sites_of_two_members_each(tmp_path: Path) -> None:
    """Two processes of a site have the same weights all the time, and all four have at the end."""
    settings = Settings(root=str(tmp_path), name="run")
    words = json.dumps(["diloco(every=4, codec=quantize(8), inner=allreduce)", -1, -1])
    script = SITES + SCRIPT.replace("101", "104")  # a batch of one is too small for batch norm
    done = Cluster(4).run(script, [words], settings=settings, limit_s=120.0)
    shown, own, end = found(done, "SHOWN"), found(done, "OWN"), found(done, "END")
    assert shown[0] == shown[1] == shown[2] == shown[3]
    assert own[0] == own[1]
    assert own[2] == own[3]
    assert own[0][0] != own[2][0]
    assert len({tuple(member) for member in end}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "kill"),
    [
        ("diloco(every=7)", (0, 12)),
        ("sparseloco(every=4, warmup=6)", (1, 25)),
        ("diloco(every=8, overlap=2)", (1, 12)),
        ("local(every=3..6, average=loss, codec=quantize(4))", (0, 25)),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, words: str, kill: tuple[int, int]) -> None:
    whole = Cluster(2).run(SCRIPT, [json.dumps([words, -1, -1])], settings=Settings(root=str(tmp_path), name="whole"))
    settings = Settings(root=str(tmp_path), name="run")
    first = Cluster(2).run(SCRIPT, [json.dumps([words, *kill])], settings=settings)
    assert any(member.code == -9 for member in first)
    again = Cluster(2).run(SCRIPT, [json.dumps([words, -1, -1])], settings=settings)
    assert found(again, "END") == found(whole, "END")


def test_all_reduce_says_what_it_leaves_out_of_a_checkpoint_within_a_round(tmp_path: Path) -> None:
    settings = Settings(root=str(tmp_path), name="run")
    first = Cluster(2).run(SCRIPT, [json.dumps(["diloco(every=1000)", 1, 25])], settings=settings)
    assert any(member.code == -9 for member in first)
    again = Cluster(2).run(SCRIPT, [json.dumps(["allreduce", -1, -1])], settings=settings)
    assert sum("what members had learnt since is left out" in member.output for member in again) == 1
