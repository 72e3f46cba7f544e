"""The finalists on the held-out steps: their entries in results.json."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from epsim.placement.base import Target
from epsim.policies.apply import BoundStack
from epsim.score.block import StackScore
from epsim.score.collect import ScoredStacks
from epsim.score.statistics import Series
from epsim.score.steps import SeenSteps
from epsim.score.summary import StackSummary
from epsim.traces.trace import Ints
from epsim.tuning.candidates import Candidate
from epsim.tuning.scorer import Part, Problem, Times, score

GAIN = "throughput_gain"


class Finals:
    """The finalists' scores on the held-out steps, compared with those of the first candidate, the baseline.

    times: step times by candidate. results: the entries `scored` and `stacks` of results.json.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        part: Part,
        step_indices: Ints,
        notes: Callable[[Candidate], Sequence[str]],
    ) -> None:
        summaries = [
            StackSummary(candidate.name, candidate.shown_stack, _notes(problem, candidate, notes), len(step_indices))
            for candidate in candidates
        ]
        self._summaries = dict(zip(candidates, summaries, strict=True))
        self._collected = ScoredStacks(summaries, problem.setting.seed)
        self.times: dict[Candidate, Times] = score(problem, candidates, part, step_indices, on_score=self._on_score)
        self.step_indices = step_indices
        base = self.times[candidates[0]].step_us
        for candidate, summary in self._summaries.items():
            gain = Series()
            gain.add(base / self.times[candidate].step_us - 1)
            summary.series[GAIN] = gain
            summary.reasons.pop(GAIN)
        self.results = self._collected.results()
        for candidate, entry in zip(candidates, self.results["stacks"], strict=True):
            # The mean over steps would differ from the gain of all steps together, which the answers give.
            total = problem.gain(self.times[candidate].step_us, base)
            if GAIN in entry["versus_first"]:
                entry["metrics"][GAIN]["mean"] = total.mean
                entry["versus_first"][GAIN] = {"difference": total.mean, "low": total.low, "high": total.high}

    def layer_us(self, candidate: Candidate) -> float:
        """Mean time of a layer: first over the layers of each step, then over the steps with tokens."""
        series = self._summaries[candidate].series["layer_time_us"]
        with np.errstate(invalid="ignore"):
            return float(np.nanmean(series.step_sums / series.step_counts))

    def _on_score(self, candidate: Candidate, bound: BoundStack, score: StackScore, seen: SeenSteps) -> None:
        summary = self._summaries[candidate]
        summary.notes = tuple(dict.fromkeys((*summary.notes, *bound.notes)))
        # A gain compares with the first candidate's times, which are complete only after the last block.
        summary.add(dataclasses.replace(score, metrics={**score.metrics, GAIN: "not complete"}))
        if summary is self._collected.summaries[0]:  # the baseline is planned once, so it sees all steps in order
            self._collected.steps.add(seen)


def _notes(problem: Problem, candidate: Candidate, more: Callable[[Candidate], Sequence[str]]) -> tuple[str, ...]:
    target = Target(problem.cluster(candidate.redundant), problem.meta.layers, candidate.stack)
    notes = [*candidate.stack.placement.notes(problem.meta.num_experts, target), *more(candidate)]
    if candidate.charged is not None:
        notes.append(
            f"scored as {candidate.stack}, which solves the same problem exactly, and charged as {candidate.charged}"
        )
    return tuple(notes)
