"""Rank loads when each expert's assignments are split evenly over its copies."""

import torch

from epsim.placement.base import Placement


def even_shares(placement: Placement) -> torch.Tensor:
    """[L, E, R] float64: the share of an expert's assignments that each rank serves. The sum over ranks is 1."""
    slots = placement.physical_to_logical
    shape = (placement.num_layers, placement.num_experts + 1, placement.num_ranks)  # index 0 is for empty slots
    held = torch.zeros(shape, dtype=torch.float64, device=slots.device)
    layer = torch.arange(placement.num_layers, device=slots.device)[:, None].expand_as(slots)
    rank = placement.rank_of_slot.expand_as(slots)
    held.index_put_((layer, slots + 1, rank), torch.ones((), dtype=torch.float64, device=slots.device), accumulate=True)
    return held[:, 1:] / placement.copies[:, :, None]


def even_rank_loads(counts: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The rank loads [..., L, R] float64 of counts [..., L, E] under an even split.

    Raises ValueError if counts and placement have different numbers of layers or experts.
    """
    expected = (placement.num_layers, placement.num_experts)
    if tuple(counts.shape[-2:]) != expected:
        raise ValueError(f"counts of shape {list(counts.shape)} do not fit a placement of {expected} (layers, experts)")
    shares = even_shares(placement)
    by_layer = counts.reshape(-1, *expected).to(torch.float64).transpose(0, 1)
    loads = torch.bmm(by_layer, shares).transpose(0, 1)
    return loads.reshape(*counts.shape[:-1], placement.num_ranks)


def even_balance(counts: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The peak / mean rank load [..., L] of counts [..., L, E] under an even split; 1 for a layer without tokens."""
    loads = even_rank_loads(counts, placement)
    mean = loads.mean(-1)
    return torch.where(mean > 0, loads.amax(-1) / mean.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
