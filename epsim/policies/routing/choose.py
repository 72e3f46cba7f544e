"""Shared by all routers: a token's order of preference, and taking its best allowed experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from epsim.policies.base import Routed, RouterWork


@dataclass(frozen=True, slots=True, eq=False)
class Preference:
    """order [..., B, E] int64: experts from most to least preferred; position [..., B, E] int64: each expert's rank in
    this order. own [..., B, E] bool: the model's choice. known [..., B, E] bool: experts that the token may take.
    active [..., B] bool: tokens to reroute, without padding."""

    order: Tensor
    position: Tensor
    own: Tensor
    known: Tensor
    active: Tensor


def preference(work: RouterWork) -> Preference:
    """Orders the model's own choice first, by score, then the other experts by score; ties by expert id, in fp32.

    If the model takes its k best scores, this is the order of the scores. If it chooses within groups, or scores were
    recorded in half precision, its choice still comes first, so that k0 = k changes nothing.
    """
    chosen = work.expert_ids >= 0
    num_experts = work.scores.shape[-1]
    marks = torch.zeros(*work.scores.shape[:-1], num_experts + 1, dtype=torch.bool, device=work.scores.device)
    own = marks.scatter_(-1, torch.where(chosen, work.expert_ids, num_experts), True)[..., :num_experts]
    scores = work.scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = scores.contiguous().view(torch.int32).to(torch.int64)
    # Integers in the order of the scores; those of the model's choice are above all others.
    key = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF)) + (own.to(torch.int64) << 33)
    order = key.sort(dim=-1, descending=True, stable=True).indices
    ranking = torch.arange(num_experts, device=order.device).expand_as(order)
    position = torch.empty_like(order).scatter_(-1, order, ranking)
    return Preference(order, position, own, own | (scores > -torch.inf), work.decode & chosen.any(-1))


def take(work: RouterWork, wish: Preference, allowed: Tensor, most: int, small: Tensor | None = None) -> Routed:
    """Each token takes its `most` best experts of those in allowed [..., B, E] bool, or all where they are fewer.

    small [...] bool: batches whose tokens take at least the model's k. A token's weights are proportional to
    `work.weight_basis` and have the sum of the model's weights. Tokens that are not rerouted keep their choice.
    """
    top_k, num_experts = work.expert_ids.shape[-1], wish.position.shape[-1]
    width = min(max(most, top_k), num_experts)
    allowed_position = torch.where(allowed & wish.known, wish.position, num_experts)
    position, ids = allowed_position.topk(width, dim=-1, largest=False)
    kept = (position < num_experts) & (torch.arange(width, device=ids.device) < most)
    if small is not None and most < top_k:
        kept |= (position < num_experts) & small[..., None, None]
    weight_basis = work.weight_basis.gather(-1, ids).float().masked_fill(~kept, 0.0)
    whole = work.weights.float().sum(-1, keepdim=True)
    weights = weight_basis / weight_basis.sum(-1, keepdim=True).clamp(min=1e-20) * whole
    anew = wish.active[..., None]
    own_ids = torch.nn.functional.pad(work.expert_ids, (0, width - top_k), value=-1)
    own_weights = torch.nn.functional.pad(work.weights.float(), (0, width - top_k))
    return Routed(torch.where(anew, ids.masked_fill(~kept, -1), own_ids), torch.where(anew, weights, own_weights))
