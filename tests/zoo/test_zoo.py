"""The zoo: two members equal DDP, a run of one equals plain PyTorch; over every kind of model and loop.

All cases run in one job of two members and one of a single process; each test looks at one case's outcome.
`ZOO_ONLY="case case"` runs only those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import uneven
from cases import CASES
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster

JOB = Path(__file__).with_name("job.py")
ONLY = os.environ.get("ZOO_ONLY", "").split()
NAMES = [name for name in CASES if name in ONLY or not ONLY]
# Some virtual machines announce AMX but stop a process that uses it: keep bf16 off it.
ENV = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@dataclass(frozen=True)
class Outcomes:
    """What the jobs wrote, by system and rank ("ours-1")."""

    folder: Path

    def of(self, who: str, name: str) -> dict[str, Tensor]:
        failures = json.loads((self.folder / f"{who}.json").read_text())
        assert name not in failures, f"{name} failed in {who}: {failures[name]}"
        tensors = load_file(self.folder / f"{who}.safetensors")
        return {key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("pair")
    settings = Settings(name="zoo", root=str(folder / "runs"), progress="off", checkpoint_keep=0, wait_limit_s=20)
    for member in Cluster(2).run(JOB, [str(folder), *ONLY], limit_s=120, env=ENV, settings=settings):
        assert member.code == 0, member.output
    return Outcomes(folder)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("single")
    env = os.environ | ENV | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(JOB), str(folder), *ONLY]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Outcomes(folder)


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two tensors of the same name; infinite where the names differ."""
    if a.keys() != b.keys() or not a:
        return float("inf")
    return max(((a[k].double() - b[k].double()).abs().max().item() for k in a if a[k].numel()), default=0.0)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that differ in any bit."""
    return sorted(k for k in a.keys() | b.keys() if k not in a or k not in b or not torch.equal(a[k], b[k]))


@pytest.mark.parametrize("name", NAMES)
def test_two_members_equal_ddp(pair: Outcomes, name: str) -> None:
    ours, ddp = pair.of("ours-0", name), pair.of("ddp-0", name)
    assert furthest(ours, ddp) <= CASES[name].tolerance


@pytest.mark.parametrize("name", [n for n in [*CASES, *uneven.UNEVEN] if n in ONLY or not ONLY])
def test_members_are_identical(pair: Outcomes, name: str) -> None:
    first, second = pair.of("ours-0", name), pair.of("ours-1", name)
    first.pop("seen", None), second.pop("seen", None)
    assert first
    assert equal(first, second) == []


@pytest.mark.parametrize("name", NAMES)
def test_run_of_one_equals_plain_pytorch(single: Outcomes, name: str) -> None:
    alone = single.of("alone-0", name)
    assert alone
    assert equal(alone, single.of("plain-0", name)) == []


@pytest.mark.parametrize("name", [n for n in uneven.UNEVEN if n in ONLY or not ONLY])
def test_uneven_batches_equal_one_process(pair: Outcomes, name: str) -> None:
    first, second = pair.of("ours-0", name), pair.of("ours-1", name)
    expected = uneven.reference(uneven.SIZES[name], [first.pop("seen"), second.pop("seen")])
    assert furthest(first, expected) <= 1e-5


@pytest.mark.skipif(bool(ONLY), reason="only some cases were run")
def test_the_cases_tell_systems_apart(pair: Outcomes, single: Outcomes) -> None:
    """Training on two members' data must not look like training on one's, or the tests above say nothing."""
    same = [n for n in NAMES if furthest(pair.of("ours-0", n), single.of("plain-0", n)) <= CASES[n].tolerance]
    assert same == []
