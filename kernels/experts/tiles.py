"""Computes the experts of a small batch in two Triton launches: silu(gate) * up, then down and the sum over experts.

Every matrix product uses all tokens of the batch (padded to 16) and masks those that the expert does not serve. This
costs no time, because tensor cores are idle while weights load. Sums are over experts in ascending order, so every run
gives the same bits. With TRITON_INTERPRET=1 it runs on CPUs.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tiling:
    """For each launch: rows of weights per program, inner values per step, warps, and stages. parts: the number of
    programs among which the second launch divides the experts."""

    first: tuple[int, int, int, int] = (32, 128, 4, 4)
    second: tuple[int, int, int, int] = (32, 256, 4, 5)
    parts: int = 4


@triton.jit
def _served(ids, weights, slot, tokens, columns: tl.constexpr, rows: tl.constexpr, most: tl.constexpr):
    """The tokens that the slot serves, [rows] bool, and its weight for each, [rows] float32."""
    token, column = tl.arange(0, rows)[:, None], tl.arange(0, most)[None, :]
    inside = (token < tokens) & (column < columns)
    hit = tl.load(ids + token * columns + column, mask=inside, other=-1) == slot
    weight = tl.load(weights + token * columns + column, mask=hit & inside, other=0.0)
    return tl.sum(hit.to(tl.int32), axis=1) > 0, tl.sum(weight, axis=1)


@triton.jit
def _list(ids, listed, counts, pairs, slots, bins: tl.constexpr, block: tl.constexpr, counted: tl.constexpr):
    """Writes to listed [slots + 1] the number of active slots, then these slots in ascending order. One program."""
    at = tl.arange(0, block)
    slot = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
    histogram = tl.histogram(tl.where(slot >= 0, slot, bins - 1), bins)
    number = tl.arange(0, bins)
    if counted:
        tl.store(counts + number, histogram.to(tl.int64), mask=number < slots)
    active = ((histogram > 0) & (number < slots)).to(tl.int32)
    tl.store(listed + tl.cumsum(active, axis=0), number, mask=active > 0)
    tl.store(listed, tl.sum(active, axis=0))


@triton.jit
def _first(
    hidden, ids, weights, gate_up, row_of, activated, listed, counts, stride, tokens, slots,
    columns: tl.constexpr, size: tl.constexpr, inter: tl.constexpr, own_rows: tl.constexpr, counted: tl.constexpr,
    rows: tl.constexpr, most: tl.constexpr, bins: tl.constexpr,
    height: tl.constexpr, step: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """gate, up and activation. One program per slot and `height` channels; it returns if the slot has no tokens."""
    slot = tl.program_id(1)
    if slot == slots:
        if tl.program_id(0) == 0:
            _list(ids, listed, counts, tokens * columns, slots, bins, rows * most, counted)
        return
    served, weight = _served(ids, weights, slot, tokens, columns, rows, most)
    if tl.max(served.to(tl.int32), axis=0) == 0:
        return
    expert = slot.to(tl.int64)
    if not own_rows:
        expert = tl.load(row_of + slot)
    token, column = tl.arange(0, rows), tl.program_id(0) * height + tl.arange(0, height)
    inside = column < inter
    gate = tl.zeros((height, rows), tl.float32)
    up = tl.zeros((height, rows), tl.float32)
    from_gate = gate_up + (expert * 2 * inter + column[:, None]) * size
    for begin in tl.range(0, size, step, num_stages=stages):
        at = begin + tl.arange(0, step)
        valid = inside[:, None] & (at < size)[None, :]
        value = tl.load(
            hidden + token[None, :] * stride + at[:, None], mask=served[None, :] & (at < size)[:, None], other=0.0
        )
        wide = tl.load(from_gate + at[None, :], mask=valid, other=0.0)
        other = tl.load(from_gate + inter * size + at[None, :], mask=valid, other=0.0)
        gate = tl.dot(wide, value, gate)
        up = tl.dot(other, value, up)
    product = gate * tl.sigmoid(gate) * up * weight[None, :]
    to = activated + (slot.to(tl.int64) * tokens + token[None, :]) * inter + column[:, None]
    tl.store(to, product.to(activated.dtype.element_ty), mask=served[None, :] & inside[:, None])


@triton.jit
def _second(
    ids, weights, down, row_of, activated, listed, partial, finished, output, tokens,
    columns: tl.constexpr, size: tl.constexpr, inter: tl.constexpr, own_rows: tl.constexpr, parts: tl.constexpr,
    rows: tl.constexpr, most: tl.constexpr, height: tl.constexpr, step: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """down. One program per `height` output columns and part of the experts; the last one to end sums the parts."""
    part = tl.program_id(1)
    active = tl.load(listed)
    token, column = tl.arange(0, rows), tl.program_id(0) * height + tl.arange(0, height)
    inside = column < size
    total = tl.zeros((height, rows), tl.float32)
    chunks: tl.constexpr = tl.cdiv(inter, step)
    first = active * part // parts
    # A single loop over experts and inner values, so that the weights of the next expert are prefetched.
    for item in tl.range(0, (active * (part + 1) // parts - first) * chunks, num_stages=stages):
        slot = tl.load(listed + 1 + first + item // chunks)
        served, _ = _served(ids, weights, slot, tokens, columns, rows, most)
        expert = slot.to(tl.int64)
        at = item % chunks * step + tl.arange(0, step)
        from_token = activated + (expert * tokens + token[None, :]) * inter + at[:, None]
        if not own_rows:
            expert = tl.load(row_of + slot)
        from_down = down + (expert * size + column[:, None]) * inter + at[None, :]
        wide = tl.load(from_down, mask=inside[:, None] & (at < inter)[None, :], other=0.0)
        value = tl.load(from_token, mask=served[None, :] & (at < inter)[:, None], other=0.0)
        total = tl.dot(wide, value, total)
    cell = token[None, :] * size + column[:, None]
    kept = (token < tokens)[None, :] & inside[:, None]
    if parts == 1:
        tl.store(output + cell, total.to(output.dtype.element_ty), mask=kept)
    else:
        tl.store(partial + part * tokens * size + cell, total, mask=kept)
        tl.debug_barrier()
        done = tl.atomic_add(finished + tl.program_id(0), 1, sem="acq_rel")
        if done == parts - 1:
            tl.debug_barrier()
            result = tl.zeros((height, rows), tl.float32)
            for other in range(parts):
                result += tl.load(partial + other * tokens * size + cell, mask=kept, other=0.0, cache_modifier=".cg")
            tl.store(output + cell, result.to(output.dtype.element_ty), mask=kept)
            tl.store(finished + tl.program_id(0), 0)


def tiled(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`decode` in two Triton launches."""
    tiling = tiling or Tiling()
    (tokens, columns), (num_rows, size, inter) = ids.shape, down.shape
    slots = num_rows if rows is None else len(rows)
    output = torch.empty_like(hidden)
    if not tokens:
        return output if counts is None else (counts.zero_(), output)[1]
    where: dict[str, Any] = {"device": hidden.device}
    activated = torch.empty(slots, tokens, inter, dtype=hidden.dtype, **where)
    listed = torch.empty(slots + 1, dtype=torch.int32, **where)
    partial = torch.empty(tiling.parts, tokens, size, dtype=torch.float32, **where)
    padded: dict[str, Any] = {"rows": max(16, triton.next_power_of_2(tokens)), "most": triton.next_power_of_2(columns)}
    shape: dict[str, Any] = {"columns": columns, "size": size, "inter": inter, "own_rows": rows is None} | padded
    height, step, warps, stages = tiling.first
    _first[(triton.cdiv(inter, height), slots + 1)](
        *(hidden, ids, weights, gate_up, rows, activated, listed, counts, hidden.stride(0), tokens, slots),
        **shape,
        counted=counts is not None,
        bins=triton.next_power_of_2(slots + 1),
        height=height,
        step=step,
        stages=stages,
        num_warps=warps,
    )
    height, step, warps, stages = tiling.second
    strips = triton.cdiv(size, height)
    finished = torch.zeros(strips, dtype=torch.int32, **where) if tiling.parts > 1 else listed
    _second[(strips, tiling.parts)](
        *(ids, weights, down, rows, activated, listed, partial, finished, output, tokens),
        **shape,
        parts=tiling.parts,
        height=height,
        step=step,
        stages=stages,
        num_warps=warps,
    )
    return output
