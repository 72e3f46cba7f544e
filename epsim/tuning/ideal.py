"""The lowest possible time of a step: perfect balance, with policies that take no time."""

from collections.abc import Sequence

import numpy as np
import torch

from epsim.planning import to_counts
from epsim.policies.load import Load
from epsim.policies.stack import parse_stack
from epsim.score.statistics import Floats
from epsim.traces.trace import Block, Ints
from epsim.tuning.scorer import Problem
from epsim.tuning.steps import chosen_blocks


def ideal_us(problem: Problem, step_indices: Ints, layers: Sequence[int] | None = None) -> Floats:
    """[n] microseconds of the steps `step_indices`, NaN for steps without tokens. layers: as for `score`."""
    stack, num_ranks, timing = parse_stack("contiguous"), problem.base.num_ranks, problem.timing
    parts = []
    for _, block in chosen_blocks(problem.trace, step_indices, layers, num_ranks):
        load = _balanced(problem, block)
        us = timing.step_us(timing.layer_us(load, stack, False), load.tokens, num_ranks)
        parts.append(torch.where((load.assignments > 0).any(-1), us, torch.nan).numpy())
    return np.concatenate(parts)


def _balanced(problem: Problem, block: Block) -> Load:
    """The block's load with work and active experts spread evenly over ranks, each active expert on one rank."""
    num_ranks, setting = problem.base.num_ranks, problem.setting
    counts = torch.from_numpy(to_counts(block, problem.meta.num_experts).counts)
    assignments = counts.sum(-1)
    tokens = assignments.double() / setting.top_k
    even = (assignments.double() / num_ranks)[..., None].expand(*assignments.shape, num_ranks)
    shared = (tokens / num_ranks * (setting.shared_cost > 0))[..., None].expand_as(even)
    active = -(-(counts > 0).sum(-1) // num_ranks)
    return Load(
        routed=even,
        routed_real=even,
        shared=shared * setting.shared_cost,
        shared_tokens=shared,
        tokens=tokens,
        assignments=assignments,
        active=active[..., None].expand_as(even),
        rounded=False,
    )
