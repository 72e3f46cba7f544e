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
    """`oea` for expert parallelism: every rank reads as many experts as the busiest rank must read.

    1. Each token's k0 best experts are read. Let M be the number of them on the rank that has most.
    2. Every other rank adds its most wanted experts until it also reads M. An expert's want is its weight in the
       model's choices, summed over the tokens to reroute. An expert that no token chose is never added.
    3. Each token takes its k best experts among all that are read.

    If experts have several copies, one copy serves each expert that is read. The copies are chosen so that M is as
    small as possible, and the added experts so that their total want is as large as possible. The split `one-copy`
    chooses the same copies from the counts. M is at most the busiest rank's number of experts under `oea`.

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
        more = f"the split {stack.split.name} may activate more, one-copy does not"
        return (f"oea-ep assumes one active copy per expert: {more}",)

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
    """The want of each expert (see `OeaEp`) in units of 1 / UNITS, [..., E] int64."""
    chosen = (work.expert_ids >= 0) & wish.active[..., None]
    units = (work.weights.double() * UNITS).round().to(torch.int64)
    *lead, _, num_experts = work.scores.shape
    want = torch.zeros(*lead, num_experts, dtype=torch.int64, device=units.device)
    at = work.expert_ids.clamp(min=0).flatten(-2)
    return want.scatter_add_(-1, at, torch.where(chosen, units, 0).flatten(-2))
