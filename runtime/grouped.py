"""Grouped expert computation on a GPU. The host never waits for the device.

Rows are sorted by expert, multiplied in two grouped products (`torch._grouped_mm`), weighted and summed. Triton kernels
sort, weight and sum. Buffers have the size of the worst case, in which all slots of all rows are used. Unused rows are
skipped. So a layer of fixed size can be captured in a CUDA graph.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl

from epsim.runtime.exchange.base import Received

SCALED = 128
"""Number of values that share a scale in float8."""


@triton.jit
def _count(slots, group_of_slot, counts, num_pairs, block: tl.constexpr, bins: tl.constexpr):
    """Adds to counts [bins] the number of (row, slot) pairs of each group. Pairs without a slot go to the last bin."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    slot = tl.load(slots + at, mask=at < num_pairs, other=-1)
    group = tl.load(group_of_slot + slot, mask=slot >= 0, other=bins - 1).to(tl.int32)
    histogram = tl.histogram(group, bins)
    tl.atomic_add(counts + tl.arange(0, bins), histogram, mask=histogram > 0)


@triton.jit
def _place(
    hidden, scales, slots, group_of_slot, cursor, position, rows, stride,
    width: tl.constexpr, columns: tl.constexpr, scaled: tl.constexpr, most: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program per row: reserves a position in the group of each of its slots and copies the row to it. position [N,
    columns]: these positions, -1 for none. cursor [groups]: the next free position of each group."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, most)
    slot = tl.load(slots + row * columns + column, mask=column < columns, other=-1)
    taken = slot >= 0
    group = tl.load(group_of_slot + slot, mask=taken, other=0)
    sorted_row = tl.atomic_add(cursor + group, 1, mask=taken).to(tl.int64)
    tl.store(position + row * columns + column, tl.where(taken, sorted_row, -1), mask=column < columns)
    if tl.max(slot, axis=0) >= 0:
        for first in range(0, width, block):
            at = first + tl.arange(0, block)
            value = tl.load(hidden + row * stride + at, mask=at < width)
            if scaled:
                scale = tl.load(scales + row * (width // 128) + at // 128, mask=at < width)
                value = (value.to(tl.float32) * scale).to(tl.bfloat16)
            target = rows + sorted_row[:, None] * width + at[None, :]
            copies = tl.broadcast_to(value[None, :], (most, block))
            tl.store(target, copies, mask=taken[:, None] & (at < width)[None, :])


@triton.jit
def _activate(gate_up, activated, ends, last, width: tl.constexpr, block: tl.constexpr):
    """One program per sorted row: silu(gate) * up. Unused rows are skipped."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + last):
        for first in range(0, width, block):
            at = first + tl.arange(0, block)
            gate = tl.load(gate_up + row * 2 * width + at, mask=at < width).to(tl.float32)
            up = tl.load(gate_up + row * 2 * width + width + at, mask=at < width).to(tl.float32)
            tl.store(activated + row * width + at, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=at < width)


@triton.jit
def _weigh(
    sorted_rows, position, weights, outputs,
    width: tl.constexpr, columns: tl.constexpr, fill: tl.constexpr, most: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program per row: the weighted sum over its slots. fill: whether rows without a slot are set to zero."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, most)
    sorted_row = tl.load(position + row * columns + column, mask=column < columns, other=-1)
    weight = tl.load(weights + row * columns + column, mask=column < columns, other=0.0)
    taken = sorted_row >= 0
    if fill or tl.max(sorted_row, axis=0) >= 0:
        for first in range(0, width, block):
            at = first + tl.arange(0, block)
            from_rows = sorted_rows + sorted_row[:, None] * width + at[None, :]
            value = tl.load(from_rows, mask=taken[:, None] & (at < width)[None, :], other=0.0)
            total = tl.sum(value.to(tl.float32) * tl.where(taken, weight, 0.0)[:, None], axis=0)
            tl.store(outputs + row * width + at, total.to(tl.bfloat16), mask=at < width)


@triton.jit
def _to_float8(hidden, values, scales, width: tl.constexpr, blocks: tl.constexpr):
    """One program per row: divides each block of 128 values by a scale, its largest absolute value / 448."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, blocks)
    at = number[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(hidden + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-4) / 448.0
    tl.store(values + row * width + at, (value / scale[:, None]).to(tl.float8e4nv), mask=at < width)
    tl.store(scales + row * (width // 128) + number, scale, mask=number < width // 128)


def to_float8(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [T, H] bfloat16 -> values [T, H] float8_e4m3fn and scales [T, H / 128] float32. H is a multiple of 128."""
    num_rows, width = hidden.shape
    values = torch.empty_like(hidden, dtype=torch.float8_e4m3fn)
    scales = hidden.new_empty(num_rows, width // SCALED, dtype=torch.float32)
    _launch(_to_float8, num_rows, hidden, values, scales, width, blocks=_power(width // SCALED))
    return values, scales


def compute(
    received: Received,
    slots: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    group_of_slot: torch.Tensor,
    fill: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """slots [N, K], weights ([groups, 2 I, H], [groups, H, I]), group_of_slot [S] -> outputs [N, H], counts [S]. All in
    bfloat16. fill: whether outputs of rows without a slot are set to zero; otherwise they are undefined."""
    hidden, gate_up, down = received.hidden, *weights
    (num_rows, width), columns, num_groups = hidden.shape, slots.shape[1], len(gate_up)
    num_pairs, inner = num_rows * columns, down.shape[2]
    outputs = torch.empty(num_rows, width, dtype=torch.bfloat16, device=hidden.device)
    bins, most = _power(num_groups + 1), _power(columns)
    counts = torch.zeros(bins, dtype=torch.int32, device=hidden.device)
    if num_rows:
        slots = slots.contiguous()
        _launch(_count, -(-num_pairs // 1024), slots, group_of_slot, counts, num_pairs, block=1024, bins=bins)
        ends = counts[:num_groups].cumsum(0, dtype=torch.int32)
        cursor = ends - counts[:num_groups]
        position = torch.empty(num_rows, columns, dtype=torch.int64, device=hidden.device)
        rows = torch.empty(num_pairs, width, dtype=torch.bfloat16, device=hidden.device)
        scaled = received.scales is not None
        into = (received.scales if scaled else hidden, slots, group_of_slot, cursor, position, rows, hidden.stride(0))
        _launch(_place, num_rows, hidden, *into, width, columns, scaled=scaled, most=most, block=512)
        grouped: Any = torch._grouped_mm
        wide = grouped(rows, gate_up.transpose(1, 2), offs=ends)
        activated = torch.empty(num_pairs, inner, dtype=torch.bfloat16, device=hidden.device)
        last = num_groups - 1
        _launch(_activate, num_pairs, wide, activated, ends, last, inner, block=min(_power(inner), 2048))
        sorted_rows = grouped(activated, down.transpose(1, 2), offs=ends)
        kept = received.weights.contiguous()
        _launch(_weigh, num_rows, sorted_rows, position, kept, outputs, width, columns, fill=fill, most=most, block=512)
    return outputs, counts[:num_groups][group_of_slot].to(torch.int64)


def _launch(kernel: Any, programs: int, *arguments: Any, **sizes: Any) -> None:
    if programs:
        kernel[(programs,)](*arguments, **sizes)


def _power(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
