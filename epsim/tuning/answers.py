"""From what the search found to answers: what to run, what it gains and costs, and when it stops paying."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from epsim.engines import SYSTEMS
from epsim.engines.base import Setup, System, plan_command
from epsim.tuning import words
from epsim.tuning.candidates import Candidate
from epsim.tuning.conditions import FEWER, MORE, Condition, by_tokens, with_other_experts
from epsim.tuning.final import Finals
from epsim.tuning.memory import Memory
from epsim.tuning.migration import Migration, migration
from epsim.tuning.race import Interval, Round, change
from epsim.tuning.scorer import Part, Problem

MIGRATION_SHARE = 0.1
"""Of a placement's gain, what rebalances of a system that plans by itself, which only keep it, may cost."""


@dataclass(frozen=True, slots=True)
class Searched:
    """candidates: all, the baseline first. picked: the cheapest of the fastest of all, and of those that each of
    `epsim.engines.SYSTEMS` can run. rebalanced: the fastest that rebalances. choose, report: the steps chosen on and
    those held out."""

    candidates: Sequence[Candidate]
    rounds: tuple[Round, ...]
    finalists: Sequence[Candidate]
    picked: tuple[Candidate, ...]
    rebalanced: Candidate | None
    intervals: tuple[int, ...]
    choose: Part
    report: Part


@dataclass(frozen=True, slots=True)
class Answers:
    """advised: whether anything but the baseline is. entry: `tune` of results.json. split: which steps were planned,
    chosen and judged on. trace_notes: for the description of the trace."""

    advised: bool
    entry: dict[str, Any]
    verdict: str
    split: str
    trace_notes: list[str]


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """Against the same placement planned once. payback: steps until one rebalance has gained what it cost, None for
    never."""

    candidate: Candidate
    gain: Interval
    migration: Migration
    payback: float | None


def answer(
    problem: Problem,
    worth: float,
    searched: Searched,
    finals: Finals,
    memory: Memory,
    used: Callable[[Candidate], float],
    setup: Setup,
    quality_loss: str,
) -> Answers:
    """Gains are those on the steps held out, each against the baseline."""
    base = searched.candidates[0]
    gains = {candidate: _gain(finals, candidate, base, problem.setting.seed) for candidate in searched.finalists}
    rebalancing = _rebalancing(searched, finals, problem.setting.seed)
    answers: list[dict[str, Any]] = []
    for system, candidate in zip((None, *SYSTEMS), searched.picked, strict=True):
        gain = gains[candidate]
        advised = candidate != base and gain.low is not None and gain.low > 0 and gain.mean >= worth
        run = candidate if advised or (system is not None and system.lacks(base.deployment)) else base
        found = {
            "for": "any" if system is None else system.name,
            "advised": advised,
            **_described(candidate, used),
            "more_bytes": used(candidate) - used(base),
            "throughput_gain": dataclasses.asdict(gain),
            "layer_us": {"baseline": _mean(finals.layer_us(base)), "own": _mean(finals.layer_us(candidate))},
            "step_us": {"baseline": finals.times[base].mean_us, "own": finals.times[candidate].mean_us},
            "commands": _commands(problem, system, run, base, setup, finals),
        }
        answers.append(found)
    best = searched.picked[0]
    advised = bool(answers[0]["advised"])
    conditions, others = _conditions(problem, searched, gains, best if advised else None)
    split = words.split(searched.choose, searched.report, problem.trace.num_steps)
    lines = words.all_lines(
        problem, searched, answers, gains, rebalancing, conditions, others, memory, used, worth, quality_loss, finals
    )
    entry = {
        "baseline": base.name,
        "split": split,
        "worth": worth,
        "quality_loss": quality_loss,
        "memory": {
            "gpu_bytes": memory.total,
            "limit_bytes": memory.limit,
            "kept_share": memory.kept_share,
            "baseline_bytes": used(base),
            "slot_bytes": memory.slot_bytes,
        },
        "rounds": [
            {"candidates": len(one.times), "steps": one.num_steps, "layers": one.num_layers} for one in searched.rounds
        ],
        "answers": answers,
        "rebalancing": None if rebalancing is None else _rebalancing_entry(rebalancing),
        "conditions": [
            {"condition": one.words, "tokens_per_gpu": one.tokens_per_gpu, "gain": dataclasses.asdict(one.gain)}
            for one in (*conditions, *([] if others is None else [others]))
        ],
        "candidates": _table(searched, gains, used, problem.setting.seed),
        "words": [{"about": about, "text": text} for about, text in lines],
    }
    return Answers(advised, entry, words.verdict(answers[0], base), split, words.sampled(problem, searched, finals))


def _gain(finals: Finals, candidate: Candidate, base: Candidate, seed: int) -> Interval:
    if candidate == base:
        return Interval(0.0, 0.0, 0.0)
    return change(finals.times[candidate].step_us, finals.times[base].step_us, seed).gain


def _rebalancing(searched: Searched, finals: Finals, seed: int) -> Rebalancing | None:
    candidate = searched.rebalanced
    if candidate is None or candidate.interval is None:
        return None
    own, once = finals.times[candidate], finals.times[candidate.planned_once]
    assert own.migration is not None
    # What a step gains before the rebalance is paid for.
    saved = once.mean_us - (own.mean_us - own.migration.us / candidate.interval)
    payback = own.migration.us / saved if saved > 0 else None
    gain = change(own.step_us, once.step_us, seed).gain
    return Rebalancing(candidate, gain, own.migration, payback)


def _rebalancing_entry(found: Rebalancing) -> dict[str, Any]:
    return {
        "name": found.candidate.name,
        "interval": found.candidate.interval,
        "gain_over_planned_once": dataclasses.asdict(found.gain),
        "rebalance_us": found.migration.us,
        "rebalance_bytes": found.migration.bytes_moved,
        "payback_steps": found.payback,
    }


def _conditions(
    problem: Problem, searched: Searched, gains: dict[Candidate, Interval], advised: Candidate | None
) -> tuple[list[Condition], Condition | None]:
    """Of what is advised with ever fewer tokens, and with other hot experts; where nothing is, of the fastest of the
    others with ever more tokens."""
    base, report = searched.candidates[0], searched.report
    if advised is not None:
        return by_tokens(problem, advised, base, report, FEWER), with_other_experts(problem, advised, base, report)
    others = [candidate for candidate in searched.finalists if candidate != base]
    if not others:
        return [], None
    fastest = max(others, key=lambda candidate: gains[candidate].mean)
    return by_tokens(problem, fastest, base, report, MORE), None


def _described(candidate: Candidate, used: Callable[[Candidate], float]) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "stack": str(candidate.shown_stack),
        "redundant": candidate.redundant,
        "interval": candidate.interval,
        "memory_bytes": used(candidate),
    }


def _table(
    searched: Searched, gains: dict[Candidate, Interval], used: Callable[[Candidate], float], seed: int
) -> list[dict[str, Any]]:
    """Every candidate as far as it came, the furthest and fastest first. A gain while choosing is flattering: it is of
    the steps that were chosen on."""
    base, rows = searched.candidates[0], []
    for candidate in searched.candidates:
        came = [number for number, one in enumerate(searched.rounds) if candidate in one.times]
        row = {**_described(candidate, used), "rounds": len(came), "steps": 0, "gain_choosing": None, "gain": None}
        if came:
            one = searched.rounds[came[-1]]
            ours, theirs = one.times[candidate].mean_us, one.times[base].mean_us
            row |= {"steps": one.num_steps, "gain_choosing": theirs / ours - 1}
        if candidate in gains:
            row["gain"] = dataclasses.asdict(gains[candidate])
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["rounds"], -(row["gain_choosing"] or 0.0), row["name"]))


def _commands(
    problem: Problem, system: System | None, candidate: Candidate, base: Candidate, setup: Setup, finals: Finals
) -> list[str]:
    deployment = candidate.deployment
    if system is None:
        planned = candidate.interval is None and not candidate.stack.placement.trivial
        return [plan_command(deployment, setup, "epsim")] if planned else []
    if system.lacks(deployment):
        return []  # a baseline that it cannot run, and nothing else to run
    return system.commands(deployment, setup, lambda least: _interval(problem, candidate, base, finals, least))


def _interval(problem: Problem, candidate: Candidate, base: Candidate, finals: Finals, least: int) -> int:
    """Steps between rebalances that cost at most MIGRATION_SHARE of the placement's gain, `least` at least."""
    if candidate not in finals.times or candidate == base:
        return least
    placement = problem.plan(candidate.stack, candidate.redundant, 0, int(problem.sums.bounds[1]), True)
    timing = problem.timing
    before = problem.in_order(candidate.redundant)
    cost = migration(before, placement, timing.hardware, timing.model, problem.layer_ms).us
    saved = finals.times[base].mean_us - finals.times[candidate].mean_us
    needed = cost / (MIGRATION_SHARE * saved) if saved > 0 else 0.0
    return max(least, int(np.ceil(needed / 100)) * 100)


def _mean(values: Any) -> float:
    return float(np.nanmean(values))
