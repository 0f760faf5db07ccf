"""The zoo with zero: every kind of model and loop gives what all-reduce gives, or is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_zoo import ENV, JOB

from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster

pytestmark = pytest.mark.slow
ROUNDED = 1e-7  # where a pass is added to a mean that is there, stage 2 adds in another order


def outcome(folder: Path, strategy: str) -> tuple[dict[str, str], list[dict[str, torch.Tensor]]]:
    """The cases that failed, and what each member has in the end."""
    folder.mkdir()
    settings = Settings(
        name="zoo", root=str(folder / "runs"), progress="off", checkpoint_keep=0, wait_limit_s=20, strategy=strategy
    )
    for member in Cluster(2).run(JOB, [str(folder)], limit_s=150, env=ENV, settings=settings):
        assert member.code == 0, member.output
    failures = json.loads((folder / "ours-0.json").read_text())
    return failures, [load_file(folder / f"ours-{rank}.safetensors") for rank in range(2)]


def test_cut_or_whole_it_is_the_same(tmp_path: Path) -> None:
    failures, (reduced, _) = outcome(tmp_path / "reduced", "allreduce")
    assert failures == {}
    for stage in 1, 2:
        failures, (first, second) = outcome(tmp_path / f"stage-{stage}", f"zero(stage={stage})")
        assert failures == {}
        assert first.keys() == reduced.keys()
        for name, tensor in first.items():
            if not name.endswith("/seen"):
                assert torch.equal(tensor, second[name]), name
            rounded = stage == 2 and tensor.is_floating_point()
            torch.testing.assert_close(tensor, reduced[name], rtol=0, atol=ROUNDED if rounded else 0, msg=name)
