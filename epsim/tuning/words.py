"""Writes the answers as text."""

import numpy as np

from epsim.engines import SYSTEMS
from epsim.engines.base import ON_EACH_HOST, System
from epsim.traces.trace import LEVELS
from epsim.tuning.findings import Findings
from epsim.tuning.memory import GB, amount
from epsim.tuning.race import Interval


def verdict(findings: Findings) -> str:
    """What to do and what it brings, in one sentence."""
    base, best = findings.base, findings.best
    gain = percent(findings.gain(best))
    if findings.advised():
        more = findings.used(best) - findings.used(base)
        return (
            f"Use {best.name}: predicted throughput changes by {gain} compared with {base.name}. It takes "
            f"{amount(more, '+')} of weights per GPU."
        )
    if best == base:
        return f"Keep {base.name}: no candidate gains enough to be worth more memory or moving parts."
    return (
        f"Keep {base.name}: {best.name} was the best on the steps used for choosing, but on the held-out steps its "
        f"throughput changes by {gain}."
    )


def split(findings: Findings) -> str:
    """Which steps placements are planned on, which are used for choosing, and which are held out."""
    choose, report, num_steps = findings.choose, findings.report, findings.problem.trace.num_steps
    return (
        f"candidates chosen on steps {choose.first} to {choose.last - 1} and judged on the held-out steps "
        f"{report.first} to {num_steps - 1}; a placement planned once uses all steps before the scored ones, a "
        "placement that is rebalanced uses the steps before each rebalance"
    )


def sampled(findings: Findings) -> list[str]:
    """Which rounds and finalists were scored on a sample of the steps and layers."""
    choose, report = findings.choose, findings.report
    rounds = [f"{len(r.times)} on {r.num_steps} steps, {r.num_layers} layers" for r in findings.rounds]
    notes = [
        f"candidates by round, of {choose.last - choose.first} steps and {findings.problem.meta.num_layers} layers: "
        + "; ".join(rounds)
    ]
    held, scored = report.last - report.first, len(findings.finals.times[findings.base].step_us)
    if scored < held:
        notes.append(f"finalists judged on {scored} of the {held} held-out steps, evenly spaced")
    return notes


def percent(gain: Interval) -> str:
    """+3.1% (95% interval +2.9% to +3.3%)."""
    if gain.low is None or gain.high is None:
        return f"{gain.mean:+.1%} (too few steps for an interval)"
    return f"{gain.mean:+.1%} (95% interval {gain.low:+.1%} to {gain.high:+.1%})"


def all_lines(findings: Findings) -> list[tuple[str, str]]:
    """(subject, text), in reading order."""
    lines = [
        ("run", _run(findings)),
        ("gain", _gain(findings) if findings.advised() else _no_gain(findings)),
        ("memory", _memory(findings)),
        ("rebalancing", _rebalancing(findings)),
        ("does not pay", _when_it_stops(findings) if findings.advised() else _never_pays(findings)),
        *((system.title, _system(findings, system)) for system in SYSTEMS),
    ]
    if findings.problem.base.num_nodes > 1:
        lines.append(("to paste", f"{ON_EACH_HOST}."))
    return [*lines, ("limits", _limits(findings))]


def _run(findings: Findings) -> str:
    candidate, problem = findings.to_run(), findings.problem
    slots = (problem.meta.num_experts + candidate.redundant) // problem.base.num_ranks
    placed = "planned once" if candidate.interval is None else f"planned again every {candidate.interval} steps"
    if candidate.stack.placement.trivial:
        placed = "experts in order"
    elif not candidate.stack.placement.needs_history:
        placed = "not planned on the trace"
    text = (
        f"{candidate.shown_stack} with {candidate.redundant} redundant experts per layer ({slots} slots per GPU), "
        f"{placed}."
    )
    if not findings.advised():
        text = f"Nothing more than the baseline: {text}"
    if candidate.stack.router.acts or candidate.stack.reader.acts:
        text += f" It changes the model's output. Accepted loss: {findings.quality_loss}."
    return text


def _no_gain(findings: Findings) -> str:
    fastest = findings.fastest_other
    if fastest is None:
        return "There was no other candidate to compare."
    gain = findings.gain(fastest)
    reason = "the held-out steps show no clear difference"
    if gain.tells and gain.mean < findings.worth:
        reason = f"gains below {findings.worth:.1%} do not justify more memory or moving parts"
    elif gain.tells:
        reason = "but it was not clearly faster on the steps used for choosing"
    return f"The fastest other candidate, {fastest.name}, changes throughput by {percent(gain)}: {reason}."


def _gain(findings: Findings) -> str:
    base, best, finals, hardware = findings.base, findings.best, findings.finals, findings.problem.timing.hardware
    gain, last = findings.gain(best), findings.rounds[-1].times
    choosing = last[base].mean_us / last[best].mean_us - 1
    layer_us = [finals.layer_us(candidate) for candidate in (best, base)]
    step_ms = [finals.times[candidate].mean_us / 1e3 for candidate in (best, base)]
    text = (
        f"{percent(gain)} tokens per second compared with {base.name}, predicted on {len(finals.times[base].step_us)} "
        f"held-out steps. An expert layer takes {layer_us[0]:,.0f} us instead of {layer_us[1]:,.0f} us, a "
        f"step {step_ms[0]:,.2f} ms instead of {step_ms[1]:,.2f} ms. On the steps used for choosing: "
        f"{choosing:+.1%}."
    )
    if best.shown_stack.shared.dispatches and not hardware.shared_grouped:
        text += (
            f" {hardware.kernel_us:g} us of each layer's gain come from saving the shared expert's own kernel, which "
            "does not depend on the balance."
        )
    faster = max(findings.others, key=lambda candidate: findings.gain(candidate).mean)
    if findings.gain(faster).mean > gain.mean:
        text += (
            f" {faster.name} gains {findings.gain(faster).mean:+.1%}, too little more to justify its memory or moving "
            "parts."
        )
    return text


def _memory(findings: Findings) -> str:
    memory, used = findings.memory, findings.used(findings.to_run())
    return (
        f"{amount(used)} of weights per GPU, {amount(used - findings.used(findings.base), '+')} compared with "
        f"{findings.base.name}. {(memory.total - used) / GB:.1f} of {memory.total / GB:.0f} GB are left. Assumptions: "
        f"{memory.kept_share:.0%} of the memory is kept free for KV cache, activations and embeddings; attention is "
        f"data-parallel. One slot in every layer takes {amount(memory.slot_bytes)}."
    )


def _rebalancing(findings: Findings) -> str:
    rebalancing = findings.rebalancing
    if rebalancing is None:
        if not findings.intervals:
            return "Not judged: the trace is too short to plan and score any interval twice in each part."
        if not any(candidate.interval is not None for candidate in findings.candidates):
            return "Not tried."
        return (
            f"Not advised: with {findings.intervals[-1]} steps or fewer between rebalances, even perfect balance does "
            f"not pay for the {findings.problem.layer_ms:g} ms of host work per layer."
        )
    gain, migration, candidate = rebalancing.gain, rebalancing.migration, rebalancing.candidate
    payback = "never pays that back"
    if rebalancing.payback is not None:
        payback = f"pays that back after {rebalancing.payback:,.0f} steps"
    advice = "Not advised"
    if gain.low is not None and gain.low > 0 and gain.mean >= findings.worth:
        advice = "Advised"
        if findings.best.interval is None:
            advice = "It pays, but the answer above is faster or cheaper without it"
    elif not gain.tells:
        advice = "Not advised, since there is no clear difference"
    return (
        f"{advice}. Every {candidate.interval} steps: {percent(gain)} compared with the same placement planned once. A "
        f"rebalance moves {amount(migration.bytes_moved)} into a GPU, stops the batch for {migration.us / 1e3:,.0f} ms "
        f"and {payback}."
    )


def _never_pays(findings: Findings) -> str:
    conditions = findings.conditions
    pays = next((c for c in conditions[1:] if c.gain.low is not None and c.gain.low > 0), None)
    if pays is not None:
        return f"The fastest other candidate would pay from about {pays.tokens_per_gpu:,.0f} tokens per GPU and step."
    most = f", up to {conditions[-1].tokens_per_gpu:,.0f} tokens per GPU and step" if conditions else ""
    return f"More tokens do not make any candidate pay{most}."


def _when_it_stops(findings: Findings) -> str:
    best, base, problem, times = findings.best, findings.base, findings.problem, findings.finals.times
    conditions, now = findings.conditions, findings.conditions[0].tokens_per_gpu
    fails = next((c for c in conditions[1:] if c.gain.mean <= 0 or not c.gain.tells), None)
    sentences = []
    if fails is not None:
        sentences.append(f"With {fails.tokens_per_gpu:,.0f} or fewer tokens per GPU and step (here {now:,.0f})")
    else:
        least = conditions[-1]
        sentences.append(
            f"Fewer tokens do not end the gain: {least.gain.mean:+.1%} at {least.tokens_per_gpu:,.0f} tokens per GPU "
            f"and step (here {now:,.0f})"
        )
    others = findings.other_experts
    if others is not None and not best.stack.placement.trivial:
        until = "until the next rebalance" if best.interval is not None else "until it is planned again"
        sentences.append(f"If other experts become hot: {percent(others.gain)} {until}")
    policy = problem.timing.policy_us(best.shown_stack, best.redundant > 0, problem.base.num_ranks, now)
    if policy:
        saved = findings.finals.layer_us(base) - findings.finals.layer_us(best)
        sentences.append(
            f"If its policies take more than {saved + policy:,.0f} us per layer ({policy:,.0f} us are predicted)"
        )
    third = max(len(times[base].step_us) // 3, 1)
    early, late = (
        float(np.nanmean(times[base].step_us[part]) / np.nanmean(times[best].step_us[part]) - 1)
        for part in (slice(None, third), slice(-third, None))
    )
    sentences.append(f"With age: {early:+.1%} on the first third of the held-out steps, {late:+.1%} on the last third")
    return ". ".join(sentences) + "."


def _system(findings: Findings, system: System) -> str:
    candidate, best, base = findings.picks[system], findings.best, findings.base
    lacks = system.lacks(best.deployment) if findings.advised() else ""
    sentences = [f"It has {lacks}"] if lacks else []
    if findings.advised(system):
        what = "It runs the answer as it is"
        if candidate != best:
            what = f"The best candidate that it can run is {candidate.name}"
        sentences.append(f"{what}: {percent(findings.gain(candidate))}")
        return ". ".join(sentences) + "." + system.remark(candidate.deployment)
    sentences.append("No candidate that it can run makes a difference worth having")
    if without := system.lacks(base.deployment):
        needed = ", and the experts do not divide evenly among the GPUs" if base.stack.placement.trivial else ""
        baseline = "it cannot run the baseline" if candidate == base else f"its own baseline is {candidate.name}"
        sentences.append(f"It has {without}{needed}, so {baseline}")
    return ". ".join(sentences) + "."


def _limits(findings: Findings) -> str:
    text = "Times are predicted, not measured (docs/time.md)."
    meta = findings.problem.meta
    if LEVELS.index(meta.level) < 2 and findings.problem.setting.shared_cost > 0:
        missing = "Waterfill needs" if meta.level == "rank_counts" else "Waterfill and whole-token splits need"
        text += f" The trace holds {meta.level.replace('_', ' ')}: {missing} tokens, so they were not tried."
    return text
