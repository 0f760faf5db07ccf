"""The examples run as a user would run them."""

from __future__ import annotations

import gzip
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster, Finished

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUIET = Settings(progress="off")


def pair(name: str, *args: str, limit_s: float = 150) -> list[Finished]:
    members = Cluster(2).run(EXAMPLES / name, args, limit_s=limit_s, settings=QUIET)
    for member in members:
        assert member.code == 0, member.output
    return members


def accuracies(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"test accuracy: (\d+\.\d\d)%", text)]


def write_idx(path: Path, content: torch.Tensor) -> None:
    head = struct.pack(f">HBB{content.dim()}I", 0, 8, content.dim(), *content.shape)
    data = head + content.to(torch.uint8).numpy().tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_digits_on_two_members_learns_and_says_so_once() -> None:
    first, second = pair("digits.py", "--epochs", "3")
    (accuracy,) = accuracies(first.output)
    assert accuracy > 90
    assert accuracies(second.output) == []


def test_digits_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--epochs", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert len(accuracies(done.stdout)) == 1


@pytest.mark.slow
def test_the_demo_reaches_its_accuracy() -> None:
    first, _ = pair("digits.py")
    assert accuracies(first.output)[0] > 97


def test_fashion_mnist_reads_packed_and_plain_files(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    for part, count in ("train", 256), ("t10k", 100):
        labels = torch.randint(10, (count,), generator=g)
        images = torch.randint(60, (count, 28, 28), generator=g)
        images[torch.arange(count), labels * 2, :] = 255  # a line whose height tells the class
        suffix = ".gz" if part == "train" else ""
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", labels)
    first, _ = pair("fashion_mnist.py", "--data", str(tmp_path), "--epochs", "2", "--batch-size", "16")
    found = accuracies(first.output)
    assert len(found) == 2
    assert found[-1] > 30


def test_fashion_mnist_without_data_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "fashion_mnist.py"), "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "train-images-idx3-ubyte" in done.stderr
    assert "apt-get install dataset-fashion-mnist" in done.stderr
    assert "Traceback" not in done.stderr


def test_char_gpt_on_a_text_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    first, second = pair("char_gpt.py", "--text", str(text), "--context", "32", "--epochs", "1")
    (loss,) = re.findall(r"test loss: (\d+\.\d+) per character", first.output)
    assert float(loss) < 3.3  # as good as guessing among the 28 characters; it has begun to learn
    assert "test loss" not in second.output


def test_char_gpt_has_a_text_of_its_own() -> None:
    first, _ = pair("char_gpt.py", "--limit", "20000", "--context", "32", "--epochs", "1")
    assert "test loss" in first.output


def test_stages_gpt_in_two_stages_ends_as_alone(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    args = ["--text", str(text), "--context", "32", "--epochs", "1"]
    stages = Cluster(2).run(EXAMPLES / "stages_gpt.py", args, limit_s=150, settings=QUIET.with_(mesh="stage=2"))
    assert [member.code for member in stages] == [0, 0], stages
    command = [sys.executable, str(EXAMPLES / "stages_gpt.py"), *args]
    alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert alone.returncode == 0, alone.stderr
    losses = [float(re.findall(r"test loss: (\d+\.\d+) per", text)[0]) for text in (stages[0].output, alone.stdout)]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    held = [int(re.findall(r"holds (\d+) numbers", text)[0]) for text in (*(m.output for m in stages), alone.stdout)]
    assert max(held[:2]) < 0.75 * held[2]
    planned, whole = (
        [float(n) for n in re.findall(rf"plan: parameters .* (\d+\.\d\d) MB {where}", stages[0].output)]
        for where in ("on the fullest stage", "without a mesh")
    )
    assert whole == [pytest.approx(4e-6 * held[2], abs=0.01)]
    assert 0.45 * whole[0] < planned[0] < 0.75 * whole[0]
    assert "plan:" not in stages[1].output


def test_sharded_gpt_tells_its_plan_and_learns() -> None:
    settings = Settings(progress="off", mesh="shard=2")
    first, second = Cluster(2).run(EXAMPLES / "sharded_gpt.py", ("--limit", "60000"), limit_s=90, settings=settings)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    planned = dict(re.findall(r"plan: (\w+) +(\d+\.\d\d) MB on each member", first.output))
    whole = dict(re.findall(r"plan: (\w+) .* (\d+\.\d\d) MB without a mesh", first.output))
    assert float(planned["state"]) == pytest.approx(float(whole["state"]) / 2, abs=0.01)
    assert float(planned["at_once"]) < float(whole["at_once"])
    (loss,) = re.findall(r"last loss: (\d+\.\d+) per character", first.output)
    assert float(loss) < 4.2  # as good as guessing among the characters is 4.6; it has begun to learn
    assert "plan:" not in second.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_online_follows_a_camera_that_turns(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    words = ["--still", "2000", "--turning", "3200", "--out", "curves.svg"]
    command = [sys.executable, str(EXAMPLES / "online.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    follows, stays = (float(number) for number in re.findall(r"(\d+\.\d)% right", done.stdout))
    assert follows > 50
    assert follows > stays + 25
    picture = (tmp_path / "curves.svg").read_text()
    curves = re.findall(r'points="([^"]+)"', picture)
    assert [len(curve.split()) > 30 for curve in curves] == [True, True]


def test_transfer_on_two_members(tmp_path: Path) -> None:
    """Pictures that are brighter the higher the kind, so that few tell them apart."""
    generator = torch.Generator().manual_seed(0)
    for part, num in ("train", 1200), ("t10k", 200):
        kinds = torch.arange(num) % 10
        noise = torch.randint(0, 20, (num, 28, 28), generator=generator)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", noise + 24 * kinds[:, None, None])
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", kinds)
    first, second = pair("transfer.py", "--data", str(tmp_path), "--epochs", "3", "--before", "4", limit_s=240)
    assert "freeze up to" in first.output
    assert len(accuracies(first.output)) == 1
    assert accuracies(second.output) == []
