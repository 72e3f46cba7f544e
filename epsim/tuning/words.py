"""Writes the answers as text. Every figure in the text is that of the tables."""

import numpy as np

from epsim.engines import SYSTEMS
from epsim.engines.base import ON_EACH_HOST, System
from epsim.report.content import amount
from epsim.traces.trace import LEVELS
from epsim.tuning.candidates import Candidate
from epsim.tuning.conditions import MORE
from epsim.tuning.findings import Findings


def verdict(findings: Findings) -> str:
    """What to do and what it brings, in one sentence."""
    base, best = findings.base, findings.best
    gain = findings.gain(best)
    if findings.advised():
        more = findings.used(best) - findings.used(base)
        return (
            f"Use {best.name}: predicted throughput changes by {gain} compared with {base.name}. It takes "
            f"{amount(more, '+')} of weights per GPU."
        )
    fastest = findings.fastest_other()
    if best != base:
        return (
            f"Keep {base.name}: {best.name}, which was chosen on the earlier steps, changes throughput by {gain} on "
            "the held-out steps."
        )
    if fastest is None or findings.gain(fastest).mean < findings.worth:
        return f"Keep {base.name}: no candidate gains enough to be worth more memory or moving parts."
    return (
        f"Keep {base.name}: {fastest.name} changes throughput by {findings.gain(fastest)}, but "
        f"{_why_not(findings, fastest)}."
    )


def split(findings: Findings) -> str:
    """Which steps placements are planned on, which are used for choosing, and which are held out."""
    choose, report, num_steps = findings.choose, findings.report, findings.problem.trace.num_steps
    return (
        f"candidates are chosen on steps {choose.first} to {choose.last - 1} and judged on the held-out steps "
        f"{report.first} to {num_steps - 1}; a placement planned once is planned on all steps before these; a "
        "placement that is rebalanced is planned on the steps before each rebalance"
    )


def sampled(findings: Findings) -> list[str]:
    """Which rounds and finalists were scored on a sample of the steps and layers."""
    choose, report = findings.choose, findings.report
    rounds = [f"{len(r.times)} on {r.num_steps} steps and {r.num_layers} layers" for r in findings.rounds]
    notes = [
        f"numbers of candidates scored in each round, of {choose.last - choose.first} steps and "
        f"{findings.problem.meta.num_layers} layers: {'; '.join(rounds)}"
    ]
    held, scored = report.last - report.first, len(findings.finals.times[findings.base].step_us)
    if scored < held:
        notes.append(f"finalists judged on {scored} of the {held} held-out steps, evenly spaced")
    return notes


def all_lines(findings: Findings) -> list[tuple[str, str]]:
    """(subject, text), in reading order. The commands follow the last line."""
    lines = [
        *([("warning", findings.long_steps)] if findings.long_steps else []),
        ("run", _run(findings)),
        ("gain", _gain(findings) if findings.advised() else _no_gain(findings)),
        ("memory", _memory(findings)),
        ("rebalancing", _rebalancing(findings)),
        ("does not pay", _when_it_stops(findings) if findings.advised() else _never_pays(findings)),
        *((system.title, _system(findings, system)) for system in SYSTEMS),
        ("limits", _limits(findings)),
    ]
    return lines + ([("to paste", ON_EACH_HOST)] if findings.problem.base.num_nodes > 1 else [])


def _run(findings: Findings) -> str:
    candidate, problem = findings.to_run(), findings.problem
    slots = (problem.meta.num_experts + candidate.redundant) // problem.base.num_ranks
    planned = "planned once" if candidate.interval is None else f"planned again every {candidate.interval} steps"
    if candidate.stack.placement.trivial:
        planned = "experts in order"
    elif not candidate.stack.placement.needs_history:
        planned = "not planned on the trace"
    text = (
        f"{candidate.shown_stack} with {candidate.redundant} redundant experts per layer ({slots} slots per GPU), "
        f"{planned}."
    )
    if not findings.advised():
        text = f"Keep the baseline: {text}"
    if candidate.stack.router.acts or candidate.stack.reader.acts:
        text += f" It changes the model's output. Accepted loss: {findings.quality_loss}."
    return text


def _why_not(findings: Findings, candidate: Candidate, system: System | None = None) -> str:
    """Why a finalist other than the baseline is not advised."""
    gain = findings.gain(candidate)
    if gain.low is None:
        return "there are too few steps to tell a gain from chance"
    if not gain.excludes_zero:
        return "the held-out steps show no clear difference"
    if gain.mean < 0:
        return "it is slower than the baseline"
    if gain.mean < findings.worth:
        return f"gains below {findings.worth:.1%} do not justify more memory or moving parts"
    cheaper = findings.picks[system].name
    return f"on the steps used for choosing it was not clearly faster than {cheaper}, which costs less"


def _no_gain(findings: Findings) -> str:
    fastest = findings.fastest_other()
    if fastest is None:
        return "There was no other candidate to compare."
    return (
        f"The fastest other candidate, {fastest.name}, changes throughput by {findings.gain(fastest)}: "
        f"{_why_not(findings, fastest)}."
    )


def _gain(findings: Findings) -> str:
    base, best, finals, hardware = findings.base, findings.best, findings.finals, findings.problem.timing.hardware
    gain, last = findings.gain(best), findings.rounds[-1].times
    choosing = last[base].mean_us / last[best].mean_us - 1
    layer_us = [finals.layer_us(candidate) for candidate in (best, base)]
    step_ms = [finals.times[candidate].mean_us / 1e3 for candidate in (best, base)]
    text = (
        f"{gain} tokens per second compared with {base.name}, predicted on {len(finals.times[base].step_us)} held-out "
        f"steps. An expert layer takes {layer_us[0]:,.0f} us instead of {layer_us[1]:,.0f} us, and a step takes "
        f"{step_ms[0]:,.2f} ms instead of {step_ms[1]:,.2f} ms. The gain on the steps used for choosing was "
        f"{choosing:+.1%}."
    )
    if best.shown_stack.shared.dispatches and not hardware.shared_grouped:
        text += (
            f" The shared expert needs no kernel of its own, which saves {hardware.kernel_us:g} us per layer, however "
            "balanced the load is."
        )
    faster = findings.fastest_other()
    if faster is not None and findings.gain(faster).mean > gain.mean:
        text += (
            f" {faster.name} gains {findings.gain(faster).mean:+.1%}, but on the steps used for choosing it was not "
            f"clearly faster than {best.name}."
        )
    return text


def _memory(findings: Findings) -> str:
    memory, used = findings.memory, findings.used(findings.to_run())
    return (
        f"{amount(used)} of weights per GPU, {amount(used - findings.used(findings.base), '+')} compared with "
        f"{findings.base.name}. {amount(memory.total - used)} of {amount(memory.total)} are left. Assumptions: "
        f"{memory.kept_share:.0%} of the memory is kept free for KV cache, activations and embeddings; attention is "
        f"data-parallel. One slot in every layer takes {amount(memory.slot_bytes)}."
    )


def _rebalancing(findings: Findings) -> str:
    rebalancing = findings.rebalancing
    if rebalancing is None:
        if not findings.intervals:
            return "Not tried: the trace is too short. Each of its parts must be at least twice as long as an interval."
        if not any(candidate.interval is not None for candidate in findings.candidates):
            return "Not tried: no candidate has a placement that can be rebalanced."
        return (
            f"Not advised: with {findings.intervals[-1]} steps or fewer between rebalances, even perfect balance does "
            f"not pay for the {findings.problem.layer_ms:g} ms of host work per layer."
        )
    gain, migration, candidate = rebalancing.gain, rebalancing.migration, rebalancing.candidate
    payback = "never saves as much time"
    if rebalancing.payback is not None:
        payback = f"saves as much time in {rebalancing.payback:,.0f} steps"
    advice = "Not advised"
    if gain.clear(findings.worth):
        advice = "Advised"
        if findings.best.interval is None:
            advice = "It pays for this candidate, but the answer above does without it"
    elif not gain.excludes_zero:
        advice = "Not advised, since there is no clear difference"
    return (
        f"{advice}. Every {candidate.interval} steps: {gain} compared with the same placement planned once. A "
        f"rebalance moves {amount(migration.bytes_moved)} into a GPU, stops the batch for {migration.us / 1e3:,.0f} ms "
        f"and {payback}."
    )


def _never_pays(findings: Findings) -> str:
    fastest, worth = findings.fastest_other(), findings.worth
    if fastest is None:
        return "There was no other candidate to try with more tokens."
    if findings.gain(fastest).clear(worth):
        return f"{fastest.name} pays on the held-out steps. A longer trace would show whether it pays in general."
    now, *more = findings.conditions
    pays = next((condition for condition in more if condition.gain.clear(worth)), None)
    shown = pays or more[-1]
    outcome = "pays" if pays else "still does not clearly pay"
    return (
        f"{fastest.name}, the fastest other candidate, was also tried with up to {MORE[-1]} times the tokens. It "
        f"{outcome} with {shown.tokens_per_gpu:,.0f} tokens per GPU and step (here {now.tokens_per_gpu:,.0f}): "
        f"{shown.gain}."
    )


def _when_it_stops(findings: Findings) -> str:
    best, base, problem, times = findings.best, findings.base, findings.problem, findings.finals.times
    now, *fewer = findings.conditions
    fails = next((condition for condition in fewer if not condition.gain.clear(findings.worth)), None)
    here = f"tokens per GPU and step (here {now.tokens_per_gpu:,.0f})"
    sentences = []
    if fails is not None:
        sentences.append(f"With {fails.tokens_per_gpu:,.0f} or fewer {here} there is no clear gain: {fails.gain}")
    elif fewer:
        sentences.append(f"It also pays with {fewer[-1].tokens_per_gpu:,.0f} {here}: {fewer[-1].gain}")
    others = findings.other_experts
    if others is not None and not best.stack.placement.trivial:
        until = "until the next rebalance" if best.interval is not None else "until it is planned again"
        sentences.append(f"If other experts become hot, the gain is {others.gain} {until}")
    policy = problem.timing.policy_us(best.shown_stack, best.redundant > 0, problem.base.num_ranks, now.tokens_per_gpu)
    if policy:
        most = findings.finals.layer_us(base) - findings.finals.layer_us(best) + policy
        sentences.append(
            f"It does not pay if its policies take more than {most:,.0f} us per layer ({policy:,.0f} us are predicted)"
        )
    busy = np.isfinite(times[base].step_us)
    ours, theirs = times[best].step_us[busy], times[base].step_us[busy]
    if third := len(ours) // 3:
        early, late = (theirs[part].sum() / ours[part].sum() - 1 for part in (slice(third), slice(-third, None)))
        sentences.append(f"The gain is {early:+.1%} on the first third of the held-out steps, {late:+.1%} on the last")
    return ". ".join(sentences) + "."


def _system(findings: Findings, system: System) -> str:
    candidate, best, base = findings.picks[system], findings.best, findings.base
    lacks = system.lacks(best.deployment) if findings.advised() else ""
    sentences = [f"It has {lacks}"] if lacks else []
    if findings.advised(system):
        what = "It runs the answer as it is"
        if candidate != best:
            what = f"The best candidate that it can run is {candidate.name}"
        sentences.append(f"{what}: {findings.gain(candidate)}")
        return ". ".join(sentences) + "." + system.remark(candidate.deployment)
    fastest = findings.fastest_other(system)
    if fastest is None:
        sentences.append(
            "On the steps used for choosing, no candidate that it can run was clearly faster by at least "
            f"{findings.worth:.1%}"
        )
    else:
        sentences.append(
            f"No candidate that it can run is advised. {fastest.name} changes throughput by {findings.gain(fastest)}: "
            f"{_why_not(findings, fastest, system)}"
        )
    if lacks_base := system.lacks(base.deployment):
        needed = ", and the experts do not divide evenly among the GPUs" if base.stack.placement.trivial else ""
        baseline = "it cannot run the baseline" if candidate == base else f"its own baseline is {candidate.name}"
        sentences.append(f"It has {lacks_base}{needed}, so {baseline}")
    return ". ".join(sentences) + "."


def _limits(findings: Findings) -> str:
    text = "Times are predicted, not measured (docs/time.md)."
    meta = findings.problem.meta
    if LEVELS.index(meta.level) < 2 and findings.problem.setting.shared_cost > 0:
        missing = "Waterfill was" if meta.level == "rank_counts" else "Waterfill and splits of whole tokens were"
        text += f" {missing} not tried, because the trace holds {meta.level.replace('_', ' ')} and no tokens."
    return text
