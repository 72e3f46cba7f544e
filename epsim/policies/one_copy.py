"""The split that wakes as few experts as it can: one copy of each active expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epsim.policies.copies import Copies
from epsim.policies.routing.matching import active_ranks
from epsim.policies.splits import Systematic


def held_by_rank(copies: Copies) -> Tensor:
    """[L, E, R] bool: which rank has a copy of which expert."""
    placement = copies.placement
    slots = placement.physical_to_logical.reshape(placement.num_layers, placement.num_ranks, -1)
    shape = (placement.num_layers, placement.num_ranks, placement.num_experts + 1)  # the first: empty slots
    by_rank = torch.zeros(shape, dtype=torch.bool, device=slots.device).scatter_(2, slots + 1, True)
    return by_rank[..., 1:].transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class OneCopy(Systematic):
    """Each active expert is served by one copy, chosen so that the largest number of active experts of a rank is least.

    Follows from which experts have tokens, so that every rank finds the same from the all-reduced counts.
    """

    name: ClassVar[str] = "one-copy"
    work: ClassVar[tuple[str, ...]] = ("assign_us",)
    complexity: ClassVar[int] = 1
    single_copies: ClassVar[bool] = True

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        holds = copies.once(held_by_rank)
        rank = active_ranks(counts > 0, torch.zeros_like(counts), holds.expand(*counts.shape, holds.shape[-1]))
        # Without tokens an expert's share is of nothing: its first copy has it.
        first = copies.slot.gather(1, copies.first)
        rank = torch.where(rank >= 0, rank, first // copies.placement.slots_per_rank)
        mine = copies.per_slot(rank, empty=-1) == copies.rank_of_slot
        # Two copies of an expert on one rank: the first of them.
        ordered = mine.gather(-1, copies.slot.expand_as(mine))
        number = ordered.cumsum(-1)
        before = number - ordered.to(number.dtype)
        start = before.gather(-1, copies.start.expand_as(before))
        single = ordered & (before == start)
        return torch.zeros(mine.shape, dtype=torch.float64, device=mine.device).scatter_(
            -1, copies.slot.expand_as(mine), single.to(torch.float64)
        )
