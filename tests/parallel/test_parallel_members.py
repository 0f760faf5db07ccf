"""Precision with two members: they stay equal, skip together, learn what float32 learns, and resume exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.settings import Settings
from paceline.launch.spec import Elastic
from paceline.testing.cluster import Cluster

SCRIPT = """
import hashlib, json, sys
import torch, torch.nn.functional as F
import paceline

burst, epochs = json.loads(sys.argv[1])
run = paceline.join(checkpoint_every_s=0.0)
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(90, 8, generator=g), torch.randint(3, (90,), generator=g))
torch.manual_seed(run.rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model)
loader = run.loader(data, batch_size=8)
step, norms, changed = 0, [], []

def bits():
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values())).hexdigest()

for epoch in run.epochs(epochs):
    for x, y in loader:
        before = bits()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if run.rank == 1 and run.step in burst:
            loss = loss * 1e9
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        changed.append(bits() != before)
scaling = run._precise.scaling(optimizer)
told = {"bits": bits(), "loss": loss.item(), "changed": changed, "norms": norms,
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "scale": scaling.scale if scaling else 0, "skipped": scaling.skipped if scaling else 0}
run.close()
print("told", json.dumps(told))
"""


def train(
    root: Path, name: str, precision: str, *, burst: tuple[int, ...] = (), epochs: int = 2, **settings: Any
) -> list[Any]:
    args = [json.dumps([burst, epochs])]
    made = Settings(root=str(root), name=name, precision=precision, progress="off", **settings)
    done = Cluster(2).run(SCRIPT, args, settings=made, limit_s=120.0)
    assert all(d.code == 0 for d in done), done
    lines = [line for d in done for line in d.output.splitlines() if line.startswith("told ")]
    return [json.loads(line.removeprefix("told ")) for line in lines]


def test_members_skip_together_and_stay_equal(tmp_path: Path) -> None:
    """Member 1's loss overflows in step 3: both skip it. The mean of the gradients is seen unscaled by both."""
    first, second = train(tmp_path, "a", "fp16(scale=1024)", burst=(3,))
    assert first["bits"] == second["bits"]
    assert first["changed"] == second["changed"] == [i != 3 for i in range(len(first["changed"]))]
    assert first["scale"] == second["scale"] == 512.0
    assert first["skipped"] == second["skipped"] == 1
    assert first["norms"][:3] == second["norms"][:3]
    assert max(first["norms"][:3]) < 20.0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["cast"] == {"precision": "fp16(scale=1024)", "scale": 512.0, "skipped": 1}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sync", "async", "bounded(staleness=2)", "sync(backups=1)"])
def test_with_servers_an_overflow_is_never_pushed(tmp_path: Path, strategy: str) -> None:
    first, second = train(tmp_path, "a", "fp16(scale=1024)", burst=(3,), strategy=strategy)
    assert second["skipped"] == 1
    assert first["skipped"] == (strategy == "sync")
    assert all(v == v and abs(v) < 1e6 for told in (first, second) for v in [told["loss"]])
    if strategy == "sync":
        assert first["bits"] == second["bits"]
        assert first["changed"] == second["changed"] == [i != 3 for i in range(len(first["changed"]))]


@pytest.mark.slow
def test_members_that_train_apart_skip_each_their_own(tmp_path: Path) -> None:
    first, second = train(tmp_path, "a", "fp16(scale=1024)", burst=(3,), strategy="local(every=6)")
    assert (first["skipped"], second["skipped"]) == (0, 1)
    assert first["changed"][3]
    assert not second["changed"][3]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16(weights)", "fp16"])
def test_members_stay_equal_and_resumed_is_uninterrupted(tmp_path: Path, precision: str) -> None:
    burst = (3,) if precision == "fp16" else ()
    whole = train(tmp_path, "whole", precision, burst=burst)
    assert train(tmp_path, "parts", precision, burst=burst, epochs=1)[0]["bits"] != whole[0]["bits"]
    parts = train(tmp_path, "parts", precision, burst=burst)
    for told in whole, parts:
        assert told[0]["bits"] == told[1]["bits"]
        assert told[0]["scale"] == told[1]["scale"]
    assert whole[0]["bits"] == parts[0]["bits"]
    assert len(parts[0]["changed"]) == len(whole[0]["changed"]) / 2
    assert (whole[0]["scale"], whole[0]["skipped"]) == (parts[0]["scale"], parts[0]["skipped"])
    expected = ["torch.bfloat16", "torch.float32"] if precision == "bf16(weights)" else ["torch.float32"]
    assert whole[0]["dtypes"] == expected


ELASTIC = """
    import hashlib, os, signal, torch, paceline
    from torch.nn import functional as F

    run = paceline.join(progress="off", checkpoint_keep=0)
    g = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(640, 8, generator=g), torch.randint(3, (640,), generator=g))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model)
    loader = run.loader(data, batch_size=8)
    mark = run.dir / "killed"
    for epoch in run.epochs(3):
        for x, y in loader:
            if run.size < 2 and run.step > 60:  # waits for the one that comes
                import time; time.sleep(0.05)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss * (1e9 if run.step == 5 else 1)).backward()
            optimizer.step()
            if run.rank == 1 and run.step == 30 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    scaling = run._precise.scaling(optimizer)
    scale = (scaling.scale, scaling.good, scaling.skipped) if scaling else ()
    state = [*model.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values())]
    bits = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest()
    print("END", run.size, {str(v.dtype) for v in state}, *scale, bits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16(weights)", "fp16(scale=1024)"])
def test_one_that_comes_gets_masters_and_scale_from_the_others(tmp_path: Path, precision: str) -> None:
    settings = Settings(root=str(tmp_path), name="a", precision=precision)
    elastic = Elastic(least=1, most=2, replacements=1, standbys=1)
    done = Cluster(2, elastic=elastic).run(ELASTIC, settings=settings, limit_s=120.0)
    ends = [(d.rank, line) for d in done for line in d.output.splitlines() if line.startswith("END ")]
    assert (tmp_path / "a" / "killed").exists()
    assert {rank for rank, _ in ends} == {0, 1}, done  # of the second one, the process that came
    assert len({line for _, line in ends}) == 1, done
    assert ends[0][1].startswith("END 2 {'torch.float32'}")
    assert ("512.0" in ends[0][1]) == precision.startswith("fp16")


DIGITS = """
import sys, torch, torch.nn.functional as F, paceline
from sklearn.datasets import load_digits

run = paceline.join()
x, y = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
train, test = torch.utils.data.Subset(data, range(1500)), torch.utils.data.Subset(data, range(1500, len(data)))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model)
loader = run.loader(train, batch_size=25)
for epoch in run.epochs(8):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
found = run.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y),
                                   "accuracy": (model(x).argmax(1) == y).float()}, test)
print("found", found["loss"], found["accuracy"])
"""


@pytest.mark.slow
def test_every_precision_learns_digits_as_float32_does(tmp_path: Path) -> None:
    found = {}
    for precision in "fp32", "bf16", "bf16(weights)", "fp16":
        settings = Settings(root=str(tmp_path), name=precision[:4] + str(len(found)), precision=precision)
        done = Cluster(2).run(DIGITS, settings=settings, limit_s=120.0)
        assert all(d.code == 0 for d in done), done
        line = next(line for line in done[0].output.splitlines() if line.startswith("found "))
        found[precision] = [float(word) for word in line.split()[1:]]
    for loss, accuracy in found.values():
        assert abs(loss - found["fp32"][0]) < 0.05 * found["fp32"][0] + 0.01, found
        assert accuracy > 0.87, found
        assert abs(accuracy - found["fp32"][1]) < 0.02, found
