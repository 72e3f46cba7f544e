"""Routers to compare with, which start from the whole union and remove experts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epsim.kernels.router import Plan
from epsim.policies.base import Routed, Router, RouterWork
from epsim.policies.routing.choose import Preference, preference, take
from epsim.policies.routing.fused import by_kernel

LEFT = "left with none of known score it takes none at all"


def _demand(work: RouterWork, wish: Preference) -> tuple[Tensor, Tensor]:
    """How many tokens to reroute chose each expert, and how many others, [..., E] int64 each, by one call of
    `work.total`."""
    by_phase = [(wish.own & tokens[..., None]).sum(-2) for tokens in (wish.active, ~work.decode)]
    both = work.total(torch.stack(by_phase, -2))
    return both[..., 0, :], both[..., 1, :]


def _take_of(work: RouterWork, wish: Preference, left: Tensor) -> Routed:
    """Every token takes its k best of the experts left [..., E] bool."""
    allowed = left[..., None, :].expand_as(wish.known)
    return take(work, wish, allowed, work.expert_ids.shape[-1])


@dataclass(frozen=True, slots=True)
class Lynx(Router):
    """Keeps the `keep` most popular experts of the union of all choices, ties by expert id; tokens take their k best of
    these (after Lynx, arXiv 2411.08982, which drops the least popular experts of a batch's union).

    The experts of prefill tokens also stay. A token has no guaranteed experts.
    """

    keep: int
    name: ClassVar[str] = "lynx"
    examples: ClassVar[tuple[str, ...]] = ("lynx(keep=8)",)
    notes: ClassVar[tuple[str, ...]] = (f"lynx acts on decode tokens alone; a token {LEFT}",)

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
    notes: ClassVar[tuple[str, ...]] = (f"mask-low-demand acts on decode tokens alone; a token {LEFT}",)

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
