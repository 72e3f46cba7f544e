"""From a real-valued split to whole tokens (docs/contract.md section 4). After `fixed_point` all arithmetic is on
integers.

Systematic rounding: if a source rank has n tokens of an expert, token j gets the point ((j << 20) + offset) // n. It
goes to the copy whose interval of the cumulative fractions contains this point. Offsets are evenly spaced over source
ranks and differ by expert. The number of tokens of each copy has a closed form that needs counts alone.
"""

import torch
from torch import Tensor

from epsim.policies.base import Batch
from epsim.policies.copies import Copies
from epsim.policies.hashing import draw, ordinal, slot_key, token_key

BITS = 20
ONE = 1 << BITS


def fixed_point(fractions: Tensor, copies: Copies) -> Tensor:
    """Fractions [..., L, P] float64 -> [..., L, P] int64 in units of 2^-20. The copies of an expert sum to 2^20.

    The last copy takes the rest. If the earlier ones sum to more than 1, the later of them are reduced.
    """
    slot = copies.slot.expand(fractions.shape)
    rounded = (fractions.gather(-1, slot) * ONE).round().to(torch.int64).clamp(0, ONE)
    upper = _upper(rounded, copies).clamp(max=ONE)
    upper.masked_fill_(copies.last, ONE)
    return torch.empty_like(upper).scatter_(-1, slot, _differences(upper, copies))


def systematic_quotas(rank_counts: Tensor, fixed: Tensor, copies: Copies) -> Tensor:
    """rank_counts [..., L, R, E] int64, fixed [..., L, P] -> assignments of each slot [..., L, R, P] int64."""
    upper = cumulative(fixed, copies)[..., None, :]
    *lead, num_layers, num_ranks, num_experts = rank_counts.shape
    expert = copies.expert[:, None, :].expand(*lead, num_layers, num_ranks, -1)
    number = copies.padded(rank_counts).gather(-1, expert)
    offset = copies.padded(offsets(num_ranks, num_experts, fixed.device))
    offset = offset.gather(1, copies.expert.reshape(1, -1).expand(num_ranks, -1))
    offset = offset.reshape(num_ranks, *copies.expert.shape).transpose(0, 1)
    # ceil((upper * number - offset) / 2^20); in two parts, since the product may pass 2^63.
    below = upper * (number >> BITS) + ((upper * (number & (ONE - 1)) - offset + (ONE - 1)) >> BITS)
    slot = copies.slot[:, None, :].expand(below.shape)
    return torch.empty_like(below).scatter_(-1, slot, _differences(below, copies, by_rank=True))


def systematic_ids(batch: Batch, fixed: Tensor, copies: Copies) -> Tensor:
    """batch, fixed [S, L, P] -> the slot of each assignment [T, L, k] int64 by systematic rounding, -1 for none."""
    result, token, layer, place_k = _single_copies(batch, copies)
    expert = batch.expert_ids[token, layer, place_k]
    step, rank = batch.token_step[token], batch.source_rank[token]
    num_layers, num_experts = copies.number.shape
    num_ranks = copies.placement.num_ranks
    group = ((step * num_layers + layer) * num_ranks + rank) * num_experts + expert
    index, number = _ordinal_and_size(group)
    offset = offsets(num_ranks, num_experts, fixed.device)[rank, expert]
    point = ((index << BITS) + offset) // number
    result[token, layer, place_k] = _slot_at(point, step, layer, expert, fixed, copies)
    return result


def sampled_ids(batch: Batch, fixed: Tensor, copies: Copies, seed: int) -> Tensor:
    """batch, fixed [S, L, P] -> slots [T, L, k] int64, -1 for none. Each token draws a copy with the fractions as
    odds."""
    result, token, layer, place_k = _single_copies(batch, copies)
    expert = batch.expert_ids[token, layer, place_k]
    step = batch.token_step[token]
    tokens = token_key(seed, batch.steps[batch.token_step], batch.source_rank, batch.local)
    slots = slot_key(batch.layers[:, None], torch.arange(batch.expert_ids.shape[2], device=fixed.device))
    point = draw(tokens[token], slots[layer, place_k], BITS)
    result[token, layer, place_k] = _slot_at(point, step, layer, expert, fixed, copies)
    return result


def offsets(num_ranks: int, num_experts: int, device: torch.device) -> Tensor:
    """The offset of each source rank and expert, [R, E] int64 in [0, 2^20).

    Offsets are evenly spaced over ranks and follow a golden-ratio sequence over experts.
    """
    rank = (torch.arange(num_ranks, device=device) << BITS) // num_ranks
    expert = torch.arange(num_experts, device=device) * 648_055  # 2^20 / golden ratio
    return (rank[:, None] + expert) & (ONE - 1)


def cumulative(fixed: Tensor, copies: Copies) -> Tensor:
    """Fractions by slot [..., L, P] -> the upper end of each copy's interval [..., L, P], in the order of `Copies`."""
    return _upper(fixed.gather(-1, copies.slot.expand(fixed.shape)), copies)


def _upper(parts: Tensor, copies: Copies) -> Tensor:
    total = parts.cumsum(-1)
    before = total - parts
    return total - before.gather(-1, copies.start.expand(parts.shape))


def _differences(upper: Tensor, copies: Copies, by_rank: bool = False) -> Tensor:
    """The upper end of each copy's interval minus that of the expert's previous copy (0 for the first copy)."""
    lower = torch.zeros_like(upper)
    same = copies.expert[:, 1:] == copies.expert[:, :-1]
    lower[..., 1:] = upper[..., :-1] * (same[:, None] if by_rank else same)
    return upper - lower


def _single_copies(batch: Batch, copies: Copies) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots [T, L, k] of the first copies, and the indices (token, layer, index in the top-k) of experts with several
    copies."""
    num_layers, num_experts = copies.number.shape
    row = torch.arange(num_layers, device=batch.expert_ids.device)[:, None] * num_experts
    index = batch.expert_ids.clamp(min=0) + row
    only = copies.slot.gather(1, copies.first).flatten()[index]
    several = (copies.number > 1).flatten()[index] & (batch.expert_ids >= 0)
    token, layer, choice = several.nonzero(as_tuple=True)
    return torch.where(batch.expert_ids >= 0, only, -1), token, layer, choice


def _ordinal_and_size(group: Tensor) -> tuple[Tensor, Tensor]:
    """Each element's index in its group, in order, and the size of the group; both [N]."""
    if not group.numel():
        return group, group
    low = group.min()
    return ordinal(group), torch.bincount(group - low)[group - low]


def _slot_at(point: Tensor, step: Tensor, layer: Tensor, expert: Tensor, fixed: Tensor, copies: Copies) -> Tensor:
    """point, step, layer, expert [N], fixed [S, L, P] -> the slot [N] of the copy whose interval contains the point.

    Points are in [0, 2^20).
    """
    num_steps, num_layers, num_physical = fixed.shape
    num_experts = copies.number.shape[1]
    row = torch.arange(num_steps * num_layers, device=fixed.device).view(num_steps, num_layers, 1)
    ends = ((row * num_experts + copies.expert) << BITS) + cumulative(fixed, copies)
    wanted = (((step * num_layers + layer) * num_experts + expert) << BITS) + point
    position = torch.searchsorted(ends.flatten(), wanted, right=True) % num_physical
    return copies.slot[layer, position]
