"""Cast: kernels round as torch does, for all numbers that there are, near them and between them."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.codecs import records
from paceline.codecs.cast import Cast
from paceline.codecs.codec import Context, PayloadError
from paceline.codecs.kernels import spread

TYPES = ["bf16", "fp16", "fp8"]
needs_numba = pytest.mark.skipif(not spread.compiled(), reason="no numba: there is only one form")


@pytest.fixture(params=[pytest.param(True, marks=needs_numba, id="fused"), pytest.param(False, id="torch")])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test once in each form."""
    monkeypatch.setattr(records, "compiled", lambda: request.param)
    return bool(request.param)


def numbers(to: str) -> torch.Tensor:
    """All finite numbers of a type as float32."""
    dtype = Cast(to).dtype
    codes = torch.arange(256, dtype=torch.uint8) if dtype.itemsize == 1 else torch.arange(-32768, 32768).short()
    values = codes.view(dtype).float()
    return values[torch.isfinite(values)]


def around(to: str) -> torch.Tensor:
    """These numbers, all middles between neighbours, and what stands next to either."""
    there = torch.unique(numbers(to).double())
    points = torch.cat([there, (there[1:] + there[:-1]) / 2]).float()
    up, down = (torch.nextafter(points, torch.tensor(limit)) for limit in (math.inf, -math.inf))
    every = torch.cat([points, up, down, -points])
    return every[torch.isfinite(every)]


def encode(codec: Cast, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    payload = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    assert codec.encode_into(x, residual, payload, Context()) == len(payload)
    return payload


@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_it_rounds_as_torch_does(to: str, form: bool) -> None:
    codec, x = Cast(to), around(to)
    largest = float(numbers(to).max())
    expected = x.clamp(-largest, largest).to(codec.dtype)
    residual = torch.full_like(x, -0.0)  # to which anything can be added without a change
    for payload in encode(codec, x), encode(codec, x, residual):
        assert torch.equal(payload, expected.view(torch.uint8))
    assert torch.equal(residual, x - expected.float())


def test_fp8_rounds_as_torch_does_to_its_scale(form: bool) -> None:
    codec, x = Cast("fp8"), around("fp8").clamp(-448, 448)  # 448 is among them: a scale of 1
    residual = torch.full_like(x, -0.0)  # to which anything can be added without a change
    payload = encode(codec, x, residual)
    assert payload[:4].clone().view(torch.float32).item() == 1.0
    assert torch.equal(payload[4:], x.to(codec.dtype).view(torch.uint8))
    assert torch.equal(residual, x - x.to(codec.dtype).float())
    smaller = encode(codec, x * 2.0**-20)
    assert torch.equal(smaller[4:], payload[4:])


@pytest.mark.parametrize("to", TYPES)
def test_every_code_is_read_as_torch_reads_it(to: str, form: bool) -> None:
    codec = Cast(to)
    head = torch.tensor([1.0]).view(torch.uint8) if to == "fp8" else torch.empty(0, dtype=torch.uint8)
    codes = torch.arange(256).byte() if to == "fp8" else torch.arange(-32768, 32768).short().view(torch.uint8)
    if to == "fp8":
        with pytest.raises(PayloadError, match="no numbers"):
            codec.decode_add(torch.cat([head, codes]), torch.zeros(256))
        codes = codes[(codes & 0x7F) != 0x7F]
    out = torch.zeros(codes.view(codec.dtype).numel())
    codec.decode_add(torch.cat([head, codes]), out, 0.25)
    expected = codes.view(codec.dtype).float() * 0.25
    assert torch.equal(out.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@pytest.mark.parametrize("to", TYPES)
def test_payloads_may_lie_anywhere(to: str, form: bool) -> None:
    codec, x = Cast(to), torch.randn(777, generator=torch.Generator().manual_seed(0))
    expected, size = encode(codec, x), codec.nbytes(777)
    for start in range(5):
        buffer = torch.full((size + 5,), 0xA5, dtype=torch.uint8)
        assert codec.encode_into(x, None, buffer[start:], Context()) == size
        assert torch.equal(buffer[start : start + size], expected)
        assert buffer[:start].eq(0xA5).all()
        assert buffer[start + size :].eq(0xA5).all()
        out, other = torch.zeros(777), torch.zeros(777)
        codec.decode_add(buffer[start : start + size], out)
        codec.decode_add(expected, other)
        assert torch.equal(out, other)


def test_what_fits_no_more_stays_in_the_residual(form: bool) -> None:
    codec, x = Cast("fp16"), torch.tensor([1e6, -7e4, 65519.0, 3.0])
    residual = torch.zeros(4)
    payload = encode(codec, x, residual)
    assert payload.view(torch.float16).tolist() == [65504.0, -65504.0, 65504.0, 3.0]
    assert residual.tolist() == [1e6 - 65504, -7e4 + 65504, 15.0, 0.0]


def test_a_scale_that_cannot_be_is_refused(form: bool) -> None:
    payload = encode(Cast("fp8"), torch.ones(5))
    for scale in math.nan, math.inf, -1.0:
        payload[:4] = torch.tensor([scale]).view(torch.uint8)
        out = torch.ones(5)
        with pytest.raises(PayloadError, match="scale"):
            Cast("fp8").decode_add(payload, out)
        assert out.eq(1).all()
