"""Every benchmark answers with --quick, within a minute on a quiet machine, prints its table and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import _network_accuracy, overhead

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {
    "allreduce": {"speedup_25mb", "speedup_100mb", "share_of_copy_limit"},
    "step": {"speedup_mlp", "speedup_cnn", "speedup_gpt"},
    "overhead": {"overhead_cnn", "overhead_gpt", "memory_over_ddp"},
    "server": {"speedup_tcp", "speedup_shm", "cpu_tcp"},
    "straggler": {"async_share_of_sum", "bounded_over_sync", "bounded_over_sync_by_step", "less_over_ddp"},
    "corrections": {"accuracy_none_4", "accuracy_dana_4", "accuracy_drop_4", "behind_sequential_4"},
    "local": {"accuracy_gap_points", "accuracy_gap_points_sparse", "final cnn ddp"},
    "chaos": {"faults_injected", "lost_steps", "doubled_samples", "hangs", "goodput", "detect_s", "recover_s"},
    "members": {"scheduler_cpu_10", "scheduler_rss_mb_30", "join_s_30", "false_suspicions"},
    "memory": {"memory_over_best_peer_zero1", "memory_over_best_peer_zero3", "memory_over_best_peer"},
    "tensor_train": {"tt_rule_right", "tt_speedup_batch1_rank8", "tt_compression", "tt_points_lost"},
    "transfer": {"transfer_extraction_5", "transfer_tuning_20", "transfer_lora_100", "cached_speedup"},
    "pipeline": {"bubble_over_formula_1f1b", "bubble_over_formula_zero_bubble", "step_over_torch_4_8"},
    "start": {"time_over_torchrun", "script_over_torchrun", "whole_over_torchrun"},
    "scaling": {"mlp_efficiency_1", "mlp_ours_1"},
    "serve --parts fresh": {"freshness_s", "freshness_taken_s", "freshness_worst_s"},  # the other parts need wrk
    "serve --device cpu": {"gpt_share_1", "gpt_share_64", "gpt_share_of_full_64", "gpt_8_p99_ms", "gpt_8_failed"},
}


@pytest.mark.slow
def test_two_members_end_where_one_with_the_doubled_batch_does() -> None:
    """What bench.overhead asks of CUDA, on the CPU."""
    figure = overhead.equality("cpu", steps=3, half=2)
    assert 0 < figure.value < 1e-5
    assert float(figure.ours.removeprefix("moved ")) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", FIGURES)
def test_quick(name: str, tmp_path: Path) -> None:
    if name in ("corrections", "local", "transfer") and (reason := _network_accuracy.missing()):
        pytest.skip(reason)
    file = tmp_path / "figures.json"
    module, *more = name.split()
    command = [sys.executable, "-m", f"bench.{module}", *more, "--quick", "--json", str(file)]
    if name == "allreduce":
        command.append("--no-hosts")
    if name == "local":
        command += ["--no-times", "--steps", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures.keys() >= FIGURES[name]
    assert all(isinstance(value, float) for value in figures.values())
    for figure in FIGURES[name] & {"speedup_25mb", "speedup_mlp", "overhead_cnn"}:
        assert figure in done.stdout
