"""Answers in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from epsim.engines import SYSTEMS
from epsim.engines.base import ON_EACH_HOST, System
from epsim.traces.trace import LEVELS
from epsim.tuning.candidates import Candidate
from epsim.tuning.conditions import Condition
from epsim.tuning.memory import GB, Memory, amount
from epsim.tuning.race import Interval
from epsim.tuning.scorer import Part, Problem

if TYPE_CHECKING:
    from epsim.tuning.answers import Rebalancing, Searched
    from epsim.tuning.final import Finals


def all_lines(
    problem: Problem,
    searched: Searched,
    answers: Sequence[Mapping[str, Any]],
    gains: Mapping[Candidate, Interval],
    rebalancing: Rebalancing | None,
    conditions: Sequence[Condition],
    others: Condition | None,
    memory: Memory,
    used: Callable[[Candidate], float],
    worth: float,
    quality_loss: str,
    finals: Finals,
) -> list[tuple[str, str]]:
    """(what about, text): in the order in which they are read."""
    first, base = answers[0], searched.candidates[0]
    picked = searched.picked[0]
    lines = [("run", _run(problem, picked if first["advised"] else base, first, quality_loss))]
    lines.append(("gain", _gain(problem, searched, first, gains, worth, finals)))
    lines.append(("memory", _memory(memory, picked if first["advised"] else base, base, used, problem)))
    lines.append(("rebalancing", _rebalancing(problem, searched, rebalancing, worth)))
    lines.append(("does not pay", _not(problem, searched, first, gains, conditions, others, finals)))
    for system, one, candidate in zip(SYSTEMS, answers[1:], searched.picked[1:], strict=True):
        lines.append((system.title, _system(system, one, candidate, picked, base, first)))
    if problem.base.num_nodes > 1:
        lines.append(("to paste", f"{ON_EACH_HOST}."))
    lines.append(("limits", _limits(problem)))
    return lines


def verdict(first: Mapping[str, Any], base: Candidate) -> str:
    gain = _interval(first["throughput_gain"])
    if first["advised"]:
        memory = amount(first["more_bytes"], "+")
        return f"Run {first['name']}: {percent(gain)} tokens a second over {base.name}, {memory} a GPU."
    if first["name"] == base.name:
        return f"No difference worth having: stay with {base.name}."
    return f"No difference: {first['name']} was chosen, and on steps held out changes throughput by {percent(gain)}."


def split(choose: Part, report: Part, num_steps: int) -> str:
    return (
        f"chosen on steps {choose.first} to {choose.last - 1}, judged on steps {report.first} to {num_steps - 1}, held "
        "out of every choice; placements planned once on all steps before those they are scored on, those that "
        "rebalance on the steps before each rebalance"
    )


def sampled(problem: Problem, searched: Searched, finals: Finals) -> list[str]:
    """What was looked at in part, for the description of the trace."""
    total, layers = searched.choose.last - searched.choose.first, problem.meta.num_layers
    rounds = [f"{len(one.times)} on {one.num_steps} steps, {one.num_layers} layers" for one in searched.rounds]
    notes = [f"searched in rounds, of {total} steps and {layers} layers: {'; '.join(rounds)}"]
    held, scored = searched.report.last - searched.report.first, len(finals.times[searched.candidates[0]].step_us)
    if scored < held:
        notes.append(f"finalists judged on {scored} of the {held} steps held out, evenly spaced")
    return notes


def percent(gain: Interval) -> str:
    """+3.1% (95% interval +2.9% to +3.3%)."""
    if gain.low is None or gain.high is None:
        return f"{gain.mean:+.1%} (too few steps for an interval)"
    return f"{gain.mean:+.1%} (95% interval {gain.low:+.1%} to {gain.high:+.1%})"


def _interval(content: Mapping[str, Any]) -> Interval:
    return Interval(content["mean"], content["low"], content["high"])


def _run(problem: Problem, candidate: Candidate, first: Mapping[str, Any], quality_loss: str) -> str:
    slots = (problem.meta.num_experts + candidate.redundant) // problem.base.num_ranks
    placed = "planned once" if candidate.interval is None else f"planned anew every {candidate.interval} steps"
    if candidate.stack.placement.trivial:
        placed = "experts in order"
    elif not candidate.stack.placement.needs_history:
        placed = "not planned on the trace"
    text = (
        f"{candidate.shown_stack} with {candidate.redundant} redundant experts a layer ({slots} slots a GPU), {placed}."
    )
    if not first["advised"]:
        text = f"Nothing beyond what runs anyway: {text}"
    if candidate.stack.router.acts or candidate.stack.reader.acts:
        text += f" It changes what the model says; accepted: {quality_loss}."
    return text


def _gain(
    problem: Problem,
    searched: Searched,
    first: Mapping[str, Any],
    gains: Mapping[Candidate, Interval],
    worth: float,
    finals: Finals,
) -> str:
    base, picked = searched.candidates[0], searched.picked[0]
    steps = len(finals.times[base].step_us)
    if not first["advised"]:
        others = [candidate for candidate in searched.finalists if candidate != base]
        if not others:
            return "Nothing else was left to compare."
        fastest = max(others, key=lambda candidate: gains[candidate].mean)
        told = "no difference" if not gains[fastest].tells else f"below {worth:.1%} is not worth moving parts"
        if gains[fastest].tells and gains[fastest].mean >= worth:
            told = "which was not clear on the steps chosen on"
        return f"The fastest of the others, {fastest.name}, changes throughput by {percent(gains[fastest])}: {told}."
    layer, step = first["layer_us"], first["step_us"]
    text = (
        f"{percent(gains[picked])} tokens a second over {base.name}, predicted on {steps} steps held out; an expert "
        f"layer takes {layer['own']:,.0f} us instead of {layer['baseline']:,.0f}, a step {step['own'] / 1e3:,.2f} ms "
        f"instead of {step['baseline'] / 1e3:,.2f}."
    )
    last = searched.rounds[-1].times
    choosing = last[base].mean_us / last[picked].mean_us - 1
    text += f" On the steps it was chosen on: {choosing:+.1%}."
    if picked.shown_stack.shared.dispatches and not problem.timing.hardware.shared_grouped:
        fused = problem.timing.hardware.kernel_us
        text += f" Of each layer's gain {fused:g} us is the shared expert's own kernel saved, whoever balances."
    faster = [c for c in searched.finalists if c != picked and gains[c].mean > gains[picked].mean]
    if faster:
        best = max(faster, key=lambda candidate: gains[candidate].mean)
        text += f" {best.name} reaches {gains[best].mean:+.1%}, which does not justify its memory or moving parts."
    return text


def _memory(
    memory: Memory, candidate: Candidate, base: Candidate, used: Callable[[Candidate], float], problem: Problem
) -> str:
    more = used(candidate) - used(base)
    kept = memory.total - used(candidate)
    return (
        f"{amount(used(candidate))} of weights a GPU, {amount(more, '+')} against {base.name}, leaving "
        f"{kept / GB:.1f} of {memory.total / GB:.0f} GB. Assumed: {memory.kept_share:.0%} of the memory stays free for "
        f"KV cache, activations and embeddings, attention is data-parallel; a slot in every layer takes "
        f"{amount(memory.slot_bytes)}."
    )


def _rebalancing(problem: Problem, searched: Searched, found: Rebalancing | None, worth: float) -> str:
    if found is None:
        if not searched.intervals:
            return "Not judged: the trace is too short for any interval to be planned on and scored twice in each part."
        if not any(candidate.interval is not None for candidate in searched.candidates):
            return "Not asked for."
        return (
            f"Not advised: at every {searched.intervals[-1]} steps or less, even perfect balance would not pay for "
            f"{problem.layer_ms:g} ms a layer of the host's work."
        )
    interval = found.candidate.interval
    moves = f"a rebalance moves {amount(found.migration.bytes_moved)} into a GPU and holds the batch up for "
    moves += f"{found.migration.us / 1e3:,.0f} ms"
    payback = "never pays that back" if found.payback is None else f"pays that back after {found.payback:,.0f} steps"
    gain = (
        f"every {interval} steps: {percent(found.gain)} against the same placement planned once; {moves} and {payback}"
    )
    if found.gain.low is not None and found.gain.low > 0 and found.gain.mean >= worth:
        picked = searched.picked[0].interval is not None
        word = "Advised" if picked else "Pays, but the answer above is faster or cheaper without it"
        return f"{word}, {gain}."
    if not found.gain.tells:
        return f"Not advised, {gain}: no difference."
    return f"Not advised, {gain}."


def _not(
    problem: Problem,
    searched: Searched,
    first: Mapping[str, Any],
    gains: Mapping[Candidate, Interval],
    conditions: Sequence[Condition],
    others: Condition | None,
    finals: Finals,
) -> str:
    parts = []
    if not first["advised"]:
        pays = next((one for one in conditions[1:] if one.gain.low is not None and one.gain.low > 0), None)
        if pays is not None:
            return (
                f"The fastest of the others would pay from about {pays.tokens_per_gpu:,.0f} tokens a GPU and step on."
            )
        most = f", up to {conditions[-1].tokens_per_gpu:,.0f} tokens a GPU and step" if conditions else ""
        return f"Nothing tried would pay with more tokens either{most}."
    picked, base = searched.picked[0], searched.candidates[0]
    fails = next((one for one in conditions[1:] if one.gain.mean <= 0 or not one.gain.tells), None)
    now = conditions[0].tokens_per_gpu
    if fails is not None:
        parts.append(f"with about {fails.tokens_per_gpu:,.0f} tokens a GPU and step or fewer (here {now:,.0f})")
    else:
        least = conditions[-1]
        parts.append(
            f"not for want of tokens: at {least.tokens_per_gpu:,.0f} a GPU and step (here {now:,.0f}) it still gains "
            f"{least.gain.mean:+.1%}"
        )
    if others is not None and not picked.stack.placement.trivial:
        turned = "until the next rebalance" if picked.interval is not None else "until it is planned anew"
        word = "when other experts become hot"
        if others.gain.mean > 0:
            less = round(others.gain.mean, 3) < round(conditions[0].gain.mean, 3)
            word = f"less {word}" if less else f"not {word}"
        parts.append(f"{word}: then {percent(others.gain)} {turned}")
    policy = problem.timing.policy_us(picked.timed_as, picked.redundant > 0, problem.base.num_ranks, now)
    if policy:
        saved = first["layer_us"]["baseline"] - first["layer_us"]["own"]
        parts.append(f"when its policies cost more than {saved + policy:,.0f} us a layer ({policy:,.0f} predicted)")
    third = max(len(finals.times[base].step_us) // 3, 1)
    ages = [
        float(np.nanmean(finals.times[base].step_us[part]) / np.nanmean(finals.times[picked].step_us[part]) - 1)
        for part in (slice(None, third), slice(-third, None))
    ]
    parts.append(f"with age: {ages[0]:+.1%} on the first third of the steps held out, {ages[1]:+.1%} on the last")
    return "; ".join(parts) + "."


def _system(
    system: System,
    one: Mapping[str, Any],
    candidate: Candidate,
    best: Candidate,
    base: Candidate,
    first: Mapping[str, Any],
) -> str:
    lacks = system.lacks(best.deployment)
    gain = percent(_interval(one["throughput_gain"]))
    head = f"runs it as it is: {gain}." if candidate == best else f"the best it can run is {candidate.name}: {gain}."
    lacking = f"has {lacks}; " if first["advised"] and lacks else ""
    if not one["advised"]:
        what = "of what it can run, nothing" if lacking else "nothing"
        said = f"{lacking}{what} makes a difference worth having"
        if cannot := system.lacks(base.deployment):
            because = ", and experts do not divide among the GPUs without" if base.stack.placement.trivial else ""
            said += f"; it has {cannot}{because}: "
            said += "it cannot run the baseline" if candidate == base else f"its own baseline is {candidate.name}"
        return f"{said}."
    return lacking + head + system.remark(candidate.deployment)


def _limits(problem: Problem) -> str:
    text = "Times are predicted, not measured (docs/time.md)."
    if LEVELS.index(problem.meta.level) < 2 and problem.setting.shared_cost > 0:
        lacks = "Waterfill" if problem.meta.level == "rank_counts" else "Waterfill and whole-token splits"
        text += f" The trace holds {problem.meta.level.replace('_', ' ')}: {lacks} need tokens and were not tried."
    return text
