"""Deep gradient compression against a plain loop, and against top-k where it must be top-k."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import records
from paceline.codecs.codec import Codec, Context, PayloadError
from paceline.codecs.dgc import DGC
from paceline.codecs.kernels import dense, spread
from paceline.codecs.topk import TopK
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.words import build

needs_numba = pytest.mark.skipif(not spread.compiled(), reason="no numba: there is only one form")
VALUES = ["float32", "bf16", "fp16", "int8", "2bit"]


def take(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in dense, records:
        monkeypatch.setattr(module, "compiled", lambda: fused)


@pytest.fixture(params=[pytest.param(True, marks=needs_numba, id="fused"), pytest.param(False, id="torch")])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test once in each form."""
    take(request.param, monkeypatch)
    return bool(request.param)


def gradients(num: int, numel: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(num)]


def encode(codec: Codec, x: torch.Tensor, residual: torch.Tensor | None, step: int = 1, size: int = 1) -> torch.Tensor:
    out = torch.full((codec.nbytes(x.numel()) + 5,), 0xA5, dtype=torch.uint8)
    n = codec.encode_into(x, residual, out, Context(step=step, size=size))
    assert n <= codec.nbytes(x.numel())
    assert out[n:].eq(0xA5).all()
    return out[:n].clone()


def decode(codec: Codec, payload: torch.Tensor, numel: int) -> torch.Tensor:
    out = torch.zeros(numel)
    codec.decode_add(payload, out)
    return out


# --------------------------------------------------------------------------------------------------------- equivalences


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("numel", [0, 1, 100, 4096, 9000])
def test_without_momentum_it_is_topk(values: str, numel: int, form: bool) -> None:
    dgc, topk = DGC(0.01, momentum=0.0, values=values), TopK(0.01, values=values)
    state, residual = torch.zeros(2 * numel), torch.zeros(numel)
    assert dgc.nbytes(numel) == 4 + topk.nbytes(numel)
    for step, x in enumerate(gradients(5, numel), 1):
        payload, plain = encode(dgc, x, state, step), encode(topk, x, residual, step)
        assert payload[:4].tolist() == [0, 0, 0, 0]
        assert torch.equal(payload[4:], plain)
        assert torch.equal(state[:numel], residual)
        assert torch.equal(decode(dgc, payload, numel), decode(topk, plain, numel))


def test_without_a_residual_it_is_topk(form: bool) -> None:
    x = gradients(1, 9000)[0]
    assert torch.equal(encode(DGC(0.02), x, None)[4:], encode(TopK(0.02), x, None))


@pytest.mark.parametrize(("momentum", "clip", "size"), [(0.9, 0.0, 1), (0.5, 0.0, 4), (0.9, 20.0, 4), (0.0, 3.0, 1)])
def test_it_is_the_published_loop(momentum: float, clip: float, size: int, form: bool) -> None:
    """Line by line as in the paper, in float64, which the codec follows to the precision of its numbers."""
    numel, density, codec = 9000, 0.01, DGC(0.01, momentum=momentum, clip=clip)
    state = torch.zeros(2 * numel)
    u, v = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step, x in enumerate(gradients(20, numel), 1):
        payload = encode(codec, x, state, step, size)
        g = x.double()
        if clip:
            g = g * min(1.0, clip / math.sqrt(size) / float(g.norm()))
        u = momentum * u + g
        v = v + u
        sent = torch.zeros(numel, dtype=torch.float64)
        for first in range(0, numel, 4096):
            part = v[first : first + 4096]
            places = part.abs().topk(math.ceil(density * len(part))).indices + first
            sent[places] = v[places]
        v[sent != 0] = 0.0
        u[sent != 0] = 0.0
        torch.testing.assert_close(decode(codec, payload, numel).double(), sent, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.view(2, -1).double(), torch.stack([v, u]), rtol=1e-4, atol=1e-5)


def test_what_is_sent_at_last_is_what_momentum_would_have_summed(form: bool) -> None:
    """One gradient, then none: an element that waits n steps has gathered 1 + m + … + m^(n−1) of it."""
    numel, m, codec = 4096, 0.9, DGC(0.25, momentum=0.9)
    x, state, seen = torch.linspace(1, 2, numel), torch.zeros(2 * numel), torch.zeros(numel)
    for step in range(1, 5):
        said = decode(codec, encode(codec, x if step == 1 else torch.zeros(numel), state, step), numel)
        places = said != 0
        assert int(places.sum()) == numel // 4
        assert not (places & (seen != 0)).any()  # factor masking: what was sent has no momentum left
        torch.testing.assert_close(said[places], x[places] * sum(m**i for i in range(step)))
        seen += said
    assert bool((seen != 0).all())
    assert not state.any()


@needs_numba
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000),
    numel=st.sampled_from([0, 1, 2, 63, 4095, 4096, 4097, 9000]),
    momentum=st.sampled_from([0.0, 0.3, 0.9, 0.999]),
    clip=st.sampled_from([0.0, 1e-3, 5.0]),
    values=st.sampled_from(VALUES),
    magnitude=st.sampled_from([1e-42, 1e-20, 1.0, 1e30]),
    ramp=st.sampled_from([0, 4]),
)
def test_kernels_and_torch_write_the_same_bytes(
    seed: int, numel: int, momentum: float, clip: float, values: str, magnitude: float, ramp: int
) -> None:
    codec, found = DGC(0.01, momentum, clip, ramp, values), []
    for fused in True, False:
        with pytest.MonkeyPatch.context() as patch:
            take(fused, patch)
            state, steps = torch.zeros(2 * numel), []
            for step, x in enumerate(gradients(3, numel, seed), 1):
                payload = encode(codec, x * magnitude, state, step, size=3)
                out = torch.ones(numel)
                codec.decode_add(payload, out, 0.3)
                steps += [payload.tolist(), state.view(torch.int32).tolist(), out.view(torch.int32).tolist()]
            found.append(steps)
    assert found[0] == found[1]


@needs_numba
def test_several_threads_write_the_same_bytes() -> None:
    xs, before, found = gradients(3, 200_000), torch.get_num_threads(), []
    try:
        for threads in 1, 3:
            torch.set_num_threads(threads)
            codec, state = DGC(0.01, clip=2.0, values="int8"), torch.zeros(400_000)
            payloads = [encode(codec, x, state, step, 2) for step, x in enumerate(xs, 1)]
            found.append([*payloads, state])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found))


# ------------------------------------------------------------------------------------------------- clipping and warm-up


def test_a_gradient_is_clipped_to_its_share_of_the_norm(form: bool) -> None:
    x = gradients(1, 9000)[0]
    for clip, size in [(1.0, 1), (1.0, 16), (1e4, 1)]:
        codec = DGC(1.0, momentum=0.0, clip=clip)
        said = decode(codec, encode(codec, x, torch.zeros(18_000), size=size), 9000)
        assert float(said.norm()) == pytest.approx(min(float(x.norm()), clip * size**-0.5), rel=1e-5)


def test_more_travels_in_the_first_passes(form: bool) -> None:
    codec, numel = DGC(0.001, ramp=8), 8192
    expected = [2048, 2048, 512, 512, 128, 128, 34, 34, 10, 10]
    lengths, state = [], torch.zeros(2 * numel)
    for step, x in enumerate(gradients(10, numel), 1):
        payload = encode(codec, x, state, step)
        assert int(payload[0]) == (step - 1) // 2
        assert int((decode(codec, payload, numel) != 0).sum()) == expected[step - 1]
        lengths.append(len(payload))
    assert lengths[0] == codec.nbytes(numel)
    assert lengths == sorted(lengths, reverse=True)
    assert codec.varies
    assert not DGC().varies
    assert encode(codec, x, state, step=10**6)[0] == 4


def test_only_stages_above_the_density_are_taken() -> None:
    assert [DGC(0.01, ramp=6).stage(step) for step in (1, 3, 5, 7)] == [0, 1, 2, 3]
    assert [DGC(0.3, ramp=6).stage(step) for step in (1, 7)] == [0, 0]
    assert [DGC(0.001, ramp=2).stage(step) for step in (0, 1, 2, 3)] == [0, 0, 2, 4]
    assert [DGC(0.001).stage(step) for step in (0, 1, 2)] == [0, 0, 0]


# ------------------------------------------------------------------------------------------------------ what is refused


def test_payloads_are_not_trusted(form: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for codec in DGC(0.01), DGC(0.01, ramp=4, values="int8"):
        payload = encode(codec, gradients(1, 5000)[0], None)
        for stage in 4, 255, -1:
            wrong = payload.clone()
            wrong[:4] = torch.tensor([stage], dtype=torch.int32).view(torch.uint8)
            with pytest.raises(PayloadError, match=r"dgc.* stage"):
                codec.decode_add(wrong, torch.zeros(5000))
        for cut in 0, 3, 4, len(payload) - 1:
            with pytest.raises(PayloadError, match="dgc"):
                codec.decode_add(payload[:cut].clone(), torch.zeros(5000))
        if codec.ramp:  # a stage that there is, with the records of another
            payload[0] = 1
            with pytest.raises(PayloadError, match="bytes"):
                codec.decode_add(payload, torch.zeros(5000))
            payload[0] = 0
        for trial in range(100):
            broken = payload.clone()
            places = torch.randint(0, len(payload), (trial // 4 + 1,), generator=generator)
            broken[places] = torch.randint(0, 256, (len(places),), dtype=torch.uint8, generator=generator)
            out = torch.ones(5000)
            try:
                codec.decode_add(broken, out)
            except PayloadError:
                assert out.eq(1).all()
            assert torch.isfinite(out).all()


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_not_finite_leaves_both_rows_alone(clip: float, form: bool) -> None:
    codec = DGC(0.01, clip=clip)
    for row, bad in [(None, math.nan), (None, math.inf), (0, math.inf), (1, -math.inf), (1, math.nan)]:
        x, state = torch.ones(5000), torch.ones(10_000)
        (x if row is None else state[row * 5000 :])[4321] = bad
        before = state.clone()
        with pytest.raises(PacelineError, match="not finite"):
            encode(codec, x, state)
        assert torch.equal(state.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("codec", [DGC(), DGC(0.01, 0.5, 2.0, 100, "int8")], ids=lambda codec: codec.words)
def test_words_build_the_same_codec(codec: DGC) -> None:
    again = build(codec.words, {"dgc": DGC}, "codec")
    assert vars(again) == vars(codec)
    assert again.words == codec.words
    assert codec.rows == 2
    assert codec.adds_as is None
    assert not codec.unbiased


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dgc(density=0)", "above 0"),
        ("dgc(momentum=1.0)", "below 1"),
        ("dgc(momentum=-0.1)", "below 1"),
        ("dgc(clip=-1)", "a norm above 0"),
        ("dgc(ramp=-1)", "number of passes"),
        ("dgc(ramp=1.5)", "number of passes"),
        ("dgc(values='int4')", "did you mean"),
    ],
)
def test_settings_that_do_not_exist(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(words, {"dgc": DGC}, "codec")
