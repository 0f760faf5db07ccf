"""On a CUDA device the dense codecs' kernels write what the torch forms write there, and on the CPU: every bit."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from paceline.codecs import Codec, Context, PayloadError, make_codec
from paceline.codecs.kernels import dense
from paceline.core.errors import PacelineError

cuda = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dense.on_cuda(torch.empty(1, device=cuda))),
    reason="no CUDA device, or no Triton that works on it",
)

WORDS = [
    "quantize(8)", "quantize(4)", "quantize(2)", "quantize(8, block=16)", "quantize(4, block=4096)",
    "quantize(2, block=64)", "quantize(8, block=16384)", "quantize(8, stochastic=True)",
    "quantize(4, stochastic=True)", "quantize(2, stochastic=True, block=1024)", "sign", "sign(block=16)",
    "sign(block=256)", "sign(block=8192)", "ternary", "ternary(clip=1.1, block=64)", "ternary(clip=0)",
]  # fmt: skip
SIZES = [0, 1, 15, 255, 256, 257, 1000, 100_003]
KINDS = ["huge", "tiny", "spread", "ties", "minus zero", "zeros", "tiny among large"]


def made(kind: str, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    return {
        "normal": x,
        "huge": x.sign() * 3e38,
        "tiny": x * 1e-41,
        "spread": x * torch.logspace(-30, 30, max(numel, 1))[:numel],
        "ties": torch.randint(-2, 3, (numel,), generator=generator).float(),
        "minus zero": torch.full((numel,), -0.0),
        "zeros": torch.zeros(numel),
        "tiny among large": torch.where(torch.rand(numel, generator=generator) < 0.5, x * 1e-38, x),
    }[kind]


def take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "on_cuda", lambda tensor: False)


def said(
    codec: Codec, x: torch.Tensor, before: torch.Tensor | None, context: Context, device: torch.device, skew: int
) -> list[torch.Tensor]:
    """The payload with what stands behind it, the residual, and a tensor to which the payload was added."""
    room = torch.full((codec.nbytes(x.numel()) + 16 + skew,), 0xA5, dtype=torch.uint8, device=device)[skew:]
    residual = None if before is None else before.clone().to(device)
    size = codec.encode_into(x.to(device), residual, room[:-16], context)
    out = made("normal", x.numel()).to(device)
    out[::3] = -0.0
    codec.decode_add(room[:size], out, -0.7)
    return [tensor.cpu().view(torch.uint8) for tensor in (room, residual, out) if tensor is not None]


@pytest.mark.parametrize("words", WORDS)
def test_bytes_residuals_and_sums_are_those_of_the_torch_forms(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = make_codec(words)
    inputs = [("normal", numel) for numel in SIZES] + list(itertools.product(KINDS, (1, 257, 9000)))
    for number, (kind, numel) in enumerate(inputs):
        x, before = made(kind, numel), None
        if number % 4:
            before = made("normal", numel).flip(0) * (0.0 if kind in ("huge", "spread") else 0.1)
        context, skew = Context(seed=number * 0x9E3779B97F4A7C15, step=number), number % 3  # some are not aligned
        ours = said(codec, x, before, context, cuda, skew)
        with monkeypatch.context() as patch:
            take_torch(patch)
            on_device = said(codec, x, before, context, cuda, skew)
            on_cpu = said(codec, x, before, context, torch.device("cpu"), skew)
        for one, two, three in zip(ours, on_device, on_cpu, strict=True):
            assert torch.equal(one, two), (kind, numel, "CUDA")
            assert torch.equal(one, three), (kind, numel, "CPU")


@pytest.mark.parametrize("words", WORDS)
def test_residuals_stay_the_same_over_steps(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, residuals = make_codec(words), []
    for path in "kernel", "torch":
        with monkeypatch.context() as patch:
            if path == "torch":
                take_torch(patch)
            residual = torch.zeros(50_001, device=cuda)
            out = torch.empty(codec.nbytes(len(residual)), dtype=torch.uint8, device=cuda)
            for step in range(6):
                codec.encode_into(made("normal", len(residual)).roll(step).to(cuda), residual, out, Context(step=step))
            residuals.append(residual.cpu())
    assert torch.equal(residuals[0].view(torch.int32), residuals[1].view(torch.int32))


@pytest.mark.parametrize("words", WORDS)
def test_codecs_take_the_kernels(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "Blocks", None)
    monkeypatch.setattr(dense, "read_scales", None)
    codec = make_codec(words)
    said(codec, made("normal", 3000), None, Context(), cuda, 0)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_and_the_residual_stays(words: str, bad: float) -> None:
    codec = make_codec(words)
    for numel, place, where in (1, 0, 0), (70_001, 70_000, 0), (5000, 17, 1), (300_000, 299_000, 1), (5000, 256, 0):
        before = [made("normal", numel), made("normal", numel).flip(0)]
        out = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=cuda)
        before[where][place] = bad
        x, residual = (tensor.to(cuda) for tensor in before)
        with pytest.raises(PacelineError, match=r"not finite"):
            codec.encode_into(x, residual, out, Context())
        assert torch.equal(residual.cpu().view(torch.int32), before[1].view(torch.int32))
        x, residual = (torch.nan_to_num(tensor, 0.0, 0.0, 0.0) for tensor in (x, residual))
        codec.encode_into(x, residual, out, Context())  # the flags are down again
    sums = torch.full((300,), 3e38, device=cuda)
    with pytest.raises(PacelineError, match=r"not finite"):  # each is finite, and their sum is not
        codec.encode_into(sums, sums.clone(), torch.empty(codec.nbytes(300), dtype=torch.uint8, device=cuda), Context())


@pytest.mark.parametrize("words", WORDS)
def test_altered_payloads_are_refused_and_nothing_is_added(words: str) -> None:
    codec, numel = make_codec(words), 150_000
    payload = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=cuda)
    codec.encode_into(made("normal", numel).to(cuda), None, payload, Context())
    num = dense.num_blocks(numel, codec.block)  # type: ignore[attr-defined]
    scales = [float("nan"), float("inf"), float("-inf"), -1.0]
    for bad, number, skew in itertools.product(scales, (0, num // 2, num - 1), (0, 1)):
        altered = torch.empty(payload.numel() + skew, dtype=torch.uint8, device=cuda)[skew:]
        altered.copy_(payload)
        altered[4 * number : 4 * number + 4] = torch.tensor([bad]).view(torch.uint8).to(cuda)
        out = torch.full((numel,), 2.5, device=cuda)
        with pytest.raises(PayloadError, match=words.partition("(")[0]):
            codec.decode_add(altered, out)
        assert bool((out == 2.5).all())
        codec.decode_add(payload, out)
        assert not bool((out == 2.5).all())
    for wrong in payload[:-1], payload[:0], torch.cat([payload, payload[:1]]):
        with pytest.raises(PayloadError):
            codec.decode_add(wrong, torch.zeros(numel, device=cuda))


def test_threads_and_streams_do_not_mix_their_flags() -> None:
    codec, numel, wrong = make_codec("quantize(8)"), 200_000, list[tuple[int, int]]()
    clean = made("normal", numel).to(cuda)
    size = codec.nbytes(numel)
    expected = torch.empty(size, dtype=torch.uint8, device=cuda)
    codec.encode_into(clean, None, expected, Context())
    torch.cuda.synchronize()

    def work(number: int) -> None:
        x, out = clean.clone(), torch.empty(size, dtype=torch.uint8, device=cuda)
        torch.cuda.synchronize()
        if number % 2:
            x[number] = float("nan")
        for turn in range(30):
            with torch.cuda.stream(streams[number][turn % 2]):
                try:
                    codec.encode_into(x, None, out, Context())
                    good = not number % 2 and torch.equal(out, expected)
                except PacelineError:
                    good = bool(number % 2)
                if not good:
                    wrong.append((number, turn))

    streams = [
        (torch.cuda.Stream(), torch.cuda.default_stream())  # type: ignore[no-untyped-call]
        for _ in range(4)
    ]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
