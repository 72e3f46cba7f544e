"""Opportunistic expert activation for expert parallelism, where the rank with the most active experts is slowest."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from epsim.kernels.router import Plan, Rule
from epsim.placement.base import Stack
from epsim.policies.base import Routed, Router, RouterWork
from epsim.policies.routing.choose import Preference, preference, take
from epsim.policies.routing.fused import by_kernel
from epsim.policies.routing.matching import active_ranks
from epsim.policies.routing.oea import DECODE_ONLY
from epsim.policies.routing.schedule import parse_schedule
from epsim.policies.routing.union import union

UNITS = 1 << 24
"""A weight of 1 as an integer: integer sums do not depend on their order."""


@dataclass(frozen=True, slots=True)
class OeaEp(Router):
    """`oea` in which ranks with slack also read the most wanted experts, up to the number of the busiest rank.

    The tokens' k0 best experts are the base. With one copy per expert, the busiest rank has M of them, and every other
    rank adds its most wanted experts until it also has M. With several copies, one copy serves each active expert,
    chosen so that M is minimal, and the added experts have the largest total want that fits M per rank (the `one-copy`
    split makes the same choice from the counts alone). An expert's want is its weight in the model's own choices,
    summed over the tokens to reroute; an expert that none chose is never added. Tokens take their k best of all experts
    that are read. So M is at most that of `oea`, and a token's experts are at least as good.

    k0: as in `oea`. Needs one all-reduce of [len(schedule) + 2, E + 1] integers.
    """

    k0: str
    name: ClassVar[str] = "oea-ep"
    examples: ClassVar[tuple[str, ...]] = ("oea-ep(k0=2)",)
    capturable: ClassVar[bool] = False  # copies of an expert are matched on the CPU
    notes: ClassVar[tuple[str, ...]] = (f"oea-ep {DECODE_ONLY}",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "k0", str(parse_schedule(self.k0, self.name, 2)))

    def notes_beside(self, stack: Stack, redundant: bool) -> tuple[str, ...]:
        if not redundant or stack.split.single_copies:
            return ()
        return (f"oea-ep counts on one active copy an expert: {stack.split.name} may wake more, one-copy does not",)

    def route(self, work: RouterWork) -> Routed:
        if work.holds is None:
            raise ValueError("oea-ep needs to know which rank holds which expert: give --ranks")
        schedule = parse_schedule(self.k0, self.name, 2)
        top_k = work.expert_ids.shape[-1]
        schedule.check(top_k, f"{self.name}(k0={self.k0})")
        if (routed := by_kernel(work, Plan("ranks", Rule(schedule.steps)))) is not None:
            return routed
        wish = preference(work)
        found = union(work, wish, schedule, extra=_want(work, wish))
        holds = work.holds.expand(*found.loaded.shape, work.holds.shape[-1])
        ranks = active_ranks(found.loaded, found.extra, holds)
        return take(work, wish, (ranks >= 0)[..., None, :].expand_as(wish.known), top_k)


def _want(work: RouterWork, wish: Preference) -> torch.Tensor:
    """The want of each expert, [..., E] int64."""
    chosen = (work.expert_ids >= 0) & wish.active[..., None]
    units = (work.weights.double() * UNITS).round().to(torch.int64)
    *lead, _, num_experts = work.scores.shape
    want = torch.zeros(*lead, num_experts, dtype=torch.int64, device=units.device)
    at = work.expert_ids.clamp(min=0).flatten(-2)
    return want.scatter_add_(-1, at, torch.where(chosen, units, 0).flatten(-2))
