"""The rows that a dispatch sends. A token is sent once to each rank, and once to each node, that serves its experts."""

from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from torch import Tensor

from epsim.policies.base import Batch
from epsim.policies.copies import Copies

RowCounts: TypeAlias = "tuple[Tensor, Tensor]"
"""Rows by source rank and serving rank [S, L, R, R], and by source rank and serving node [S, L, R, N]; float64."""


def token_rows(batch: Batch, expert_ranks: Tensor, shared_ranks: Tensor | None, node_of_rank: Tensor) -> RowCounts:
    """Counts the rows of tokens whose ranks are known.

    expert_ranks [T, L, k] int64: the ranks that serve a token's experts, -1 for none. shared_ranks [T, L]: the rank
    that serves its shared expert, -1 for none; None if shared experts are not dispatched. node_of_rank [R].
    """
    num_steps, num_ranks = len(batch.steps), len(node_of_rank)
    num_nodes = int(node_of_rank.max()) + 1
    if shared_ranks is not None:
        expert_ranks = torch.cat([expert_ranks, shared_ranks[:, :, None]], dim=2)
    rank_rows = np.zeros((num_steps, expert_ranks.shape[1], num_ranks, num_ranks))
    node_rows = np.zeros((*rank_rows.shape[:3], num_nodes))
    _count(
        batch.token_step.cpu().numpy(),
        batch.source_rank.cpu().numpy(),
        expert_ranks.cpu().contiguous().numpy(),
        node_of_rank.cpu().numpy(),
        rank_rows,
        node_rows,
    )
    device = expert_ranks.device
    return torch.from_numpy(rank_rows).to(device), torch.from_numpy(node_rows).to(device)


def quota_rows(batch: Batch, quotas: Tensor, copies: Copies) -> RowCounts:
    """Counts the rows of a split with quotas, without each token's slot. An expert's tokens fill its copies in order.

    quotas [S, L, R, P] int64: how many tokens of a source rank each slot takes; they sum to the tokens of the batch.
    Nodes must have equally many ranks.
    """
    num_nodes = copies.placement.num_nodes
    num_steps, num_layers, num_ranks, _ = quotas.shape
    rank_rows = np.zeros((num_steps, num_layers, num_ranks, num_ranks))
    node_rows = np.zeros((num_steps, num_layers, num_ranks, num_nodes))
    fill: Any = _fill
    fill(
        *(part.cpu().numpy() for part in (batch.token_step, batch.source_rank, batch.expert_ids)),
        *(part.cpu().numpy() for part in (copies.first, copies.number, copies.slot)),
        quotas.cpu().to(torch.int32).numpy(),
        copies.placement.slots_per_rank,
        num_ranks // num_nodes,
        rank_rows,
        node_rows,
    )
    return torch.from_numpy(rank_rows).to(quotas.device), torch.from_numpy(node_rows).to(quotas.device)


def expected_rows(
    by_source: Tensor, tokens: Tensor, top_k: int, shared: Tensor | None, node_of_rank: Tensor
) -> RowCounts:
    """The expected rows if the top_k choices of a token are independent and distributed as those of its source rank.

    by_source [S, L, R, R]: assignments by source rank and serving rank. tokens [S, L, R]: tokens of each source rank.
    shared [S, L, R, R]: shared-expert tokens by source rank and serving rank; None if they are not dispatched.
    """
    num_nodes = int(node_of_rank.max()) + 1
    to_node = torch.nn.functional.one_hot(node_of_rank, num_nodes).double()
    share = by_source.double() / (tokens.double().clamp(min=1e-300) * top_k)[..., None]

    def rows(share: Tensor, shared: Tensor | None) -> Tensor:
        visited = visits(share, top_k)
        sent = visited * tokens[..., None]
        return sent if shared is None else sent + shared * (1 - visited)

    shared = None if shared is None else shared.double()
    return rows(share, shared), rows(share @ to_node, None if shared is None else shared @ to_node)


def visits(share: Tensor, top_k: int) -> Tensor:
    """The probability that at least one of top_k independent choices falls on a rank with this share of all choices."""
    left = (1 - share).clamp(min=0)
    # By repeated squaring: torch.pow is slow, and its last bit depends on an element's place in the tensor.
    missed, factor = torch.ones_like(left), left
    while top_k:
        if top_k % 2:
            missed = missed * factor
        top_k //= 2
        factor = factor * factor
    return 1 - missed


@numba.njit(cache=True, nogil=True)
def _count(step: Any, source: Any, ranks: Any, node: Any, rank_rows: Any, node_rows: Any) -> None:
    num_tokens, num_layers, width = ranks.shape
    last_rank = np.full(rank_rows.shape[3], -1, dtype=np.int64)
    last_node = np.full(node_rows.shape[3], -1, dtype=np.int64)
    for token in range(num_tokens):
        for layer in range(num_layers):
            visit = token * num_layers + layer
            for slot in range(width):
                rank = ranks[token, layer, slot]
                if rank < 0:
                    continue
                if last_rank[rank] != visit:
                    last_rank[rank] = visit
                    rank_rows[step[token], layer, source[token], rank] += 1.0
                if last_node[node[rank]] != visit:
                    last_node[node[rank]] = visit
                    node_rows[step[token], layer, source[token], node[rank]] += 1.0


@numba.njit(cache=True, nogil=True)
def _fill(
    step: Any,
    source: Any,
    ids: Any,
    first: Any,
    number: Any,
    slot: Any,
    left: Any,
    per_rank: int,
    per_node: int,
    rank_rows: Any,
    node_rows: Any,
) -> None:
    """left [S, L, R, P]: the quotas. They are counted down to 0."""
    num_tokens, num_layers, width = ids.shape
    num_steps, _, num_ranks, _ = left.shape
    num_experts = first.shape[1]
    current = np.empty((num_steps, num_ranks, num_experts), dtype=np.int32)
    last_rank = np.full(num_ranks, -1, dtype=np.int64)
    last_node = np.full(num_ranks // per_node, -1, dtype=np.int64)
    for layer in range(num_layers):
        for expert in range(num_experts):
            current[:, :, expert] = first[layer, expert]
        for token in range(num_tokens):
            visit = layer * num_tokens + token
            s, r = step[token], source[token]
            for choice in range(width):
                expert = ids[token, layer, choice]
                if expert < 0:
                    continue
                copy = current[s, r, expert]
                if number[layer, expert] > 1:
                    while left[s, layer, r, slot[layer, copy]] == 0:
                        copy += 1
                    current[s, r, expert] = copy
                    left[s, layer, r, slot[layer, copy]] -= 1
                rank = slot[layer, copy] // per_rank
                if last_rank[rank] != visit:
                    last_rank[rank] = visit
                    rank_rows[s, layer, r, rank] += 1.0
                    if last_node[rank // per_node] != visit:
                        last_node[rank // per_node] = visit
                        node_rows[s, layer, r, rank // per_node] += 1.0
