"""Routes a batch whose tokens are on several ranks: two launches of passes.cu, and a sum over ranks between them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from epsim.kernels.router.cuda import LANES, MOST_EXPERTS, MOST_STEPS, WARPS, Rule, arguments_of, definitions, source
from epsim.kernels.split.launch import compiled, launch

Kind: TypeAlias = Literal["base", "union", "ranks", "popular", "least"]
KINDS: dict[Kind, int] = {"base": 0, "union": 1, "ranks": 2, "popular": 3, "least": 4}
MOST_RANKS = 64
NO_RULE = Rule(())


@dataclass(frozen=True, slots=True)
class Plan:
    """Which experts tokens may take. The policies are in epsim/policies/routing.

    kind: `base`, a token's best k0 experts (`pruned` in oea.py); `union`, the union of the bases of all tokens (`oea`);
    `ranks`, the union and experts that fit ranks with slack (ranks.py); `popular`, the `number` most popular experts;
    `least`, experts with at least `number` choices (both in rivals.py). rule: of the first three kinds only.
    """

    kind: Kind
    rule: Rule = NO_RULE
    number: int = 0

    @property
    def settled(self) -> bool:
        """Whether a rank needs no numbers of other ranks, because k0 does not depend on the batch size."""
        return self.kind == "base" and len(self.rule.steps) == 1 and self.rule.steps[0][0] <= 1

    def shape(self, experts: int) -> tuple[int, ...]:
        """The shape of the numbers that are summed over ranks, for one batch."""
        if self.kind == "base":
            return (1,)
        if self.kind in ("popular", "least"):
            return (2, experts)
        return (len(self.rule.steps) + 1 + (self.kind == "ranks"), experts + 1)


def uncovered(plan: Plan, experts: int, top_k: int, ranks: int) -> str | None:
    """The reason why passes.cu cannot run this plan on these sizes, or None if it can."""
    rule = plan.rule
    if experts > MOST_EXPERTS or max(top_k, rule.kmax or 0) > LANES or len(rule.steps) > MOST_STEPS:
        return f"{experts} experts, k {top_k}, kmax {rule.kmax} and {len(rule.steps)} steps"
    if rule.kmax is not None and rule.kmax < top_k:
        return f"kmax {rule.kmax} is less than k {top_k}, the experts per token of batches below the first step"
    if plan.kind == "ranks" and ranks > MOST_RANKS:
        return f"{ranks} ranks, more than {MOST_RANKS}"
    return None


@functools.cache
def _kernel(device: int, name: str, experts: int, cluster: int) -> int:
    return compiled(device, source("passes.cu"), {"EXPERTS": experts, "CLUSTER": cluster}, name)


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The two launches for one batch, or several along leading axes; they do not wait for the device. See `of`."""

    plan: Plan
    tensors: dict[str, torch.Tensor]
    ranks: int

    @classmethod
    def of(
        cls,
        plan: Plan,
        scores: torch.Tensor,
        weight_basis: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        decode: torch.Tensor,
        holds: torch.Tensor | None = None,
    ) -> Passes:
        """Creates it from the tensors of RouterWork for this rank's tokens."""
        assert expert_ids.dtype == torch.int64
        assert decode.dtype == torch.bool
        compared = scores.float().contiguous()
        # If both are one tensor, pass it once.
        proportions = compared if weight_basis is scores else weight_basis.float().contiguous()
        tensors = {"scores": compared, "weight_basis": proportions, "selected": decode.contiguous()}
        tensors |= {"choice": expert_ids.contiguous(), "choice_weights": weights.float().contiguous()}
        if plan.kind != "ranks":
            return cls(plan, tensors, 0)
        assert holds is not None
        each = holds.expand(*scores.shape[:-2], *holds.shape[-2:]) if holds.ndim > 2 else holds
        return cls(plan, tensors | {"holds": each.contiguous()}, holds.shape[-1])

    def demand(self) -> torch.Tensor:
        """The numbers that the caller sums over ranks, from this rank's tokens, [..., *plan.shape(E)] int64."""
        *lead, tokens, experts = self.tensors["scores"].shape
        message = self._empty(*lead, *self.plan.shape(experts), dtype=torch.int64)
        size = definitions(tokens, experts)
        rows = 2 if self.plan.kind in ("popular", "least") else len(self.plan.rule.steps) + 1
        shared = (8 + 4 * rows) * size["EXPERTS"] + 16
        argument = self.argument({"message": message}, 0)
        self._launch("demand", size["CLUSTER"], math.prod(lead) * size["CLUSTER"], shared, argument)
        return message

    def answer(self, summed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """expert_ids [..., B, k'] int64, weights [..., B, k'] float32. summed: `demand` summed over ranks, or None if
        the plan is settled."""
        *lead, tokens, experts = self.tensors["scores"].shape
        top_k, blocks = self.tensors["choice"].shape[-1], -(-tokens // WARPS)
        width = min(max(self.plan.rule.kmax or 0, top_k), experts)
        ids = self._empty(*lead, tokens, width, dtype=torch.int64)
        weights = self._empty(*lead, tokens, width, dtype=torch.float32)
        given = {"ids": ids, "weights": weights} | ({} if summed is None else {"summed": summed.contiguous()})
        shared = 26 * definitions(tokens, experts)["EXPERTS"] + 1024
        self._launch("answer", 1, math.prod(lead) * blocks, shared, self.argument(given, blocks))
        return ids, weights

    def argument(self, further: dict[str, torch.Tensor], blocks: int) -> Any:
        each = self.ranks > 0 and self.tensors["holds"].ndim > 2
        numbers = (KINDS[self.plan.kind], self.plan.number, self.ranks, int(each), blocks)
        scores, top_k = self.tensors["scores"], self.tensors["choice"].shape[-1]
        return arguments_of(self.plan.rule, scores, top_k, 1.0, True, self.tensors | further, numbers)

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.tensors["scores"].device)

    def _launch(self, name: str, cluster: int, blocks: int, shared: int, argument: Any) -> None:
        device = self.tensors["scores"].device.index
        if blocks:
            experts = definitions(1, self.tensors["scores"].shape[-1])["EXPERTS"]
            stream = torch.cuda.current_stream(device).cuda_stream
            function = _kernel(device, name, experts, cluster)
            launch(function, (blocks,), 32 * WARPS, shared, stream, argument, early=True)
