"""Waterfill and split as one problem: whole shared-expert tokens fill the room that the exact split leaves.

Over splits and shared placements together the least total peak is max(M*, mean total load), where M* is the least
routed peak (docs/contract.md section 1). The split reaches M*, and shared tokens placed around it reach the mean to
within one token's cost. Nothing is random: numbers by source and serving rank follow from loads that all ranks know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from epsim.kernels.water import assign, pour
from epsim.placement.base import Stack
from epsim.policies.base import Needs, SharedDispatch, SharedWork
from epsim.traces.trace import Level


@dataclass(frozen=True, slots=True)
class WaterfillJoint(SharedDispatch):
    """candidates: `all` ranks, or `visited`, a token's own rank and those of its routed experts.

    `visited`: which ranks a token visits only its own rank knows. All know how many assignments each rank has on each
    other, and a k-th of them, rounded down, can always be tokens that are served there (every token spread evenly over
    its k slots is such an assignment, in fractions; so there is one in whole tokens). Within these numbers the peak is
    the least possible.
    """

    candidates: Literal["all", "visited"] = "all"
    name: ClassVar[str] = "waterfill-joint"
    work: ClassVar[tuple[str, ...]] = ("of_joint",)
    level: ClassVar[Level] = "rank_counts"

    @property
    def needs(self) -> Needs:
        return "reduced" if self.candidates == "all" else "gathered"

    def check(self, stack: Stack) -> None:
        if not stack.split.exact:
            raise ValueError(
                f"{self.name} fills up what an exact split leaves, {stack.split.name} in {str(stack)!r} is none: "
                "write lplb(counts=gathered)+waterfill-joint, or waterfill"
            )

    def served(self, work: SharedWork) -> Tensor:
        most = None
        if self.candidates == "visited":
            # A router policy may give tokens more experts than the model's top-k.
            width = 0 if work.batch is None else work.batch.expert_ids.shape[-1]
            most = work.routed_by_source // max(work.top_k, width)
        return pour(work.routed, work.tokens, work.cost, work.node_of_rank, most)[0]

    def token_ranks(self, work: SharedWork) -> Tensor:
        """Implements `SharedDispatch.token_ranks`; tokens go to ranks they visit anyway, as far as `served` allows."""
        batch, present = work.batch, work.present()
        assert batch is not None
        token, layer = present.nonzero(as_tuple=True)
        source = batch.source_rank[token]
        quotas = self.served(work)
        num_layers, num_ranks = quotas.shape[1:3]
        row = (batch.token_step[token] * num_layers + layer) * num_ranks + source
        visited = None if work.expert_ranks is None else work.expert_ranks[token, layer]
        ranks = torch.full(present.shape, -1, device=token.device)
        ranks[token, layer] = assign(row, source, visited, quotas.reshape(-1, num_ranks))
        return ranks
