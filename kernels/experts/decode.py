"""Computes the experts of a small batch with the implementation that fits the device and the shape."""

import torch

from epsim.kernels.experts import cuda
from epsim.kernels.experts.plain import plain

MOST_TOKENS = 64


def decode(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's weighted sum of its experts' outputs down(silu(gate) * up), [B, H] bfloat16. It reads only experts
    with tokens.

    hidden [B, H] bfloat16, B <= 64; ids [B, k] int64: experts, distinct in a row, -1 for none (a row of -1 is padding
    and gives zeros); weights [B, k] float32. gate_up [E, 2 I, H] (gate's I rows, then up's), down [E, H, I] bfloat16.
    rows [S] int64: ids are then slots, and this is the row of each slot in gate_up and down. counts [S] int64: if
    given, receives the number of tokens of each expert or slot.
    Sums are in float32; activated values are weighted, then rounded to bfloat16. Each implementation gives the same
    bits in every run. The call does not wait for the GPU and can be captured in a CUDA graph.
    Raises ValueError for inputs of the wrong shape, type or device. Ids out of range, or twice in a row, raise it only
    on a CPU, because on a GPU the check would wait. On a GPU such ids read wrong memory or lose a weight.
    """
    _check(hidden, ids, weights, gate_up, down)
    slots = len(gate_up) if rows is None else len(rows)
    _check_slots(hidden, slots, rows, counts)
    ids, weights = ids.contiguous(), weights.contiguous()
    if not hidden.is_cuda:
        _check_ids(ids, slots)
        if counts is not None:
            counts.copy_(torch.bincount(ids[ids >= 0], minlength=slots))
        return plain(hidden, ids, weights, gate_up, down, rows)
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("gate_up and down are not contiguous, and a copy per call would cost more than the layer")
    if cuda.available(hidden.device.index) and cuda.uncovered(hidden, ids, gate_up, slots) is None:
        return cuda.fused(hidden, ids, weights, gate_up, down, rows, counts)
    from epsim.kernels.experts.tiles import tiled

    return tiled(hidden, ids, weights, gate_up, down, rows, counts)


def _check(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> None:
    if len(hidden) > MOST_TOKENS:
        raise ValueError(
            f"{len(hidden)} tokens: `decode` is for at most {MOST_TOKENS}, use grouped matrix products instead"
        )
    if (hidden.ndim, gate_up.ndim, down.ndim) != (2, 3, 3):
        raise ValueError(f"hidden, gate_up and down have {hidden.ndim}, {gate_up.ndim}, {down.ndim} axes, not 2, 3, 3")
    size, inter = down.shape[1:]
    if tuple(gate_up.shape) != (len(down), 2 * inter, size) or hidden.shape[1] != size:
        raise ValueError(
            f"shapes do not match: hidden {list(hidden.shape)}, gate_up {list(gate_up.shape)}, "
            f"down {list(down.shape)}, not [B, H], [E, 2 I, H], [E, H, I]"
        )
    if not hidden.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, gate_up {gate_up.dtype}, down {down.dtype}: give them one type")
    if ids.ndim != 2 or ids.shape != weights.shape or len(ids) != len(hidden) or ids.dtype != torch.int64:
        raise ValueError(f"ids are {list(ids.shape)} {ids.dtype}, weights {list(weights.shape)}, not [B, k] int64")
    if weights.dtype != torch.float32:
        raise ValueError(f"weights are {weights.dtype}, not float32")
    if len({tensor.device for tensor in (hidden, ids, weights, gate_up, down)}) > 1:
        raise ValueError("hidden, ids, weights, gate_up and down are not on one device")


def _check_slots(hidden: torch.Tensor, slots: int, rows: torch.Tensor | None, counts: torch.Tensor | None) -> None:
    """Raises ValueError unless rows and counts are contiguous int64 tensors on the device of hidden."""
    for name, tensor in (("rows", rows), ("counts", counts)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != (slots,) or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} are {list(tensor.shape)} {tensor.dtype}, not [{slots}] int64, contiguous")
        if tensor.device != hidden.device:
            raise ValueError(f"{name} are on {tensor.device}, hidden on {hidden.device}")


def _check_ids(ids: torch.Tensor, slots: int) -> None:
    outside = (ids < -1) | (ids >= slots)
    if bool(outside.any()):
        raise ValueError(f"id {int(ids[outside][0])} is outside 0..{slots - 1} (or -1 for none)")
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token, column = twice.nonzero()[0].tolist()
        raise ValueError(f"token {token} has expert {int(ordered[token, column])} twice")
