"""Applies a router policy to the recorded tokens of a block."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epsim.policies.base import Router, RouterWork, checked_route
from epsim.traces.trace import Phase, TokenBlock

ROUTED_ANEW = ("decode", "unknown")
CELLS = 1 << 21
"""The most elements of an intermediate tensor, unless a single batch has more."""


@dataclass(frozen=True, slots=True, eq=False)
class Rerouted:
    """block: with the policy's expert ids. kept_mass [S, L] float64: the summed recorded scores of the experts that
    tokens take, divided by those of the experts that the model chose; 1 for a step that is not rerouted."""

    block: TokenBlock
    kept_mass: Tensor


def reroute_block(
    router: Router, block: TokenBlock, phase: Phase, num_experts: int, num_ranks: int, holds: Tensor
) -> Rerouted:
    """Reroutes the steps of phase decode (or unknown). A batch is a step, or one source rank's tokens of a step.

    phase: of the trace, for blocks without phases per step. holds [L, E, R] bool: which rank holds which expert; the
    work runs on its device. Weights are assumed proportional to the scores, which is exact for models that choose and
    weight by the same scores. Raises ValueError if no step may be rerouted, or if scores are missing.
    """
    num_steps, num_layers = len(block.steps), block.expert_ids.shape[1]
    if block.phase is None and phase not in ROUTED_ANEW:
        raise ValueError(
            f"router {router.name} acts on decode steps, but the trace is of phase {phase} and has no phase per step: "
            "record with phases, or import with --phase decode if its steps are decode steps"
        )
    anew = np.isin(block.phase, ROUTED_ANEW) if block.phase is not None else np.ones(num_steps, dtype=bool)
    tokens = np.flatnonzero(anew[block.token_step])
    kept_mass = torch.ones(num_steps, num_layers, dtype=torch.float64)
    if not len(tokens):
        return Rerouted(block, kept_mass)
    if block.scores is None:
        raise ValueError(
            f"router {router.name} needs router scores, but the trace has none for step "
            f"{int(block.steps[block.token_step[tokens[0]]])}: record with num_scores='all', or import a recording "
            "that has them"
        )
    group = block.token_step[tokens]
    if not router.whole_batch:
        group = group * num_ranks + block.source_rank[tokens]
    _, begins, sizes = np.unique(group, return_index=True, return_counts=True)
    ids = torch.from_numpy(block.expert_ids[tokens].astype(np.int64))
    chosen: list[Tensor] = []
    own_mass, taken_mass = [], []
    for first, last in _parts(sizes, num_layers * num_experts):
        part = slice(int(begins[first]), int(begins[last - 1] + sizes[last - 1]))
        scores = scores_by_expert(block, tokens[part], num_experts)
        place = np.arange(part.stop - part.start) - np.repeat(begins[first:last] - part.start, sizes[first:last])
        batch = np.repeat(np.arange(last - first), sizes[first:last])
        at = (torch.from_numpy(batch), torch.from_numpy(place))
        routed = _route(router, ids[part], scores, at, (last - first, int(sizes[first:last].max())), holds)
        chosen.append(routed)
        own_mass.append(kept_scores(scores, ids[part]))
        taken_mass.append(kept_scores(scores, routed))
    width = max(ids.shape[-1], chosen[0].shape[-1])
    expert_ids = np.full((len(block.token_step), num_layers, width), -1, dtype=np.int64)
    expert_ids[..., : ids.shape[-1]] = block.expert_ids
    expert_ids[tokens] = torch.cat(chosen).numpy()
    step = torch.from_numpy(block.token_step[tokens].astype(np.int64))
    own, taken = (torch.zeros_like(kept_mass).index_add_(0, step, torch.cat(mass)) for mass in (own_mass, taken_mass))
    return Rerouted(dataclasses.replace(block, expert_ids=expert_ids), torch.where(own > 0, taken / own, kept_mass))


def _route(
    router: Router, ids: Tensor, scores: Tensor, at: tuple[Tensor, Tensor], shape: tuple[int, int], holds: Tensor
) -> Tensor:
    """The policy's ids [n, L, k'] int64 for ids [n, L, k] and scores [n, L, E] of tokens at (batch, index) [n]."""

    def batched(values: Tensor, empty: float) -> Tensor:
        padded = torch.full((*shape, *values.shape[1:]), empty, dtype=values.dtype)
        padded[at] = values
        return padded.transpose(1, 2).to(holds.device)

    padded_ids, padded_scores = batched(ids, -1), batched(scores, 0.0)
    weight_basis = padded_scores.clamp(min=0)
    weights = weight_basis.gather(-1, padded_ids.clamp(min=0)).masked_fill(padded_ids < 0, 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    decode = torch.ones(padded_ids.shape[:-1], dtype=torch.bool, device=holds.device)
    work = RouterWork(padded_scores, weight_basis, padded_ids, weights, decode, holds)
    routed = checked_route(router, work)
    return routed.expert_ids.cpu().transpose(1, 2)[at]


def scores_by_expert(block: TokenBlock, tokens: np.ndarray, num_experts: int) -> Tensor:
    """The scores of the tokens by expert, [n, L, E] float32; -inf where the trace has none."""
    assert block.scores is not None
    scores = torch.from_numpy(block.scores[tokens].astype(np.float32))
    if scores.shape[-1] == num_experts and block.score_ids is None:
        return scores
    named = block.expert_ids if block.score_ids is None else block.score_ids
    ids = torch.from_numpy(named[tokens].astype(np.int64))
    dense = torch.full((*scores.shape[:-1], num_experts + 1), -torch.inf)
    return dense.scatter_(-1, torch.where(ids >= 0, ids, num_experts), scores)[..., :num_experts]


def kept_scores(scores: Tensor, ids: Tensor) -> Tensor:
    """The sum of scores [n, L, E] over each token's experts ids [n, L, k], as [n, L] float64."""
    found = scores.gather(-1, ids.clamp(min=0)).to(torch.float64)
    return found.masked_fill(ids < 0, 0.0).clamp(min=0).sum(-1)


def _parts(sizes: np.ndarray, per_token: int) -> list[tuple[int, int]]:
    """Groups consecutive batches that have at most CELLS elements when padded to their largest, or one batch."""
    parts, first = [], 0
    largest = 0
    for number, size in enumerate(sizes.tolist()):
        largest = max(largest, size)
        if number > first and (number + 1 - first) * largest * per_token > CELLS:
            parts.append((first, number))
            first, largest = number, size
    return [*parts, (first, len(sizes))]
