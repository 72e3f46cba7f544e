"""The gain of a candidate under other conditions: fewer or more tokens per step, other hot experts."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from epsim.traces.trace import Block, Ints, TokenBlock
from epsim.tuning.candidates import Candidate
from epsim.tuning.gains import Interval
from epsim.tuning.scorer import ChangeBlock, Part, Problem, score
from epsim.tuning.steps import chosen_blocks, evenly

FEWER = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
MORE = (2, 4, 8, 16)
MOST_STEPS, MOST_LAYERS = 24, 8
MOST_DRAWN = 10**9
"""NumPy draws from fewer assignments than this."""
PAIR_TOKENS = 1 << 22
"""The number of (token, layer) pairs scored under one condition at token level."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The throughput gain over the baseline under another condition. tokens_per_gpu: mean tokens per GPU and step."""

    words: str
    tokens_per_gpu: float
    gain: Interval


def by_tokens(
    problem: Problem, candidate: Candidate, base: Candidate, part: Part, factors: Sequence[float]
) -> list[Condition]:
    """The gain with each factor times the tokens per step, after the gain with the recorded tokens (factor 1). Fewer
    tokens are drawn from the recorded ones without replacement. For more tokens, each recorded token counts several
    times."""
    conditions, steps = [], _Steps(problem, part)
    now = steps.tokens_per_gpu
    for factor in (1.0, *(factor for factor in factors if factor > 1 or factor * now >= 1)):
        resized = partial(_resized, factor=factor, top_k=problem.meta.top_k, seed=problem.setting.seed)
        gain = steps.gain(candidate, base, resized)
        conditions.append(Condition(f"{factor:g} x the tokens", now * factor, gain))
    return conditions


def with_other_experts(problem: Problem, candidate: Candidate, base: Candidate, part: Part) -> Condition:
    """The gain if other experts are hot than those that the placement was planned for. The experts of each layer are
    permuted."""
    num_layers, num_experts = problem.meta.num_layers, problem.meta.num_experts
    rng = np.random.default_rng(problem.setting.seed)
    order = rng.permuted(np.tile(np.arange(num_experts), (num_layers, 1)), axis=1)[_layers(problem)]
    steps = _Steps(problem, part)
    gain = steps.gain(candidate.planned_once, base, lambda block: _permuted(block, order))
    return Condition("hot experts become others", steps.tokens_per_gpu, gain)


class _Steps:
    """A sample of the steps and layers of a part, which is read once."""

    def __init__(self, problem: Problem, part: Part) -> None:
        most = MOST_STEPS
        if problem.meta.level == "tokens":
            most = int(min(most, max(PAIR_TOKENS // max(problem.tokens_a_step * MOST_LAYERS, 1), 4)))
        self.problem, self.part, self.layers = problem, part, _layers(problem)
        self.step_indices = evenly(part.first, part.last, most)
        self.tokens_per_gpu = float(problem.tokens(self.step_indices).mean()) / problem.base.num_ranks
        self.blocks = list(chosen_blocks(problem.trace, self.step_indices, self.layers, problem.base.num_ranks))

    def gain(self, candidate: Candidate, base: Candidate, changed: ChangeBlock) -> Interval:
        scored = [base, candidate]
        times = score(
            self.problem, scored, self.part, self.step_indices, self.layers, changed=changed, blocks=self.blocks
        )
        return self.problem.gain(times[candidate].step_us, times[base].step_us)


def _layers(problem: Problem) -> list[int]:
    return [int(layer) for layer in evenly(0, problem.meta.num_layers, MOST_LAYERS)]


def _resized(block: Block, factor: float, top_k: int, seed: int) -> Block:
    """The block with `factor` times its tokens."""
    if factor == 1:
        return block
    rng = np.random.default_rng((seed, round(1 / factor), int(block.steps[0])))
    if isinstance(block, TokenBlock):
        chosen = np.arange(len(block.token_step))
        chosen = np.repeat(chosen, round(factor)) if factor > 1 else chosen[rng.random(len(chosen)) < factor]
        return dataclasses.replace(
            block,
            token_step=block.token_step[chosen],
            source_rank=block.source_rank[chosen],
            expert_ids=block.expert_ids[chosen],
            scores=None if block.scores is None else block.scores[chosen],
            score_ids=None if block.score_ids is None else block.score_ids[chosen],
            domain=None,
        )
    if factor > 1:
        return dataclasses.replace(block, counts=block.counts * round(factor))
    flat = block.counts.reshape(-1, block.counts.shape[-1])
    # Whole tokens of top-k assignments each, rounded up or down at random.
    wanted = flat.sum(1) * factor / top_k
    number = np.floor(wanted + rng.random(len(wanted))).astype(np.int64) * top_k
    number = np.minimum(number, flat.sum(1) // top_k * top_k)
    drawn = [_drawn(rng, row, n) for row, n in zip(flat, number)]
    return dataclasses.replace(block, counts=np.array(drawn, dtype=np.int64).reshape(block.counts.shape))


def _drawn(rng: np.random.Generator, row: Ints, number: int) -> Ints:
    """`number` of the assignments of a row, drawn without replacement."""
    total = int(row.sum())
    if total < MOST_DRAWN:
        return rng.multivariate_hypergeometric(row, number, method="marginals")
    # At such sizes a draw differs little from its mean, which is used instead.
    return (row * (number / total)).astype(np.int64)


def _permuted(block: Block, order: Ints) -> Block:
    """The block with other expert ids. order [L, E]: the new id of each expert."""
    if isinstance(block, TokenBlock):
        layer = np.arange(len(order))[None, :, None]
        recorded = block.expert_ids.astype(np.int64)
        ids = np.where(recorded >= 0, order[layer, recorded], -1).astype(block.expert_ids.dtype)
        # Scores would have to move with their experts. Without a router policy they are not needed.
        return dataclasses.replace(block, expert_ids=ids, scores=None, score_ids=None)
    counts = np.empty_like(block.counts)
    for index, new_ids in enumerate(order):
        counts[:, index][..., new_ids] = block.counts[:, index]
    return dataclasses.replace(block, counts=counts)
