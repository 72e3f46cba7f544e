"""Published routers to compare with. They start from all experts that a batch chose, and remove some."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epsim.kernels.router import Plan
from epsim.policies.base import Routed, Router, RouterWork
from epsim.policies.routing.choose import Preference, preference, take
from epsim.policies.routing.fused import by_kernel

LEFT = "a token takes no expert if none of those that stay has a known score"


def _demand(work: RouterWork, wish: Preference) -> tuple[Tensor, Tensor]:
    """Two counts per expert, [..., E] int64 each: how many of the tokens to reroute chose it, and how many of the other
    tokens. Calls `work.total` once."""
    by_phase = [(wish.own & tokens[..., None]).sum(-2) for tokens in (wish.active, ~work.decode)]
    both = work.total(torch.stack(by_phase, -2))
    return both[..., 0, :], both[..., 1, :]


def _take_of(work: RouterWork, wish: Preference, left: Tensor) -> Routed:
    """Every token takes its k best of the experts that stay: left [..., E] bool."""
    allowed = left[..., None, :].expand_as(wish.known)
    return take(work, wish, allowed, work.expert_ids.shape[-1])


@dataclass(frozen=True, slots=True)
class Lynx(Router):
    """Keeps the `keep` experts that most tokens of the batch chose; ties go to the lower expert id. Tokens take their k
    best of these. Lynx (arXiv 2411.08982) drops the least popular experts of a batch in this way.

    The experts of prefill tokens also stay. No expert is guaranteed to a token.
    """

    keep: int
    name: ClassVar[str] = "lynx"
    examples: ClassVar[tuple[str, ...]] = ("lynx(keep=8)",)
    notes: ClassVar[tuple[str, ...]] = (f"lynx changes decode tokens only; {LEFT}",)

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"lynx: keep={self.keep}: give 1 or more")

    def route(self, work: RouterWork) -> Routed:
        if (routed := by_kernel(work, Plan("popular", number=self.keep))) is not None:
            return routed
        wish = preference(work)
        demand, fixed = _demand(work, wish)
        popular = demand.sort(dim=-1, descending=True, stable=True).indices[..., : self.keep]
        left = torch.zeros_like(demand, dtype=torch.bool).scatter_(-1, popular, True) & (demand > 0)
        return _take_of(work, wish, left | (fixed > 0))


@dataclass(frozen=True, slots=True)
class MaskLowDemand(Router):
    """Masks experts that fewer than `least` tokens chose; tokens take their k best of the others.

    If no expert has that many tokens, all chosen experts stay.
    """

    least: int
    name: ClassVar[str] = "mask-low-demand"
    examples: ClassVar[tuple[str, ...]] = ("mask-low-demand(least=2)",)
    notes: ClassVar[tuple[str, ...]] = (f"mask-low-demand changes decode tokens only; {LEFT}",)

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ValueError(f"mask-low-demand: least={self.least}: give 1 or more")

    def route(self, work: RouterWork) -> Routed:
        if (routed := by_kernel(work, Plan("least", number=self.least))) is not None:
            return routed
        wish = preference(work)
        demand, fixed = _demand(work, wish)
        left = demand >= self.least
        left = torch.where(left.any(-1, keepdim=True), left, demand > 0)
        return _take_of(work, wish, left | (fixed > 0))
