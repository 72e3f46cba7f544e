"""The split with the fewest active experts: one copy of each expert that has tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epsim.placement.balance import even_shares
from epsim.policies.copies import Copies
from epsim.policies.routing.matching import active_ranks
from epsim.policies.splits import Systematic


def held_by_rank(copies: Copies) -> Tensor:
    """[L, E, R] bool: whether a rank has a copy of an expert."""
    return even_shares(copies.placement) > 0


@dataclass(frozen=True, slots=True)
class OneCopy(Systematic):
    """One copy serves each active expert. The copies are chosen so that the busiest rank has the fewest active experts.

    The choice depends only on which experts have tokens, so every rank makes the same one from the all-reduced counts.
    """

    name: ClassVar[str] = "one-copy"
    work: ClassVar[tuple[str, ...]] = ("solve_us", "assign_us")
    complexity: ClassVar[int] = 1
    single_copies: ClassVar[bool] = True

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        holds = copies.once(held_by_rank)
        rank = active_ranks(counts > 0, torch.zeros_like(counts), holds.expand(*counts.shape, holds.shape[-1]))
        # The first copy stands for an expert without tokens.
        first = copies.slot.gather(1, copies.first)
        rank = torch.where(rank >= 0, rank, first // copies.placement.slots_per_rank)
        on_rank = copies.per_slot(rank, empty=-1) == copies.rank_of_slot
        # If a rank has two copies of an expert, the first serves it.
        slot = copies.slot.expand_as(on_rank)
        ordered = on_rank.gather(-1, slot)
        number = ordered.cumsum(-1)
        before = number - ordered.to(number.dtype)
        single = ordered & (before == before.gather(-1, copies.start.expand_as(before)))
        return torch.zeros_like(on_rank, dtype=torch.float64).scatter_(-1, slot, single.to(torch.float64))
