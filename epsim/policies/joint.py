"""Waterfill after an exact split: shared-expert tokens fill the ranks whose routed load is below the peak.

The lowest possible total peak is max(M*, mean total load), where M* is the lowest routed peak (docs/contract.md section
1). The split reaches M*, and the shared tokens then fill the ranks below it. The total peak exceeds the lowest possible
by less than the cost of one token. There are no random draws. All ranks know the same loads, so they compute the same
number of tokens from each source rank to each serving rank.
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
    """candidates: the ranks that may serve a token's shared expert: `all` ranks, or those that the token has `visited`,
    which are its own rank and the ranks of its routed experts.

    With `visited`, a rank knows where its own tokens go, but of other ranks only how many assignments they have on each
    rank. If a source rank has n assignments on a rank, they belong to at least n // k different tokens, because a token
    has at most k experts (`SharedWork.most_experts`). So n // k shared tokens can always be served there. The peak is
    the lowest that is possible within these limits.
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
