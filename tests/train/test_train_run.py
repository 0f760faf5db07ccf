"""The run as users hold it: alone equal to plain PyTorch, and every promise of the loop."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.core import status
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster
from paceline.train.outermost import PATIENCE


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with paceline.join(root=str(tmp_path), name="run", progress="off") as run:
        yield run


def data(num: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(num, 5, generator=generator), torch.randint(3, (num,), generator=generator))


def test_alone_nothing_is_copied_and_the_bits_are_pytorchs(run: Any) -> None:
    torch.manual_seed(3)
    ours = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    before = [p.data_ptr() for p in ours.parameters()]
    adam = torch.optim.Adam(ours.parameters(), lr=0.01)
    optimizer = run.optimizer(adam, ours)
    assert optimizer is adam
    assert isinstance(optimizer, torch.optim.Adam)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    loader = run.loader(data(), batch_size=8)
    for _ in run.epochs(2):
        for x, y in loader:
            for model, opt in (ours, optimizer), (plain, reference):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
                opt.step()
    assert [p.data_ptr() for p in ours.parameters()] == before
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters())


def test_schedulers_made_before_and_after_count_steps(run: Any) -> None:
    for early in (True, False):
        model = nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        if early:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
        optimizer = run.optimizer(sgd, model)
        if not early:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        before = run._meter.step
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where a scheduler steps before its optimizer
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.125
        if early:
            assert run._meter.step == before + 3


def test_what_cannot_work_is_refused_with_a_reason(run: Any) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times"):
        run.optimizer(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(ConfigError, match=r"Use torch\.optim\.Adam"):
        run.optimizer(torch.optim.SparseAdam(model.parameters()), model)
    with pytest.raises(ConfigError, match=r"not an nn\.Module"):
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), list(model.parameters()))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    with pytest.raises(ConfigError, match="once per optimizer"):
        run.optimizer(optimizer, model)
    with pytest.raises(ConfigError, match=r"loss\.backward\(\) first"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ConfigError, match="no state_dict"):
        run.track(number=3)
    with pytest.raises(ConfigError, match="unknown setting 'seeed': did you mean 'seed'"):
        paceline.join(seeed=1)
    with pytest.raises(ConfigError, match="sees no CUDA device: use --device cpu"):
        paceline.join(device="cuda")
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        paceline.join(device="gpu")
    with pytest.raises(ConfigError, match="did you mean 'allreduce'"):
        paceline.join(strategy="alreduce")


def test_evaluate_and_metric_count_each_sample_once(tmp_path: Path) -> None:
    def script() -> None:
        import torch

        import paceline

        run = paceline.join()
        model = torch.nn.Linear(1, 1)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        values = torch.arange(11.0)
        dataset = torch.utils.data.TensorDataset(values)

        def measure(x: torch.Tensor) -> dict[str, torch.Tensor]:
            assert not model.training
            assert not torch.is_grad_enabled()
            return {"each": x, "batch": x.mean(), "big": x > 4}

        got = run.evaluate(measure, dataset, batch_size=2)
        assert got == {"each": 5.0, "batch": 5.0, "big": 6 / 11}, got
        assert model.training
        assert run.metric("weighted", run.rank, weight=run.rank + 1) == (0 * 1 + 1 * 2 + 2 * 3) / 6
        print("fine")

    for member in Cluster(3).run(script):
        assert member.code == 0, member.output
        assert "fine" in member.output


def warnings_of(run: Any) -> list[str]:
    lines = [json.loads(line) for line in (run.dir / "events" / "rank-0.jsonl").read_text().splitlines()]
    return [line["message"] for line in lines if line["kind"] == "warning"]


@pytest.mark.parametrize("over_the_end", [False, True])
def test_gradients_that_a_checkpoint_does_not_hold_are_told(run: Any, over_the_end: bool) -> None:
    model = nn.Linear(5, 3)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader, count = run.loader(data(), batch_size=8), 0  # five batches, windows of two
    for _ in run.epochs(3):
        for i, (x, y) in enumerate(loader):
            count += 1
            last = count % 2 == 0 or (i + 1 == len(loader) and not over_the_end)
            with contextlib.nullcontext() if last else run.accumulate():
                F.cross_entropy(model(x), y).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                count = 0
    assert len(warnings_of(run)) == over_the_end
    assert all("run.accumulate() keeps are not in the checkpoint" in text for text in warnings_of(run))


def test_what_a_checkpoint_trains_unlike_the_script_is_named(tmp_path: Path) -> None:
    told = []
    for frozen in (None, 0, 0):
        with paceline.join(root=str(tmp_path), name="run", progress="off") as run:
            model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            if frozen is not None:
                model[frozen].requires_grad_(False)
            for _ in run.epochs(len(told) + 1):
                assert model[0].weight.requires_grad == (len(told) < 2)
                model[0].requires_grad_(frozen is None)
        told.append(warnings_of(run))
    assert told[0] == []
    assert len(told[1]) == 1, "the third start finds what it wants"
    assert told[1] == told[2]
    assert told[1][0].startswith("0.weight, 0.bias: trained as in the checkpoint")


def test_a_checkpoint_waits_for_an_iterator_that_is_kept_but_not_for_ever(tmp_path: Path) -> None:
    with paceline.join(root=str(tmp_path), name="run", progress="off", checkpoint_every_s=1e-9) as run:
        model = nn.Linear(5, 3)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader, other = run.loader(data(PATIENCE + 20), batch_size=1), run.loader(data(), batch_size=8)
        for _ in run.epochs(1):
            kept = iter(other)
            next(kept)
            for step, (x, y) in enumerate(loader):
                assert (run._saver._pending is not None) == (step >= PATIENCE)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert len(warnings_of(run)) == 1
        assert "checkpoints do not wait for it any longer" in warnings_of(run)[0]


def test_events_summary_and_report_are_written(tmp_path: Path) -> None:
    script = """
        import torch, paceline
        run = paceline.join()
        model = torch.nn.Linear(3, 1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = run.loader(torch.utils.data.TensorDataset(torch.randn(64, 3)), batch_size=4)
        for epoch in run.epochs(2):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
    """
    finished = Cluster(2).run(script, settings=Settings(root=str(tmp_path), name="seen"))
    assert [m.code for m in finished] == [0, 0], finished[0].output
    folder = tmp_path / "seen"
    events = [json.loads(line) for line in (folder / "events" / "rank-0.jsonl").read_text().splitlines()]
    kinds = [e["kind"] for e in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("epoch") == 2
    assert kinds.count("checkpoint") == 2
    end = events[-1]
    assert end["outcome"] == "finished"
    assert end["step"] == 16
    assert [m["rank"] for m in end["members"]] == [0, 1]
    assert sum(m["samples"] for m in end["members"]) == 128
    assert all(m["sent_bytes"] > 0 for m in end["members"])
    assert "<svg" in (folder / "report.html").read_text()
    assert json.loads((folder / "summary.json").read_text())["samples"] == 128
    assert "samples/s" in finished[0].output
    assert (folder / "events" / "rank-1.jsonl").exists()


def test_a_member_that_fails_stops_the_others_at_once() -> None:
    def script() -> None:
        import torch

        import paceline

        run = paceline.join()
        model = torch.nn.Linear(3, 1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(100):
            if run.rank == 1 and step == 3:
                raise ValueError("a bad batch")
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    finished = Cluster(2, notice_s=20.0, grace_s=20.0).run(script, limit_s=40)  # nobody but the links tells member 0
    assert "a bad batch" in finished[1].output
    assert finished[0].code != 0
    assert "member 1 left" in finished[0].output


def test_members_with_unlike_models_are_told_which(tmp_path: Path) -> None:
    def script() -> None:
        import torch

        import paceline

        run = paceline.join()
        model = torch.nn.Linear(3 + run.rank, 1)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    for member in Cluster(2).run(script):
        assert member.code == 1
        assert "parameter 'weight' is float32 of shape (1, 3) on member 0" in member.output
        assert "float32 of shape (1, 4) on member 1" in member.output


def test_the_command_line_goes_before_the_script() -> None:
    def script() -> None:
        import paceline

        run = paceline.join(seed=5, check_finite=True, strategy=paceline.AllReduce(bucket_mb=2))
        print("seed", run.seed, run.settings.check_finite, run._strategy.bucket_bytes)

    (member,) = Cluster(1).run(script, settings=Settings(seed=9))
    assert "seed 9 True 2000000" in member.output
    (member,) = Cluster(1).run(script, settings=Settings(strategy="allreduce(bucket_mb=3)"))
    assert "seed 5 True 3000000" in member.output


def test_gloo_gives_what_our_own_transport_gives() -> None:
    def script() -> None:
        import hashlib

        import torch

        import paceline

        run = paceline.join()
        torch.manual_seed(1)
        model = torch.nn.Linear(30, 20)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        generator = torch.Generator().manual_seed(run.rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 30, generator=generator)).square().mean().backward()
            optimizer.step()
        print("WEIGHTS", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), type(run.group).__name__)

    outputs = {}
    for transport in "own", "gloo":
        finished = Cluster(2).run(script, settings=Settings(transport=transport))
        assert [m.code for m in finished] == [0, 0], finished[0].output
        outputs[transport] = {m.output.split("WEIGHTS ")[1].split()[0] for m in finished}
        assert ("TorchGroup" in finished[0].output) == (transport == "gloo")
    assert outputs["own"] == outputs["gloo"]


def test_joins_in_a_notebook_cell_again_and_again(tmp_path: Path) -> None:
    cells = """
        import paceline, torch
        for cell in range(2):
            run = paceline.join(root={root!r}, progress="off")
            model = torch.nn.Linear(2, 1)
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            for epoch in run.epochs(1):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        print("ended", run.rank, run.size)
    """
    import textwrap

    code = textwrap.dedent(cells.format(root=str(tmp_path)))
    ended = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=60, check=False)
    assert "ended 0 1" in ended.stdout, ended.stderr
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("notebook")]) == 2


def test_an_evaluation_refuses_what_it_decides_itself(run: Any) -> None:
    for name, value in {"shuffle": True, "seed": 1, "pad": True, "rank": 0}.items():
        with pytest.raises(ConfigError, match=rf"run\.evaluate\(\.\.\., {name}=\.\.\.\): .*leave (it|{name}) out"):
            run.evaluate(lambda x, y: {}, data(), **{name: value})
    with pytest.raises(ConfigError, match=r"run\.loader\(\.\.\., rank="):
        run.loader(data(), 4, rank=0)


@pytest.mark.parametrize("samples", [8, 9])
def test_batches_for_training_that_are_drawn_without_gradients_are_warned_of(samples: int) -> None:
    def script() -> None:
        import sys

        import torch

        import paceline

        run = paceline.join(progress="off")
        model = torch.nn.Linear(1, 1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = run.loader(torch.ones(int(sys.argv[1]), 1), batch_size=4)

        @torch.no_grad()
        def scaled():  # type: ignore[no-untyped-def]
            for x in loader:
                yield 2 * x

        for _ in range(2):
            for x in scaled():
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()

    for rank, member in enumerate(Cluster(2).run(script, [str(samples)])):
        assert member.code == 0, member.output
        warning = f"member {rank}: a batch that is not full was drawn under torch.no_grad()"
        assert member.output.count(warning) == (samples == 9)


LEAVES = """
    import os, sys
    import torch, paceline
    run = paceline.join()
    model = torch.nn.Linear(1, 1)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    def train():
        for epoch in run.epochs(3):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            if sys.argv[1] == "break" and epoch: break
            if sys.argv[1] == "exit" and epoch: sys.exit(0)
            if sys.argv[1] == "close" and epoch: run.close(); return
    train()
"""


@pytest.mark.parametrize(
    ("how", "outcome"), [("end", "finished"), ("break", "left early"), ("exit", "left early"), ("close", "left early")]
)
def test_a_script_that_ends_in_the_middle_has_not_finished(tmp_path: Path, how: str, outcome: str) -> None:
    (member,) = Cluster(1).run(LEAVES, [how], settings=Settings(root=str(tmp_path), name="run"))
    assert member.code == 0, member.output
    end = json.loads((tmp_path / "run" / "events" / "rank-0.jsonl").read_text().splitlines()[-1])
    assert (end["kind"], end["outcome"]) == ("end", outcome)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == outcome
    assert status.read(tmp_path / "run" / "status" / "rank-0", 0).what == outcome
    assert member.output.count(f"{outcome}  2 steps" if outcome == "left early" else "finished  3 steps") == 1


@pytest.mark.parametrize("keep", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_waits_for_the_others_at_the_end_of_an_epoch_waits(keep: int) -> None:
    script = """
        import time, torch, paceline
        run = paceline.join()
        model = torch.nn.Linear(2, 2)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = run.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
        for epoch in run.epochs(2):
            for i, (x,) in enumerate(loader):
                model(x).sum().backward()
                if run.rank == 1 and i == 1:
                    time.sleep(1.0)
                optimizer.step()
        print("waited", run._meter.totals["wait_s"], run._meter.totals["seconds"])
    """
    finished = Cluster(2).run(script, settings=Settings(strategy="async", progress="off", checkpoint_keep=keep))
    (fast, whole), (slow, _) = (map(float, m.output.split("waited ")[1].split()[:2]) for m in finished)
    assert fast > slow + 1.0  # of the two seconds that the other slept
    assert whole > fast
