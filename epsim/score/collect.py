"""The scores of all blocks gathered into a results.json's `stacks`, `scored` and `verdict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epsim.placement.base import Placement
from epsim.score.block import StackScore
from epsim.score.statistics import BlockBootstrap
from epsim.score.steps import ScoredSteps, SeenSteps, add_copies
from epsim.score.summary import StackSummary, tied_with_best
from epsim.score.verdict import verdict


class ScoredStacks:
    """Gathers the scores of several stacks over the same steps, block by block, in order.

    The first stack is the one that the others are compared with.
    """

    def __init__(self, summaries: Sequence[StackSummary], num_steps: int, seed: int) -> None:
        self.summaries, self.steps = list(summaries), ScoredSteps()
        self._bootstrap = BlockBootstrap(num_steps, seed)

    def add(self, scores: Sequence[StackScore], seen: SeenSteps) -> None:
        """One block's scores, one for each stack."""
        self.steps.add(seen)
        for summary, score in zip(self.summaries, scores, strict=True):
            summary.add(score)

    def results(self, placements: Sequence[Placement] = (), measured: bool = False) -> dict[str, Any]:
        """The entries `scored`, `stacks` and `verdict`.

        placements: of each stack, if none changes from step to step; the stacks' entries then name the ranks that hold
        the hottest experts. measured: whether a run has measured the loads.
        """
        entries = [summary.entry(self._bootstrap, self.summaries[0]) for summary in self.summaries]
        scored = self.steps.entry(self.summaries[0].detail.stretches)
        if placements:
            add_copies(entries, placements, scored)
        tied = tied_with_best(entries, self.summaries, self._bootstrap)
        return {"scored": scored, "stacks": entries, "verdict": verdict(entries, tied, measured)}
