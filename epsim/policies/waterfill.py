"""Waterfill computes each token's shared expert on a rank with little routed load.

This is SGLang's Waterfill for DeepEP, from its published description. A source rank sees loads L_r and N waiting
tokens.
The waterline is H = ceil((sum of L + N * cost) / R), and the slack of a rank is max(H - L_r, 0). Each token draws a
rank from its candidates in proportion to their slack, with a weight of 10/11 for ranks other than its own. If no
candidate has slack, the candidate with the lowest load takes the token if the load of the token's rank is more than 1.1
times as large; otherwise the token stays. A source rank with few tokens keeps them. The cost is rounded to 2^-20, and
all other arithmetic is on integers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from epsim.kernels.dispatch.rule import SharedRule
from epsim.policies.base import Needs, SharedDispatch, SharedWork
from epsim.policies.hashing import draw, slot_key, token_key
from epsim.traces.trace import Level

FEW_TOKENS = 64
MOST_TOKENS = 1 << 28
COST_BITS = 20
CELLS = 1 << 18
"""The most tokens times ranks that are processed together."""


@dataclass(frozen=True, slots=True)
class Waterfill(SharedDispatch):
    """candidates: `visited`, the token's rank and the ranks of its routed experts; or `all` ranks.

    load: `routed`, the assignments that a rank serves; or `routed+local`, these and the shared work of the rank's
    tokens.
    counts: `global`, loads and waiting tokens of the whole group; or `local`, those of the source rank's tokens only.
    """

    candidates: Literal["visited", "all"] = "visited"
    load: Literal["routed", "routed+local"] = "routed"
    counts: Literal["global", "local"] = "global"
    name: ClassVar[str] = "waterfill"
    work: ClassVar[tuple[str, ...]] = ("waterfill_us",)
    complexity: ClassVar[int] = 1
    notes: ClassVar[tuple[str, ...]] = (
        f"as in SGLang, source ranks with fewer than {FEW_TOKENS} tokens in a step keep their shared-expert tokens",
    )

    @property
    def level(self) -> Level:
        return "tokens" if self.candidates == "visited" else "rank_counts"

    @property
    def needs(self) -> Needs:
        return "none" if self.counts == "local" else "reduced"

    @property
    def kernel(self) -> SharedRule:
        return SharedRule(self.candidates, self.load == "routed+local", self.counts == "global")

    @property
    def engines(self) -> Mapping[str, str]:
        return {"sglang": f"waterfill(candidates={self.candidates},load={self.load})"}

    def token_ranks(self, work: SharedWork) -> Tensor:
        """Implements `SharedDispatch.token_ranks`; `visited` also needs the ranks of the tokens' routed experts."""
        batch = work.batch
        assert batch is not None
        present = work.present()
        token, layer = present.nonzero(as_tuple=True)
        place = (batch.token_step[token], layer, batch.source_rank[token])
        visited = None
        if self.candidates == "visited":
            assert work.expert_ranks is not None
            visited = work.expert_ranks[token, layer]
        ranks = torch.full(present.shape, -1, device=token.device)
        ranks[token, layer] = self._choose(work, place, batch.local[token], visited)
        return ranks

    def served(self, work: SharedWork) -> Tensor:
        if work.batch is not None:
            return SharedDispatch.served(self, work)
        number = work.tokens.flatten()
        if number.sum(dtype=torch.float64) > MOST_TOKENS:
            raise ValueError(
                f"{int(number.sum())} tokens (over layers) in one part of a trace are too many to draw one by one: "
                "use the shared policy `local`"
            )
        row = torch.arange(len(number), device=number.device).repeat_interleave(number)
        local = torch.arange(len(row), device=row.device) - (number.cumsum(0) - number)[row]
        step, layer, source = torch.unravel_index(row, work.tokens.shape)
        place = (step, layer, source)
        rank = self._choose(work, place, local, None)
        shape = (*work.tokens.shape, work.tokens.shape[-1])
        at = _flat(place, work.tokens.shape) * shape[-1] + rank
        return torch.bincount(at, minlength=math.prod(shape)).reshape(shape)

    def _choose(
        self, work: SharedWork, place: tuple[Tensor, Tensor, Tensor], local: Tensor, visited: Tensor | None
    ) -> Tensor:
        """The ranks [N] of N tokens. place: their step, layer and source rank. visited [N, k]: candidates, None:
        all."""
        loads, weights = self._scales(work)
        rank = place[2].clone()
        row = _flat(place, work.tokens.shape)
        several = (work.tokens.flatten()[row] >= FEW_TOKENS).nonzero(as_tuple=True)[0]
        for part in torch.split(several, max(CELLS // work.tokens.shape[-1], 1)):
            step, layer, source = (axis[part] for axis in place)
            key = token_key(work.seed, work.steps[step], source, local[part])
            number = draw(key, slot_key(work.layers[layer], torch.full_like(layer, work.top_k)), 63)
            near = None if visited is None else visited[part]
            rank[part] = _pick(number, source, loads[row[part]], weights[row[part]], near)
        return rank

    def _scales(self, work: SharedWork) -> tuple[Tensor, Tensor]:
        """The loads and weights of all ranks, as each source rank sees them; both [S * L * R, R] int64."""
        num_ranks = work.tokens.shape[-1]
        if self.counts == "global":
            waiting = work.tokens.sum(-1, keepdim=True).expand_as(work.tokens)
            loads = work.routed[..., None, :].expand_as(work.routed_by_source)
            local_tokens = work.tokens[..., None, :]
        else:
            waiting = work.tokens
            loads = work.routed_by_source
            local_tokens = torch.diag_embed(work.tokens)
        cost = round(work.cost * (1 << COST_BITS))
        if self.load == "routed+local":
            loads = loads + _rounded_up(local_tokens, cost)
        line = -((-loads.sum(-1) - _rounded_up(waiting, cost)) // num_ranks)
        slack = (line[..., None] - loads).clamp(min=0)
        weights = slack * (10 + torch.eye(num_ranks, dtype=torch.int64, device=slack.device))
        return loads.reshape(-1, num_ranks), weights.reshape(-1, num_ranks)


def _pick(number: Tensor, source: Tensor, loads: Tensor, weights: Tensor, visited: Tensor | None) -> Tensor:
    """The drawn ranks [N]. number [N]: random; source [N]: ranks; loads, weights [N, R]; visited [N, k], -1: none."""
    own_load = loads.gather(1, source[:, None])[:, 0]
    if visited is not None:
        candidate = torch.zeros(*loads.shape[:1], loads.shape[1] + 1, dtype=torch.bool, device=loads.device)
        candidate.scatter_(1, visited + 1, True).scatter_(1, source[:, None] + 1, True)
        candidate = candidate[:, 1:]
        weights = weights * candidate
        loads = loads.masked_fill(~candidate, torch.iinfo(torch.int64).max)
    ends = weights.cumsum(1)
    total = ends[:, -1]
    drawn = torch.searchsorted(ends, (number % total.clamp(min=1))[:, None], right=True)[:, 0]
    least, lightest = loads.min(1)
    fallback = torch.where(10 * own_load > 11 * least, lightest, source)
    return torch.where(total > 0, drawn, fallback)


def _rounded_up(tokens: Tensor, cost: int) -> Tensor:
    """Tokens times the cost (in units of 2^-20), rounded up to whole assignments."""
    return -((-tokens * cost) >> COST_BITS)


def _flat(place: tuple[Tensor, Tensor, Tensor], shape: torch.Size) -> Tensor:
    step, layer, source = place
    return (step * shape[1] + layer) * shape[2] + source
