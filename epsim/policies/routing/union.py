"""The union of a batch's base experts: phase 1 of opportunistic expert activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epsim.policies.base import RouterWork
from epsim.policies.routing.choose import Preference
from epsim.policies.routing.schedule import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Union:
    """loaded [..., E] bool: experts that are read anyway: some token's base, or a prefill token's choice.
    base [..., B, E] bool: each token's own guaranteed experts. small [...] bool: batches below the schedule's first
    step, whose tokens keep the model's choice. extra [..., E] int64: what was summed along."""

    loaded: torch.Tensor
    base: torch.Tensor
    small: torch.Tensor
    extra: torch.Tensor


def union(
    work: RouterWork, wish: Preference, schedule: Schedule, p: float = 1.0, extra: torch.Tensor | None = None
) -> Union:
    """Every token's best n_i = min(k0, t_i) experts, t_i the fewest whose share of the token's scores reaches p.

    k0 follows from the batch size (tokens to route anew) by the schedule; a batch below its first step takes the
    model's own choice whole. One call of `work.total`, of [..., steps of the schedule + 1, E + 1] whole numbers (a row
    more with `extra` [..., E] int64): demand under every k0 that the schedule may ask for, and the batch size.
    """
    there = wish.there[..., None]
    candidates = [wish.own & there]
    least = _reaching(work, wish, p) if p < 1 else None
    for k0 in schedule.values:
        number = torch.full_like(wish.position[..., :1], k0) if least is None else least.clamp(max=k0)
        candidates.append((wish.position < number) & wish.known & there)
    fixed = (wish.own & ~work.decode[..., None]).sum(-2)
    rows = [base.sum(-2) + fixed for base in candidates]
    if extra is not None:
        rows.append(extra)
    size = wish.there.sum(-1)
    message = torch.stack([torch.cat([row, size[..., None]], -1) for row in rows], -2)
    summed = work.total(message)
    place = schedule.place(summed[..., 0, -1])
    demand = summed[..., :-1].gather(-2, place[..., None, None].expand(*place.shape, 1, rows[0].shape[-1]))[..., 0, :]
    # With few steps a loop of selections is less memory than a stack of all candidates.
    base = candidates[0]
    for index, other in enumerate(candidates[1:], 1):
        base = torch.where((place == index)[..., None, None], other, base)
    along = summed[..., -1, :-1] if extra is not None else demand.new_zeros(demand.shape)
    return Union(demand > 0, base, place == 0, along)


def _reaching(work: RouterWork, wish: Preference, p: float) -> torch.Tensor:
    """[..., B, 1] int64: how many of the best experts have at least p of the token's known scores."""
    ordered: torch.Tensor = work.weight_basis.float().masked_fill(~wish.known, 0.0).gather(-1, wish.order)
    share = ordered.cumsum(-1)
    short = share < p * share[..., -1:]
    return (short.sum(-1, keepdim=True) + 1).clamp(max=short.shape[-1])
