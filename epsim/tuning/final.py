"""The finalists on the steps held out: the entries of results.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epsim.kernels.split import SplitStructure, prepare
from epsim.planning import to_counts
from epsim.policies.apply import BoundStack
from epsim.policies.copies import Copies
from epsim.policies.load import Load
from epsim.replaying import least_peak
from epsim.score.metrics import layer_metrics
from epsim.score.statistics import BlockBootstrap, Series
from epsim.score.steps import ScoredSteps
from epsim.score.summary import StackSummary
from epsim.score.time_metrics import timed_metrics
from epsim.traces.trace import Block, Ints
from epsim.tuning.candidates import Candidate
from epsim.tuning.scorer import Floats, Part, Problem, Times, score

GAIN = "throughput_gain"


class Finals:
    """entries: of results.json, the first candidate being what the others are compared with. times: of each."""

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        part: Part,
        places: Ints,
        notes: Callable[[Candidate], Sequence[str]],
    ) -> None:
        self._problem = problem
        self._counts: Ints = np.empty(0, dtype=np.int64)
        self.scored = ScoredSteps()
        self._summaries = {
            candidate: StackSummary(
                candidate.name, candidate.shown_stack, _notes(problem, candidate, notes), len(places)
            )
            for candidate in candidates
        }
        self.times: dict[Candidate, Times] = score(problem, candidates, part, places, None, self._on_load, self._seen)
        base = self.times[candidates[0]].step_us
        for candidate, summary in self._summaries.items():
            gain = Series()
            gain.add(base / self.times[candidate].step_us - 1)
            summary.series[GAIN] = gain
            summary.reasons.pop(GAIN)
        bootstrap = BlockBootstrap(len(places), problem.setting.seed)
        first = self._summaries[candidates[0]]
        self.entries: list[dict[str, Any]] = [summary.entry(bootstrap, first) for summary in self._summaries.values()]
        self.described = self.scored.entry(first.detail.stretches)

    def layer_us(self, candidate: Candidate) -> Floats:
        """[n]: mean over layers of each step's, NaN for a step without tokens."""
        series = self._summaries[candidate].series["layer_time_us"]
        with np.errstate(invalid="ignore"):
            per_step: Floats = series.step_sums / series.step_counts
        return per_step

    def _seen(self, block: Block) -> Block:
        self._counts = to_counts(block, self._problem.meta.num_experts).counts
        self.scored.add(self._counts)
        return block

    def _on_load(self, candidate: Candidate, bound: BoundStack, load: Load, chosen: npt.NDArray[np.bool_]) -> None:
        counts = load.counts if load.counts is not None else torch.from_numpy(self._counts[chosen])
        optimum = least_peak(bound.copies.once(_structure), counts, bound.setting.backend)
        metrics = layer_metrics(load, optimum, bound.has_shared)
        timing, redundant, stack = self._problem.timing, bound.copies.redundant, candidate.timed_as
        timed, _, phases = timed_metrics(timing, load, stack, redundant, bound.has_shared, None)
        # A gain needs the other stack's times, and what rebalances cost: it is filled in at the end.
        metrics |= timed | {GAIN: "filled in at the end"}
        summary = self._summaries[candidate]
        summary.notes = tuple(dict.fromkeys((*summary.notes, *bound.notes)))
        summary.add(metrics, load.total.double(), load.tokens, phases)


def _structure(copies: Copies) -> SplitStructure:
    placement = copies.placement
    return prepare(placement.physical_to_logical, placement.num_ranks, placement.num_experts)


def _notes(problem: Problem, candidate: Candidate, more: Callable[[Candidate], Sequence[str]]) -> tuple[str, ...]:
    cluster = problem.cluster(candidate.redundant)
    found = [*candidate.stack.placement.notes(problem.meta.num_experts, cluster), *more(candidate)]
    if candidate.charged is not None:
        found.append(
            f"scored as {candidate.stack}, which solves the same problem exactly, and charged as {candidate.charged}"
        )
    return tuple(found)
