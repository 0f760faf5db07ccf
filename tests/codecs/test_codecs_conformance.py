"""What every codec promises, over the whole table."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from paceline.codecs import CODECS, Codec, Context, PayloadError, make_codec
from paceline.core.errors import ConfigError, PacelineError

WORDS = [
    "cast(bf16)", "cast(fp16)", "cast(fp8)", "dgc", "dgc(0.1, 0.5, values=int8)", "dgc(0.01, ramp=8)", "nonzero",
    "quantize(8)", "quantize(4)", "quantize(2)", "quantize(8, stochastic=True)", "quantize(4, stochastic=True)",
    "quantize(2, stochastic=True)", "quantize(8, shared=True)", "quantize(8, stochastic=True, shared=True)",
    "sign", "sign(block=64)", "ternary", "ternary(clip=0)",
    "threshold(0.5)", "threshold(density=0.1)", "topk(0.01)", "topk(0.3, chunk=64)", "topk(1.0, chunk=16)",
    "topk(0.1, values=int8)", "topk(0.1, values=fp16)", "topk(0.1, values='2bit')",
    "sampled_topk(0.1, values='2bit')", "sampled_topk(0.01)", "sampled_topk(0.5)",
]  # fmt: skip
SIZES = [0, 1, 2, 7, 8, 63, 64, 65, 255, 4096, 4097, 70_001]


def made(kind: str, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    return {
        "normal": x,
        "zeros": torch.zeros(numel),
        "constant": torch.full((numel,), 0.37),
        "huge": x.sign() * 3e38,
        "tiny": x * 1e-41,
        "spread": x * torch.logspace(-30, 30, max(numel, 1))[:numel],
        "sparse": x * (torch.rand(numel, generator=generator) < 0.05),
        "minus zero": torch.full((numel,), -0.0),
        "ties": torch.randint(-2, 3, (numel,), generator=generator).float(),
    }[kind]


KINDS = ["zeros", "constant", "huge", "tiny", "spread", "sparse", "minus zero", "ties"]
INPUTS = [("normal", numel) for numel in SIZES] + [(kind, numel) for kind in KINDS for numel in (1, 65, 5000)]


def encoded(codec: Codec, x: torch.Tensor, residual: torch.Tensor | None = None, seed: int = 1) -> torch.Tensor:
    room = torch.full((codec.nbytes(x.numel()) + 64,), 0xA5, dtype=torch.uint8)
    agreed = codec.agree(x, residual)
    n = codec.encode_into(x, residual, room[:-64], Context(step=1, lr=0.1, size=2, seed=seed, agreed=agreed))
    assert 0 <= n <= codec.nbytes(x.numel())
    assert bool((room[-64:] == 0xA5).all()), "wrote beyond what it may"
    return room[:n].clone()


def kept(codec: Codec, unsaid: torch.Tensor) -> torch.Tensor:
    """What a codec keeps whose residual is this, and all else that it keeps is zero."""
    return torch.cat([unsaid, unsaid.new_zeros((codec.rows - 1) * unsaid.numel())])


def decoded(codec: Codec, payload: torch.Tensor, numel: int, weight: float = 1.0) -> torch.Tensor:
    out = torch.zeros(numel)
    codec.decode_add(payload, out, weight)
    return out


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take(request.param, monkeypatch)
    return str(request.param)


def take(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("paceline.codecs") and hasattr(module, "compiled"):
            monkeypatch.setattr(module, "compiled", lambda: path == "kernel")


@pytest.mark.parametrize("words", WORDS)
def test_within_its_bound_for_every_size_and_kind(words: str, path: str) -> None:
    codec = make_codec(words)
    for kind, numel in INPUTS:
        x = made(kind, numel)
        y = decoded(codec, encoded(codec, x), numel)
        assert torch.isfinite(y).all(), (numel, kind)
        if numel:
            error = float((x.double() - y.double()).abs().max())
            assert error <= codec.bound(x) * (1 + 1e-6), (numel, kind)


@pytest.mark.parametrize("words", WORDS)
def test_both_paths_write_the_same_bytes_and_residuals(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = make_codec(words)
    for kind, numel in INPUTS:
        x, before = made(kind, numel), made("normal", numel) * (0.0 if kind in ("huge", "spread") else 0.1)
        results = []
        for path in "kernel", "torch":
            take(path, monkeypatch)
            residual = kept(codec, before)
            payload = encoded(codec, x, residual)
            out = made("normal", numel)
            codec.decode_add(payload, out, 0.7)
            results.append((payload, residual, out))
        for one, other in zip(*results):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (numel, kind)


@pytest.mark.parametrize("words", WORDS)
def test_the_residual_is_what_was_not_said(words: str, path: str) -> None:
    codec = make_codec(words)
    for kind, numel in INPUTS:
        if kind not in ("huge", "spread"):
            x, unsaid = made(kind, numel), made("normal", numel) * 0.1
            residual = kept(codec, unsaid)
            said = decoded(codec, encoded(codec, x, residual), numel)
            assert torch.allclose(said + residual[:numel], x + unsaid, rtol=1e-6, atol=1e-6), (numel, kind)


@pytest.mark.parametrize("words", WORDS)
def test_two_threads_write_the_same_bytes(words: str) -> None:
    codec, x = make_codec(words), made("normal", 300_001)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in 1, 2, 3:
            torch.set_num_threads(threads)
            residual = kept(codec, torch.zeros_like(x))
            payload = encoded(codec, x, residual)
            results.append((payload, residual, decoded(codec, payload, x.numel())))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result))


@pytest.mark.parametrize("words", WORDS)
def test_its_words_make_it_again(words: str) -> None:
    codec = make_codec(words)
    assert make_codec(codec.words).words == codec.words


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_name(words: str, bad: float, path: str) -> None:
    codec = make_codec(words)
    for numel, place in (1, 0), (70_001, 70_000), (5000, 17):
        x, residual = made("normal", numel), torch.zeros(codec.rows * numel)
        x[place] = bad
        with pytest.raises(PacelineError, match=r"not finite"):
            encoded(codec, x, residual)
        assert not residual.any()


@pytest.mark.parametrize("words", WORDS)
def test_agreement_says_what_is_not_finite_and_refuses_nothing(words: str, path: str) -> None:
    codec = make_codec(words)
    for bad in float("nan"), float("inf"), float("-inf"):
        x = made("normal", 5000)
        x[4999] = bad
        agreed = codec.agree(x, kept(codec, torch.zeros(5000)))
        assert agreed is None or not torch.isfinite(agreed).all()
        agreed = codec.agree(torch.full((70,), 3e38), kept(codec, torch.full((70,), 3e38)))
        assert agreed is None or not torch.isfinite(agreed).all()


@pytest.mark.parametrize("words", WORDS)
def test_payloads_that_add_have_one_head_and_say_the_sum(words: str, path: str) -> None:
    codec, size = make_codec(words), 3
    if codec.adds_as is None:
        pytest.skip("payloads do not add")
    for numel in SIZES:
        xs = [made("normal", numel + i)[i:] * (0.1 + i) for i in range(size)]
        agreed = [a for x in xs if (a := codec.agree(x, None)) is not None]
        together = torch.stack(agreed).amax(0) if agreed else None
        head, payloads = codec.head_bytes(numel), list[torch.Tensor]()
        for seed, x in enumerate(xs):
            payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
            assert codec.encode_into(x, None, payload, Context(size=size, seed=seed, agreed=together)) == len(payload)
            assert torch.equal(payload[:head], payloads[0][:head] if payloads else payload[:head])
            payloads.append(payload)
        total = payloads[0].clone()
        total[head:] = sum(p[head:].clone().view(codec.adds_as) for p in payloads).view(torch.uint8)  # type: ignore[union-attr]
        apart = torch.stack([decoded(codec, p, numel) for p in payloads])
        off = (decoded(codec, total, numel) - apart.sum(0)).abs()
        assert bool((off <= 2.0**-7 * apart.abs().sum(0) + 1e-6).all())  # which sums of bf16 lose on their way


@pytest.mark.parametrize("words", WORDS)
def test_unbiased_codecs_are_right_on_average(words: str) -> None:
    codec = make_codec(words)
    if not codec.unbiased:
        pytest.skip("biased")
    x = made("normal", 512)
    draws = torch.stack([decoded(codec, encoded(codec, x, seed=s * 7919 + 1), 512) for s in range(300)]).double()
    rare = 8 * codec.bound(x) / 300  # a step that is taken once in hundreds of draws may not have been seen
    assert bool(((draws.mean(0) - x).abs() <= 5.5 * draws.std(0) / 300**0.5 + rare + 1e-6).all())
    assert abs(float((draws.mean(0) - x).mean())) <= 5.5 * float(draws.std(0).mean()) / (300 * 512) ** 0.5 + 1e-6


@pytest.mark.parametrize("words", WORDS)
def test_malformed_payloads_are_refused_and_nothing_is_touched(words: str, path: str) -> None:
    codec, numel = make_codec(words), 5000
    payload = encoded(codec, made("normal", numel))
    generator = torch.Generator().manual_seed(3)
    bad = [payload[:-1], payload[: payload.numel() // 2], payload[:0], torch.cat([payload, payload[:1]])]
    for wrong in bad:
        out = torch.full((numel,), 2.5)
        with pytest.raises(PayloadError, match=codec.words.partition("(")[0]):
            codec.decode_add(wrong, out)
        assert bool((out == 2.5).all())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(25):  # any bytes at all: an answer or a refusal, never a crash
            size = int(torch.randint(0, 2 * payload.numel(), (1,), generator=generator))
            size = payload.numel() if size % 2 else size
            noise = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
            mixed = payload.clone()
            mixed[: min(16, mixed.numel())] = noise[: min(16, mixed.numel())] if size >= 16 else 0xFF
            for wrong in noise, mixed:
                out = torch.full((numel,), 2.5)
                try:
                    codec.decode_add(wrong, out)
                except PayloadError:
                    assert bool((out == 2.5).all())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quantize(3)", "bits"),
        ("quantize(4, shared=True)", "8 bits"),
        ("dgc(0)", "density"),
        ("dgc(momentum=1)", "momentum"),
        ("dgc(clip=-1)", "clip"),
        ("dgc(ramp=0.5)", "ramp"),
        ("topk(0)", "density"),
        ("topk(1.5)", "density"),
        ("sampled_topk(-1)", "density"),
        ("threshold(-1)", "threshold"),
        ("threshold(density=2)", "density"),
        ("cast(int8)", "cast"),
        ("sign(block=0)", "block"),
        ("ternary(clip=-1)", "clip"),
        ("ternary(clip=True)", "clip"),
        ("cast(8)", r"cast\(to=8\): known: 'bf16'"),
        ("cast([1])", "known: 'bf16'"),
        ("threshold('x')", "a magnitude above 0"),
        ("threshold(True)", "a magnitude above 0"),
        ("dgc(momentum='x')", "a number from 0 to below 1"),
        ("dgc(momentum=False)", "a number from 0 to below 1"),
        ("dgc(clip='x')", "a norm above 0"),
        ("dgc(ramp=True)", "a number of passes"),
        ("topk(chunk=True)", "1 to 1048576 elements"),
        ("topk(values=8)", "known: '2bit'"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_codec(words)


@pytest.mark.parametrize("wrong", [42, 0.5, True, ["sign"], b"sign", object()])
def test_what_is_no_codec_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r'give words such as "topk\(0.01\)"'):
        make_codec(wrong)


def test_a_class_is_no_codec() -> None:
    for make in CODECS.values():
        with pytest.raises(ConfigError, match=r"that is a class; write \w+\(\)"):
            make_codec(make)  # type: ignore[arg-type]


def test_the_table_is_whole() -> None:
    assert {w.partition("(")[0] for w in WORDS} == set(CODECS)


@pytest.mark.parametrize("words", WORDS)
def test_what_is_no_flat_float32_is_refused(words: str) -> None:
    codec = make_codec(words)
    room = torch.empty(codec.nbytes(64) + 64, dtype=torch.uint8)
    flat = torch.ones(64)
    for wrong in torch.arange(64), flat.bool(), flat.double(), flat.bfloat16(), flat.view(8, 8), torch.ones(128)[::2]:
        with pytest.raises(ConfigError, match="flat, contiguous float32"):
            codec.encode_into(wrong, None, room, Context())
        if make_codec(words).agree(flat, None) is not None:
            with pytest.raises(ConfigError, match="flat, contiguous float32"):
                codec.agree(wrong, None)
    numel = 64 * codec.rows
    for residual in (
        torch.zeros(numel - 1), torch.zeros(numel, dtype=torch.float64), torch.zeros(8, numel // 8),
        torch.zeros(2 * numel)[::2], torch.zeros(numel, requires_grad=True), torch.zeros(numel, device="meta"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="belongs there"):
            codec.encode_into(flat, residual, room, Context())


@pytest.mark.parametrize("words", WORDS)
def test_rooms_that_cannot_be_written_to_are_refused(words: str, path: str) -> None:
    codec, x = make_codec(words), made("normal", 5000)
    size = codec.nbytes(5000)
    memory = torch.full((2 * size + 64,), 0xA5, dtype=torch.uint8)
    residual = torch.zeros(codec.rows * 5000)
    wrong = [
        memory[: size - 1], memory[:0], memory[: 2 * size : 2], memory[: 2 * size].view(2, size),
        memory.view(torch.int8), torch.zeros(size), memory.to("meta"),
    ]  # fmt: skip
    for out in wrong:
        with pytest.raises(ConfigError, match=rf"{codec.words.partition('(')[0]}.*torch.empty\({size}, "):
            codec.encode_into(x, residual, out, Context())
    assert bool((memory == 0xA5).all())
    assert not residual.any()
    assert codec.encode_into(x, residual, memory[:size], Context()) <= size


@pytest.mark.parametrize("words", WORDS)
def test_what_cannot_be_added_to_is_refused(words: str, path: str) -> None:
    codec, numel = make_codec(words), 5000
    payload = encoded(codec, made("normal", numel))
    flat = torch.full((numel,), 2.5)
    for out in (
        flat.double(), flat.half(), flat.int(), flat.view(50, 100), torch.full((2 * numel,), 2.5)[::2],
        flat.clone().requires_grad_(),
    ):  # fmt: skip
        before = out.detach().clone()
        with pytest.raises(ConfigError, match="flat, contiguous float32"):
            codec.decode_add(payload, out)
        assert torch.equal(out.detach(), before)
    for wrong in (
        payload.view(torch.int8), payload.float(), payload.view(1, -1), payload.repeat_interleave(2)[::2],
        payload.to("meta"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="as a payload"):
            codec.decode_add(wrong, flat)
    for other in numel + 4096, 0:  # of another size: what a payload says of itself tells
        out = torch.full((other,), 2.5)
        with pytest.raises(PayloadError, match=codec.words.partition("(")[0]):
            codec.decode_add(payload, out)
        assert bool((out == 2.5).all())


def test_scales_that_members_agreed_on_must_fit() -> None:
    codec, x = make_codec("quantize(8, shared=True)"), made("normal", 5000)
    room = torch.empty(codec.nbytes(5000), dtype=torch.uint8)
    for agreed in torch.ones(4), torch.ones(5, dtype=torch.float64), torch.ones(5, 1):
        with pytest.raises(ConfigError, match="5 blocks"):
            codec.encode_into(x, None, room, Context(agreed=agreed))


LOADED = """
import json, pathlib, sys, torch
from numba.core.registry import CPUDispatcher
from paceline.codecs import Context, make_codec, warm_up

def kernels():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("paceline.codecs.kernels."):
            for each in vars(module).values():
                if isinstance(each, CPUDispatcher):
                    found[f"{each.py_func.__module__}.{each.py_func.__name__}"] = len(each.signatures)
    return found

words = json.loads(sys.argv[1])
codecs = [make_codec(w) for w in words]
for codec in codecs:
    warm_up(codec, torch.device("cpu"))
before, numel = kernels(), 70_001
for word, codec in zip(words, codecs):
    for x in torch.randn(numel), torch.randn(numel) * (torch.rand(numel) < 0.01), torch.zeros(numel):
        residual, out = torch.zeros(codec.rows * numel), torch.empty(codec.nbytes(numel), dtype=torch.uint8)
        n = codec.encode_into(x, residual, out, Context(step=3, size=2, agreed=codec.agree(x, residual)))
        codec.decode_add(out[:n], torch.zeros(numel), 0.5)
    assert kernels() == before, word
assert sum(before.values()) > 10
"""


@pytest.mark.slow
def test_after_a_warm_up_no_kernel_is_loaded_or_compiled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(WORDS)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
