"""The entry `tune` of results.json: what to run, what it gains and costs, and when it does not pay."""

from dataclasses import asdict
from typing import Any

import numpy as np

from epsim.engines import SYSTEMS
from epsim.engines.base import System, plan_command
from epsim.tuning import words
from epsim.tuning.candidates import Candidate
from epsim.tuning.findings import Findings
from epsim.tuning.migration import migration

MIGRATION_SHARE = 0.1
"""If a system plans by itself, rebalances may cost this share of the time that the placement saves."""


def entry(findings: Findings) -> dict[str, Any]:
    """The entry; docs/tune.md describes its keys. Gains are over the baseline, on the held-out steps."""
    memory, rebalancing = findings.memory, findings.rebalancing
    others = [] if findings.other_experts is None else [findings.other_experts]
    return {
        "baseline": findings.base.name,
        "split": words.split(findings),
        "worth": findings.worth,
        "quality_loss": findings.quality_loss,
        "memory": {
            "gpu_bytes": memory.total,
            "limit_bytes": memory.limit,
            "kept_share": memory.kept_share,
            "baseline_bytes": findings.used(findings.base),
            "slot_bytes": memory.slot_bytes,
        },
        "rounds": [{"candidates": len(r.times), "steps": r.num_steps, "layers": r.num_layers} for r in findings.rounds],
        "answers": [_answer(findings, system) for system in (None, *SYSTEMS)],
        "rebalancing": rebalancing
        and {
            "name": rebalancing.candidate.name,
            "interval": rebalancing.candidate.interval,
            "gain_over_planned_once": asdict(rebalancing.gain),
            "rebalance_us": rebalancing.migration.us,
            "rebalance_bytes": rebalancing.migration.bytes_moved,
            "payback_steps": rebalancing.payback,
        },
        "conditions": [
            {"condition": c.words, "tokens_per_gpu": c.tokens_per_gpu, "gain": asdict(c.gain)}
            for c in (*findings.conditions, *others)
        ],
        "candidates": _table(findings),
        "words": [{"about": about, "text": text} for about, text in words.all_lines(findings)],
    }


def _answer(findings: Findings, system: System | None) -> dict[str, Any]:
    """The best of all candidates (system None), or of those that the system can run."""
    base, pick, finals = findings.base, findings.picks[system], findings.finals
    layer_us, step_us = (
        {"baseline": us(base), "own": us(pick)} for us in (finals.layer_us, lambda c: finals.times[c].mean_us)
    )
    return {
        "for": "any" if system is None else system.name,
        "advised": findings.advised(system),
        **_described(findings, pick),
        "more_bytes": findings.used(pick) - findings.used(base),
        "throughput_gain": asdict(findings.gain(pick)),
        "layer_us": layer_us,
        "step_us": step_us,
        "commands": _commands(findings, system),
    }


def _described(findings: Findings, candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "stack": str(candidate.shown_stack),
        "redundant": candidate.redundant,
        "interval": candidate.interval,
        "memory_bytes": findings.used(candidate),
    }


def _table(findings: Findings) -> list[dict[str, Any]]:
    """All candidates with the gain in their last round, sorted by the number of rounds and then by this gain.
    `gain_choosing` is too high for the best candidates, because they were chosen on these steps."""
    rows = []
    for candidate in findings.candidates:
        rounds = [scored for scored in findings.rounds if candidate in scored.times]
        row = {**_described(findings, candidate), "rounds": len(rounds), "steps": 0, "gain_choosing": None}
        if rounds:
            ours, theirs = (rounds[-1].times[c].mean_us for c in (candidate, findings.base))
            row |= {"steps": rounds[-1].num_steps, "gain_choosing": theirs / ours - 1}
        row["gain"] = asdict(findings.gain(candidate)) if candidate in findings.finals.times else None
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["rounds"], -(row["gain_choosing"] or 0.0), row["name"]))


def _commands(findings: Findings, system: System | None) -> list[str]:
    candidate, setup = findings.to_run(system), findings.setup
    deployment = candidate.deployment
    if system is None:
        planned = candidate.interval is None and not candidate.stack.placement.trivial
        return [plan_command(deployment, setup, "epsim")] if planned else []
    if system.lacks(deployment):
        return []  # the system can run neither the baseline nor any other candidate
    return system.commands(deployment, setup, lambda least: _interval(findings, candidate, least))


def _interval(findings: Findings, candidate: Candidate, least: int) -> int:
    """The number of steps between rebalances, at least `least`, at which they cost at most MIGRATION_SHARE of the time
    that the placement saves."""
    base, problem, times = findings.base, findings.problem, findings.finals.times
    if candidate not in times or candidate == base:
        return least
    placement = problem.plan(candidate.stack, candidate.redundant, 0, int(problem.sums.bounds[1]), True)
    timing, before = problem.timing, problem.in_order(candidate.redundant)
    cost = migration(before, placement, timing.hardware, timing.model, problem.layer_ms).us
    saved = times[base].mean_us - times[candidate].mean_us
    needed = cost / (MIGRATION_SHARE * saved) if saved > 0 else 0.0
    return max(least, int(np.ceil(needed / 100)) * 100)
