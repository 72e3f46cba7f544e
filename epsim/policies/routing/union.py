"""The union of a batch's base experts: phase 1 of opportunistic expert activation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from epsim.policies.base import RouterWork
from epsim.policies.routing.choose import Preference
from epsim.policies.routing.schedule import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Union:
    """loaded [..., E] bool: experts that are read in any case: in some token's base, or chosen by a prefill token.
    base [..., B, E] bool: each token's guaranteed experts. small [...] bool: batches below the schedule's first step,
    whose tokens keep the model's choice. extra [..., E] int64: the sum of `extra` over ranks."""

    loaded: Tensor
    base: Tensor
    small: Tensor
    extra: Tensor


def union(work: RouterWork, wish: Preference, schedule: Schedule, p: float = 1.0, extra: Tensor | None = None) -> Union:
    """The union of every token's best min(k0, t) experts, where t experts are the fewest that reach the share p of the
    token's scores.

    The schedule gives k0 by the batch size (tokens to reroute); a batch below its first step takes the model's whole
    choice. Calls `work.total` once, with [..., steps of the schedule + 1, E + 1] integers (one more row with `extra`
    [..., E] int64): the demand under every k0 of the schedule, and the batch size.
    """
    active = wish.active[..., None]
    candidates = [wish.own & active]
    least = _reaching(work, wish, p) if p < 1 else None
    for k0 in schedule.values:
        number = torch.full_like(wish.position[..., :1], k0) if least is None else least.clamp(max=k0)
        candidates.append((wish.position < number) & wish.known & active)
    fixed = (wish.own & ~work.decode[..., None]).sum(-2)
    rows = [base.sum(-2) + fixed for base in candidates]
    if extra is not None:
        rows.append(extra)
    size = wish.active.sum(-1)
    message = torch.stack([torch.cat([row, size[..., None]], -1) for row in rows], -2)
    summed = work.total(message)
    chosen = schedule.place(summed[..., 0, -1])
    demand = summed[..., :-1].gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, rows[0].shape[-1]))[..., 0, :]
    # There are few steps, and a loop takes less memory than a stack of all candidates.
    base = candidates[0]
    for index, other in enumerate(candidates[1:], 1):
        base = torch.where((chosen == index)[..., None, None], other, base)
    along = summed[..., -1, :-1] if extra is not None else demand.new_zeros(demand.shape)
    return Union(demand > 0, base, chosen == 0, along)


def _reaching(work: RouterWork, wish: Preference, p: float) -> Tensor:
    """How many of the best experts reach the share p of the token's known scores, [..., B, 1] int64."""
    ordered: Tensor = work.weight_basis.float().masked_fill(~wish.known, 0.0).gather(-1, wish.order)
    share = ordered.cumsum(-1)
    short = share < p * share[..., -1:]
    return (short.sum(-1, keepdim=True) + 1).clamp(max=short.shape[-1])
