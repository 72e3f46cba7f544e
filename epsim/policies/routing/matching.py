"""Assigns active experts to ranks so that the busiest rank has as few active experts as possible.

Each expert takes a rank that holds a copy, with at most M experts per rank. This is a bipartite matching with
capacities, grown one expert at a time along augmenting paths. M rises only if no path is left, so it is minimal. The
sets of experts that fit with capacity M are the independent sets of a transversal matroid, so adding experts in order
of decreasing want is optimal (Edmonds and Fulkerson 1965, "Transversals and matroid partition").
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor


def active_ranks(must: Tensor, want: Tensor, holds: Tensor) -> Tensor:
    """The rank that serves each expert, [..., E] int64, -1 for an inactive expert.

    must [..., E] bool: experts that must be active; want [..., E] int64 >= 0: the value of activating others, 0 for
    none; holds [..., E, R] bool: which rank has a copy. The most `must` experts on a rank, M, is minimal. Others are
    added as long as no rank exceeds M, so that their total want is largest, ties by expert id. Batches whose experts
    have one copy each stay on their device.
    """
    if holds.shape[-1] == 1 or bool((holds.sum(-1) == 1).all()):
        return _single_copies(must, want, holds)
    shape, num_ranks = must.shape, holds.shape[-1]
    num_experts = shape[-1]
    ranks = np.empty((must.numel() // max(num_experts, 1), num_experts), dtype=np.int64)
    _match_all(
        must.cpu().numpy().reshape(-1, num_experts),
        want.cpu().numpy().reshape(-1, num_experts),
        np.ascontiguousarray(holds.cpu().numpy()).reshape(-1, num_experts, num_ranks),
        ranks,
    )
    return torch.from_numpy(ranks).to(must.device).reshape(shape)


def _single_copies(must: Tensor, want: Tensor, holds: Tensor) -> Tensor:
    ranks = holds.to(torch.int8).argmax(-1)
    active = (must[..., None] & holds).sum(-2)
    most = active.amax(-1, keepdim=True)
    worth = torch.where(must, -1, want)
    order = worth.sort(dim=-1, descending=True, stable=True).indices
    ordered_holds = holds.gather(-2, order[..., None].expand_as(holds)) & (worth.gather(-1, order) > 0)[..., None]
    # For each expert, in this order, the number of the rank's wanted experts up to and including it.
    turn = ordered_holds.cumsum(-2).gather(-1, ranks.gather(-1, order)[..., None])[..., 0]
    slack = (most - active).gather(-1, ranks.gather(-1, order))
    added = torch.zeros_like(must).scatter_(-1, order, (turn <= slack) & (worth.gather(-1, order) > 0))
    return torch.where(must | added, ranks, -1)


@numba.njit(cache=True)
def _match_all(must: Any, want: Any, holds: Any, ranks: Any) -> None:
    for problem in range(len(must)):
        _match(must[problem], want[problem], holds[problem], ranks[problem])


@numba.njit(cache=True)
def _match(must: Any, want: Any, holds: Any, rank_of: Any) -> None:
    num_experts, num_ranks = holds.shape
    rank_of[:] = -1
    active = np.zeros(num_ranks, np.int64)
    most = 0
    for expert in range(num_experts):
        if must[expert] and not _augment(expert, holds, rank_of, active, most):
            most += 1
            _augment(expert, holds, rank_of, active, most)
    # Ties in want: the lower expert id first.
    for expert in np.argsort(-want, kind="mergesort"):
        if want[expert] <= 0:
            break
        if rank_of[expert] < 0:
            _augment(expert, holds, rank_of, active, most)


@numba.njit(cache=True)
def _augment(expert: Any, holds: Any, rank_of: Any, active: Any, most: Any) -> bool:
    """Assigns the expert to a rank, moving others to other copies if needed; False if all reachable ranks are full."""
    num_experts, num_ranks = holds.shape
    via = np.full(num_ranks, -1, np.int64)  # the expert that would move to this rank
    queue = np.empty(num_ranks, np.int64)
    head = tail = 0
    for rank in range(num_ranks):
        if holds[expert, rank]:
            via[rank] = expert
            queue[tail] = rank
            tail += 1
    while head < tail:
        rank = queue[head]
        head += 1
        if active[rank] < most:
            active[rank] += 1
            while True:
                mover = via[rank]
                left = rank_of[mover]
                rank_of[mover] = rank
                if mover == expert:
                    return True
                rank = left
        for other in range(num_experts):
            if rank_of[other] == rank:
                for further in range(num_ranks):
                    if holds[other, further] and via[further] < 0:
                        via[further] = other
                        queue[tail] = further
                        tail += 1
    return False
