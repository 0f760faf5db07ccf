"""Sign, Quantize and Ternary: both forms give the same bytes, and these bytes say what the formulas say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs.codec import Codec, Context, PayloadError
from paceline.codecs.kernels import dense, random, spread
from paceline.codecs.quantize import Quantize
from paceline.codecs.sign import Sign
from paceline.codecs.ternary import Ternary
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.words import build

CODECS: list[Codec] = [
    Sign(block=64),
    Quantize(8),
    Quantize(4, block=64),
    Quantize(2, block=16),
    Quantize(8, stochastic=True),
    Quantize(4, block=32, stochastic=True),
    Quantize(2, stochastic=True),
    Ternary(block=64),
    Ternary(clip=0, block=256),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.words)
needs_numba = pytest.mark.skipif(not spread.compiled(), reason="no numba: there is only one form")
SIZES = [0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 257, 1000, 4099]
MAGNITUDES = [1e-45, 1e-42, 1e-37, 2.0**-100, 1e-20, 1e-3, 1.0, 1e20, 1e37, 1e38, 3.4028234663852886e38]


def tensor(seed: int, numel: int, magnitude: float) -> torch.Tensor:
    """Values up to `magnitude`, that itself among them, zeros of both signs, and exact halves of it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(numel, generator=generator, dtype=torch.float64) * 2 - 1
    kind = torch.randint(0, 12, (numel,), generator=generator)
    for value, of_kind in enumerate([0.0, -0.0, 0.5, -0.5, 1.0, -1.0]):
        x[kind == value] = of_kind
    return (x * magnitude).clamp(-3.4028234663852886e38, 3.4028234663852886e38).float()


def encode(codec: Codec, x: torch.Tensor, residual: torch.Tensor | None = None, **context: int) -> torch.Tensor:
    out = torch.full((codec.nbytes(x.numel()) + 5,), 0xA5, dtype=torch.uint8)
    size = codec.encode_into(x, residual, out, Context(**context))
    assert size == codec.nbytes(x.numel())
    assert out[size:].eq(0xA5).all()
    return out[:size]


def decode(codec: Codec, payload: torch.Tensor, numel: int, weight: float = 1.0) -> torch.Tensor:
    out = torch.zeros(numel)
    codec.decode_add(payload, out, weight)
    return out


def bits_of(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


# ------------------------------------------------------------------------------------------------ two forms, one answer


@needs_numba
@every_codec
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    numel=st.one_of(st.sampled_from(SIZES), st.integers(0, 1500)),
    magnitude=st.sampled_from(MAGNITUDES),
    of_residual=st.sampled_from([None, 0.0, 1e-3, 0.5, 1.0]),
    step=st.integers(0, 2**40),
)
def test_kernels_and_torch_give_the_same_bits(
    codec: Codec, seed: int, numel: int, magnitude: float, of_residual: float | None, step: int
) -> None:
    x = tensor(seed, numel, magnitude if of_residual is None else magnitude / 2)
    residual = None if of_residual is None else tensor(seed + 1, numel, magnitude / 2 * of_residual)
    results = []
    for fused in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense, "compiled", lambda fused=fused: fused)
            kept = None if residual is None else residual.clone()
            payload = encode(codec, x, kept, seed=seed, step=step)
            out = tensor(seed + 2, numel, min(magnitude, 1.0))
            codec.decode_add(payload, out, weight=0.3)
            results.append((payload.tolist(), None if kept is None else bits_of(kept), bits_of(out)))
    assert results[0] == results[1]


@needs_numba
@every_codec
def test_threads_and_one_thread_give_the_same_bits(codec: Codec) -> None:
    numel = (1 << 17) + 777  # more than a thread takes alone
    x = tensor(1, numel, 1.0)
    results = []
    before = torch.get_num_threads()
    try:
        for threads, fused in [(1, True), (3, True), (1, False)]:
            torch.set_num_threads(threads)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dense, "compiled", lambda fused=fused: fused)
                residual = tensor(2, numel, 0.1)
                payload = encode(codec, x, residual, seed=3)
                results.append((payload, residual, decode(codec, payload, numel)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result))


@pytest.fixture(params=[pytest.param(True, marks=needs_numba, id="fused"), pytest.param(False, id="torch")])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test once in each form."""
    monkeypatch.setattr(dense, "compiled", lambda: request.param)
    return bool(request.param)


# ------------------------------------------------------------------------------------------------------------ the bytes


def test_nbytes_counts_scales_and_packed_codes() -> None:
    assert [Sign(block=64).nbytes(n) for n in (0, 1, 8, 9, 64, 65)] == [0, 5, 5, 6, 12, 8 + 9]
    assert [Quantize(8, block=256).nbytes(n) for n in (0, 1, 256, 257)] == [0, 5, 260, 265]
    assert [Quantize(4, block=256).nbytes(n) for n in (0, 1, 3, 256, 257)] == [0, 5, 6, 132, 8 + 129]
    assert [Quantize(2, block=256).nbytes(n) for n in (0, 1, 5, 256, 257)] == [0, 5, 6, 68, 8 + 65]
    assert Ternary(block=1024).nbytes(4097) == 5 * 4 + 1025
    assert Sign().nbytes(1 << 20) * 31 < 4 << 20


def test_the_payload_of_signs_byte_by_byte(form: bool) -> None:
    x = torch.tensor([1.0, -2.0, 0.0, -3.0, 4.0] + [-2.0] * 5)  # ten elements: two bytes, eight planes of two
    payload = encode(Sign(block=16), x)
    assert payload[:4].clone().view(torch.float32).item() == 2.0
    assert payload[4:].tolist() == [0b00011000, 0b00011111]  # of the elements 0, 2, 4, …; of 1, 3, 5, …
    assert decode(Sign(block=16), payload, 10, weight=0.5).tolist() == [1, -1, 1, -1, 1] + [-1] * 5


def test_the_payload_of_codes_byte_by_byte(form: bool) -> None:
    x = torch.tensor([7.0, -7.0, 2.5, 3.5, -0.5])  # halves go to even
    assert encode(Quantize(4, block=16), x)[4:].tolist() == [0x47, 0x09, 0x02]
    assert decode(Quantize(4, block=16), encode(Quantize(4, block=16), x), 5).tolist() == [7.0, -7.0, 2.0, 4.0, 0.0]
    assert encode(Quantize(2, block=16), x)[4:].tolist() == [0b01, 0b11]
    assert decode(Quantize(2, block=16), encode(Quantize(2, block=16), x), 5).tolist() == [7.0, -7.0, 0.0, 0.0, 0.0]
    y = torch.tensor([127.0, -127.0, 63.5, -1.0])
    assert encode(Quantize(8, block=16), y)[4:].view(torch.int8).tolist() == [127, -127, 64, -1]


@every_codec
def test_payloads_may_lie_anywhere(codec: Codec, form: bool) -> None:
    x = tensor(4, 300, 1.0)
    expected = encode(codec, x, seed=1)
    buffer = torch.zeros(codec.nbytes(300) + 3, dtype=torch.uint8)
    codec.encode_into(x, None, buffer[3:], Context(seed=1))
    assert torch.equal(buffer[3:], expected)
    assert torch.equal(decode(codec, buffer[3:], 300), decode(codec, expected, 300))


# --------------------------------------------------------------------------------------------------- what the bytes say


@every_codec
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_the_bound_holds(codec: Codec, form: bool, magnitude: float) -> None:
    for numel in SIZES:
        x = tensor(numel, numel, magnitude)
        decoded = decode(codec, encode(codec, x, seed=numel), numel)
        assert torch.isfinite(decoded).all()
        assert not numel or float((decoded.double() - x.double()).abs().max()) <= codec.bound(x)


def test_bounds_are_no_wider_than_they_need_to_be() -> None:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for codec in CODECS:
        off = max(
            float((decode(codec, encode(codec, x, seed=seed), 4096) - x).abs().max()) / codec.bound(x)
            for seed in range(3)
        )
        assert off > 0.45, codec.words


@every_codec
def test_a_residual_is_exactly_what_was_not_said(codec: Codec, form: bool) -> None:
    x, residual = tensor(1, 777, 1.0), tensor(2, 777, 0.2)
    whole = x + residual
    payload = encode(codec, x, residual, seed=5)
    assert torch.equal(residual, whole - decode(codec, payload, 777))


def test_signs_carry_the_mean_of_their_block(form: bool) -> None:
    x = tensor(3, 64 * 3 + 5, 1.0)
    decoded = decode(Sign(block=64), encode(Sign(block=64), x), x.numel())
    for part, said in zip(torch.split(x, 64), torch.split(decoded, 64)):
        torch.testing.assert_close(said.abs(), part.abs().mean().expand_as(said))
        assert torch.equal(said < 0, part < 0)


def test_a_block_of_tiny_values_is_zeros_and_its_neighbour_is_not(form: bool) -> None:
    x = torch.cat([torch.full((16,), 1e-38), torch.full((16,), 1e-20)])
    decoded = decode(Quantize(8, block=16), encode(Quantize(8, block=16), x), 32)
    assert decoded[:16].eq(0).all()
    torch.testing.assert_close(decoded[16:], x[16:])


def test_ternary_clips_at_so_many_root_mean_squares(form: bool) -> None:
    x = torch.ones(1024)
    x[3] = 1000.0
    codec = Ternary(clip=2.5, block=1024)
    decoded = decode(codec, encode(codec, x), 1024)
    assert decoded[3].item() == pytest.approx(2.5 * math.sqrt((1023 + 1e6) / 1024))
    assert decode(Ternary(clip=0), encode(Ternary(clip=0), x), 1024)[3].item() == 1000.0
    assert set(decoded.tolist()) <= {0.0, decoded[3].item()}


@pytest.mark.parametrize(
    ("codec", "levels"),
    [
        (Quantize(8, stochastic=True), 127),
        (Quantize(4, stochastic=True), 7),
        (Quantize(2, stochastic=True), 1),
        (Ternary(clip=0), 1),
    ],
)
def test_the_mean_of_many_draws_is_what_was_encoded(codec: Codec, levels: int) -> None:
    assert codec.unbiased
    x = tensor(8, 512, 1.0)  # all blocks hold a 1
    num = 3000
    total = torch.zeros(512, dtype=torch.float64)
    for step in range(num):
        total += decode(codec, encode(codec, x, seed=11, step=step), 512)
    up = (x.double() * levels).frac().abs()  # the chance of the higher code
    deviation = (up * (1 - up) / num).sqrt()
    off = (total / num - x.double()) * levels
    assert (off.abs() <= 5 * deviation + 4 / num).all()  # the last: for chances so small that hardly any came true
    usual = off[deviation > 0.002] / deviation[deviation > 0.002]
    assert abs(float(usual.mean())) < 4 / math.sqrt(usual.numel())
    assert 0.7 < float(usual.square().mean()) < 1.4  # and they vary as much as they should


def test_codecs_say_whether_they_are_biased() -> None:
    assert not Sign().unbiased
    assert not Quantize(8).unbiased
    assert not Ternary().unbiased
    assert Ternary(clip=0).unbiased
    x = torch.full((256,), 0.3)
    x[0] = 1.0
    assert decode(Quantize(2), encode(Quantize(2), x), 256)[1:].eq(0).all()


# ------------------------------------------------------------------------------------------------------------ the draws


def test_draws_are_uniform_and_unlike_for_every_seed_step_and_element() -> None:
    streams = [random.keys(seed, step) for seed in (0, 1, 2**63, -1) for step in (0, 1, 2)]
    drawn = torch.stack([random.draws(stream, 1 << 14) for stream in streams]).double()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.stack([torch.histc(row, 64, 0, 1) for row in drawn])
    chi = ((counts - 256).square() / 256).sum(1)
    assert (chi < 63 + 5 * math.sqrt(2 * 63)).all()
    together = torch.corrcoef(torch.cat([drawn, drawn.roll(1, 1), drawn.roll(16, 1)])).fill_diagonal_(0)
    assert together.abs().max() < 5.5 / math.sqrt(1 << 14)


def test_the_global_generator_is_left_alone() -> None:
    before, numpy_before = torch.get_rng_state(), str(np.random.get_state())
    encode(Quantize(8, stochastic=True), torch.randn(100, generator=torch.Generator().manual_seed(0)), seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert numpy_before == str(np.random.get_state())


def test_seed_and_step_name_the_draws() -> None:
    codec, x = Quantize(4, stochastic=True), tensor(1, 1000, 1.0)
    payload = encode(codec, x, seed=1, step=1)
    assert torch.equal(payload, encode(codec, x, seed=1, step=1))
    assert not torch.equal(payload, encode(codec, x, seed=2, step=1))
    assert not torch.equal(payload, encode(codec, x, seed=1, step=2))


# ------------------------------------------------------------------------------------------------------ what is refused


@every_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 300, 699])
def test_what_is_not_finite_is_refused_before_the_residual_changes(
    codec: Codec, form: bool, value: float, where: int
) -> None:
    x, residual = tensor(1, 700, 1.0), tensor(2, 700, 1.0)
    x[where] = value
    before = residual.clone()
    with pytest.raises(PacelineError, match="not finite"):
        encode(codec, x, residual)
    assert torch.equal(residual, before)
    with pytest.raises(PacelineError, match="not finite"):
        encode(codec, x)


@every_codec
def test_a_sum_that_overflows_is_refused(codec: Codec, form: bool) -> None:
    residual = torch.full((300,), 3e38)
    with pytest.raises(PacelineError, match="not finite"):
        encode(codec, torch.full((300,), 3e38), residual)
    assert residual.eq(3e38).all()


@every_codec
def test_malformed_payloads_are_refused_and_change_nothing(codec: Codec, form: bool) -> None:
    payload = encode(codec, tensor(1, 700, 1.0))
    broken = [payload[:-1], payload[:4], payload[:0], torch.cat([payload, payload[:1]])]
    for scale in (math.nan, math.inf, -1.0):
        for first in (0, 4):
            altered = payload.clone()
            altered[first : first + 4] = torch.tensor([scale]).view(torch.uint8)
            broken.append(altered)
    out = torch.ones(700)
    for wrong in broken:
        with pytest.raises(PayloadError, match=codec.words.split("(")[0]):
            codec.decode_add(wrong, out)
        assert out.eq(1).all()


@every_codec
def test_any_codes_decode_to_something_finite(codec: Codec, form: bool) -> None:
    payload = encode(codec, tensor(1, 700, 1.0))
    scales = 4 * -(-700 // codec.block)  # type: ignore[attr-defined]
    payload[scales:] = torch.randint(0, 256, (payload.numel() - scales,), generator=torch.Generator().manual_seed(1))
    assert torch.isfinite(decode(codec, payload, 700)).all()


@every_codec
def test_words_build_the_same_codec(codec: Codec) -> None:
    again = build(codec.words, {"sign": Sign, "quantize": Quantize, "ternary": Ternary}, "codec")
    assert type(again) is type(codec)
    assert vars(again) == vars(codec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantize(3), r"quantize\(bits=3\): 8, 4 or 2"),
        (lambda: Quantize(8, block=100), r"quantize\(block=100\): a power of two"),
        (lambda: Quantize(8, block=8), "from 16 to 65536"),
        (lambda: Quantize(8, stochastic="yes"), "True or False"),  # type: ignore[arg-type]
        (lambda: Sign(block=0), r"sign\(block=0\)"),
        (lambda: Sign(block=1 << 17), "from 16 to 65536"),
        (lambda: Sign(block=64.0), "a power of two"),  # type: ignore[arg-type]
        (lambda: Ternary(clip=-1), r"ternary\(clip=-1\): a number above 0"),
        (lambda: Ternary(clip=math.nan), "a number above 0"),
        (lambda: Ternary(block=3), r"ternary\(block=3\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
