"""The times of chosen steps under each candidate. Every placement is planned only on steps before those that it
serves.

The placement of a candidate planned once is planned on all steps before the scored part. A candidate that rebalances
every I steps always has the placement planned on the I steps before its last rebalance, as in serving. The cost of a
rebalance is spread over the I steps that follow it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from epsim.cost.layer_time import LayerTiming
from epsim.parallel import in_parallel
from epsim.placement.base import Cluster, Placement
from epsim.planning import planned_as
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.copies import Copies
from epsim.policies.load import Load
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.score.block import StackScore, score_block
from epsim.score.statistics import Floats
from epsim.score.steps import SeenSteps
from epsim.traces.select import take_steps
from epsim.traces.store import StoredTrace
from epsim.traces.trace import Block, Ints, TraceMeta
from epsim.tuning.candidates import Candidate
from epsim.tuning.gains import Interval, throughput_gain
from epsim.tuning.migration import Migration, migration
from epsim.tuning.steps import WindowSums, chosen_blocks

ChangeBlock = Callable[[Block], Block]
OnScore = Callable[[Candidate, BoundStack, StackScore, SeenSteps], None]
"""Called with a candidate, its bound stack, its score on successive steps, and the facts about these steps."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A trace and the cluster to tune for.

    meta: of the trace, regrouped to the cluster's ranks. base: the cluster without redundant experts. sums: the counts
    that placements are planned on. layer_ms: host work of a rebalance per layer. tokens_a_step: mean tokens per step.
    """

    trace: StoredTrace
    meta: TraceMeta
    base: Cluster
    timing: LayerTiming
    setting: Setting
    sums: WindowSums
    layer_ms: float
    tokens_a_step: float
    _plans: dict[tuple[object, int, int, int], Placement] = field(default_factory=dict)

    def cluster(self, redundant: int) -> Cluster:
        """The cluster with `redundant` redundant experts per layer."""
        return dataclasses.replace(self.base, num_redundant=redundant)

    def plan(self, stack: PolicyStack, redundant: int, first: int, last: int, keep: bool) -> Placement:
        """A placement planned on steps first..last-1. keep: whether to keep it for later calls."""
        key = (planned_as(stack), redundant, first, last)
        placement = self._plans.get(key)
        if placement is None:
            placement = self.sums.plan(stack, self.cluster(redundant), first, last)
            if keep:
                self._plans[key] = placement
        return placement

    def gain(self, ours: Floats, theirs: Floats) -> Interval:
        """The throughput gain of ours over theirs, for step times of the same steps."""
        return throughput_gain(ours, theirs, self.setting.seed, self.base.num_ranks)

    def tokens(self, step_indices: Ints) -> Floats:
        """[n]: the number of tokens of each of these steps."""
        tokens: Floats = self.sums.by_step[step_indices] / (self.meta.num_layers * self.meta.top_k)
        return tokens

    def in_order(self, redundant: int) -> Placement:
        """The placement with experts in order, with which serving systems start."""
        return self.plan(parse_stack("contiguous"), redundant, 0, int(self.sums.bounds[1]), True)


@dataclass(frozen=True, slots=True)
class Part:
    """Steps first..last-1, which are scored; placements may be planned on all steps before `first`."""

    first: int
    last: int

    def segment(self, step: int, interval: int | None) -> int:
        """The number of rebalances between the start of the part and a step."""
        return 0 if interval is None else (step - self.first) // interval

    def bounds(self, intervals: Sequence[int]) -> list[int]:
        """The steps at which the windows that placements are planned on begin and end."""
        edges = {self.first, self.last}
        for interval in intervals:
            edges |= set(range(self.first - interval, self.last, interval))
        return sorted(edge for edge in edges if edge >= 0)


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one candidate on the chosen steps.

    step_us [n]: the time of each step with its share of a rebalance, NaN for a step without tokens. migration: the mean
    cost of a rebalance; None if the candidate is planned once.
    """

    step_us: Floats
    migration: Migration | None

    @property
    def mean_us(self) -> float:
        return float(np.nanmean(self.step_us))


class _Walk:
    """The candidates that share a placement, which is planned once or at intervals, on the steps of a part in order."""

    def __init__(self, problem: Problem, part: Part, layers: Sequence[int] | None, candidates: list[Candidate]) -> None:
        self.problem, self.part, self.layers, self.candidates = problem, part, layers, candidates
        self.interval = candidates[0].interval
        self.stack, self.redundant = candidates[0].stack, candidates[0].redundant
        self.costs: dict[int, Migration] = {}
        self.segments: list[Ints] = []
        self.step_us: dict[Candidate, list[Floats]] = {candidate: [] for candidate in candidates}
        self._now = -1
        self._placement: Placement | None = None
        self._bound: dict[PolicyStack, BoundStack] = {}

    def score(self, step_indices: Ints, block: Block, on_score: OnScore | None) -> None:
        """Scores the next steps, whose numbers in the trace are `step_indices` (ascending)."""
        segments = np.array([self.part.segment(int(index), self.interval) for index in step_indices])
        for segment in np.unique(segments):
            self._go_to(int(segment))
            part = take_steps(block, segments == segment)
            if on_score is None:
                self._time(part)
            else:
                self._score(part, on_score)
        self.segments.append(segments)

    def _time(self, block: Block) -> None:
        timing = self.problem.timing
        loads = {stack: bound.load(block) for stack, bound in self._bound.items()}
        for candidate in self.candidates:
            load, redundant = loads[candidate.stack], self._bound[candidate.stack].copies.redundant
            layer_us = timing.layer_us(load, candidate.shown_stack, redundant)
            self._add_times(candidate, load, timing.step_us(layer_us, load.tokens, load.routed.shape[-1]))

    def _score(self, block: Block, on_score: OnScore) -> None:
        stacks = [self._bound[candidate.stack] for candidate in self.candidates]
        timed_as = [candidate.shown_stack for candidate in self.candidates]
        scored = score_block([block] * len(stacks), stacks, self.problem.timing, timed_as)
        for candidate, bound, score in zip(self.candidates, stacks, scored.stacks, strict=True):
            assert score.step_us is not None
            self._add_times(candidate, score.load, score.step_us)
            on_score(candidate, bound, score, scored.seen)

    def _add_times(self, candidate: Candidate, load: Load, step_us: torch.Tensor) -> None:
        busy = (load.assignments > 0).any(-1)
        self.step_us[candidate].append(torch.where(busy, step_us, torch.nan).numpy())

    def times(self) -> dict[Candidate, Times]:
        mean: Migration | None = None
        share: Floats = np.zeros(1)
        if self.interval is not None:
            segments = np.concatenate(self.segments)
            costs, first = self.costs, int(segments[0])
            # The first rebalance starts from experts in order, so it counts like the others, if there are any.
            if others := [cost for segment, cost in costs.items() if segment != first]:
                costs = costs | {first: _mean(others)}
            share = np.array([costs[int(segment)].us for segment in segments]) / self.interval
            mean = _mean(list(costs.values()))
        return {candidate: Times(np.concatenate(parts) + share, mean) for candidate, parts in self.step_us.items()}

    def _go_to(self, segment: int) -> None:
        if segment == self._now:
            return
        problem = self.problem
        last = self.part.first if self.interval is None else self.part.first + segment * self.interval
        first = 0 if self.interval is None else last - self.interval
        placement = problem.plan(self.stack, self.redundant, first, last, self.interval is None)
        if self.interval is not None:
            before = self._placement
            if before is None:
                before = problem.in_order(self.redundant)
            timing = problem.timing
            self.costs[segment] = migration(before, placement, timing.hardware, timing.model, problem.layer_ms)
        self._now, self._placement = segment, placement
        taken, layers = placement, problem.meta.layers
        if self.layers is not None:
            slots = placement.physical_to_logical[list(self.layers)]
            taken = Placement(slots, placement.num_experts, placement.num_ranks, placement.num_nodes)
            layers = tuple(layers[layer] for layer in self.layers)
        setting = dataclasses.replace(problem.setting, layers=layers)
        copies: dict[str, Copies] = {}
        self._bound = {candidate.stack: bind(candidate.stack, taken, setting, copies) for candidate in self.candidates}


def score(
    problem: Problem,
    candidates: Sequence[Candidate],
    part: Part,
    step_indices: Ints,
    layers: Sequence[int] | None = None,
    on_score: OnScore | None = None,
    changed: ChangeBlock = lambda block: block,
    blocks: Iterable[tuple[Ints, Block]] | None = None,
) -> dict[Candidate, Times]:
    """Scores the candidates on the steps `step_indices` of the part (ascending).

    layers: indices of the layers to score; None for all. on_score: called for successive steps in order, from several
    threads for several placements. changed: changes the steps before they are scored, but not those that placements are
    planned on. blocks: the steps, if `chosen_blocks` has read them before.
    """
    groups: dict[tuple[object, int, int | None], list[Candidate]] = {}
    for candidate in candidates:
        key = (planned_as(candidate.stack), candidate.redundant, candidate.interval)
        groups.setdefault(key, []).append(candidate)
    walks = [_Walk(problem, part, layers, group) for group in groups.values()]
    if not walks:
        return {}
    if blocks is None:
        blocks = chosen_blocks(problem.trace, step_indices, layers, problem.base.num_ranks)
    for steps, block in blocks:
        block = changed(block)
        for _ in in_parallel(lambda walk: walk.score(steps, block, on_score), walks):  # noqa: B023
            pass
    times = {candidate: times for walk in walks for candidate, times in walk.times().items()}
    return {candidate: times[candidate] for candidate in candidates}


def _mean(costs: Sequence[Migration]) -> Migration:
    return Migration(*(float(np.mean([getattr(cost, name) for cost in costs])) for name in ("us", "bytes_moved")))
