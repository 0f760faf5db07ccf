"""Top-k, threshold and non-zero codecs: the same bytes from kernels and torch, nothing lost, nothing trusted."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs.codec import Codec, Context, PayloadError
from paceline.codecs.kernels.spread import compiled
from paceline.codecs.nonzero import NonZero
from paceline.codecs.records import Records
from paceline.codecs.sampled import SampledTopK
from paceline.codecs.threshold import Threshold
from paceline.codecs.topk import TopK
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.words import build

KNOWN = {"topk": TopK, "sampled_topk": SampledTopK, "threshold": Threshold, "nonzero": NonZero}
PATHS = ["torch", *(["kernels"] if importlib.util.find_spec("numba") else [])]
SIZES = st.sampled_from([0, 1, 2, 7, 8, 9, 63, 300, 4095, 4096, 4097, 9000])
DENSITIES = st.sampled_from([1e-4, 0.01, 0.07, 0.3, 0.9, 1.0])
VALUES = st.sampled_from(["float32", "bf16", "fp16", "int8", "2bit"])
ALL = [TopK(), TopK(0.1, 64, "int8"), TopK(0.5, 100), SampledTopK(0.1), Threshold(value=1.0), NonZero()]
ALL += [
    Threshold(density=0.2, values="fp16"),
    SampledTopK(0.3, "int8"),
    TopK(0.1, 64, "2bit"),
    SampledTopK(0.3, "2bit"),
]


@pytest.fixture(scope="module", autouse=True)
def environment_is_kept() -> Iterator[None]:
    before = os.environ.get("PACELINE_KERNELS")
    yield
    os.environ.pop("PACELINE_KERNELS", None)
    if before is not None:
        os.environ["PACELINE_KERNELS"] = before
    compiled.cache_clear()


@contextmanager
def path(name: str) -> Iterator[None]:
    os.environ["PACELINE_KERNELS"] = name
    compiled.cache_clear()
    yield


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def encode(
    codec: Codec, x: torch.Tensor, residual: torch.Tensor | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The payload and the new residual; the bytes behind a payload stay as they were."""
    out = torch.full((codec.nbytes(x.numel()) + 5,), 171, dtype=torch.uint8)
    unsaid = None if residual is None else residual.clone()
    size = codec.encode_into(x, unsaid, out, Context(seed=seed))
    assert size <= codec.nbytes(x.numel())
    assert bool((out[codec.nbytes(x.numel()) :] == 171).all())
    return out[:size], unsaid


def decode(codec: Codec, payload: torch.Tensor, numel: int) -> torch.Tensor:
    out = torch.full((numel,), -0.0)  # to which anything can be added without a change
    codec.decode_add(payload, out)
    return out


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    density, values = draw(DENSITIES), draw(VALUES)
    return draw(
        st.sampled_from(
            [
                TopK(density, draw(st.sampled_from([1, 2, 37, 256, 4096])), values),
                SampledTopK(density, values),
                Threshold(density=density, values=values),
                Threshold(value=draw(st.sampled_from([1e-30, 0.5, 2.0, 1e30])), values=values),
                NonZero(),
            ]
        )
    )


@st.composite
def tensors(draw: st.DrawFn, numel: int) -> torch.Tensor:
    """Plain ones, with ties, with many zeros of both signs, all alike, huge, below the normal numbers, all mixed."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    kind = draw(st.sampled_from(["plain", "ties", "zeros", "alike", "huge", "tiny", "mixed"]))
    if kind == "ties":
        return x.round()
    if kind == "zeros":
        return torch.where(x.abs() < draw(st.sampled_from([0.1, 1.0, 2.5])), x * 0.0, x)
    if kind == "alike":
        return x.sign() * draw(st.sampled_from([0.0, 1.0, 3.4028234663852886e38, 1e-45]))
    if kind == "mixed":
        return x * 10.0 ** torch.randint(-44, 38, (numel,), generator=torch.Generator().manual_seed(0))
    return x.clamp(-3, 3) * {"plain": 1.0, "huge": 1.1e38, "tiny": 1e-42}[kind]


@pytest.mark.skipif(PATHS == ["torch"], reason="numba is not installed")
@settings(max_examples=200, deadline=None)
@given(data=st.data(), codec=codecs(), numel=SIZES, seed=st.integers(0, 2**63))
def test_kernels_and_torch_write_the_same_bytes(data: st.DataObject, codec: Codec, numel: int, seed: int) -> None:
    x = data.draw(tensors(numel))
    residual = data.draw(st.one_of(st.none(), tensors(numel)))
    if residual is not None:
        residual.mul_(0.01)
        x.clamp_(-3.3e38, 3.3e38)
    found = []
    for name in PATHS:
        with path(name):
            payload, unsaid = encode(codec, x, residual, seed)
            out = torch.ones(numel)
            codec.decode_add(payload, out, 0.3)
            found.append((payload, unsaid, out))
    (a, unsaid_a, out_a), (b, unsaid_b, out_b) = found
    assert torch.equal(a, b)
    assert torch.equal(bits(out_a), bits(out_b))
    if unsaid_a is not None and unsaid_b is not None:
        assert torch.equal(bits(unsaid_a), bits(unsaid_b))


@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), codec=codecs(), numel=SIZES)
def test_nothing_is_lost(name: str, data: st.DataObject, codec: Codec, numel: int) -> None:
    x = data.draw(tensors(numel))
    residual = data.draw(st.sampled_from([torch.zeros(numel), 0.1 * x, -x]))
    x.clamp_(-3e38, 3e38)
    whole = x + residual
    with path(name):
        payload, unsaid = encode(codec, x, residual)
        said = decode(codec, payload, numel)
        assert unsaid is not None
        plain = decode(codec, encode(codec, x)[0], numel)
        assert not numel or float((plain.double() - x.double()).abs().max()) <= codec.bound(x)
    if getattr(codec, "values", "float32") == "float32":
        kept = unsaid != whole
        assert torch.equal(bits(said)[kept], bits(whole)[kept])
        assert bool((unsaid[kept] == 0).all())
        assert torch.equal(said + unsaid, whole)
    else:
        assert torch.equal(whole - said, unsaid)
    if isinstance(codec, NonZero):
        there = bits(whole) != 0
        assert torch.equal(bits(said)[there], bits(whole)[there])
        assert not bits(unsaid).any()


@pytest.mark.parametrize("name", PATHS)
def test_topk_takes_the_largest_and_of_equal_ones_the_first(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    with path(name):
        for density, chunk, numel in [(0.01, 4096, 9000), (0.1, 4096, 8192), (0.3, 64, 1000), (0.001, 5000, 5000)]:
            x = (torch.randn(numel, generator=generator) * 50).round()  # many are equal
            codec = TopK(density, chunk)
            said = decode(codec, encode(codec, x)[0], numel)
            for first in range(0, numel, chunk):
                part = x[first : first + chunk]
                order = sorted(range(len(part)), key=lambda i, part=part: (-abs(float(part[i])), i))
                k = -(-round(density * len(part) * 10**6) // 10**6)
                expected = torch.full_like(part, -0.0)
                expected[order[:k]] = part[order[:k]]
                assert torch.equal(said[first : first + chunk], expected)


def test_topk_bytes_are_packed() -> None:
    assert TopK(0.01, 4096).nbytes(4096) == 44 + 41 * 4  # 41 x 6 low bits, 41 ones and 63 zeros
    assert TopK(64 / 4096, 4096, "int8").nbytes(4096 * 3) == 3 * (64 + 64 + 4)
    assert TopK(0.01, 4096, "fp16").nbytes(4096 + 100) == 44 + 82 + 1 + 2  # the rest: one position of 7 bits
    assert TopK(64 / 4096, 4096, "2bit").nbytes(4096 * 3) == 3 * (4 + 64 + 16)
    assert TopK(1 / 8, 4096, "2bit").nbytes(4096) == 4 + 320 + 128
    assert TopK(0.02, 100, "2bit").nbytes(100) == 4 + 2 + 1
    assert TopK(0.5, 4096).nbytes(1) == 4  # one element: no bits are needed to say where


def test_positions_take_their_entropy_and_a_bit_and_never_more_than_plain_ones() -> None:
    for room in (1, 2, 3, 100, 1000, 4096):
        for count in {1, 2, room // 64, room // 8, room // 3, room - 1, room} - {0}:
            if count <= room:
                records = Records(room, room, "float32", np.array([count]), 0)
                least = math.log2(math.comb(room, count))
                plain = count * (room - 1).bit_length()
                assert records.index_bytes[0] <= -(-plain // 8)
                if count <= room / 4:
                    assert 8 * records.index_bytes[0] <= least + count + 8


@pytest.mark.parametrize("name", PATHS)
def test_high_parts_of_positions_are_not_trusted(name: str) -> None:
    """A position too many, one too few, and one more at the end."""
    codec = TopK(64 / 4096, 4096, "2bit")
    payload, _ = encode(codec, torch.randn(4096, generator=torch.Generator().manual_seed(1)))
    begin, end = 4 + 48, 4 + 64  # after 64 x 6 low bits
    high = np.unpackbits(payload[begin:end].numpy(), bitorder="little")
    assert high[:127].sum() == 64
    with path(name):
        for wrong in (int(np.flatnonzero(high == 0)[5]), int(np.flatnonzero(high)[5]), 126):
            changed = high.copy()
            changed[wrong] ^= 1
            broken = payload.clone()
            broken[begin:end] = torch.from_numpy(np.packbits(changed, bitorder="little"))
            with pytest.raises(PayloadError, match="positions or values"):
                decode(codec, broken, 4096)


@pytest.mark.parametrize("name", PATHS)
def test_two_bits_are_a_sign_and_one_of_two_means(name: str) -> None:
    codec, x = TopK(6 / 100, 100, "2bit"), torch.zeros(100)
    x[[3, 7, 20, 50, 51, 99]] = torch.tensor([1.0, -2.0, 1.5, -8.0, 16.0, 1.5])  # their mean is 5
    with path(name):
        payload, unsaid = encode(codec, x, torch.zeros(100))
        said = decode(codec, payload, 100)
    assert said[[3, 7, 20, 50, 51, 99]].tolist() == [1.5, -1.5, 1.5, -12.0, 12.0, 1.5]
    assert unsaid is not None
    assert torch.equal(unsaid, x - said)
    assert payload[:4].view(torch.bfloat16).tolist() == [1.5, 12.0]
    assert payload[-2:].tolist() == [0b11_00_10_00, 0b00_01]


@pytest.mark.parametrize("name", PATHS)
def test_two_bits_say_most_of_what_travels(name: str) -> None:
    x = torch.randn(40_960, generator=torch.Generator().manual_seed(0))
    codec = TopK(64 / 4096, 4096, "2bit")
    with path(name):
        said = decode(codec, encode(codec, x)[0], len(x))
    kept = said.abs() > 0
    assert int(kept.sum()) == 640
    assert float((x - said)[kept].norm() / x[kept].norm()) < 0.1


@pytest.mark.parametrize("name", PATHS)
def test_sampled_topk_meets_its_density(name: str) -> None:
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 3, 300_000)
    with path(name):
        for codec in (SampledTopK(0.02), Threshold(density=0.02)):
            kept = (decode(codec, encode(codec, x, seed=3)[0], len(x)) != 0).float()
            assert 0.015 < float(kept.mean()) < 0.025
            assert float(x[kept == 1].abs().min()) > float(x[kept == 0].abs().max())  # one threshold for all
        assert not torch.equal(encode(SampledTopK(0.02), x, seed=3)[0], encode(SampledTopK(0.02), x, seed=4)[0])


@pytest.mark.parametrize("name", PATHS)
def test_sampled_topk_holds_its_capacity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(x: torch.Tensor) -> torch.Tensor:
        return decode(SampledTopK(0.02), encode(SampledTopK(0.02), x)[0], len(x)) != 0

    x = torch.ones(300_000)
    with path(name):
        assert kept(x).nonzero().view(-1).tolist() == list(range(7500))  # all alike: the first of them
        x[200_000:203_000] = 2.0
        assert kept(x).nonzero().view(-1).tolist() == list(range(200_000, 203_000))  # the larger ones, and no others
        x[100_000:130_000] = torch.linspace(2, 3, 30_000)
        monkeypatch.setattr("paceline.codecs.sampled.sampled_cut", lambda *_: 1)  # a sample that saw only zeros
        found = kept(x)
        assert 6000 <= int(found.sum()) <= 7500
        assert bool(found[130_000 - int(found.sum()) : 130_000].all())


@pytest.mark.parametrize("name", PATHS)
def test_threshold_is_reached_or_not(name: str) -> None:
    x = torch.tensor([0.5, -0.5, 0.49999997, 0.0, -7.0])
    with path(name):
        payload, _ = encode(Threshold(value=0.5), torch.cat((x, torch.zeros(95))))
        assert len(payload) == 8 + 2 + 3 + 3 * 4  # three positions of 7 bits
        assert decode(Threshold(value=0.5), payload, 100)[:5].tolist() == [0.5, -0.5, 0.0, 0.0, -7.0]
        # Dearer than the tensor itself: the tensor itself.
        payload, unsaid = encode(Threshold(value=0.5), torch.ones(100), torch.ones(100))
        assert len(payload) == 8 + 400
        assert decode(Threshold(value=0.5), payload, 100).tolist() == [2.0] * 100
        assert unsaid is not None
        assert not unsaid.any()


@pytest.mark.parametrize("name", PATHS)
def test_nonzero_takes_the_shortest_way(name: str) -> None:
    with path(name):
        for there, size in [(40, 8 + 2 + 43 + 160), (2000, 8 + 512 + 8000), (4096, 8 + 4 * 4096)]:
            x = torch.zeros(4096)
            x[torch.randperm(4096, generator=torch.Generator().manual_seed(0))[:there]] = -0.0
            payload, _ = encode(NonZero(), x)
            assert len(payload) == size
            assert torch.equal(bits(decode(NonZero(), payload, 4096)) != 0, torch.ones(4096) != 0)  # -0.0 + ±0.0
            out = torch.zeros(4096)
            NonZero().decode_add(encode(NonZero(), x + 3 * (bits(x) != 0))[0], out, 2.0)
            assert torch.equal(out, 6.0 * (bits(x) != 0))


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.words)
def test_payloads_are_not_trusted(name: str, codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    with path(name):
        for numel in (1, 100, 5000):
            x = torch.randn(numel, generator=generator)
            x *= torch.rand(numel, generator=generator) < 0.7
            payload, _ = encode(codec, x)
            out = torch.randn(numel, generator=generator)
            before = out.clone()
            for cut in {0, 1, 7, 8, 9, len(payload) // 2, len(payload) - 1} - {len(payload)}:
                if cut < len(payload):
                    with pytest.raises(PayloadError, match="payload of "):
                        codec.decode_add(payload[:cut].clone(), out)
            with pytest.raises(PayloadError):
                codec.decode_add(torch.cat((payload, payload[:1])), out)
            assert torch.equal(bits(out), bits(before))
            refused = 0
            for trial in range(60):
                broken = payload.clone()
                if trial % 3 == 0:
                    broken = torch.randint(0, 256, (len(payload),), dtype=torch.uint8, generator=generator)
                else:
                    places = torch.randint(0, len(payload), (trial,), generator=generator)
                    broken[places] = torch.randint(0, 256, (trial,), dtype=torch.uint8, generator=generator)
                try:
                    codec.decode_add(broken, out)
                except PayloadError:
                    refused += 1
                    assert torch.equal(bits(out), bits(before))
                assert bool(torch.isfinite(decode_or_zero(codec, broken, numel)).all())
                out.copy_(before)
            assert refused or numel == 1


def decode_or_zero(codec: Codec, payload: torch.Tensor, numel: int) -> torch.Tensor:
    try:
        return decode(codec, payload, numel)
    except PayloadError:
        return torch.zeros(numel)


@pytest.mark.parametrize("name", PATHS)
def test_what_cannot_be_is_refused(name: str) -> None:
    with path(name):
        codec = TopK(0.02, 100)  # two positions of seven bits, then two values
        payload, _ = encode(codec, torch.arange(100.0))
        out = torch.zeros(100)
        for positions in (5 | 5 << 7, 6 | 5 << 7, 5 | 100 << 7):
            payload[:2] = torch.tensor([positions & 255, positions >> 8])
            with pytest.raises(PayloadError, match="cannot be"):
                codec.decode_add(payload, out)
        payload[:2] = torch.tensor([(5 | 99 << 7) & 255, (5 | 99 << 7) >> 8])
        codec.decode_add(payload, out)
        assert out[[5, 99]].tolist() == [98.0, 99.0]
        payload[2:6] = torch.tensor([float("nan")]).view(torch.uint8)
        with pytest.raises(PayloadError, match="cannot be"):
            codec.decode_add(payload, out)
        small = TopK(0.02, 100, "int8")
        payload, _ = encode(small, torch.arange(100.0))
        payload[:4] = torch.tensor([float("inf")]).view(torch.uint8)
        with pytest.raises(PayloadError, match="cannot be"):
            small.decode_add(payload, out)


@pytest.mark.parametrize("name", PATHS)
def test_counts_that_do_not_fit_are_refused(name: str) -> None:
    out = torch.zeros(100)
    with path(name):
        payload, _ = encode(SampledTopK(0.5), torch.randn(100))
        with pytest.raises(PayloadError, match="header"):  # sensible, but more than others of this density may say
            SampledTopK(0.1).decode_add(payload, out)
        for count, of_block in [(101, 101), (40, 41), (41, 40)]:
            broken = torch.zeros(8 + 2 + -(-of_block * 7 // 8) + 4 * of_block, dtype=torch.uint8)
            broken[0], broken[8] = count, of_block
            for codec in (Threshold(value=1.0), NonZero()):
                with pytest.raises(PayloadError, match="counts"):
                    codec.decode_add(broken, out)
        buffer = torch.zeros(500, dtype=torch.uint8)  # a payload may begin at any byte
        dense, _ = encode(NonZero(), torch.ones(100))
        buffer[3 : 3 + len(dense)] = dense
        NonZero().decode_add(buffer[3 : 3 + len(dense)], out)
    assert out.tolist() == [1.0] * 100


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.words)
def test_not_finite_leaves_the_residual_alone(name: str, codec: Codec) -> None:
    for wrong, unsaid in [(float("nan"), 0.0), (float("inf"), 0.0), (3e38, 3e38), (-3e38, -3e38)]:
        x, residual = torch.ones(5000), torch.ones(5000)
        x[4321], residual[4321] = wrong, unsaid
        before = residual.clone()
        out = torch.empty(codec.nbytes(5000), dtype=torch.uint8)
        with path(name), pytest.raises(PacelineError, match="not finite"):
            codec.encode_into(x, residual, out, Context())
        assert torch.equal(residual, before)


@pytest.mark.skipif(PATHS == ["torch"], reason="numba is not installed")
def test_several_threads_write_the_same_bytes() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    x *= torch.rand(200_000, generator=torch.Generator().manual_seed(1)) < 0.6
    threads = torch.get_num_threads()
    try:
        with path("kernels"):
            for codec in ALL:
                found = []
                for num in (1, 3):
                    torch.set_num_threads(num)
                    payload, unsaid = encode(codec, x, 0.1 * x)
                    assert unsaid is not None
                    found.append((payload, unsaid, decode(codec, payload, len(x))))
                assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*found, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.words)
def test_words_build_the_same_codec(codec: Codec) -> None:
    again = build(codec.words, KNOWN, "codec")
    assert type(again) is type(codec)
    assert vars(again) == vars(codec)
    assert again.words == codec.words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("topk(density=0)", "above 0"),
        ("topk(density=1.5)", "at most 1"),
        ("topk(chunk=0)", "sampled_topk"),
        ("topk(values='fp61')", "did you mean 'fp16'"),
        ("sampled_topk(density=-1)", "above 0"),
        ("threshold()", "one of both"),
        ("threshold(value=1.0, density=0.1)", "one of both"),
        ("threshold(value=0.0)", "above 0"),
        ("threshold(density=2)", "at most 1"),
    ],
)
def test_settings_that_do_not_exist(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(words, KNOWN, "codec")
