"""Waterfill and split as one problem: shared-expert tokens fill the ranks that the exact split leaves below the peak.

The lowest total peak over all splits and all ranks for the shared expert is max(M*, mean total load), where M* is the
lowest routed peak (docs/contract.md section 1). The split reaches M*, and shared tokens placed exactly around it reach
the mean to within the cost of one token. There are no random draws: loads that all ranks know give the number of tokens
from each source rank to each serving rank.
"""

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
    """candidates: `all` ranks; or `visited`, a token's rank and the ranks of its routed experts.

    With `visited`, only a token's own rank knows which ranks it visits. All ranks know how many assignments each source
    rank has on each rank. At least 1/k of these, rounded down, belong to different tokens, so that many shared tokens
    can always be served there. Within these limits the peak is the lowest possible.
    """

    candidates: Literal["all", "visited"] = "all"
    name: ClassVar[str] = "waterfill-joint"
    work: ClassVar[tuple[str, ...]] = ("joint_us",)
    level: ClassVar[Level] = "rank_counts"

    @property
    def needs(self) -> Needs:
        return "reduced" if self.candidates == "all" else "gathered"

    def check(self, stack: Stack) -> None:
        if not stack.split.exact:
            raise ValueError(
                f"{self.name} needs an exact split, and {stack.split.name} in {str(stack)!r} is not exact: "
                "write lplb(counts=gathered)+waterfill-joint, or waterfill"
            )

    def served(self, work: SharedWork) -> Tensor:
        most = None
        if self.candidates == "visited":
            most = work.routed_by_source // work.most_experts
        return pour(work.routed, work.tokens, work.cost, work.node_of_rank, most)[0]

    def token_ranks(self, work: SharedWork) -> Tensor:
        """Implements `SharedDispatch.token_ranks`. Tokens that visit a serving rank anyway are sent there first."""
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
