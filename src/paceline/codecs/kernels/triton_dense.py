"""Fused kernels of the dense codecs for CUDA devices, in Triton. dense.py has the layout; bytes and residuals are the
same as everywhere, bit for bit.

    encode       `_measure` finds each block's scale, and whether all is finite; `_write` then packs the codes and
                 updates the residual. It goes from the end to the beginning: what was read last is still in the cache
    decode_add   `_check` looks at all scales of a payload, `_add` then adds what its codes say

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from paceline.codecs.codec import Context, PayloadError, check_finite, check_length
from paceline.codecs.kernels.random import keys

if TYPE_CHECKING:
    from paceline.codecs.kernels.dense import Plan

_NOT_FINITE = tl.constexpr(0x7F7FFFFF)  # bits of magnitudes above these are those of inf and nan
_SMALLEST = tl.constexpr(2.0**-100)  # these two are dense.py's
_LARGEST = tl.constexpr(3.4e38)


def _jit(kernel: Callable[..., Any]) -> Any:
    """Sizes and keys change from call to call: kernels are not compiled anew for those that 16 divides."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    return triton.jit(do_not_specialize=[name for name in names if name in ("numel", "key", "other_key")])(kernel)


# `x`, `residual` and the like point to where a program's tile begins; `first` is the element that stands there and
# `left` how many there are from it on. A tile is some rows, which are blocks, and some columns, which are the elements
# or the bytes of a block. One that the tensor fills is not `masked`: masks would cost it the wide loads.


@_jit
def _whole(
    x: tl.tensor,
    residual: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    kept: tl.constexpr,
    masked: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tensor:
    """x and what its residual adds. The policy says how long the cache is to hold them."""
    if masked:
        p = tl.load(x + at, mask=mask, other=0.0)
        if kept:
            p += tl.load(residual + at, mask=mask, other=0.0)
    else:
        p = tl.load(x + at, eviction_policy=policy)
        if kept:
            p += tl.load(residual + at, eviction_policy=policy)
    return p


@_jit
def _magnitude(p: tl.tensor) -> tl.tensor:
    return p.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@_jit
def _flip(value: tl.tensor, negative: tl.tensor) -> tl.tensor:
    """The value with the other sign, where `negative` is 1."""
    return (value.to(tl.int32, bitcast=True) ^ (negative.to(tl.int32) << 31)).to(tl.float32, bitcast=True)


@_jit
def _draw(index: tl.tensor, key: tl.tensor, other_key: tl.tensor) -> tl.tensor:
    """random.draw."""
    word = index.to(tl.uint32) ^ key.to(tl.uint32, bitcast=True)
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) ^ other_key.to(tl.uint32, bitcast=True)
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    word = word ^ (word >> 16)
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@_jit
def _term(p: tl.tensor, power: tl.constexpr) -> tl.tensor:
    wide = p.to(tl.float64)
    return tl.abs(wide) if power == 1 else wide * wide


@_jit
def _pair(
    x: tl.tensor,
    residual: tl.tensor,
    at: tl.tensor,
    left: tl.tensor,
    distance: tl.constexpr,
    power: tl.constexpr,
    kept: tl.constexpr,
    masked: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tensor:
    """The magnitudes and the terms of an element and of the one half a block further."""
    near = _whole(x, residual, at, at < left, kept, masked, policy)
    far = _whole(x, residual, at + distance, at + distance < left, kept, masked, policy)
    return tl.maximum(_magnitude(near), _magnitude(far)), _term(near, power) + _term(far, power)


@_jit
def _measure_tile(
    x: tl.tensor,
    residual: tl.tensor,
    left: tl.tensor,
    rows: tl.constexpr,
    block: tl.constexpr,
    levels: tl.constexpr,
    power: tl.constexpr,
    clip: tl.constexpr,
    kept: tl.constexpr,
    masked: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tensor:
    """The bits of the largest magnitude of each block, and what its scale is made of."""
    row = tl.arange(0, rows)
    if power == 0:
        at = row[:, None] * block + tl.arange(0, block)[None, :]
        largest = tl.max(_magnitude(_whole(x, residual, at, at < left, kept, masked, policy)), axis=1)
        measure = largest.to(tl.float32, bitcast=True)
    else:
        part: tl.constexpr = block // 8
        at = row[:, None] * block + tl.arange(0, part)[None, :]
        most_0, sum_0 = _pair(x, residual, at, left, 4 * part, power, kept, masked, policy)
        most_1, sum_1 = _pair(x, residual, at + part, left, 4 * part, power, kept, masked, policy)
        most_2, sum_2 = _pair(x, residual, at + 2 * part, left, 4 * part, power, kept, masked, policy)
        most_3, sum_3 = _pair(x, residual, at + 3 * part, left, 4 * part, power, kept, masked, policy)
        largest = tl.max(tl.maximum(tl.maximum(most_0, most_2), tl.maximum(most_1, most_3)), axis=1)
        sums = (sum_0 + sum_2) + (sum_1 + sum_3)
        for level in tl.static_range(levels - 3):
            sums = tl.sum(tl.reshape(sums, (rows, 2, part >> (level + 1))), axis=1)
        count = tl.minimum(tl.maximum(left - row * block, 1), block)
        mean = tl.reshape(sums, (rows,)) / count.to(tl.float64)
        if power == 2:
            limit = tl.sqrt(mean) * tl.full((), clip, tl.float64)
            mean = tl.minimum(largest.to(tl.float32, bitcast=True).to(tl.float64), limit)
        measure = mean.to(tl.float32)
    return largest, measure


@_jit
def _measure(
    x: tl.tensor,
    residual: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    flag: tl.tensor,
    host_flag: tl.tensor,
    numel: tl.tensor,
    rows: tl.constexpr,
    block: tl.constexpr,
    levels: tl.constexpr,
    bits: tl.constexpr,
    power: tl.constexpr,
    clip: tl.constexpr,
    kept: tl.constexpr,
    cached: tl.constexpr,
) -> None:
    """The scales of all blocks, to `scales`, followed by their inverses, and to the head of the payload."""
    first_row = tl.program_id(0).to(tl.int64) * rows
    x += first_row * block
    residual += first_row * block
    left = numel - first_row * block
    if left < rows * block:
        largest, measure = _measure_tile(x, residual, left, rows, block, levels, power, clip, kept, True, "")
    elif left > cached:
        largest, measure = _measure_tile(
            x, residual, left, rows, block, levels, power, clip, kept, False, "evict_first"
        )
    else:
        largest, measure = _measure_tile(x, residual, left, rows, block, levels, power, clip, kept, False, "evict_last")
    row = tl.arange(0, rows)
    mask = row * block < left
    if bits == 1:
        scale = measure
    else:
        highest = tl.full((rows,), (1 << (bits - 1)) - 1, tl.float32)
        live = measure >= _SMALLEST
        limited = tl.where(live, tl.minimum(measure, _LARGEST), highest)
        scale = tl.where(live, tl.div_rn(limited, highest), 0.0)
        inverses = scales + (numel + block - 1) // block
        tl.store(inverses + first_row + row, tl.where(live, tl.div_rn(highest, limited), 0.0), mask=mask)
    tl.store(scales + first_row + row, scale, mask=mask)
    place = tl.arange(0, 4)
    octets = scale.to(tl.int32, bitcast=True)[:, None] >> (8 * place)[None, :]
    tl.store(out + first_row * 4 + (row * 4)[:, None] + place[None, :], octets.to(tl.uint8), mask=mask[:, None])
    bad = tl.max(largest, axis=0) > _NOT_FINITE
    tl.store(flag, 1, mask=bad)
    tl.store(host_flag, 1, mask=bad)


@_jit
def _write_tile(
    x: tl.tensor,
    residual: tl.tensor,
    scales: tl.tensor,
    inverses: tl.tensor,
    codes: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    key: tl.tensor,
    other_key: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    rows: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    kept: tl.constexpr,
    drawn: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    row = tl.arange(0, rows)
    in_rows = row * block < left
    scale = tl.load(scales + row, mask=in_rows, other=0.0)[:, None]
    if bits > 1:
        inverse = tl.load(inverses + row, mask=in_rows, other=0.0)[:, None]
    wholes: tl.tuple = ()
    for plane in tl.static_range(8 // bits):  # a store in between would hold up the loads
        at = row[:, None] * block + column + plane * width
        mask = (column < width) & (at < left)
        wholes += (_whole(x, residual, at, mask, kept, masked, "evict_first"),)
    packed = tl.zeros((rows, column.shape[1]), tl.int32)
    for plane in tl.static_range(8 // bits):
        p = wholes[plane]
        at = row[:, None] * block + column + plane * width
        mask = (column < width) & (at < left)
        if bits == 1:
            code = (p < 0.0).to(tl.int32)
            said = _flip(scale, code)
        else:
            steps = tl.minimum(tl.abs(p) * inverse, (1 << (bits - 1)) - 1)
            if drawn:
                down = steps.to(tl.int32).to(tl.float32)
                steps = tl.where(_draw(first + at, key, other_key) < steps - down, down + 1.0, down)
            else:
                steps = (steps + 12582912.0) - 12582912.0  # as in packing.py
            steps = _flip(steps, p < 0.0)
            code = steps.to(tl.int32) & ((1 << bits) - 1)
            said = steps * scale
        packed |= code << (plane * bits)
        if kept:
            if masked:
                tl.store(residual + at, p - said, mask=mask)
            else:
                tl.store(residual + at, p - said)
    to = codes + row[:, None] * (block * bits // 8) + column
    if masked:
        tl.store(to, packed.to(tl.uint8), mask=(column < width) & in_rows[:, None])
    else:
        tl.store(to, packed.to(tl.uint8))


@_jit
def _tile(
    numel: tl.tensor, rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, bits: tl.constexpr
) -> tl.tensor:
    """Of this program: its first row, its columns, how many elements it has, and the bytes of the last block."""
    width: tl.constexpr = block * bits // 8
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    first_row = (number // (width // columns)).to(tl.int64) * rows
    column = (number % (width // columns)) * columns + tl.arange(0, columns)[None, :]
    left = tl.minimum(numel - first_row * block, rows * block).to(tl.int32)
    return first_row, column, left, ((numel % block) * bits + 7) // 8


@_jit
def _widths(
    left: tl.tensor, short: tl.tensor, rows: tl.constexpr, block: tl.constexpr, bits: tl.constexpr
) -> tl.tensor:
    """The bytes of each block of a tile, of which one may be short."""
    return tl.where((tl.arange(0, rows) + 1) * block <= left, block * bits // 8, short)[:, None]


@_jit
def _write(
    x: tl.tensor,
    residual: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    flag: tl.tensor,
    numel: tl.tensor,
    key: tl.tensor,
    other_key: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    kept: tl.constexpr,
    drawn: tl.constexpr,
) -> None:
    """The codes of all blocks, and the residual that they leave."""
    if tl.load(flag) == 0:
        first_row, column, left, short = _tile(numel, rows, columns, block, bits)
        first = first_row * block
        codes = out + 4 * ((numel + block - 1) // block) + first_row * (block * bits // 8)
        x += first
        residual += first
        scales += first_row
        inverses = scales + (numel + block - 1) // block
        if left >= rows * block:
            _write_tile(
                x, residual, scales, inverses, codes, first, left, key, other_key, column, block * bits // 8,
                rows, block, bits, kept, drawn, False,
            )  # fmt: skip
        else:
            _write_tile(
                x, residual, scales, inverses, codes, first, left, key, other_key, column,
                _widths(left, short, rows, block, bits), rows, block, bits, kept, drawn, True,
            )  # fmt: skip


@_jit
def _scale(payload: tl.tensor, number: tl.tensor, mask: tl.tensor, aligned: tl.constexpr) -> tl.tensor:
    if aligned:
        return tl.load(payload.to(tl.pointer_type(tl.float32)) + number, mask=mask, other=0.0)
    word = tl.load(payload + number * 4, mask=mask, other=0).to(tl.int32)
    for place in tl.static_range(1, 4):
        word |= tl.load(payload + number * 4 + place, mask=mask, other=0).to(tl.int32) << (8 * place)
    return word.to(tl.float32, bitcast=True)


@_jit
def _check(
    payload: tl.tensor,
    flag: tl.tensor,
    host_flag: tl.tensor,
    numel: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    scale = _scale(payload, number, number < (numel + block - 1) // block, aligned)
    good = (scale >= 0.0) & (scale < float("inf"))
    bad = tl.min(good.to(tl.int32), axis=0) == 0
    tl.store(flag, 1, mask=bad)
    tl.store(host_flag, 1, mask=bad)


@_jit
def _add_tile(
    codes: tl.tensor,
    factor: tl.tensor,
    out: tl.tensor,
    left: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    rows: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    row = tl.arange(0, rows)[:, None]
    place = codes + row * (block * bits // 8) + column
    if masked:
        packed = tl.load(place, mask=(column < width) & (row * block < left), other=0).to(tl.int32)
    else:
        packed = tl.load(place).to(tl.int32)
    before: tl.tuple = ()
    for plane in tl.static_range(8 // bits):
        at = row * block + column + plane * width
        if masked:
            before += (tl.load(out + at, mask=(column < width) & (at < left), other=0.0),)
        else:
            before += (tl.load(out + at),)
    for plane in tl.static_range(8 // bits):
        field = (packed >> (plane * bits)) & ((1 << bits) - 1)
        if bits == 1:
            said = _flip(factor, field)
        else:
            said = ((field ^ (1 << (bits - 1))) - (1 << (bits - 1))).to(tl.float32) * factor
        at = row * block + column + plane * width
        if masked:
            tl.store(out + at, before[plane] + said, mask=(column < width) & (at < left))
        else:
            tl.store(out + at, before[plane] + said)


@_jit
def _add(
    payload: tl.tensor,
    out: tl.tensor,
    flag: tl.tensor,
    numel: tl.tensor,
    weight: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    if tl.load(flag) == 0:
        first_row, column, left, short = _tile(numel, rows, columns, block, bits)
        codes = payload + 4 * ((numel + block - 1) // block) + first_row * (block * bits // 8)
        out += first_row * block
        row = tl.arange(0, rows)
        factor = (_scale(payload, first_row + row, row * block < left, aligned) * weight)[:, None]
        if left >= rows * block:
            _add_tile(codes, factor, out, left, column, block * bits // 8, rows, block, bits, False)
        else:
            width = _widths(left, short, rows, block, bits)
            _add_tile(codes, factor, out, left, column, width, rows, block, bits, True)


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
        check = _Launch(_check, 1, 4, (payload, flags.on_device, flags.on_host, 1), 1024, 16, True)
        check(flags.stream, payload.data_ptr(), *flags.addresses, 1)
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
        measure, write = plan.compiled[name]
        at_scales, (flag, host_flag) = scales.data_ptr(), flags.addresses
        measure(flags.stream, at_x, at_old, at_scales, at_out, flag, host_flag, numel)
        flags.checked.record(flags.of_torch)
        write(flags.stream, at_x, at_old, at_scales, at_out, flag, numel, *words)
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
    measure = _Launch(_measure, -(-num // rows), warps, (*tensors, host_flag, numel), *settings)
    rows, columns, programs, warps = _tiles(num, block, bits)
    tiles = (rows, columns, block, bits)
    return measure, _Launch(_write, programs, warps, (*tensors, numel, 0, 0), *tiles, kept, plan.drawn)


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
        check, add = plan.compiled[name]
        check(flags.stream, at_payload, *flags.addresses, numel)
        flags.checked.record(flags.of_torch)
        add(flags.stream, at_payload, at_out, flags.addresses[0], numel, float(weight))
        if flags.raised():
            raise PayloadError(f"a payload of {plan.codec.words} has a scale that is negative or not finite")


def _decoder(plan: Plan, payload: torch.Tensor, out: torch.Tensor, flags: _Flags) -> tuple[_Launch, _Launch]:
    numel, block, bits = out.numel(), plan.block, plan.bits
    num, aligned = -(-numel // block), payload.data_ptr() % 4 == 0
    checked = (payload, flags.on_device, flags.on_host, numel)
    check = _Launch(_check, -(-num // 1024), 4, checked, 1024, block, aligned)
    rows, columns, programs, warps = _tiles(num, block, bits)
    added = (payload, out, flags.on_device, numel, 1.0)
    return check, _Launch(_add, programs, warps, added, rows, columns, block, bits, aligned)


def _tiles(num: int, block: int, bits: int) -> tuple[int, int, int, int]:
    """How many blocks a program has, how many bytes of each, how many programs there are, and their warps."""
    width, target = block * bits // 8, 128 * bits
    rows, columns = max(target // width, 1), min(target, width)
    return rows, columns, -(-num // rows) * (width // columns), 2 if bits == 8 else 1
