"""From a real-valued split to whole tokens: docs/contract.md section 4. After `fixed_point` all arithmetic is on
integers.

Systematic rounding: of n tokens of an expert on a source rank, token j gets the point ((j << 20) + offset) // n and
goes to the copy in whose interval of the cumulative fractions the point falls. Offsets differ by source rank, evenly
spaced, and by expert. How many tokens a copy gets follows in closed form, without looking at tokens.
"""

from __future__ import annotations

import torch

from epsim.policies.base import Batch, ordinal
from epsim.policies.copies import Copies
from epsim.policies.hashing import draw, slot_key, token_key

BITS = 20
ONE = 1 << BITS


def fixed_point(fractions: torch.Tensor, copies: Copies) -> torch.Tensor:
    """[..., L, P] float64 -> [..., L, P] int64 in units of 2^-20: an expert's copies add up to 2^20.

    The last copy takes the rest; where earlier ones already add up to more than 1, the later of them are cut.
    """
    slot = copies.slot.expand(fractions.shape)
    rounded = (fractions.gather(-1, slot) * ONE).round().to(torch.int64).clamp(0, ONE)
    upper = _upper(rounded, copies).clamp(max=ONE)
    upper.masked_fill_(copies.last, ONE)
    return torch.empty_like(upper).scatter_(-1, slot, _differences(upper, copies))


def systematic_quotas(rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
    """rank_counts [..., L, R, E] int64, fixed [..., L, P] -> [..., L, R, P] int64: assignments for each slot."""
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


def systematic_ids(batch: Batch, fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
    """batch, fixed [S, L, P] -> physical experts [T, L, k] int64 by systematic rounding."""
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


def sampled_ids(batch: Batch, fixed: torch.Tensor, copies: Copies, seed: int) -> torch.Tensor:
    """batch, fixed [S, L, P] -> physical experts [T, L, k] int64: every token draws its copy by the fractions."""
    result, token, layer, place_k = _single_copies(batch, copies)
    expert = batch.expert_ids[token, layer, place_k]
    step = batch.token_step[token]
    tokens = token_key(seed, batch.steps[batch.token_step], batch.source_rank, batch.local)
    slots = slot_key(batch.layers[:, None], torch.arange(batch.expert_ids.shape[2], device=fixed.device))
    point = draw(tokens[token], slots[layer, place_k], BITS)
    result[token, layer, place_k] = _slot_at(point, step, layer, expert, fixed, copies)
    return result


def offsets(num_ranks: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """[R, E] int64 in [0, 2^20): evenly spaced over ranks, a golden-ratio sequence over experts."""
    rank = (torch.arange(num_ranks, device=device) << BITS) // num_ranks
    expert = torch.arange(num_experts, device=device) * 648_055  # 2^20 / golden ratio
    return (rank[:, None] + expert) & (ONE - 1)


def cumulative(fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
    """[..., L, P] by slot -> [..., L, P] in the order of `Copies`: the upper end of each copy's interval."""
    return _upper(fixed.gather(-1, copies.slot.expand(fixed.shape)), copies)


def _upper(parts: torch.Tensor, copies: Copies) -> torch.Tensor:
    total = parts.cumsum(-1)
    before = total - parts
    return total - before.gather(-1, copies.start.expand(parts.shape))


def _differences(upper: torch.Tensor, copies: Copies, by_rank: bool = False) -> torch.Tensor:
    """Each copy's upper end less that of the copy before it, or less 0 for an expert's first."""
    lower = torch.zeros_like(upper)
    same = copies.expert[:, 1:] == copies.expert[:, :-1]
    lower[..., 1:] = upper[..., :-1] * (same[:, None] if by_rank else same)
    return upper - lower


def _single_copies(batch: Batch, copies: Copies) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Physical experts [T, L, k], all by their first copies, and where there are more: token, layer, slot."""
    num_layers, num_experts = copies.number.shape
    row = torch.arange(num_layers, device=batch.expert_ids.device)[:, None] * num_experts
    at = batch.expert_ids.clamp(min=0) + row
    only = copies.slot.gather(1, copies.first).flatten()[at]
    several = (copies.number > 1).flatten()[at] & (batch.expert_ids >= 0)
    token, layer, place_k = several.nonzero(as_tuple=True)
    return torch.where(batch.expert_ids >= 0, only, -1), token, layer, place_k


def _ordinal_and_size(group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] -> [N], [N]: each element's index in its group, in order, and the group's size."""
    if not group.numel():
        return group, group
    low = group.min()
    return ordinal(group), torch.bincount(group - low)[group - low]


def _slot_at(
    point: torch.Tensor,
    step: torch.Tensor,
    layer: torch.Tensor,
    expert: torch.Tensor,
    fixed: torch.Tensor,
    copies: Copies,
) -> torch.Tensor:
    """All [N], fixed [S, L, P] -> [N]: the slot of the copy in whose interval the point in [0, 2^20) falls."""
    num_steps, num_layers, num_physical = fixed.shape
    num_experts = copies.number.shape[1]
    row = torch.arange(num_steps * num_layers, device=fixed.device).view(num_steps, num_layers, 1)
    ends = ((row * num_experts + copies.expert) << BITS) + cumulative(fixed, copies)
    wanted = (((step * num_layers + layer) * num_experts + expert) << BITS) + point
    place = torch.searchsorted(ends.flatten(), wanted, right=True) % num_physical
    return copies.slot[layer, place]
