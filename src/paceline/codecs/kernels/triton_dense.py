"""Fused kernels of the dense codecs for CUDA devices, in Triton. dense.py has the layout; bytes and residuals are the
same as everywhere, bit for bit.

    encode       `measure` finds each block's scale, and whether all is finite; `write` then packs the codes and
                 updates the residual. It goes from the end to the beginning: what was read last is still in the cache
    decode_add   `check` looks at all scales of a payload, `add` then adds what its codes say

The kernels are in triton_encode.py and triton_decode.py; here is what starts them.

The first kernel of each pair raises a flag, on the device and on the host, where something is not to be; the second one
does nothing where the flag is up. So nothing is touched before all is known to be good, and the host waits for the
first kernel alone, while the second one runs.

What keeps the bits the same: no product and sum become one operation (`enable_fp_fusion`), divisions are rounded
(`div_rn`: a plain one is an estimate), signs are flipped as bits (Triton's -x is 0 - x, which loses that of a zero),
and float64 sums add halves to halves one by one, since a plain sum has no order.

Importing this needs Triton, which comes with torch for CUDA: dense.py does so where the first kernel is wanted.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import driver

from paceline.codecs.codec import Context, PayloadError, check_finite, check_length
from paceline.codecs.kernels.random import keys
from paceline.codecs.kernels.triton_decode import add, check
from paceline.codecs.kernels.triton_encode import measure, write

if TYPE_CHECKING:
    from paceline.codecs.kernels.dense import Plan


class _Flags:
    """Of one thread on one stream: what the first kernel of a pair has to say to the second one and to the host."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.of_torch = torch.cuda.current_stream()
        self.on_device = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.on_host = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # kernels write to it where it stands
        self.said = self.on_host.numpy()
        self.checked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.scales = torch.empty(0, device="cuda")
        self.addresses = self.on_device.data_ptr(), self.on_host.data_ptr()

    def room(self, numel: int) -> torch.Tensor:
        """For what the first kernel leaves to the second one. Calls on one stream may share it."""
        if self.scales.numel() < numel:
            self.scales = torch.empty(numel, device="cuda")
        return self.scales

    def raised(self) -> bool:
        """Whether the first kernel found something; waits for it. The flags are down again after this."""
        self.checked.synchronize()
        if not self.said[0]:
            return False
        self.on_device.zero_()  # behind the second kernel, which still looks at it
        self.of_torch.synchronize()
        self.said[0] = 0
        return True


_of_thread = threading.local()


def _flags(index: int) -> _Flags:
    """Of this thread on the current stream of this device, which is the current one."""
    stream = driver.active.get_current_stream(index)
    try:
        flags: _Flags = _of_thread.flags[index, stream]
    except (AttributeError, KeyError):
        _of_thread.__dict__.setdefault("flags", {})[index, stream] = flags = _Flags(stream)
    return flags


class _Launch:
    """A kernel that is compiled, for a number of programs. Triton's own way there takes longer than many a kernel."""

    def __init__(self, kernel: Any, programs: int, warps: int, arguments: tuple[Any, ...], *settings: Any) -> None:
        options = {"grid": (programs,), "num_warps": warps, "enable_fp_fusion": False}
        self.run, self.settings = kernel.warmup(*arguments, *settings, **options)[(programs, 1, 1)], settings

    def __call__(self, stream: int, *arguments: int | float) -> None:
        """Tensors are given as addresses, aligned as those were for which it was compiled."""
        self.run(*arguments, *self.settings, stream=stream)


def try_out(device: torch.device) -> None:
    """Compile and run a small kernel. Raises what Triton raises where it cannot."""
    with torch.cuda.device(device):
        flags = _flags(torch.cuda.current_device())
        payload = torch.zeros(4, dtype=torch.uint8, device="cuda")
        look = _Launch(check, 1, 4, (payload, flags.on_device, flags.on_host, 1), 1024, 16, True)
        look(flags.stream, payload.data_ptr(), *flags.addresses, 1)
        flags.of_torch.synchronize()


def encode(plan: Plan, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
    """`encode_into` of the codec that the plan is of."""
    numel, size = x.numel(), plan.codec.nbytes(x.numel())
    assert x.dtype == torch.float32
    assert residual is None or residual.shape == x.shape
    assert out.dtype == torch.uint8
    assert out.numel() >= size, "kernels do not look where a tensor ends"
    if not numel:
        return size
    old = x if residual is None else residual
    first, second = keys(context.seed, context.step) if plan.drawn else (0, 0)
    words = first - (first >> 31 << 32), second - (second >> 31 << 32)  # signed
    index, at_x, at_old, at_out = x.get_device(), x.data_ptr(), old.data_ptr(), out.data_ptr()
    with torch.cuda.device(index):
        flags = _flags(index)
        scales = flags.room(2 * -(-numel // plan.block))
        name = ("encode", index, numel, residual is None, at_x % 16 == 0, at_old % 16 == 0, at_out % 16 == 0)
        if name not in plan.compiled:
            tensors = (x, old, scales, out, flags.on_device)
            plan.compiled[name] = _encoder(plan, residual is not None, tensors, flags.on_host)
        first_kernel, second_kernel = plan.compiled[name]
        at_scales, (flag, host_flag) = scales.data_ptr(), flags.addresses
        first_kernel(flags.stream, at_x, at_old, at_scales, at_out, flag, host_flag, numel)
        flags.checked.record(flags.of_torch)
        second_kernel(flags.stream, at_x, at_old, at_scales, at_out, flag, numel, *words)
        if flags.raised():
            check_finite(float("inf"), plan.codec)
    return size


def _encoder(
    plan: Plan, kept: bool, tensors: tuple[torch.Tensor, ...], host_flag: torch.Tensor
) -> tuple[_Launch, _Launch]:
    numel, block, bits = tensors[0].numel(), plan.block, plan.bits
    num, power = -(-numel // block), 1 if bits == 1 else 2 if plan.clip else 0
    rows, warps = max((2048 if power else 1024) // block, 1), min(max(block // 1024, 2 if power else 1), 32)
    cached = torch.cuda.get_device_properties().L2_cache_size // 12  # two thirds of it, in elements of 8 bytes
    settings = (rows, block, block.bit_length() - 1, bits, power, plan.clip, kept, cached)
    first = _Launch(measure, -(-num // rows), warps, (*tensors, host_flag, numel), *settings)
    rows, columns, programs, warps = _tiles(num, block, bits)
    tiles = (rows, columns, block, bits)
    return first, _Launch(write, programs, warps, (*tensors, numel, 0, 0), *tiles, kept, plan.drawn)


def decode_add(plan: Plan, payload: torch.Tensor, out: torch.Tensor, weight: float) -> None:
    """`decode_add` of the codec that the plan is of."""
    numel = out.numel()
    check_length(payload, plan.codec.nbytes(numel), plan.codec)
    assert out.dtype == torch.float32
    assert payload.device == out.device
    if not numel:
        return
    index, at_payload, at_out = out.get_device(), payload.data_ptr(), out.data_ptr()
    with torch.cuda.device(index):
        flags = _flags(index)
        name = ("decode", index, numel, at_payload % 4 == 0, at_payload % 16 == 0, at_out % 16 == 0)
        if name not in plan.compiled:
            plan.compiled[name] = _decoder(plan, payload, out, flags)
        first_kernel, second_kernel = plan.compiled[name]
        first_kernel(flags.stream, at_payload, *flags.addresses, numel)
        flags.checked.record(flags.of_torch)
        second_kernel(flags.stream, at_payload, at_out, flags.addresses[0], numel, float(weight))
        if flags.raised():
            raise PayloadError(f"a payload of {plan.codec.words} has a scale that is negative or not finite")


def _decoder(plan: Plan, payload: torch.Tensor, out: torch.Tensor, flags: _Flags) -> tuple[_Launch, _Launch]:
    numel, block, bits = out.numel(), plan.block, plan.bits
    num, aligned = -(-numel // block), payload.data_ptr() % 4 == 0
    checked = (payload, flags.on_device, flags.on_host, numel)
    first = _Launch(check, -(-num // 1024), 4, checked, 1024, block, aligned)
    rows, columns, programs, warps = _tiles(num, block, bits)
    added = (payload, out, flags.on_device, numel, 1.0)
    return first, _Launch(add, programs, warps, added, rows, columns, block, bits, aligned)


def _tiles(num: int, block: int, bits: int) -> tuple[int, int, int, int]:
    """How many blocks a program has, how many bytes of each, how many programs there are, and their warps."""
    width, target = block * bits // 8, 128 * bits
    rows, columns = max(target // width, 1), min(target, width)
    return rows, columns, -(-num // rows) * (width // columns), 2 if bits == 8 else 1
