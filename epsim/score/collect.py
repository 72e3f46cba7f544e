"""Gathers the scores of all blocks into the entries `stacks`, `scored` and `verdict` of results.json."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from epsim.placement.base import Placement
from epsim.score.block import StackScore
from epsim.score.statistics import Floats
from epsim.score.steps import ScoredSteps, SeenSteps, add_copies
from epsim.score.summary import StackSummary, tied_with_best
from epsim.score.time_metrics import about_long_steps
from epsim.score.verdict import verdict


class ScoredStacks:
    """Gathers the scores of several stacks over the same steps, block by block, in order. The others are compared with
    the first stack."""

    def __init__(self, summaries: Sequence[StackSummary], seed: int) -> None:
        self.summaries, self.steps, self._seed = list(summaries), ScoredSteps(), seed
        self._times: list[tuple[Floats, Floats]] = []

    def add(self, scores: Sequence[StackScore], seen: SeenSteps) -> None:
        """One block's scores, one for each stack."""
        self.steps.add(seen)
        for summary, score in zip(self.summaries, scores, strict=True):
            summary.add(score)
        if scores[0].step_us is not None:
            self._times.append((scores[0].step_us.numpy(), scores[0].load.tokens.amax(-1).numpy()))

    @property
    def warnings(self) -> list[str]:
        """About steps of the first stack that are too long for one forward pass."""
        step_us, tokens = (np.concatenate(parts) for parts in zip(*self._times)) if self._times else ((), ())
        return list(filter(None, [about_long_steps(np.array(step_us), np.array(tokens))]))

    def results(self, placements: Sequence[Placement] = (), measured: bool = False) -> dict[str, Any]:
        """The entries `scored`, `stacks` and `verdict`.

        placements: of each stack, if they stay the same in all steps; the entries then name the ranks that hold the
        hottest experts. measured: whether the loads were measured by a run.
        """
        entries = [summary.entry(self.summaries[0], self._seed) for summary in self.summaries]
        scored = self.steps.entry(self.summaries[0].detail.stretches)
        if placements:
            add_copies(entries, placements, scored)
        tied = tied_with_best(entries, self.summaries, self._seed)
        return {"scored": scored, "stacks": entries, "verdict": verdict(entries, tied, measured)}
