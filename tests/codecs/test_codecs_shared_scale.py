"""Quantize with shared scales: codes of several members add up in a byte, and their sum says the sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs.codec import Context, PayloadError
from paceline.codecs.kernels import dense, spread
from paceline.codecs.quantize import Quantize
from paceline.core.errors import ConfigError, PacelineError

needs_numba = pytest.mark.skipif(not spread.compiled(), reason="no numba: there is only one form")
FORMS = [pytest.param(True, marks=needs_numba, id="fused"), pytest.param(False, id="torch")]


def take(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "compiled", lambda: fused)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test once in each form."""
    take(request.param, monkeypatch)
    return bool(request.param)


def tensors(num: int, numel: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) * 10.0 ** (i % 4 - 2) for i in range(num)]


def agree(codec: Quantize, xs: list[torch.Tensor], residuals: list[torch.Tensor] | None = None) -> torch.Tensor:
    said = [codec.agree(x, residuals[i] if residuals else None) for i, x in enumerate(xs)]
    return torch.stack([one for one in said if one is not None]).amax(0)


def encode(codec: Quantize, x: torch.Tensor, residual: torch.Tensor | None, context: Context) -> torch.Tensor:
    payload = torch.full((codec.nbytes(x.numel()) + 3,), 0xA5, dtype=torch.uint8)
    size = codec.encode_into(x, residual, payload, context)
    assert payload[size:].eq(0xA5).all()
    return payload[:size]


def total_of(codec: Quantize, payloads: list[torch.Tensor], numel: int) -> torch.Tensor:
    """What a ring makes of payloads: the codes are added as bytes, the head stays."""
    head, total = codec.head_bytes(numel), payloads[0].clone()
    for payload in payloads[1:]:
        assert torch.equal(payload[:head], total[:head])
        total[head:].view(torch.int8).add_(payload[head:].view(torch.int8))
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 8, 42, 127])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("numel", [1, 700, 5000])
def test_the_sum_of_codes_says_the_sum(size: int, stochastic: bool, numel: int, form: bool) -> None:
    codec = Quantize(8, stochastic=stochastic, shared=True, block=256)
    xs = tensors(size, numel)
    agreed = agree(codec, xs)
    payloads = [encode(codec, x, None, Context(size=size, seed=i, agreed=agreed)) for i, x in enumerate(xs)]
    out, apart = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
    codec.decode_add(total_of(codec, payloads, numel), out)
    for payload in payloads:
        one = torch.zeros(numel)
        codec.decode_add(payload, one)
        apart += one
    torch.testing.assert_close(out.double(), apart, rtol=1e-5, atol=1e-5)
    step = agreed.double().repeat_interleave(256)[:numel] / (127 // size)
    off = (out.double() - torch.stack(xs).double().sum(0)).abs()
    assert bool((off <= step * size * (1.001 if stochastic else 0.501) + 1e-6).all())


def test_all_at_the_edge_do_not_overflow_a_byte(form: bool) -> None:
    for size in range(1, 128):
        for stochastic in False, True:
            codec = Quantize(8, stochastic=stochastic, shared=True)
            x = torch.full((50,), 3.4028234663852886e38 if size % 2 else 0.1)
            payload = encode(codec, x, None, Context(size=size, agreed=codec.agree(x, None), seed=size))
            codes = payload[codec.head_bytes(50) :].view(torch.int8)
            assert codes.eq(127 // size).all()
            assert size * int(codes[0]) <= 127


def test_one_member_is_the_ordinary_codec(form: bool) -> None:
    for stochastic in False, True:
        shared, plain = (Quantize(8, 1024, stochastic=stochastic, shared=s) for s in (True, False))
        (x, unsaid), found = tensors(2, 5000), []
        for codec in shared, plain:
            residual = unsaid.clone()
            payload = encode(codec, x, residual, Context(seed=5, step=2, agreed=codec.agree(x, residual)))
            found.append((payload, residual))
        assert all(torch.equal(one, other) for one, other in zip(*found))


@needs_numba
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    numel=st.sampled_from([0, 1, 15, 16, 17, 1023, 1024, 1025, 3000]),
    size=st.sampled_from([1, 2, 5, 8, 64, 127]),
    magnitude=st.sampled_from([1e-42, 1e-20, 1.0, 1e30, 3e38]),
    stochastic=st.booleans(),
    kept=st.booleans(),
    short=st.sampled_from([1.0, 0.3, 0.0]),
)
def test_kernels_and_torch_give_the_same_bits(
    seed: int, numel: int, size: int, magnitude: float, stochastic: bool, kept: bool, short: float
) -> None:
    codec = Quantize(8, stochastic=stochastic, shared=True)
    generator = torch.Generator().manual_seed(seed)
    x, unsaid = ((torch.rand(numel, generator=generator) * 2 - 1) * magnitude / 2 for _ in range(2))
    found = []
    for fused in True, False:
        with pytest.MonkeyPatch.context() as patch:
            take(fused, patch)
            residual = unsaid.clone() if kept else None
            agreed = codec.agree(x, residual)
            assert agreed is not None
            context = Context(size=size, seed=seed, step=3, agreed=agreed * short)  # others' that is too small, too
            payload = encode(codec, x, residual, context)
            out = torch.ones(numel)
            codec.decode_add(payload, out, 0.3)
            floats = [agreed, out, *([residual] if residual is not None else [])]
            found.append([payload.tolist(), *(t.view(torch.int32).tolist() for t in floats)])
    assert found[0] == found[1]
    assert (payload[codec.head_bytes(numel) :].view(torch.int8).abs() <= 127 // size).all()


def test_a_residual_is_exactly_what_was_not_said(form: bool) -> None:
    codec, (x, unsaid) = Quantize(8, shared=True), tensors(2, 3000)
    whole, said = x + unsaid, torch.zeros(3000)
    agreed = codec.agree(x, unsaid)
    assert agreed is not None
    payload = encode(codec, x, unsaid, Context(size=4, agreed=agreed * 2))
    codec.decode_add(payload, said)
    assert torch.equal(unsaid, whole - said)


def test_residuals_make_up_for_few_levels(form: bool) -> None:
    """With one level to either side, the mean over steps still comes near to what was encoded."""
    codec, x = Quantize(8, shared=True), tensors(1, 2000)[0]
    residual, total = torch.zeros(2000), torch.zeros(2000)
    for step in range(1, 201):
        context = Context(size=100, step=step, agreed=codec.agree(x, residual))
        codec.decode_add(encode(codec, x, residual, context), total)
    assert float((total / 200 - x).abs().max()) < 0.05 * float(x.abs().max())


def test_what_is_not_finite_is_agreed_on_and_refused(form: bool) -> None:
    codec = Quantize(8, shared=True)
    for bad in float("nan"), float("inf"):
        x, fine = torch.ones(3000), torch.ones(3000)
        x[2000] = bad
        agreed = agree(codec, [x, fine])
        assert torch.isinf(agreed).tolist() == [False, True, False]
        for one in x, fine:
            residual = torch.zeros(3000)
            with pytest.raises(PacelineError, match="not finite"):
                encode(codec, one, residual, Context(size=2, agreed=agreed))
            assert not residual.any()


def test_too_many_members_are_refused() -> None:
    codec, x = Quantize(8, shared=True), torch.ones(10)
    with pytest.raises(ConfigError, match="128 members do not add up in a byte"):
        encode(codec, x, None, Context(size=128, agreed=codec.agree(x, None)))


def test_settings() -> None:
    codec = Quantize(shared=True)
    assert (codec.bits, codec.block, codec.adds_as, codec.rows) == (8, 1024, torch.int8, 1)
    assert codec.words == "quantize(bits=8, block=1024, shared=True)"
    assert codec.head_bytes(1025) == 8
    assert Quantize().block == 256
    assert Quantize().adds_as is None
    assert Quantize().agree(torch.ones(3), None) is None
    for bits in 4, 2:
        with pytest.raises(ConfigError, match="need 8 bits"):
            Quantize(bits, shared=True)
    with pytest.raises(ConfigError, match="True or False"):
        Quantize(shared=1)  # type: ignore[arg-type]


def test_altered_payloads_never_crash(form: bool) -> None:
    codec, generator = Quantize(8, shared=True), torch.Generator().manual_seed(0)
    payload = encode(codec, torch.randn(3000, generator=generator), None, Context(size=2))
    for _ in range(50):
        broken = payload.clone()
        places = torch.randint(0, len(payload), (20,), generator=generator)
        broken[places] = torch.randint(0, 256, (20,), generator=generator, dtype=torch.uint8)
        broken[:4] = torch.randint(0, 256, (4,), generator=generator, dtype=torch.uint8)
        out = torch.ones(3000)
        try:
            codec.decode_add(broken, out)
        except PayloadError:
            assert out.eq(1).all()
