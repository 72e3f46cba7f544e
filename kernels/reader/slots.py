"""Multiplies tokens with the weights of their experts."""

from typing import Any

import torch
import torch.nn.functional as F

FEW = 256
"""For at most this many (token, expert) pairs, weights are gathered without host synchronization, for CUDA graphs."""


def slot_products(values: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """weight[ids] @ values, [T, k, m], for values [T, n] or [T, k, n], ids [T, k] int64 and weight [E, m, n].

    values and weight have one type. An id of -1 gives zeros for any value.
    """
    num_tokens, slots = ids.shape
    if values.dim() == 2:
        values = values[:, None].expand(-1, slots, -1)
    filled = ids >= 0
    if ids.numel() <= FEW:
        product = (weight[ids.clamp(min=0)] @ values[..., None])[..., 0]
        return product.masked_fill(~filled[..., None], 0.0)
    expert = torch.where(filled, ids, len(weight)).flatten()
    order = expert.argsort(stable=True)
    ends = torch.bincount(expert, minlength=len(weight) + 1).cumsum(0)
    rows = values.reshape(-1, values.shape[-1])[order]
    out = values.new_zeros(ids.numel(), weight.shape[1])
    out[order] = _grouped(rows, weight, ends[:-1])
    return out.view(num_tokens, slots, -1).masked_fill(~filled[..., None], 0.0)


def _grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Grouped product: rows before ends[e] belong to experts up to e. The caller masks the rows after the last end."""
    grouped: Any = getattr(F, "grouped_mm", None)
    if grouped is not None and rows.is_cuda and rows.dtype == torch.bfloat16:
        out: torch.Tensor = grouped(rows, weight.transpose(1, 2), offs=ends.to(torch.int32))
        return torch.where(torch.arange(len(rows), device=rows.device)[:, None] < ends[-1], out, 0.0)
    out = rows.new_zeros(len(rows), weight.shape[1])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if last > first:
            torch.mm(rows[first:last], weight[expert].T, out=out[first:last])
        first = last
    return out
