"""The entry of one stack in results.json, gathered block by block from replayed or measured loads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch

from epsim.policies.stack import PolicyStack
from epsim.score.block import StackScore
from epsim.score.detail import StackDetail
from epsim.score.formulas import METRICS
from epsim.score.statistics import Floats, Series, add_in_order, difference
from epsim.score.verdict import best_of, label

STATISTICS = ("mean", "p50", "p95", "p99", "max")


class StackSummary:
    """Gathers the metrics of one stack over `num_steps` steps, block by block."""

    def __init__(self, name: str, stack: PolicyStack, notes: Sequence[str], num_steps: int) -> None:
        self.name, self.stack, self.notes = name, stack, tuple(notes)
        self.detail = StackDetail(num_steps)
        self.series: dict[str, Series] = {}
        self.reasons: dict[str, str] = {}
        self.phases: dict[str, Series] = {}
        self._layer_sums: Floats | None = None
        self._rank_sums: Floats | None = None

    def add(self, score: StackScore) -> None:
        """Adds the next block of steps."""
        for phase, us in score.phases.items():
            self.phases.setdefault(phase, Series()).add(us.numpy())
        for key, value in score.metrics.items():
            if isinstance(value, str):
                self.reasons[key] = value
            else:
                exact = METRICS[key.removeprefix("routed_")].unit == "assignments"
                self.series.setdefault(key, Series(exact)).add(value.numpy())
        total = score.load.total.double()
        max_over_mean = score.metrics["max_over_mean"]
        assert isinstance(max_over_mean, torch.Tensor)
        over_mean = (total / total.mean(-1, keepdim=True)).nan_to_num().numpy().sum(1)  # [S, R], summed over layers
        if self._layer_sums is None or self._rank_sums is None:
            self._layer_sums, self._rank_sums = np.zeros((2, total.shape[1])), np.zeros(total.shape[2])
        layers = torch.stack((max_over_mean.nan_to_num(), (~max_over_mean.isnan()).double()), 1).numpy()
        add_in_order(self._layer_sums[None], repeat(0), layers)
        add_in_order(self._rank_sums[None], repeat(0), over_mean)
        self.detail.add(score.metrics, total, score.load.tokens)

    def entry(self, first: StackSummary, seed: int) -> dict[str, Any]:
        """The stack's entry. first: the stack that it is compared with; seed: of the bootstrap."""
        num_ranks = 1 if self._rank_sums is None else len(self._rank_sums)
        metrics: dict[str, Any] = {}
        versus_first: dict[str, Any] = {}
        for key in (*self.series, *self.reasons):
            metric = METRICS[key.removeprefix("routed_")]
            summary = self.series[key].summary() if key in self.series else None
            if summary is None:
                reason = self.reasons.get(key, "no step has tokens")
                metrics[key] = dict.fromkeys(STATISTICS) | {"unit": metric.unit, "reason": reason}
                continue
            metrics[key] = summary | {"unit": metric.unit}
            if key in first.series:
                interval = difference(self.series[key], first.series[key], seed)
                versus_first[key] = metric.within(interval, summary["mean"], num_ranks)
        entry: dict[str, Any] = {"stack": str(self.stack)} | ({"name": self.name} if self.name else {})
        entry |= {"metrics": metrics, "versus_first": versus_first}
        if self._layer_sums is not None and self._rank_sums is not None:
            sums, counts = self._layer_sums.tolist()
            entry["max_over_mean_by_layer"] = [s / n if n else None for s, n in zip(sums, counts, strict=True)]
            num_loads = max(float(self._layer_sums[1].sum()), 1.0)
            entry["load_over_mean_by_rank"] = (self._rank_sums / num_loads).tolist()
            entry |= self.detail.entry(self.series["max_over_mean"].values)
        if self.phases:
            of_phases = ((phase, series.summary()) for phase, series in self.phases.items())
            entry["phases_us"] = {phase: summary for phase, summary in of_phases if summary is not None}
        entry["notes"] = list(self.notes)
        return entry


def tied_with_best(entries: Sequence[dict[str, Any]], summaries: Sequence[StackSummary], seed: int) -> list[str]:
    """The names of the stacks that these steps cannot separate from the best one."""
    index = best_of(entries)
    if index is None:
        return []
    best, tied = summaries[index], []
    for entry, summary in zip(entries, summaries, strict=True):
        low = difference(summary.series["max_over_mean"], best.series["max_over_mean"], seed)["low"]
        if summary is not best and low is not None and low <= 0:
            tied.append(label(entry))
    return tied
