"""The search: a first round scores all candidates on a few steps, and each later round fewer candidates on more steps.

This is successive halving (Jamieson and Talwalkar 2016, "Non-stochastic best arm identification") on paired steps: all
candidates of a round are scored on the same steps, evenly spaced over the part of the trace used for choosing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from epsim.score.statistics import Floats, paired_difference
from epsim.traces.trace import Ints
from epsim.tuning.candidates import Candidate
from epsim.tuning.ideal import ideal_us
from epsim.tuning.scorer import Part, Problem, Times, score
from epsim.tuning.steps import evenly

Class = Callable[[Candidate], bool]
Cost = Callable[[Candidate], tuple[float, int, float, str]]
"""What a candidate costs besides time: memory, complexity, rebalances per step, and its name as a tie-break. Of
candidates with equal times the one with the lowest cost is preferred."""

PAIR_US = {"counts": 9.0, "rank_counts": 300.0, "tokens": 300.0}
TOKEN_US = 0.65
"""Estimated microseconds of one core for a (step, layer) under one candidate, by the trace's level, and for each token
at token level. The sizes of the rounds are computed from them, so they do not depend on a clock."""
ROUND_US = 45e6
"""Core time of one round, all candidates together. A round has at least LEAST_STEPS steps and LEAST_LAYERS layers."""
FIRST_STEPS = {"counts": 48, "rank_counts": 48, "tokens": 24}
LEAST_STEPS, LEAST_LAYERS = 4, 2
GROWTH, KEPT = 4, 3
"""A round has GROWTH times the steps of the round before, and 1/KEPT of its candidates."""
LEAST_KEPT = 6


@dataclass(frozen=True, slots=True)
class Interval:
    """A relative difference: its mean, and its 95% interval, None if there are too few steps for one."""

    mean: float
    low: float | None
    high: float | None

    @property
    def tells(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def gain(self) -> Interval:
        """From a relative difference of step times to that of throughput (tokens per second)."""
        low, high = (None if x is None else _inverse(x) for x in (self.high, self.low))
        return Interval(_inverse(self.mean), low, high)


@dataclass(frozen=True, slots=True)
class Round:
    """The step times of a round's candidates, and its number of steps and layers."""

    times: Mapping[Candidate, Times]
    num_steps: int
    num_layers: int


def change(ours: Floats, theirs: Floats, seed: int) -> Interval:
    """Ours minus theirs, over the mean of theirs: step times [n] of the same steps, NaN for those without tokens."""
    paired = paired_difference(np.nan_to_num(ours) - np.nan_to_num(theirs), (~np.isnan(ours)).astype(float), seed)
    base = float(np.nanmean(theirs))
    low, high = (None if end is None else end / base for end in (paired["low"], paired["high"]))
    return Interval((paired["difference"] or 0.0) / base, low, high)


def race(
    problem: Problem,
    candidates: Sequence[Candidate],
    part: Part,
    classes: Sequence[Class],
    cost: Cost,
    worth: float,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Round]:
    """Runs rounds until all steps of the part are scored, or as many as ROUND_US allows.

    classes: the best candidates of each class survive a round. The baseline (the first candidate) always survives, and
    with a candidate that rebalances the same one planned once.
    """
    rounds: list[Round] = []
    total = part.last - part.first
    left, steps = list(candidates), FIRST_STEPS[problem.meta.level]
    while True:
        num_steps, num_layers = affordable(problem, len(left), min(steps, total))
        layers = None if num_layers == problem.meta.num_layers else _layers(problem, num_layers)
        places = evenly(part.first, part.last, num_steps)
        times = score(problem, [c for c in left if c.interval is None], part, places, layers)
        rebalancing = [c for c in left if c.interval is not None]
        if not rounds:
            rebalancing = _hopeful(problem, rebalancing, times, classes, places, layers)
        times |= score(problem, rebalancing, part, places, layers)
        rounds.append(Round(times, len(places), num_layers))
        progress(num_steps / total)
        enough = num_steps == total and num_layers == problem.meta.num_layers
        limited = len(rounds) > 1 and num_steps <= rounds[-2].num_steps and num_layers <= rounds[-2].num_layers
        if enough or limited:
            return rounds
        fewer = survivors(
            rounds[-1].times, classes, cost, worth, max(len(left) // KEPT, LEAST_KEPT), problem.setting.seed
        )
        left = [candidate for candidate in times if candidate in fewer or candidate == candidates[0]]
        steps = num_steps * GROWTH


def affordable(problem: Problem, num_candidates: int, most_steps: int) -> tuple[int, int]:
    """The number of steps and layers of a round: all layers if ROUND_US allows."""
    layers = problem.meta.num_layers
    pairs = ROUND_US / (pair_us(problem) * num_candidates)
    few = min(most_steps, LEAST_STEPS)
    num_layers = int(min(layers, max(pairs // most_steps, LEAST_LAYERS)))
    return int(min(most_steps, max(pairs // num_layers, few))), num_layers


def pair_us(problem: Problem) -> float:
    """Estimated core time of a (step, layer) under one candidate."""
    level = problem.meta.level
    return PAIR_US[level] + (TOKEN_US * problem.tokens_a_step if level == "tokens" else 0.0)


def survivors(
    times: Mapping[Candidate, Times], classes: Sequence[Class], cost: Cost, worth: float, most: int, seed: int
) -> set[Candidate]:
    """The candidates of the next round: of each class the fastest `most` that are not clearly slower than its fastest,
    and the cheapest of those; for each that rebalances also the same one planned once."""
    kept: set[Candidate] = set()
    for belongs in classes:
        members = {candidate: own_times for candidate, own_times in times.items() if belongs(candidate)}
        if not members:
            continue
        alike = not_worse(members, worth, seed)
        kept |= set(sorted(alike, key=lambda candidate: (members[candidate].mean_us, cost(candidate)))[:most])
        kept.add(min(alike, key=cost))
    return kept | {candidate.planned_once for candidate in kept if candidate.planned_once in times}


def not_worse(times: Mapping[Candidate, Times], worth: float, seed: int) -> list[Candidate]:
    """The candidates that are not clearly slower than the fastest, or slower by at most `worth`."""
    fastest = min(times, key=lambda candidate: times[candidate].mean_us)
    kept = []
    for candidate, own_times in times.items():
        slower = change(own_times.step_us, times[fastest].step_us, seed)
        if candidate == fastest or slower.low is None or slower.low <= 0 or slower.mean <= worth:
            kept.append(candidate)
    return kept


def _hopeful(
    problem: Problem,
    rebalancing: list[Candidate],
    once: Mapping[Candidate, Times],
    classes: Sequence[Class],
    places: Ints,
    layers: Sequence[int] | None,
) -> list[Candidate]:
    """The candidates that could become faster than those planned once. The others rebalance so often that the host work
    alone takes more time than perfect balance could save."""
    if not rebalancing:
        return []
    least = float(np.nanmean(ideal_us(problem, places, layers)))
    fastest = [min(times.mean_us for c, times in once.items() if belongs(c)) for belongs in classes]
    work_us = problem.layer_ms * 1e3 * problem.timing.model.moe_layers
    return [c for c in rebalancing if c.interval is not None and least + work_us / c.interval < max(fastest)]


def _layers(problem: Problem, number: int) -> list[int]:
    return [int(layer) for layer in evenly(0, problem.meta.num_layers, number)]


def _inverse(change: float) -> float:
    return 1 / (1 + change) - 1
