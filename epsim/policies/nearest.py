"""The split that sends tokens to a nearest copy. The placement alone gives its table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epsim.kernels.dispatch.rule import SplitRule
from epsim.policies.base import Batch, Needs, Split
from epsim.policies.copies import Copies
from epsim.traces.trace import Level


def nearest_slots(copies: Copies) -> Tensor:
    """[L, R, E] int64: the slot to which each source rank sends an expert's tokens.

    A copy on the rank itself (the first of several), otherwise one on its node, otherwise any. Source ranks that choose
    from the same copies take them in turn. The first copy in turn differs by expert.
    """
    placement, node = copies.placement, copies.node_of_rank
    expert = torch.arange(placement.num_experts, device=node.device)[:, None]
    tables = []  # one per layer
    for slots in placement.logical_to_physical():
        exists = slots >= 0
        rank = copies.rank_of_slot[slots.clamp(min=0)]
        on_rank = exists[:, None] & (rank[:, None] == torch.arange(len(node), device=node.device)[:, None])
        on_node = exists[:, None] & (node[rank][:, None] == node[:, None])
        has_local, has_near = on_rank.any(-1), on_node.any(-1)
        from_node = ~has_local & has_near
        candidates = torch.where(
            has_local[..., None], on_rank, torch.where(has_near[..., None], on_node, exists[:, None].expand_as(on_node))
        )
        # The ranks of a node are consecutive, so a running count over all ranks gives them consecutive turns.
        turn = torch.where(has_near, from_node.cumsum(1), (~has_near).cumsum(1)) - 1 + expert
        turn = torch.where(has_local, 0, turn)
        wanted = turn % candidates.sum(-1)
        chosen = (candidates.cumsum(-1) == wanted[..., None] + 1).to(torch.int64).argmax(-1)
        tables.append(slots.gather(1, chosen).T)
    return torch.stack(tables)


@dataclass(frozen=True, slots=True)
class Static(Split):
    """Every source rank sends all tokens of an expert to one nearest copy, as SGLang's `static` does.

    Ranks without a copy of their own take the copies of their node in turn, or all copies if the node has none. SGLang
    takes the first copy of the node, or a random copy; taking turns is at least as even.
    """

    name: ClassVar[str] = "static"
    other_names: ClassVar[Mapping[str, str]] = {"nearest": "the nearest copy for each source rank"}
    needs: ClassVar[Needs] = "none"
    level: ClassVar[Level] = "rank_counts"
    by_fractions: ClassVar[bool] = False
    complexity: ClassVar[int] = 0
    kernel: ClassVar[SplitRule] = SplitRule(follow="nearest")
    engines: ClassVar[Mapping[str, str]] = {"sglang": "static"}

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        """The share of source ranks that send to a slot: its fraction if all source ranks have the same counts."""
        senders = _served(torch.ones_like(copies.once(nearest_slots)), copies).sum(-2).to(torch.float64)
        fractions = senders / copies.placement.num_ranks
        return fractions.expand(*counts.shape[:-2], *fractions.shape)

    def quotas(self, rank_counts: Tensor, fixed: Tensor, copies: Copies) -> Tensor:
        return _served(rank_counts, copies)

    def physical_ids(self, batch: Batch, rank_counts: Tensor, fixed: Tensor, copies: Copies, seed: int) -> Tensor:
        table = copies.once(nearest_slots)
        layer = torch.arange(table.shape[0], device=table.device)[:, None]
        ids = table[layer, batch.source_rank[:, None, None], batch.expert_ids.clamp(min=0)]
        return torch.where(batch.expert_ids >= 0, ids, -1)


def _served(rank_counts: Tensor, copies: Copies) -> Tensor:
    """Counts by expert [..., L, R, E] -> counts by slot [..., L, R, P]."""
    table = copies.once(nearest_slots).expand(rank_counts.shape)
    served = rank_counts.new_zeros(*rank_counts.shape[:-1], copies.placement.num_physical)
    return served.scatter_(-1, table, rank_counts)
