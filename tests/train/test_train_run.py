"""The run as users hold it: alone equal to plain PyTorch, and every promise of the loop."""

from __future__ import annotations

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
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster


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
