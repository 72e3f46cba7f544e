"""Assigns a rank's tokens to physical experts, and to ranks for the shared expert, by the simulator's policy objects.

A rank knows only its own tokens. If a policy needs numbers of other ranks, one small collective gets them. For a split:
the sum of the counts [E] (`reduced`), or the counts of all ranks [R, E] (`gathered`). For a shared policy: the summed
loads and the token numbers of all ranks [2, R] (`reduced`), or the loads by source rank [R, R + 1] (`gathered`).
"""

from __future__ import annotations

import torch

from epsim.kernels.dispatch import Assigned
from epsim.placement.base import Placement
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.base import Batch, Needs, SharedWork
from epsim.policies.rounding import fixed_point
from epsim.policies.stack import PolicyStack
from epsim.runtime.collective import Collective


class Balancer:
    """Applies a policy stack to the tokens of one rank in one layer.

    placement: of this layer, [1, P]. version: the placement's version. setting: its `layers` is this layer's number.
    split_needs, shared_needs: the collectives that the split and the shared policy need.
    """

    def __init__(self, stack: PolicyStack, placement: Placement, setting: Setting, collective: Collective) -> None:
        if placement.num_layers != 1:
            raise ValueError(f"a layer's balancer needs the placement of one layer, not of {placement.num_layers}")
        if placement.num_ranks != collective.size:
            raise ValueError(f"the placement is for {placement.num_ranks} ranks, the group has {collective.size}")
        if stack.reader.acts:
            raise ValueError(f"{str(stack)!r}: the runtime supports only the reader `dense`")
        self.bound: BoundStack = bind(stack, placement, setting)
        self.placement, self.collective, self.version = placement, collective, placement.version
        self.split_needs: Needs = self.bound.split.needs
        self.shared_needs: Needs = stack.shared.needs if self.bound.has_shared else "none"
        device = placement.physical_to_logical.device
        self._layers = torch.tensor(setting.layers, device=device)
        self._fixed = None
        if self.split_needs == "none":
            nothing = torch.zeros(1, 1, placement.num_experts, dtype=torch.int64, device=device)
            self._fixed = self._fractions(nothing)

    @property
    def slots_per_rank(self) -> int:
        """The number of slots per rank in the exchange, including the slot of the shared expert."""
        return self.placement.slots_per_rank + self.bound.has_shared

    def on(self, placement: Placement) -> Balancer:
        """A balancer with the same stack and another placement."""
        return Balancer(self.bound.stack, placement, self.bound.setting, self.collective)

    def begin(self, step: int) -> None:
        """Sets the step number for random draws. Call it before each replay of a captured graph. Nothing to do here."""

    def assign(self, ids: torch.Tensor, step: int) -> Assigned:
        """The slots of this rank's tokens, and the ranks of their shared expert. ids [T, k] int64, -1 for none.
        Collective if a policy needs one."""
        batch = self._batch(ids, step)
        physical = self._physical(batch)
        shared_rank = self._shared(batch, physical) if self.bound.has_shared else None
        return Assigned(physical[:, 0], shared_rank, self._slots(physical[:, 0], shared_rank))

    def _batch(self, ids: torch.Tensor, step: int) -> Batch:
        number = torch.arange(len(ids), device=ids.device)
        return Batch(
            steps=torch.tensor([step], device=ids.device),
            layers=self._layers,
            token_step=torch.zeros_like(number),
            source_rank=torch.full_like(number, self.collective.rank),
            expert_ids=ids[:, None],
            local=number,
        )

    def _physical(self, batch: Batch) -> torch.Tensor:
        """The physical experts, [T, 1, k]."""
        split, copies, fixed = self.bound.split, self.bound.copies, self._fixed
        rank_counts = torch.empty(0, dtype=torch.int64, device=batch.expert_ids.device)
        if fixed is None:
            num_experts = self.placement.num_experts
            rank_count = torch.bincount(batch.expert_ids.flatten() + 1, minlength=num_experts + 1)[1:]
            if self.split_needs == "gathered":
                rank_counts = self.collective.all_gather(rank_count)[None, None]
                counts = rank_counts.sum(2)
            else:
                counts = self.collective.all_reduce(rank_count)[None, None]
            fixed = self._fractions(counts)
        return split.physical_ids(batch, rank_counts, fixed, copies, self.bound.setting.seed)

    def _fractions(self, counts: torch.Tensor) -> torch.Tensor:
        """Fixed-point fractions [1, 1, P] from counts [1, 1, E]; empty if the split does not use fractions."""
        split, copies = self.bound.split, self.bound.copies
        return fixed_point(split.fractions(counts, copies), copies) if split.by_fractions else counts.new_empty(0)

    def _shared(self, batch: Batch, physical: torch.Tensor) -> torch.Tensor:
        """The rank of each token's shared expert, [T]."""
        num_ranks, rank = self.collective.size, self.collective.rank
        ranks = torch.where(physical >= 0, physical // self.placement.slots_per_rank, -1)
        rank_loads = torch.bincount(ranks.flatten() + 1, minlength=num_ranks + 1)[1:]
        number = (batch.expert_ids >= 0).any(-1).sum()
        if self.shared_needs == "gathered":
            rows = self.collective.all_gather(torch.cat([rank_loads, number[None]]))
            loads, tokens = rows[:, :-1], rows[:, -1]
        else:
            loads, tokens = rank_loads.new_zeros(num_ranks, num_ranks), rank_loads.new_zeros(num_ranks)
            loads[rank], tokens[rank] = rank_loads, number
        routed = loads.sum(0)
        if self.shared_needs == "reduced":
            routed, tokens = self.collective.loads_and_tokens(rank_loads, number)
        setting = self.bound.setting
        work = SharedWork(
            cost=setting.shared_cost,
            seed=setting.seed,
            top_k=setting.top_k,
            most_experts=self.bound.most_experts,
            steps=batch.steps,
            layers=batch.layers,
            routed=routed[None, None],
            routed_by_source=loads[None, None],
            tokens=tokens[None, None],
            node_of_rank=self.bound.copies.node_of_rank,
            batch=batch,
            expert_ranks=ranks,
        )
        return self.bound.stack.shared.token_ranks(work)[:, 0]

    def _slots(self, physical: torch.Tensor, shared_rank: torch.Tensor | None) -> torch.Tensor:
        if shared_rank is None:
            return physical
        # The shared slot of a rank follows its routed slots.
        shifted = torch.where(physical >= 0, physical + physical // self.placement.slots_per_rank, -1)
        last = self.slots_per_rank - 1
        shared = torch.where(shared_rank >= 0, shared_rank * self.slots_per_rank + last, -1)
        return torch.cat([shifted, shared[:, None]], dim=1)
