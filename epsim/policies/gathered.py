"""A split in whole tokens from the counts of every source rank. Its peak load is exactly ceil(optimum).

It takes an all-gather of counts [R, E] instead of an all-reduce of [E] (docs/contract.md section 4). All arithmetic is
on integers, so every rank and the simulator compute the same assignment.
"""

import torch
from torch import Tensor

from epsim.policies.base import Batch
from epsim.policies.copies import Copies
from epsim.policies.hashing import ordinal


def gathered_quotas(rank_counts: Tensor, loads: Tensor, copies: Copies) -> Tensor:
    """rank_counts [..., L, R, E] int64, whole loads [..., L, P] int64 of the slots -> [..., L, R, P] int64.

    An expert's loads add up to its counts over source ranks. A copy takes tokens of its own rank first, then of its
    node, then of any rank; within each of these, ranks in order to copies in order.
    """
    lead = rank_counts.shape[:-2]
    num_ranks, num_physical = copies.placement.num_ranks, copies.placement.num_physical
    expert = copies.expert[:, None, :].expand(*lead, num_ranks, num_physical)
    room = loads.gather(-1, copies.slot.expand(loads.shape))
    left = copies.padded(rank_counts)
    taken = torch.zeros_like(expert)
    source = torch.arange(num_ranks, device=loads.device)
    rank = copies.rank_of_slot[copies.slot]
    for group in (source, copies.node_of_rank, torch.zeros_like(source)):
        near = group[rank][:, None, :] == group[:, None]  # [L, R, P]: sources of a copy's own group
        supply = left.gather(-1, expert) * near
        upper = supply.cumsum(-2)
        room_upper = _cumulative_in_group(room, group[rank], copies)[..., None, :]
        overlap = torch.minimum(upper, room_upper) - torch.maximum(upper - supply, room_upper - room[..., None, :])
        given = overlap.clamp(min=0) * near
        taken += given
        left = left - torch.zeros_like(left).scatter_add_(-1, expert, given)
        room = room - given.sum(-2)
    slot = copies.slot[:, None, :].expand(taken.shape)
    return torch.empty_like(taken).scatter_(-1, slot, taken)


def ids_by_quotas(batch: Batch, quotas: Tensor, copies: Copies) -> Tensor:
    """batch, quotas [S, L, R, P] -> physical experts [T, L, k] int64, -1 for an empty slot.

    A source rank's tokens of an expert fill its quotas in order of local index, copies in order of slot. Only the
    quotas of the batch's own source ranks matter.
    """
    num_layers, num_experts = copies.number.shape
    num_physical = copies.placement.num_physical
    token, layer, choice = (batch.expert_ids >= 0).nonzero(as_tuple=True)
    expert = batch.expert_ids[token, layer, choice]
    row = (batch.token_step[token] * num_layers + layer) * quotas.shape[2] + batch.source_rank[token]
    index = ordinal(row * num_experts + expert)
    # The running sums continue from row to row, so that one search finds every token's copy.
    upper = quotas.gather(-1, copies.slot[:, None, :].expand(quotas.shape)).flatten().cumsum(0)
    start = row * num_physical + copies.first[layer, expert]
    before = torch.where(start > 0, upper[(start - 1).clamp(min=0)], 0)
    position = torch.searchsorted(upper, before + index, right=True) % num_physical
    result = torch.full_like(batch.expert_ids, -1)
    result[token, layer, choice] = copies.slot[layer, position]
    return result


def _cumulative_in_group(room: Tensor, group: Tensor, copies: Copies) -> Tensor:
    """room [..., L, P] in the order of `Copies`, group [L, P] -> running sums among an expert's copies of one group."""
    total = room.cumsum(-1)
    begins = torch.ones_like(group, dtype=torch.bool)
    begins[:, 1:] = (copies.expert[:, 1:] != copies.expert[:, :-1]) | (group[:, 1:] != group[:, :-1])
    position = torch.arange(room.shape[-1], device=room.device)
    start = torch.where(begins, position, 0).cummax(-1).values
    return total - (total - room).gather(-1, start.expand(room.shape))
