"""Decides which rank computes each token's shared expert: first token numbers per pair of ranks, then the tokens."""

import math

import torch

COST_BITS = 20
LARGEST = 1 << 40
"""The largest sum of loads and shared work, in assignments."""


def pour(
    routed: torch.Tensor,
    tokens: torch.Tensor,
    cost: float,
    node_of_rank: torch.Tensor,
    most: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many shared-expert tokens each source rank sends to each rank, so that the peak load is lowest.

    The load of a rank is routed + cost * (tokens served). Without `most`, as few tokens as possible leave their rank.
    routed, tokens [..., R], integers >= 0: the assignments that a rank serves, and the tokens of a source rank.
    cost > 0: the cost of a token in assignments, rounded to 2^-20. node_of_rank [R]. most [..., R, R] >= 0: how many
    tokens a rank may send to another, None for no limit. Each row sums to at most the tokens of its source rank.
    Returns quotas [..., R, R] int64, tokens by source and serving rank, and the peak [...] float64, in assignments.
    Solved on the CPU in integers. Raises ValueError for shapes that do not fit, for a cost that is not positive and
    finite, and for loads that are not integers from 0 to 2^40.
    """
    from epsim.kernels.water.pour import pour_range

    lead, num_ranks, device = routed.shape[:-1], routed.shape[-1] if routed.ndim else 0, routed.device
    if not num_ranks or tokens.shape != routed.shape or node_of_rank.shape != (num_ranks,):
        shapes = f"{list(routed.shape)}, tokens {list(tokens.shape)} and node_of_rank {list(node_of_rank.shape)}"
        raise ValueError(f"shapes do not fit: routed {shapes}; expected [..., R], [..., R] and [R]")
    if most is not None and most.shape != (*routed.shape, num_ranks):
        raise ValueError(f"most is {list(most.shape)}, not {[*routed.shape, num_ranks]}")
    if not 0 < cost < math.inf:
        raise ValueError(f"a token's cost is {cost}, not a finite number above 0")
    flat_routed = _whole("routed", routed).reshape(-1, num_ranks)
    flat_tokens = _whole("tokens", tokens).reshape(-1, num_ranks)
    limits = torch.empty(0, num_ranks, num_ranks, dtype=torch.int64)
    if most is not None:
        limits = _whole("most", most).reshape(-1, num_ranks, num_ranks)
    unit = max(round(cost * (1 << COST_BITS)), 1)
    highest = flat_routed.sum(-1, dtype=torch.float64) + cost * flat_tokens.sum(-1, dtype=torch.float64)
    if len(highest) and float(highest.max()) > LARGEST:
        raise ValueError("a step's layer has more than 2^40 assignments, shared ones included: scale the counts down")
    quotas = torch.empty(len(flat_routed), num_ranks, num_ranks, dtype=torch.int64)
    level = torch.empty(len(flat_routed), dtype=torch.int64)
    pour_range(
        (flat_routed << COST_BITS).contiguous().numpy(),
        flat_tokens.numpy(),
        limits.numpy(),
        unit,
        node_of_rank.to("cpu", torch.int64).contiguous().numpy(),
        most is not None,
        quotas.numpy(),
        level.numpy(),
    )
    served = quotas.sum(1) * unit + (flat_routed << COST_BITS)
    peak = served.amax(-1).double() / (1 << COST_BITS)
    return quotas.reshape(*lead, num_ranks, num_ranks).to(device), peak.reshape(lead).to(device)


def _whole(name: str, values: torch.Tensor) -> torch.Tensor:
    """Values as int64 on the CPU. Raises ValueError if they are not integers >= 0."""
    whole = values.to("cpu", torch.int64).contiguous()
    if values.is_floating_point() or (whole.numel() and int(whole.min()) < 0):
        raise ValueError(f"{name} must be integers >= 0")
    return whole


def assign(
    group: torch.Tensor, source_rank: torch.Tensor, visited: torch.Tensor | None, quotas: torch.Tensor
) -> torch.Tensor:
    """Assigns each token to a rank, by the quotas of its group. As many tokens as possible go to ranks that they visit.

    group [N] int64: for each token, its row of quotas [G, R] int64; a row sums to the number of tokens of its group.
    source_rank [N]. visited [N, k]: the ranks that serve a token's routed experts, -1 for none; it may be None.
    Returns the rank of each token, [N] int64. If some tokens must go to ranks that they do not visit, these are the
    first tokens of their group. Solved on the CPU.
    """
    from epsim.kernels.water.pour import assign_range

    device = group.device
    if visited is None:
        visited = torch.empty(len(group), 0, dtype=torch.int64)
    members = group.cpu().argsort(stable=True)
    rows, number = torch.unique_consecutive(group.cpu()[members], return_counts=True)
    wanted = quotas.cpu()[rows].contiguous()
    # The compiled code does not check indices. Without this check it could write outside the arrays.
    if bool((wanted < 0).any()) or not torch.equal(wanted.sum(1), number):
        sums = f"sum to {wanted.sum(1).tolist()} (the smallest is {int(wanted.min())})"
        raise ValueError(f"quotas do not fit: groups have {number.tolist()} tokens, but quotas {sums}")
    first = torch.cat([torch.zeros(1, dtype=torch.int64), number.cumsum(0)])
    ranks = torch.empty(len(group), dtype=torch.int64)
    assign_range(
        first.numpy(),
        members.numpy(),
        source_rank.cpu()[members[first[:-1]]].contiguous().numpy(),
        visited.cpu().contiguous().numpy(),
        wanted.numpy(),
        ranks.numpy(),
    )
    return ranks.to(device)
