"""The search: all candidates on a few steps, ever fewer on ever more, those told to be worse leaving first.

Successive halving (Jamieson and Talwalkar 2016, "Non-stochastic best arm identification") on paired steps: every round
scores its candidates on the same steps, evenly spaced over the part that is chosen on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from epsim.score.statistics import BlockBootstrap, Floats, Series
from epsim.traces.trace import Ints
from epsim.tuning.candidates import Candidate
from epsim.tuning.ideal import ideal_us
from epsim.tuning.scorer import Part, Problem, Times, score
from epsim.tuning.steps import evenly

Class = Callable[[Candidate], bool]
Cost = Callable[[Candidate], tuple[float, int, float, str]]
"""What a candidate costs besides time: memory, complexity, rebalances a step, and its name to settle ties; less is
preferred where times are alike."""

PAIR_US = {"counts": 9.0, "rank_counts": 300.0, "tokens": 300.0}
TOKEN_US = 0.65
"""A core's microseconds for a (step, layer) under one candidate by the trace's level, and for each of its tokens where
they are looked at: what the sizes of the rounds reckon with. Rounded figures of this project's machine; rounds never
depend on a clock."""
ROUND_US = 45e6
"""Of one round, all candidates together, as far as the least steps and layers allow."""
FIRST_STEPS = {"counts": 48, "rank_counts": 48, "tokens": 24}
LEAST_STEPS, LEAST_LAYERS = 4, 2
GROWTH, KEPT = 4, 3
"""A round has GROWTH times the steps of the last and 1/KEPT of its candidates."""
LEAST_KEPT = 6


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference of step times as a share of the other's: mean, and a 95% interval, None where it cannot be told."""

    mean: float
    low: float | None
    high: float | None

    @property
    def tells(self) -> bool:
        """Whether it excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def gain(self) -> Interval:
        """Of step times -> of throughput: tokens a second over the other's, minus 1."""
        low, high = (None if x is None else _inverse(x) for x in (self.high, self.low))
        return Interval(_inverse(self.mean), low, high)


@dataclass(frozen=True, slots=True)
class Round:
    """What a round scored: candidates, at so many steps and layers."""

    times: Mapping[Candidate, Times]
    num_steps: int
    num_layers: int


def change(ours: Floats, theirs: Floats, seed: int) -> Interval:
    """Ours minus theirs, over the mean of theirs: step times [n] of the same steps, NaN for those without tokens."""
    first, second = Series(), Series()
    first.add(ours)
    second.add(theirs)
    found = BlockBootstrap(len(ours), seed).difference(first, second)
    base = float(np.nanmean(theirs))
    low, high = found["low"], found["high"]
    difference = found["difference"]
    assert difference is not None
    return Interval(difference / base, None if low is None else low / base, None if high is None else high / base)


def race(
    problem: Problem,
    candidates: Sequence[Candidate],
    part: Part,
    classes: Sequence[Class],
    cost: Cost,
    worth: float,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Round]:
    """Rounds until all steps of the part are scored, or as many as can be afforded; the last has the survivors.

    classes: of each, the best survive. The baseline (the first candidate) and, of a candidate that rebalances, the one
    planned once always do.
    """
    rounds: list[Round] = []
    total = part.last - part.first
    left, steps = list(candidates), FIRST_STEPS[problem.meta.level]
    while True:
        num_steps, num_layers = affordable(problem, len(left), min(steps, total))
        layers = None if num_layers == problem.meta.num_layers else _layers(problem, num_layers)
        places = evenly(part.first, part.last, num_steps)
        times = score(problem, [one for one in left if one.interval is None], part, places, layers)
        rebalancing = [one for one in left if one.interval is not None]
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
        left = [one for one in times if one in fewer or one == candidates[0]]
        steps = num_steps * GROWTH


def affordable(problem: Problem, num_candidates: int, most_steps: int) -> tuple[int, int]:
    """Steps and layers of a round: all layers if they can be afforded, else evenly spaced ones."""
    layers = problem.meta.num_layers
    pairs = ROUND_US / (pair_us(problem) * num_candidates)
    few = min(most_steps, LEAST_STEPS)
    num_layers = int(min(layers, max(pairs // most_steps, LEAST_LAYERS)))
    return int(min(most_steps, max(pairs // num_layers, few))), num_layers


def pair_us(problem: Problem) -> float:
    """Of one core, for a (step, layer) under one candidate."""
    level = problem.meta.level
    return PAIR_US[level] + (TOKEN_US * problem.tokens_a_step if level == "tokens" else 0.0)


def survivors(
    times: Mapping[Candidate, Times], classes: Sequence[Class], cost: Cost, worth: float, most: int, seed: int
) -> set[Candidate]:
    """Of each class the best, at most `most` of those that are not told to be worse than its best, and the cheapest
    of these; and what they would be without rebalancing."""
    kept: set[Candidate] = set()
    for belongs in classes:
        members = {candidate: own for candidate, own in times.items() if belongs(candidate)}
        if not members:
            continue
        alike = not_worse(members, worth, seed)
        kept |= set(sorted(alike, key=lambda candidate: (members[candidate].mean_us, cost(candidate)))[:most])
        kept.add(min(alike, key=cost))
    return kept | {candidate.planned_once for candidate in kept if candidate.planned_once in times}


def not_worse(times: Mapping[Candidate, Times], worth: float, seed: int) -> list[Candidate]:
    """Those that the steps do not tell to be slower than the fastest, or that are slower by less than `worth`."""
    fastest = min(times, key=lambda candidate: times[candidate].mean_us)
    found = []
    for candidate, own in times.items():
        slower = change(own.step_us, times[fastest].step_us, seed)
        if candidate == fastest or slower.low is None or slower.low <= 0 or slower.mean <= worth:
            found.append(candidate)
    return found


def _hopeful(
    problem: Problem,
    rebalancing: list[Candidate],
    once: Mapping[Candidate, Times],
    classes: Sequence[Class],
    places: Ints,
    layers: Sequence[int] | None,
) -> list[Candidate]:
    """Without those that rebalance so often that, for the host's work alone, even perfect balance would not make them
    faster than what is planned once."""
    if not rebalancing:
        return []
    least = float(np.nanmean(ideal_us(problem, places, layers)))
    fastest = [min(own.mean_us for one, own in once.items() if belongs(one)) for belongs in classes]
    work_us = problem.layer_ms * 1e3 * problem.timing.model.moe_layers
    return [one for one in rebalancing if one.interval is not None and least + work_us / one.interval < max(fastest)]


def _layers(problem: Problem, number: int) -> list[int]:
    return [int(place) for place in evenly(0, problem.meta.num_layers, number)]


def _inverse(change: float) -> float:
    return 1 / (1 + change) - 1
