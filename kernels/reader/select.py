"""Selects the channels to keep: the k with the highest scores, or all above a threshold. Ties: the lower index."""

from typing import Literal

import torch


def top_mask(values: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
    """The `number` largest of values [..., n], as [..., n] bool; ties: the lower index. number: an int or [...] int64.

    It only compares values, so it is exact and the same on every device. NaN counts as infinite.
    """
    values = values.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    size = values.shape[-1]
    if isinstance(number, int):
        number = min(max(number, 0), size)
        if number in (0, size):
            return torch.full_like(values, number > 0, dtype=torch.bool)
        return _down_to(values, values.topk(number, -1).values.amin(-1, keepdim=True), number)
    wanted = number.clamp(0, size)[..., None]
    threshold = values.sort(-1, descending=True).values.gather(-1, (wanted - 1).clamp(min=0))
    return _down_to(values, threshold, wanted) & (wanted > 0)


def _down_to(values: torch.Tensor, threshold: torch.Tensor, wanted: int | torch.Tensor) -> torch.Tensor:
    """The values above `threshold`, and the first of those equal to it, `wanted` in total."""
    above, tied = values > threshold, values == threshold
    room = wanted - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def output_scores(weights: torch.Tensor, norms: torch.Tensor, activations: torch.Tensor) -> torch.Tensor:
    """The most that a channel adds to the layer's output, |w_j| |d_j| |p_j| float32, comparable between experts.

    weights [T, k], norms [T, k, I], activations [T, k, I], multiplied in this order."""
    return (weights[..., None].float() * norms.float() * activations.float()).abs()


def keep_top(scores: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
    """The `number` channels with the highest scores over all experts of each token, [T, k, I] bool. scores [T, k, I].
    Ties go to the earlier of the token's k experts, then to the lower channel."""
    return top_mask(scores.flatten(1), number).view_as(scores)


def keep_above(scores: torch.Tensor, threshold: float | torch.Tensor) -> torch.Tensor:
    """The channels with a score above a calibrated threshold. NaN counts as infinite."""
    return ~(scores <= threshold)


def keep_for_batch(
    scores: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    number: int | torch.Tensor,
    batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """The `number` channels of each batch with the largest sum of scores over its tokens, [T, k, I] bool. All tokens of
    an expert keep the same channels. ids [T, k] int64, -1 for none. batch [T]: the batch of each token, of n batches
    with number [n]; None for one batch."""
    where = torch.where(ids >= 0, ids, num_experts)
    count = 1
    if batch is not None:
        count = len(number) if isinstance(number, torch.Tensor) else int(batch.max()) + 1
        where = where + batch[:, None] * (num_experts + 1)
    total = scores.new_zeros(count * (num_experts + 1), scores.shape[-1])
    total.index_add_(0, where.flatten(), scores.flatten(0, 1))
    served = torch.zeros(len(total), dtype=torch.bool, device=ids.device)
    served[where.flatten()] = True
    # Channels of experts without tokens rank below channels with score 0.
    known = total.masked_fill(~served[:, None], -1.0).view(count, num_experts + 1, -1)[:, :num_experts]
    several = number if isinstance(number, int) else number.view(count)
    chosen = torch.zeros_like(total, dtype=torch.bool).view(count, num_experts + 1, -1)
    chosen[:, :num_experts] = top_mask(known.flatten(1), several).view_as(known)
    return chosen.flatten(0, 1)[where]


ShareBy = Literal["experts", "weights"]


def rank_quotas(
    number: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    rank_of_expert: torch.Tensor,
    num_ranks: int,
    by: ShareBy,
) -> torch.Tensor:
    """How many channels of each token each rank keeps, [T, R] int64. They sum to number [T] int64, or to 0 for a token
    whose weights are all 0. ids and weights [T, k], rank_of_expert [E].

    Quotas are proportional to the number of the token's experts on a rank or, by "weights", to the sum of the absolute
    weights there (to the number if a weight is not finite). They are rounded by largest remainder, ties to the lower
    rank. Every rank that serves the token knows these inputs, so all ranks get the same quotas without communication.
    """
    served = (ids >= 0) & (weights != 0)
    amount = served.double()
    if by == "weights":
        sizes = weights.double().abs().masked_fill(~served, 0.0)
        amount = torch.where(sizes.isfinite().all(1, keepdim=True), sizes, amount)
    share = amount.new_zeros(len(ids), num_ranks)
    share.scatter_add_(1, rank_of_expert[ids.clamp(min=0)], amount)
    share = share / share.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    ideal = share * number[:, None]
    whole = ideal.floor()
    left = (number - whole.sum(1).long()).clamp(min=0)
    # Only ranks that serve the token may take the remainder.
    remainder = torch.where(share > 0, ideal - whole, -1.0)
    return whole.long() + (top_mask(remainder, left) & (share > 0)).long()


def keep_by_rank(
    scores: torch.Tensor, ids: torch.Tensor, quotas: torch.Tensor, rank_of_expert: torch.Tensor
) -> torch.Tensor:
    """The channels with the highest scores on each rank, as many as its quota [T, R], as [T, k, I] bool. If a rank has
    fewer channels than its quota, the remaining quota is not given to other ranks."""
    rank = torch.where(ids >= 0, rank_of_expert[ids.clamp(min=0)], -1)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for number in range(quotas.shape[1]):
        on_rank = (rank == number)[..., None]
        allowed = torch.minimum(quotas[:, number], on_rank.sum((1, 2)) * scores.shape[-1])
        kept |= keep_top(scores.masked_fill(~on_rank, -1.0), allowed) & on_rank
    return kept
