"""What of a batch is cut into micro-batches; and options of `run.model` that a mesh has no use for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import ConfigError
from paceline.core.mesh import Mesh
from paceline.parallel.samples import Samples
from paceline.parallel.unused import unused
from tests.parallel._runs import run


def shapes(samples: Samples, inputs: list[Any], target: Any, micros: int) -> list[list[tuple[int, ...]]]:
    return [[tuple(t.shape) for t in (*m.inputs, m.target)] for m in samples.split(inputs, target, micros)]


def test_a_square_as_long_as_the_batch_is_told_and_can_be_kept_whole() -> None:
    x, mask, y = torch.zeros(4, 6), torch.zeros(4, 4), torch.zeros(4)
    told: list[str] = []
    assert shapes(Samples(["x", "mask"], None, told.append), [x, mask], y, 2) == [[(2, 6), (2, 4), (2,)]] * 2
    assert len(told) == 1
    assert "mask has shape (4, 4) and is cut into micro-batches" in told[0]
    assert "run.model(model, whole=['mask'])" in told[0]
    assert shapes(Samples(["x", "mask"], ["mask"], told.append), [x, mask], y, 2) == [[(2, 6), (4, 4), (2,)]] * 2
    assert shapes(Samples(["x", "mask"], [], told.append), [x, mask], y, 2) == [[(2, 6), (2, 4), (2,)]] * 2
    Samples(["x", "mask"], None, told.append).split([torch.zeros(4, 4), torch.zeros(4, 3)], y, 2)  # one is enough
    assert len(told) == 1


def test_the_first_batch_decides_for_all() -> None:
    kept = Samples(["x", "mask"])
    kept.split([torch.zeros(8, 6), torch.zeros(3, 3)], torch.zeros(8), 2)
    short = shapes(kept, [torch.zeros(3, 6), torch.zeros(3, 3)], torch.zeros(3), 2)  # as many samples, by chance
    assert short == [[(2, 6), (3, 3), (2,)], [(1, 6), (3, 3), (1,)]]

    cut = Samples(["x", "mask"])
    cut.split([torch.zeros(8, 6), torch.zeros(8, 8)], torch.zeros(8), 2)
    with pytest.raises(
        ConfigError, match=r"mask has shape \(8, 8\) in a batch of 3 samples, and was cut.*whole=\['mask'"
    ):
        cut.split([torch.zeros(3, 6), torch.zeros(8, 8)], torch.zeros(3), 2)
    with pytest.raises(ConfigError, match=r"the target has shape \(8,\) in a batch of 3 samples.*a part of the loss"):
        cut.split([torch.zeros(3, 6), torch.zeros(3, 8)], torch.zeros(8), 2)


def test_tensors_within_mappings_are_counted_one_by_one() -> None:
    samples = Samples(["x", "more"], ["more"])
    found = samples.split([torch.zeros(4, 6), {"a": torch.zeros(4, 4), "b": torch.zeros(4)}], {"y": torch.zeros(4)}, 2)
    assert [(len(m.inputs[1]["a"]), len(m.inputs[1]["b"]), len(m.target["y"])) for m in found] == [(4, 4, 2)] * 2


@pytest.mark.parametrize(
    ("whole", "said"),
    [(["maks"], "is no input of the model: did you mean 'mask'"), (["x"], "along the rows of the model's first input")],
)
def test_names_that_cannot_be_are_refused(whole: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Samples(["x", "mask"], whole)


def test_what_goes_with_any_mesh_is_not_told() -> None:
    options = {"cut": [], "like": None, "micro": 0, "schedule": "1f1b", "split": None, "sequence": False}
    for mesh in Mesh(), Mesh(replicate=2), Mesh(shard=2), Mesh(stage=2), Mesh(split=2):
        assert unused(mesh, options) == []
    everything = {"cut": ["a"], "micro": 2, "whole": [], "split": {"a": "row"}, "sequence": True}
    assert unused(Mesh(stage=2), {**everything, "split": None, "sequence": False}) == []
    assert unused(Mesh(split=2), {"split": {"a": "row"}, "sequence": True}) == []
    assert unused(Mesh(shard=2), {"like": torch.zeros(2)}) == [
        "run.model(like=...) has no effect on --mesh shard=2: it is for --mesh stage=N"
    ]


MASKED = """
import copy, paceline, torch
from torch import nn
from torch.nn import functional as F

class Seen(nn.Module):
    "Each place sees what a mask lets it: places and samples are as many."
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
    def forward(self, x, mask):
        return self.second(mask @ self.first(x).relu())

run = paceline.join(progress="off", checkpoint_keep=0)
torch.manual_seed(run.seed)
torch.set_default_dtype(torch.float64)
x, mask, y = torch.randn(8, 8, 6), torch.ones(8, 8).tril(), torch.randint(3, (8, 8))
loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
plain = Seen()
part = run.model(copy.deepcopy(plain), WHOLE)
run.optimizer(torch.optim.SGD(part.parameters(), lr=0.1), part)
wanted = loss(plain(x, mask), y)
wanted.backward()
mean = run.backward(part, x, mask, y, loss=loss)
torch.testing.assert_close(mean, wanted)
found = dict(part.named_parameters())
assert len(found) == 2 * (3 - run.size), found.keys()
for name, p in found.items():
    torch.testing.assert_close(p.grad, dict(plain.named_parameters())[name].grad)
print("EQUAL", flush=True)
"""


def test_a_mask_for_all_samples_is_given_to_each_micro_batch(tmp_path: Path) -> None:
    done = run(tmp_path, MASKED.replace("WHOLE", "whole=['mask']"), "-n", "2", "--mesh", "stage=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("EQUAL") == 2
    assert "has no effect" not in done.stderr
    alone = run(tmp_path, MASKED.replace("WHOLE", "whole=['mask']"), "-n", "1")
    assert "EQUAL" in alone.stdout
    assert "has no effect" not in alone.stderr
    done = run(tmp_path, MASKED.replace("WHOLE", ""), "-n", "2", "--mesh", "stage=2")
    assert done.returncode == 1
    assert done.stderr.count("paceline: run.backward: mask has shape (8, 8) and is cut into micro-batches") == 1


def test_options_without_a_use_are_told_once(tmp_path: Path) -> None:
    script = """
import paceline, torch
run = paceline.join(progress="off", checkpoint_keep=0)
for _ in range(2):
    run.model(torch.nn.Linear(200, 200), micro=4, sequence=True)
"""
    done = run(tmp_path, script, "-n", "2", "--mesh", "shard=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("run.model(micro=...) has no effect on --mesh shard=2: it is for --mesh stage=N") == 1
    assert done.stderr.count("run.model(sequence=...) has no effect on --mesh shard=2") == 1
    done = run(tmp_path, script, "-n", "2")
    assert done.stderr.count("run.model(micro=...) has no effect without --mesh stage=N") == 1
