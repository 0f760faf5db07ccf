"""All-reduce through a codec: the same bits on all members, nothing unsaid lost, and every fault told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.codecs import PayloadError, make_codec
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.strategies import AllReduce, World, make_strategy
from paceline.strategies.reducers import Coder, Method, Piece, Reducer
from paceline.strategies.reducers.coder import Bucket
from paceline.strategies.reducers.frame import Frame
from paceline.strategies.reducers.low_rank import orthonormal
from paceline.strategies.reducers.two_way import cut
from paceline.testing.cluster import Cluster
from paceline.testing.together import together
from paceline.transport.group import Group
from paceline.transport.link import Link
from paceline.transport.ring import Ring

HOSTS = {
    "one host": ["a", "a"],
    "two hosts": ["a", "b"],
    "two members on each of two hosts": ["a", "a", "b", "b"],
    "three hosts": ["a", "b", "c"],
}
CODECS = [
    "cast(bf16)", "cast(fp16)", "cast(fp8)", "sign", "ternary", "quantize(8)", "quantize(4)", "quantize(2)",
    "quantize(8, stochastic=True)", "threshold(0.01)", "threshold(density=0.05)", "nonzero", "topk(0.05)",
    "sampled_topk(0.05)", "quantize(8, shared=True)", "dgc(0.05, momentum=0.5, ramp=3)", "lowrank(1)", "auto",
]  # fmt: skip
WAYS = [
    *({"codec": codec} for codec in CODECS),
    {"codec": "sign", "back": "sign"},
    {"codec": "topk(0.05)", "back": "quantize(8)"},
    {"codec": "quantize(4)", "back": "threshold(density=0.05)"},
    {"codec": "threshold(density=0.05)", "back": "quantize(2)"},
    {"codec": "dgc(0.05, momentum=0.5, ramp=3)", "back": "topk(0.1)"},
]


class Small(nn.Module):
    """Parameters that are encoded and such as are too small for it, and statistics that follow the first member."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 100), nn.BatchNorm1d(100), nn.Linear(100, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def train(group: Group, steps: int, **options: object) -> tuple[nn.Module, AllReduce, list[list[torch.Tensor]]]:
    """A few steps on unlike data; the gradients of each."""
    model = Small()
    own = torch.Generator().manual_seed(0)  # members are threads here, and share the global one
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=own) / 5)
    strategy = AllReduce(bucket_mb=0.005, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.attach(model, optimizer, World(group, seed=5))
    generator = torch.Generator().manual_seed(group.rank)
    history = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        history.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return model, strategy, history


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ", back=".join(way.values()))
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_all_members_end_with_the_same_bits(way: dict[str, str], hosts: list[str]) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        model, _, _ = train(group, 4, **way)
        return list(model.state_dict().values())

    first, *others = together(len(hosts), body, hosts=hosts)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))
    assert all(torch.isfinite(t).all() for t in first)


@pytest.mark.parametrize("back", [None, "nonzero"])
def test_a_lossless_codec_gives_what_none_gives(back: str | None) -> None:
    def body(group: Group) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        return train(group, 3, codec="nonzero", back=back)[2], train(group, 3)[2]

    for coded, plain in together(3, body, hosts=["a", "b", "c"]):
        for one, other in zip(coded, plain):
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(one, other))


@pytest.mark.parametrize(
    "way",
    [
        {"codec": "topk(0.02)"},
        {"codec": "sign"},
        {"codec": "quantize(2)"},
        {"codec": "quantize(8, shared=True)"},
        {"codec": "lowrank(2)"},
        {"codec": "sign", "back": "topk(0.1)"},
    ],
    ids=str,
)
def test_what_is_unsaid_is_said_later(way: dict[str, str]) -> None:
    """Members that stand still: all that was given out plus all that is left is all that there was."""

    def body(group: Group) -> float:
        torch.manual_seed(1)
        model = nn.Linear(100, 40, bias=False)
        strategy = AllReduce(**way)
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        x = torch.randn(4, 100, generator=torch.Generator().manual_seed(group.rank))
        given = torch.zeros(40, 100)
        for _ in range(30):
            model.zero_grad()
            model(x).sum().backward()
            assert model.weight.grad is not None
            given += model.weight.grad
        (engine,) = strategy._engines.values()
        assert engine.coder is not None
        engine.coder.fold(Bucket.of(torch.float32, 4000, [Piece("weight", slice(0, 4000), 0)]), ())
        left = group.all_reduce(engine.coder.residuals["weight"].clone()).view(40, 100)
        there = 30 * group.all_reduce(x.sum(0).expand(40, 100).clone()) / 2
        return float((given + left - there).abs().max() / there.abs().max())

    assert max(together(2, body, hosts=["a", "b"])) < 1e-5


@pytest.mark.parametrize(
    "way",
    [
        {"codec": "topk(0.05)"},
        {"codec": "cast(bf16)"},
        {"codec": "threshold(density=0.05)"},
        {"codec": "quantize(8, shared=True)"},
        {"codec": "lowrank(2)"},
        {"codec": "sign", "back": "quantize(8)"},
    ],
    ids=str,
)
def test_a_spoilt_pass_gives_back_what_was_said(way: dict[str, str]) -> None:
    """As a GradScaler needs it, which skips the step on everyone and goes on."""

    def body(group: Group) -> torch.Tensor:
        model = nn.Linear(100, 40)
        strategy = AllReduce(**way)
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        (engine,) = strategy._engines.values()
        assert engine.coder is not None
        x = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
        model(x).sum().backward()
        before = engine.coder.residuals["weight"].clone()
        model.zero_grad()
        (model(x).sum() * (float("inf") if group.rank else 1.0)).backward()
        assert model.weight.grad is not None
        assert not bool(torch.isfinite(model.weight.grad).any())
        gradient = 0.0 if group.rank else x.sum(0).expand(40, 100).reshape(-1) / 2  # the other could say nothing
        assert torch.allclose(engine.coder.residuals["weight"], before + gradient, atol=1e-6)
        model.zero_grad()
        model(x).sum().backward()
        assert bool(torch.isfinite(model.weight.grad).all())
        return model.weight.grad.clone()

    first, second = together(2, body, hosts=["a", "b"])
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "way",
    [
        {"codec": "sign"},
        {"codec": "quantize(4)", "back": "sign"},
        {"codec": "topk(0.05)"},
        {"codec": "quantize(8, shared=True)"},
        {"codec": "lowrank(2)"},
    ],
    ids=str,
)
def test_a_spoilt_pass_leaves_nothing_between_parameters(way: dict[str, str]) -> None:
    """A bias of 200 elements is padded to 208, and nobody ever writes a gradient there."""

    def body(group: Group) -> list[bool]:
        model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 40))
        strategy = AllReduce(**way)
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        finite = []
        for step in range(4):
            model.zero_grad()
            loss = model(torch.ones(4, 64)).square().mean()
            (loss * float("inf") if step == 1 and group.rank else loss).backward()
            finite.append(all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters()))
        return finite

    for finite in together(2, body, hosts=["a", "b"]):
        assert finite == [True, False, True, True]


def test_buffers_may_hold_infinities() -> None:
    """A mask of an attention layer, which travels beside the gradients."""

    def body(group: Group) -> torch.Tensor:
        model = nn.Linear(100, 40)
        model.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
        strategy = AllReduce(codec="sign")
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 100)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    for grad in together(2, body, hosts=["a", "b"]):
        assert torch.isfinite(grad).all()


def test_residuals_follow_the_learning_rate() -> None:
    def body(group: Group) -> float:
        codec, coder = make_codec("topk(0.01)"), Coder(Method.of("topk(0.01)"))
        piece, out = Piece("w", slice(0, 4096), 7), torch.empty(40000, dtype=torch.uint8)
        coder.begin({7: 0.1})
        coder.encode(codec, piece, torch.ones(4096), out, (0, 2))
        coder.begin({7: 0.05})
        coder.encode(codec, piece, torch.zeros(4096), out, (0, 2))
        return float(coder.residuals["w"][-1])

    assert together(2, body) == [2.0, 2.0]


def test_unbiased_codecs_keep_no_residual_unless_told() -> None:
    unbiased, biased = Method.of("quantize(8, stochastic=True)"), Method.of("quantize(8)")
    assert [unbiased.feeds(None), biased.feeds(None), unbiased.feeds(True), biased.feeds(False)] == [0, 1, 1, 0]
    assert Method.of("lowrank").feeds(None)
    assert not Method.of("none").feeds(True)


def test_warmup_exchanges_gradients_as_they_are() -> None:
    def body(group: Group) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        return train(group, 4, codec="sign", warmup=3)[2], train(group, 4)[2]

    for coded, plain in together(2, body, hosts=["a", "b"]):
        for step in range(3):
            assert all(torch.allclose(a, b) for a, b in zip(coded[step], plain[step]))
        assert not all(torch.allclose(a, b) for a, b in zip(coded[3], plain[3]))


@pytest.mark.parametrize("other", ["sign", "none"])
def test_members_with_other_codecs_are_told_so(other: str) -> None:
    def body(group: Group) -> None:
        train(group, 1, codec=other if group.rank else "topk(0.01)")

    with pytest.raises(ConfigError, match=rf"member 0 encodes with topk.* and member 1 with {other}"):
        together(2, body)


def test_the_words_of_the_command_line() -> None:
    strategy = make_strategy("allreduce(bucket_mb=8)", "topk(0.02)")
    assert isinstance(strategy, AllReduce)
    assert strategy.method.words.startswith("topk(density=0.02")
    assert make_strategy("allreduce(codec='sign')", "none").method.codec is None  # type: ignore[attr-defined]
    both = make_strategy("allreduce(codec='sign', back='quantize(8)')")
    assert both.method.words == "sign(block=1024), back=quantize(bits=8, block=256)"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="unknown codec 'topc': did you mean 'topk'"):
        make_strategy("allreduce", "topc(0.1)")
    with pytest.raises(ConfigError, match="warmup=-1"):
        AllReduce(codec="sign", warmup=-1)
    assert make_strategy("allreduce", "sign, back=sign").method.back is not None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="not for their sums"):
        AllReduce(codec="sign", back="dgc")
    for words in "quantize(8.0)", "topk(0.01, chunk=100.5)", "topk(density=0.1, density=0.2)", "sampled_topk(True)":
        with pytest.raises(ConfigError):
            AllReduce(codec=words)
    for codec in "none", "auto", "lowrank":
        with pytest.raises(ConfigError, match="nothing is encoded on the way back"):
            AllReduce(codec=codec, back="sign")
    with pytest.raises(ConfigError, match="did you mean 'high'"):
        AllReduce(codec="auto(fidelity=hihg)")
    with pytest.raises(ConfigError, match="rank=0"):
        AllReduce(codec="lowrank(0)")


@pytest.mark.parametrize("momentum", [{"momentum": 0.9}, {}])
def test_dgc_keeps_the_momentum_itself(momentum: dict[str, float]) -> None:
    def body(group: Group) -> None:
        model = nn.Linear(100, 40)
        make = torch.optim.SGD if momentum else torch.optim.Adam
        strategy = AllReduce(codec="dgc(0.01)")
        strategy.attach(model, make(model.parameters(), lr=0.1, **momentum), World(group))

    with pytest.raises(ConfigError, match="dgc keeps the momentum itself"):
        together(2, body)


def test_small_parameters_may_have_momentum_beside_dgc() -> None:
    def body(group: Group) -> bool:
        model = nn.Linear(100, 40)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "momentum": 0.9}]
        optimizer, strategy = torch.optim.SGD(groups, lr=0.1), AllReduce(codec="dgc(0.01)")
        strategy.attach(model, optimizer, World(group))
        model(torch.ones(1, 100)).sum().backward()
        assert strategy.finish(optimizer)
        optimizer.param_groups[0]["momentum"] = 0.9  # as a scheduler may
        with pytest.raises(ConfigError, match="dgc keeps"):
            strategy.finish(optimizer)
        return True

    assert all(together(2, body))


class Loop:
    """A collective of one member that gives back what the test puts in its place."""

    size, position, link, sent_bytes = 2, 0, None, 0

    def all_reduce_bytes(self, nbytes: int) -> int:
        return nbytes

    def measure(self) -> None: ...

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("not with this codec")

    def __init__(self, change: object) -> None:
        self._change = change

    def all_reduce(self, flat: torch.Tensor) -> None:
        raise AssertionError("not with this codec")

    def all_gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        rows = out.view(2, -1)
        rows[0], rows[1] = flat, self._change(flat.clone()) if flat.dtype == torch.uint8 else flat  # type: ignore[operator]


@pytest.mark.parametrize("place", [0, 4, 8, 12, 20, -1])
def test_an_altered_message_is_refused(place: int) -> None:
    def alter(message: torch.Tensor) -> torch.Tensor:
        message[place] ^= 0x10
        return message

    def body(group: Group) -> None:
        coder = Coder(Method.of("topk(0.05)"))
        reducer = Reducer(coder)
        flat = torch.randn(2000)
        reducer.add(0, flat.dtype, 2000, [Piece("w", slice(0, 1500), 1)])
        coder.begin({})
        with pytest.raises(PayloadError, match="member 1"):
            reducer.through(Loop(alter))(flat)

    together(1, body)


SCRIPT = """
import hashlib, os, signal, sys, torch, paceline
kill = int(sys.argv[1])
strategy = paceline.AllReduce(codec=sys.argv[2], back=(sys.argv[3:] or [None])[0])
run = paceline.join(strategy=strategy, checkpoint_every_s=0.01)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.ReLU(), torch.nn.Linear(60, 40))
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
run.track(scheduler=scheduler)
data = torch.utils.data.TensorDataset(torch.randn(64, 40), torch.randn(64, 40))
loader = run.loader(data, 4)
for epoch in run.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if run._meter.step == kill and run.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
print("ENDS", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


def test_the_summary_tells_bytes_times_and_what_is_unsaid(tmp_path: Path) -> None:
    Cluster(2).run(SCRIPT, ["-1", "topk(0.02)"], settings=Settings(root=str(tmp_path), name="told"))
    told = json.loads((tmp_path / "told" / "summary.json").read_text())["coded"]
    steps, coded, rest = 24, 2 * 40 * 60, 60 + 40 + 5 + 4
    assert told["codec"].startswith("topk(density=0.02")
    assert told["bytes_before"] >= 2 * steps * 4 * (coded + rest)
    small = make_codec("quantize(8, stochastic=True)").nbytes(60 + 40)  # biases, as one piece
    exact = 8 + 2 * (4 + make_codec("topk(0.02)").nbytes(2400)) + 4 + small + 4 * (5 + 4)
    assert abs(told["bytes_after"] / (2 * steps) - exact) <= 2 * 16 * 4  # padding between parameters
    assert told["residual_norm"] > 0
    assert min(told[f"{part}_s"] for part in ("encode", "wire", "decode")) > 0
    assert "topk(density=0.02" in (tmp_path / "told" / "report.html").read_text()


@pytest.mark.parametrize(
    "way",
    [
        ["quantize(4, stochastic=True)", "sign"],
        *(pytest.param([codec], marks=pytest.mark.slow) for codec in ("topk(0.02)", "lowrank(2)")),
    ],
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path, way: list[str]) -> None:
    ends = []
    for name, kills in ("whole", [-1]), ("broken", [13, -1]):
        for kill in kills:
            done = Cluster(2).run(SCRIPT, [str(kill), *way], settings=Settings(root=str(tmp_path), name=name))
        ends.append([line for member in done for line in member.output.splitlines() if "ENDS" in line])
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]


def test_members_that_are_gone_hand_on_what_they_left_unsaid() -> None:
    def body(group: Group) -> float:
        coder = Coder(Method.of("sign"))
        states = [{"residuals": {"w": torch.full((3,), float(i))}, "rates": {}} for i in (1, 2)]
        coder.load(states)
        return float(coder.residuals["w"].sum())

    assert together(1, body) == [9.0]


def test_sums_that_a_member_makes_no_more_leave_nothing_unsaid() -> None:
    coder = Coder(Method.of("sign", back="sign"))
    bucket = Bucket.of(torch.float32, 4096, [Piece("w", slice(0, 4096), 0)])
    coder.load([{"residuals": {}, "rates": {}, "returns": {"w@2048": torch.ones(2048), "w@0": torch.ones(100)}}])
    coder.fold(bucket, [bucket.pieces[0].part(2048, 4096)])
    assert list(coder.returns) == ["w@2048"]
    assert coder.residuals["w"].nonzero().view(-1).tolist() == list(range(100))


def test_a_matrix_of_low_rank_comes_out_as_it_went_in() -> None:
    """Each member has one sample, so two members' gradients have rank two at most."""

    def body(group: Group) -> list[float]:
        off = []
        for rank in 1, 2:
            models = [nn.Linear(60, 50) for _ in range(2)]
            models[1].load_state_dict(models[0].state_dict())
            for model, codec in zip(models, (None, f"lowrank({rank})")):
                AllReduce(codec=codec).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
                x = torch.randn(1, 60, generator=torch.Generator().manual_seed(group.rank))
                model(x).square().sum().backward()
                model.zero_grad()
                model(x).square().sum().backward()
            plain, thin = (m.weight.grad for m in models)
            assert plain is not None
            assert thin is not None
            off.append(float((plain - thin).norm() / plain.norm()))
        return off

    for one, two in together(2, body, hosts=["a", "b"]):
        assert one > 0.1
        assert two < 1e-5


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("numels", [[5000], [3000, 10, 70_000, 1100], [100], [200_000, 1]])
def test_parts_cover_the_bucket_and_are_about_equal(size: int, numels: list[int]) -> None:
    pieces, at = [], 0
    for i, numel in enumerate(numels):
        pieces.append(Piece(str(i), slice(at, at + numel), i))
        at += numel + 6
    bucket = Bucket.of(torch.float32, at, pieces)
    codec = make_codec("sign")
    parts = cut(bucket, (codec, codec), size)
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == at
    frames = [Frame(codec, bucket, part) for part in parts]
    assert sum(p.numel for f in frames for p in f.coded) == sum(p.numel for p in bucket.pieces)
    if at > 50_000:
        assert max(f.nbytes for f in frames) < 1.5 * Frame(codec, bucket, slice(0, at)).nbytes / size + 1000


@pytest.mark.parametrize("numels", [[5 * 4096], [640, 2304, 3 * 4096 + 100, 10, 9 * 4096]])
def test_parts_end_where_chunks_do(numels: list[int]) -> None:
    """So that what a codec chooses in a chunk does not depend on how many members there are."""
    pieces, at = [], 0
    for i, numel in enumerate(numels):
        pieces.append(Piece(str(i), slice(at, at + numel), i))
        at += numel
    bucket = Bucket.of(torch.float32, at, pieces)
    codecs = make_codec("dgc(0.005, values=int8)"), make_codec("topk(0.01, values=int8)")
    for part in cut(bucket, codecs, 4):
        for piece in Frame(codecs[0], bucket, part).coded:
            assert piece.start % 4096 == 0


@pytest.mark.parametrize("size", [2, 3, 8])
def test_parts_are_about_equal_beside_many_small_parameters(size: int) -> None:
    """A norm's weights take a byte each beside a coarse codec, which is many times what a weight of a matrix takes."""
    pieces, at = [], 0
    for i in range(60):
        numel = 9 * 4096 if i % 3 == 0 else 300
        pieces.append(Piece(str(i), slice(at, at + numel), i))
        at += numel
    bucket = Bucket.of(torch.float32, at, pieces)
    codecs = make_codec("dgc(0.002, values=int8)"), make_codec("topk(0.01, values=int8)")
    parts = cut(bucket, codecs, size)
    both = [sum(Frame(codec, bucket, part).nbytes for codec in codecs) for part in parts]
    assert max(both) < 1.15 * sum(both) / size


def test_the_momentum_of_a_part_is_that_of_the_whole() -> None:
    """Sums that come back as they are: the same gradients as where everyone's codes go to everyone."""

    def body(group: Group) -> list[torch.Tensor]:
        said = []
        for back in None, "topk(1.0)":
            model = nn.Linear(4096, 7, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            AllReduce(codec="dgc(0.02)", back=back).attach(model, optimizer, World(group))
            for step in range(4):
                model.zero_grad()
                noise = torch.randn(7, 4096, generator=torch.Generator().manual_seed(10 * step + group.rank))
                (model.weight * noise).sum().backward()
                assert model.weight.grad is not None
                said.append(model.weight.grad.clone())
        return said

    for said in together(3, body, hosts=["a", "b", "c"]):
        assert all(torch.equal(one, two) for one, two in zip(said[:4], said[4:]))
        assert said[3].count_nonzero() > 0


def test_small_parameters_are_right_in_the_mean() -> None:
    """With a coarse codec they are rounded by chance, with a fine one they travel as they are."""

    def body(group: Group) -> tuple[float, float]:
        worst = []
        for codec in "sign", "quantize(4)":
            model = nn.Linear(100, 80)
            AllReduce(codec=codec).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
            factors, total = torch.arange(80.0) * (group.rank + 1), torch.zeros(80)
            for _ in range(100):
                model.zero_grad()
                (model(torch.ones(1, 100)) * factors).sum().backward()
                assert model.bias.grad is not None
                total += model.bias.grad
            worst.append(float((total / 100 - torch.arange(80.0) * 1.5).abs().max()))
        return worst[0], worst[1]

    for coarse, fine in together(2, body, hosts=["a", "b"]):
        assert 0 < coarse < 0.3  # a level is 1.2 wide, and a hundred draws lie within a tenth of it
        assert fine < 1e-4


class Two(nn.Module):
    """A large parameter and a small one, in buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.zeros(4000)), nn.Parameter(torch.zeros(500))


def passes(group: Group, factors: list[tuple[float, float]], **way: object) -> tuple[list[torch.Tensor], Coder]:
    """The large parameter's gradients where those of both are ones times these; 0 where a pass is spoilt."""
    model, given = Two(), []
    strategy = AllReduce(bucket_mb=1e-6, **way)  # type: ignore[arg-type]
    strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
    for large, small in factors:
        model.zero_grad()
        ((model.large * large).sum() + (model.small * small).sum()).backward()
        grads = [p.grad for p in model.parameters()]
        assert all(g is not None for g in grads)
        spoilt = not all(bool(torch.isfinite(g).all()) for g in grads if g is not None)
        given.append(torch.zeros(4000) if spoilt or grads[0] is None else grads[0].clone())
    (engine,) = strategy._engines.values()
    assert engine.coder is not None
    return given, engine.coder


@pytest.mark.parametrize(
    "way",
    [{"codec": "topk(0.1)"}, {"codec": "sign", "back": "quantize(8)"}, {"codec": "topk(0.5)", "back": "topk(0.5)"}],
    ids=str,
)
def test_a_pass_that_another_bucket_spoils_counts_once(way: dict[str, str]) -> None:
    """All that was given out and all that is left is all that there was, however often a pass had to be taken back."""
    inf = float("inf")

    def body(group: Group) -> float:
        given, coder = passes(group, [(1, 1), (1, inf if group.rank else 1), (1, 1), (1, inf), (1, 1)], **way)
        coder.fold(Bucket.of(torch.float32, 4000, [Piece("large", slice(0, 4000), 0)]), ())
        left = group.all_reduce(coder.residuals["large"].clone())
        return float((torch.stack(given).sum(0) + left - 5).abs().max())

    assert max(together(2, body, hosts=["a", "b"])) < 1e-4


def test_large_gradients_are_cut_off_and_not_for_ever() -> None:
    def body(group: Group) -> list[bool]:
        factors = [1.5e5 if i == 1 else 1.0 for i in range(12)]
        given, _ = passes(group, [(f, 1.0) for f in factors], codec="cast(fp16)")
        return [bool((g > 0).all()) for g in given]

    for finite in together(3, body, hosts=["a", "b", "c"]):
        assert all(finite)


def test_low_rank_recovers_from_a_gradient_of_zeros() -> None:
    def body(group: Group) -> float:
        model = nn.Embedding(200, 50)
        AllReduce(codec="lowrank(2)").attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        for step in range(6):
            model.zero_grad()
            (model(torch.arange(100, 200)).sum() * min(step, 1)).backward()
        assert model.weight.grad is not None
        return float(model.weight.grad[100:].mean())

    assert all(mean > 0.5 for mean in together(2, body, hosts=["a", "b"]))


def test_columns_are_the_same_whatever_the_threads() -> None:
    p = torch.randn(50_000, 4, generator=torch.Generator().manual_seed(0))
    threads, found = torch.get_num_threads(), []
    try:
        for count in 1, 2, 3:
            torch.set_num_threads(count)
            found.append(orthonormal(p))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.allclose(found[0].T @ found[0], torch.eye(4), atol=1e-5)


def test_another_codec_after_a_resume_is_taken_and_keeps_what_is_unsaid() -> None:
    auto = Coder(Method.of("auto"))
    auto.chosen = Method.of("topk(0.01, values=int8)")
    for words, expected in ("quantize(8)", "quantize(bits=8, block=256)"), ("auto(fidelity=exact)", "none"):
        again = Coder(Method.of(words))
        again.load_common(auto.common())
        assert again.method.words == expected
    dgc, piece = Coder(Method.of("dgc(0.01)")), Piece("w", slice(0, 3), 0)
    dgc.load([{"residuals": {"w": torch.ones(3)}, "rates": {}}])
    assert dgc.residual(piece, 2).tolist() == [1, 1, 1, 0, 0, 0]
    assert dgc.residual(piece).tolist() == [1, 1, 1]


def test_what_was_left_at_a_rate_of_zero_has_no_effect_later() -> None:
    coder, piece, out = Coder(Method.of("sign")), Piece("w", slice(0, 2048), 7), torch.empty(4096, dtype=torch.uint8)
    x = torch.randn(2048)
    for rate in 0.0, 0.0:
        coder.begin({7: rate})
        coder.encode(make_codec("sign"), piece, x, out, (0, 1))
    assert float(coder.residuals["w"].norm()) > 0
    coder.begin({7: 0.1})
    assert float(coder.residual(piece).norm()) == 0


class Scaled(nn.Module):
    """Parameters of several types and memory formats, whose gradients need no products of half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.zeros(3001, dtype=dtype))
        self.image = nn.Parameter(torch.zeros(8, 16, 3, 5, dtype=dtype).contiguous(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.zeros(70, 40, dtype=dtype).T)
        self.few = nn.Parameter(torch.zeros(70))

    def forward(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        terms = [(p.float() * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters()]
        return torch.stack(terms).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "way",
    [{"codec": "quantize(8)"}, {"codec": "cast(fp16)"}, {"codec": "topk(1.0)", "back": "quantize(8)"},
     {"codec": "quantize(8, shared=True)"}, {"codec": "lowrank(40)"}, {"codec": "nonzero"}],
    ids=str,
)  # fmt: skip
def test_other_types_and_memory_formats_arrive_where_they_belong(way: dict[str, str], dtype: torch.dtype) -> None:
    def body(group: Group) -> list[float]:
        model = Scaled(dtype)
        AllReduce(**way).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        for _ in range(2):
            model.zero_grad()
            model(group.rank).backward()
        off = []
        expected = Scaled(torch.float32)
        ((expected(0) + expected(1) + expected(2)) / 3).backward()
        for p, q in zip(model.parameters(), expected.parameters()):
            assert p.grad is not None
            assert q.grad is not None
            assert p.grad.dtype == p.dtype
            off.append(float((p.grad.float() - q.grad).norm() / q.grad.norm()))
        return off

    for off in together(3, body, hosts=["a", "b", "c"]):
        assert max(off) < 0.05


@pytest.mark.parametrize(
    "codec",
    [
        "cast(bf16)", "sign", "quantize(4)", "quantize(8, shared=True)", "topk(0.05)", "threshold(density=0.05)",
        "lowrank(2)", "sign, back=sign", "topk(0.05), back=quantize(8)", "nonzero, back=nonzero",
    ],
)  # fmt: skip
@pytest.mark.parametrize("hosts", ["aa", "ab", "abc", "aabbc"])
def test_the_bytes_that_are_told_are_those_that_are_sent(
    monkeypatch: pytest.MonkeyPatch, codec: str, hosts: str
) -> None:
    """Before: what the same exchange sends without a codec. Of a host with several members, the first one tells."""
    monkeypatch.setattr(Ring, "_measured", lambda ring: Link(latency_s=1e-4, bytes_per_s=1e8))

    def body(group: Group) -> list[tuple[int, int, int]]:
        rows = []
        for words in codec, "none":
            model = nn.Linear(100, 80)
            strategy = AllReduce(codec=words)
            strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
            x = torch.randn(4, 100, generator=torch.Generator().manual_seed(group.rank))
            seen = []
            for _ in range(3):
                model.zero_grad()
                model(x).sum().backward()
                told = strategy.readings()
                seen.append((told.get("bytes_before", 0), told.get("bytes_after", 0), sent_between(group)))
            rows.append(tuple(after - before for before, after in zip(seen[1], seen[2])))
            strategy.close()
        return rows  # type: ignore[return-value]

    for rank, ((before, after, counted), (_, _, plain)) in enumerate(together(len(hosts), body, hosts=list(hosts))):
        if hosts.index(hosts[rank]) == rank or len(set(hosts)) == 1:
            assert after == counted
            # On one host, gradients without a codec are summed where they lie.
            assert len(set(hosts)) == 1 or abs(before - plain) <= 2 * len(hosts) * 4
        else:
            assert (before, after) == (0, 0)


def sent_between(group: Group) -> int:
    """What a group counts for those that exchange buckets: with several hosts, on the rings between these."""
    rings = sum(ring.sent_bytes for ring in group._rings)
    return rings if len(group._hosts) > 1 else group.sent_bytes


@pytest.mark.parametrize(("hosts", "line"), [(2, ""), (8, r"codec quantize.* sends .* between 8 hosts, .* back=")])
def test_a_codec_that_sends_more_than_none_is_told_once(monkeypatch: pytest.MonkeyPatch, hosts: int, line: str) -> None:
    """Everyone's message to everyone grows with the number of hosts, and a ring does not."""
    monkeypatch.setattr(Ring, "_measured", lambda ring: Link(latency_s=1e-6, bytes_per_s=1e6))

    def body(group: Group) -> list[str]:
        told: list[str] = []
        model = nn.Linear(100, 80)
        strategy = AllReduce(codec="quantize(8)")
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group, tell=told.append))
        for _ in range(14):
            model.zero_grad()
            model(torch.ones(1, 100)).sum().backward()
        return told

    for told in together(hosts, body, hosts=[chr(97 + i) for i in range(hosts)]):
        assert len(told) == bool(line)
        assert not line or re.match(line, told[0])
