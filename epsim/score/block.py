"""One block of steps scored: from the loads of its stacks to metrics, optimum, gaps and times."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from epsim.cost.layer_time import LayerTiming
from epsim.policies.apply import BoundStack, CountedSteps
from epsim.policies.load import Load, joined
from epsim.policies.stack import PolicyStack
from epsim.score.metrics import Values, layer_metrics
from epsim.score.steps import SeenSteps, seen_steps
from epsim.score.time_metrics import timed_metrics
from epsim.traces.trace import Block, TokenBlock

_Solved: TypeAlias = "tuple[Load, torch.Tensor]"
"""A load, and its optimum as in `StackScore`."""


@dataclass(frozen=True, slots=True, eq=False)
class StackScore:
    """One stack on one block of S steps.

    metrics: by the names of `epsim.score.formulas`. optimum [S, L] float64: the least routed peak that any split of
    the placement can reach, as a proven lower bound. step_us [S]: time of each step in microseconds, and phases:
    microseconds of each layer [S, L] by phase; None and empty where no times are predicted.
    """

    load: Load
    optimum: torch.Tensor
    metrics: Mapping[str, Values]
    step_us: torch.Tensor | None = None
    phases: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class BlockScore:
    """stacks: one score for each stack, in order. seen: the scored steps as they were recorded."""

    stacks: list[StackScore]
    seen: SeenSteps


def score_block(
    blocks: Sequence[Block],
    stacks: Sequence[BoundStack],
    timing: LayerTiming | None = None,
    timed_as: Sequence[PolicyStack] | None = None,
) -> BlockScore:
    """Scores the same steps under every stack.

    blocks: the steps as each stack receives them; the same object for stacks with the same tokens. Tokens are counted
    once for each object. Stacks that share their copies (see `bind`) also share the optimum, which is solved once.
    timing: the model that predicts times; None for no times. timed_as: the stacks whose policies' time is charged; the
    stacks themselves by default. `throughput_gain` compares with the first stack.
    Raises ValueError as `BoundStack.load`.
    """
    loads, seen = _loads(blocks, stacks)
    scores: list[StackScore] = []
    for number, bound in enumerate(stacks):
        load, optimum = loads[id(blocks[number]), id(bound)]
        score = StackScore(load, optimum, layer_metrics(load, optimum, bound.has_shared))
        if timing is not None:
            stack = bound.stack if timed_as is None else timed_as[number]
            first_us = scores[0].step_us if scores else None
            times = timed_metrics(timing, load, stack, bound.copies.redundant, bound.has_shared, first_us)
            values, step_us, phases = times
            score = dataclasses.replace(score, metrics={**score.metrics, **values}, step_us=step_us, phases=phases)
        scores.append(score)
    return BlockScore(scores, seen)


def _loads(blocks: Sequence[Block], stacks: Sequence[BoundStack]) -> tuple[dict[tuple[int, int], _Solved], SeenSteps]:
    """The load and the optimum, by the ids of block and stack, and the recorded steps."""
    # Stacks with the same tokens share their counts. A router that acts changes the tokens, so its stack stands alone.
    groups: dict[tuple[int, int], list[BoundStack]] = {}
    for block, bound in zip(blocks, stacks, strict=True):
        bound.check_level(block)
        group = groups.setdefault((id(block), id(bound) if bound.stack.router.acts else 0), [])
        if bound not in group:
            group.append(bound)
    by_id = {id(block): block for block in blocks}
    solved: dict[tuple[int, int], _Solved] = {}
    seen: list[SeenSteps] = []
    for (block_id, router), members in groups.items():
        block, kept_mass = by_id[block_id], None
        if router:
            assert isinstance(block, TokenBlock)
            routed = members[0].rerouted(block)
            block, kept_mass = routed.block, routed.kept_mass
        parts: list[list[_Solved]] = [[] for _ in members]
        first_seen = not router and block is blocks[0]
        for part in members[0].counted(block):
            for scored, pair in zip(parts, _part_loads(part, members), strict=True):
                scored.append(pair)
            if first_seen:
                seen.append(seen_steps(part.counts.numpy(), part.assignments.numpy()))
        for bound, pairs in zip(members, parts, strict=True):
            load, optimum = joined([load for load, _ in pairs]), torch.cat([optimum for _, optimum in pairs])
            load = load if kept_mass is None else dataclasses.replace(load, kept_mass=kept_mass)
            solved[block_id, id(bound)] = load, optimum
    if not seen:  # every stack has a router that acts
        seen = [seen_steps(part.counts.numpy(), part.assignments.numpy()) for part in stacks[0].counted(blocks[0])]
    return solved, SeenSteps.joined(seen)


def _part_loads(part: CountedSteps, stacks: Sequence[BoundStack]) -> list[_Solved]:
    """The load and the optimum of each stack. Optima come last, because splits may have solved the same problem."""
    views = {id(bound.copies): bound.copies.remembering() for bound in stacks}
    loads = [bound.load_of(part, views[id(bound.copies)]) for bound in stacks]
    return [(load, views[id(bound.copies)].optimum(part.counts)) for load, bound in zip(loads, stacks, strict=True)]
