"""The search. A first round scores all candidates on a few steps. Each later round scores fewer candidates on more
steps.

This is successive halving (Jamieson and Talwalkar 2016, "Non-stochastic best arm identification") on paired steps: all
candidates of a round are scored on the same steps, evenly spaced over the part of the trace used for choosing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from epsim.traces.trace import Ints
from epsim.tuning.candidates import Candidate
from epsim.tuning.ideal import ideal_us
from epsim.tuning.scorer import Part, Problem, Times, score
from epsim.tuning.steps import evenly

CandidateFilter = Callable[[Candidate], bool]
"""Whether a system can run a candidate."""
Cost = Callable[[Candidate], tuple[float, int, float, str]]
"""What a candidate costs besides time: memory, complexity, rebalances per step, and its name as a tie-break. If several
candidates take the same time, the one with the lowest cost is preferred."""

PAIR_US = {"counts": 9.0, "rank_counts": 300.0, "tokens": 300.0}
"""Estimated microseconds of one core to score one layer of one step under one candidate, by the level of the trace."""
TOKEN_US = 0.65
"""The same for each token of the step, at token level. The sizes of rounds are computed from these estimates, so they
do not depend on a clock."""
ROUND_US = 45e6
"""Core time of one round for all its candidates. A round has at least LEAST_STEPS steps of LEAST_LAYERS layers."""
FIRST_STEPS = {"counts": 48, "rank_counts": 48, "tokens": 24}
LEAST_STEPS, LEAST_LAYERS = 4, 2
GROWTH, KEPT = 4, 3
"""A round has GROWTH times as many steps as the round before it, and 1/KEPT of the candidates."""
LEAST_KEPT = 6


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """The step times of a round's candidates, the steps in the trace, and the number of layers."""

    times: Mapping[Candidate, Times]
    step_indices: Ints
    num_layers: int

    @property
    def num_steps(self) -> int:
        return len(self.step_indices)


def race(
    problem: Problem,
    candidates: Sequence[Candidate],
    part: Part,
    filters: Sequence[CandidateFilter],
    cost: Cost,
    worth: float,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Round]:
    """Runs rounds until all steps of the part are scored, or as many as ROUND_US allows.

    filters: one for each answer. The best candidates of each filter reach the next round. The baseline (the first
    candidate) always does. A candidate that rebalances takes along the same candidate planned once.
    """
    rounds: list[Round] = []
    total = part.last - part.first
    remaining, steps = list(candidates), FIRST_STEPS[problem.meta.level]
    while True:
        num_steps, num_layers = affordable(problem, len(remaining), min(steps, total))
        layers = None if num_layers == problem.meta.num_layers else _layers(problem, num_layers)
        step_indices = evenly(part.first, part.last, num_steps)
        times = score(problem, [c for c in remaining if c.interval is None], part, step_indices, layers)
        rebalancing = [c for c in remaining if c.interval is not None]
        if not rounds:
            rebalancing = _worth_scoring(problem, rebalancing, times, filters, step_indices, layers)
        times |= score(problem, rebalancing, part, step_indices, layers)
        rounds.append(Round(times, step_indices, num_layers))
        progress(num_steps / total)
        all_scored = num_steps == total and num_layers == problem.meta.num_layers
        limited = len(rounds) > 1 and num_steps <= rounds[-2].num_steps and num_layers <= rounds[-2].num_layers
        if all_scored or limited:
            return rounds
        most = max(len(remaining) // KEPT, LEAST_KEPT)
        kept = survivors(problem, times, filters, cost, worth, most)
        remaining = [candidate for candidate in times if candidate in kept or candidate == candidates[0]]
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
    problem: Problem,
    times: Mapping[Candidate, Times],
    filters: Sequence[CandidateFilter],
    cost: Cost,
    worth: float,
    most: int,
) -> set[Candidate]:
    """The candidates of the next round. For each filter these are the fastest `most` candidates that are not clearly
    slower than the fastest one, and the cheapest of them. A candidate that rebalances adds the same one planned once.
    """
    kept: set[Candidate] = set()
    for can_run in filters:
        members = {candidate: scored for candidate, scored in times.items() if can_run(candidate)}
        if not members:
            continue
        equal = not_slower(problem, members, worth)
        kept |= set(sorted(equal, key=lambda candidate: (members[candidate].mean_us, cost(candidate)))[:most])
        kept.add(min(equal, key=cost))
    return kept | {candidate.planned_once for candidate in kept if candidate.planned_once in times}


def not_slower(problem: Problem, times: Mapping[Candidate, Times], worth: float) -> list[Candidate]:
    """The candidates that are not clearly slower than the fastest one, or slower by at most `worth`."""
    fastest = min(times, key=lambda candidate: times[candidate].mean_us)
    kept = []
    for candidate, scored in times.items():
        gain = problem.gain(times[fastest].step_us, scored.step_us)
        if candidate == fastest or gain.low is None or gain.low <= 0 or gain.mean <= worth:
            kept.append(candidate)
    return kept


def _worth_scoring(
    problem: Problem,
    rebalancing: list[Candidate],
    planned_once: Mapping[Candidate, Times],
    filters: Sequence[CandidateFilter],
    step_indices: Ints,
    layers: Sequence[int] | None,
) -> list[Candidate]:
    """The candidates that could become faster than those planned once. The others rebalance so often that the host work
    alone takes more time than perfect balance could save."""
    if not rebalancing:
        return []
    lowest_us = float(np.nanmean(ideal_us(problem, step_indices, layers)))
    fastest_us = [min(times.mean_us for c, times in planned_once.items() if can_run(c)) for can_run in filters]
    work_us = problem.layer_ms * 1e3 * problem.timing.model.moe_layers
    return [c for c in rebalancing if c.interval is not None and lowest_us + work_us / c.interval < max(fastest_us)]


def _layers(problem: Problem, number: int) -> list[int]:
    return [int(layer) for layer in evenly(0, problem.meta.num_layers, number)]
