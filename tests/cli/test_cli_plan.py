"""`paceline plan memory`: the table, the verdict, and what it says to those who name something wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        self.head = nn.Linear(512, 10)

    def forward(self, x):
        return self.head(self.layers(x))

def make_net():
    return Net()

def needs(width):
    return Net()

def broken():
    net = Net()
    net.head = nn.Linear(99, 10)
    return net
"""
INPUTS = """
def example_inputs():
    return torch.zeros(16, 512)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "net.py"
    file.write_text(MODEL)
    return str(file)


def test_the_table_has_every_choice(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", f"{model}:make_net", "--batch", "16x512", "-n", "4"]) == 0
    out = capsys.readouterr().out
    assert "2.11M parameters, adamw, fp32, a batch of 16x512 on each of 4 members" in out
    for words in (
        "allreduce",
        "zero(stage=1)",
        "zero(stage=2)",
        "mesh shard=2",
        "mesh shard=4",
        "zero(offload=optimizer)",
    ):
        assert words in out
    assert "8.43 MB" in out  # parameters
    assert "16.9 MB" in out  # state of AdamW


def test_the_verdict_is_the_exit_code(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(model).write_text(MODEL + INPUTS)
    command = ["plan", "memory", model, "--device", "cpu", "-n", "2"]
    assert main([*command, "--memory", "1GB"]) == 0
    assert f"fits in 1 GB: paceline run -n 2 {model}" in capsys.readouterr().out
    assert main([*command, "--memory", "12MB"]) == 1
    out = capsys.readouterr().out
    assert "nothing fits in 12 MB on 2 members" in out
    assert "the smallest that would do: paceline run -n 4 --mesh shard=4" in out
    assert main([*command, "--memory", "1kB"]) == 1
    assert "no number of members would do" in capsys.readouterr().out


def test_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", f"{model}:make_net", "--batch", "16x512", "--memory", "1GB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == 8 * (512 * 512 + 512) + 5130
    assert told["choices"][0]["parameters"] == 4 * told["parameters"]
    assert told["best"]["flags"] == "-n 1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{model}:make_nte", "--batch", "16x512"], "has no function 'make_nte': did you mean 'make_net'?"),
        (["{model}:needs", "--batch", "16x512"], "needs width: name a function without arguments"),
        (["{model}x.py"], "there is no file"),
        (["nowhere:make"], "there is no module 'nowhere'"),
        (["{model}:make_net"], "what does a batch look like?"),
        (["{model}:make_net", "--batch", "16by512"], "'16by512' is not a shape"),
        (["{model}:make_net", "--batch", "16x512:int46"], "'int46' is not a type of elements: did you mean 'int64'?"),
        (["{model}:make_net", "--batch", "16x511"], "the model does not take a batch of 16x511"),
        (["{model}:broken", "--batch", "16x512"], "net.py, line 12, in Linear)"),
        (["{model}:make_net", "--memory", "lots"], "'lots' is not a size"),
        (["{model}:make_net", "--batch", "16x512", "--optimizer", "sgdd"], "unknown optimizer 'sgdd'"),
        (["{model}:make_net", "--btach", "1"], "unknown option '--btach': did you mean '--batch'?"),
    ],
)
def test_errors_say_what_to_do(words: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", *(word.replace("{model}", model) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_other_plans_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memroy"]) == 2
    assert "did you mean 'memory'?" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "plan what?" in capsys.readouterr().err


def test_a_file_that_trains_when_it_is_imported_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "script.py"
    file.write_text("raise SystemExit(1)")
    assert main(["plan", "memory", str(file)]) == 2
    assert 'put what trains under if __name__ == "__main__"' in capsys.readouterr().err
