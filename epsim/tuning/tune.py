"""The search of `epsim tune`: which stack, redundant experts and rebalance interval to run under a memory limit.

Candidates are chosen on one part of a trace's steps and judged on a later part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from epsim.cost.layer_time import LayerTiming
from epsim.engines import SYSTEMS
from epsim.engines.base import Setup, System
from epsim.placement.base import Cluster
from epsim.policies.apply import Setting
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.report.content import amount
from epsim.results import SCHEMA_VERSION, ResultsData, described_cluster, described_trace
from epsim.traces.regroup import regrouped_meta
from epsim.traces.store import StoredTrace
from epsim.tuning import words
from epsim.tuning.answers import entry
from epsim.tuning.candidates import (
    Candidate,
    all_candidates,
    check_levels,
    given_candidates,
    possible_intervals,
    redundancies,
)
from epsim.tuning.final import Finals
from epsim.tuning.findings import Findings
from epsim.tuning.memory import Memory
from epsim.tuning.migration import LAYER_MS
from epsim.tuning.race import LEAST_STEPS, ROUND_US, CandidateFilter, Round, not_slower, pair_us, race
from epsim.tuning.scorer import Part, Problem
from epsim.tuning.steps import WindowSums, evenly
from epsim.version import VERSION

FEWEST_STEPS = 6
PLAN_SHARE, CHOOSE_SHARE = 0.3, 0.35
TICKS = 64
"""Placements that use single steps get sums over so many windows instead."""
MOST_SHOWN = 4
"""The number of fastest candidates among the finalists, besides the answers."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """gpus, nodes: of the cluster. groups: expert groups of the model's router. memory: bytes per GPU. kv_share: the
    share of this memory that is kept free.

    redundant, policies, intervals: what is tried; empty for the defaults. routers: router policies that are tried as
    well. They change the model's output, so they need quality_loss, the accepted loss in the user's words. baseline:
    the stack that runs today, which the others are compared with; None for experts in order. worth: throughput gains
    below this share do not justify more memory or moving parts. layer_ms: host work of a rebalance per layer.
    model_path, trace_path, reading (options that say how the trace is read): used in the printed commands.
    """

    gpus: int
    nodes: int
    groups: int
    memory: float
    kv_share: float = 0.2
    redundant: tuple[int, ...] = ()
    policies: tuple[PolicyStack, ...] = ()
    intervals: tuple[int, ...] = ()
    routers: tuple[str, ...] = ()
    quality_loss: str = ""
    baseline: PolicyStack | None = None
    worth: float = 0.005
    layer_ms: float = LAYER_MS
    seed: int = 0
    shared_cost: float | None = None
    model_path: str = "MODEL"
    trace_path: str = "TRACE"
    reading: tuple[str, ...] = ()
    command: str = ""

    def __post_init__(self) -> None:
        changing = [str(stack) for stack in self.policies if stack.router.acts or stack.reader.acts] + [*self.routers]
        if changing and not self.quality_loss.strip():
            raise ValueError(
                f"{changing[0]} changes the model's output: give the loss you accept, as measured for your model, with "
                '--quality-loss "..." (docs/oea.md, docs/reader.md), or leave the policy out'
            )
        for text in self.routers:
            if not parse_stack(text).router.acts:
                raise ValueError(
                    f"--router {text}: this is not a router policy that changes anything; give one such as oea(k0=4)"
                )
        if not 0 <= self.worth < 1:
            raise ValueError(f"--worth {self.worth}: give a share from 0 to below 1, such as 0.005")
        if not 0 <= self.layer_ms < 1e6:
            raise ValueError(f"--rebalance-layer-ms {self.layer_ms}: give milliseconds, 0 or more")
        if any(interval < 1 for interval in self.intervals):
            raise ValueError(f"--interval {min(self.intervals)}: give 1 step or more")


def tune(
    trace: StoredTrace,
    options: TuneOptions,
    timing: LayerTiming,
    *,
    trace_name: str = "trace",
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> ResultsData:
    """Searches the candidates and returns results with the finalists on the held-out steps, the baseline first, and the
    entry `tune` (docs/tune.md).

    progress: called with the current phase of the work and the share of it that is done. Raises ValueError if trace,
    model, cluster and memory do not fit together, a stack needs a finer trace, or the trace has too few steps.
    """
    problem, choose, report, intervals = _problem(trace, options, timing)
    memory = Memory(timing.model, options.memory, options.kv_share)
    clusters = _clusters(problem, options, memory)
    has_shared = problem.setting.shared_cost > 0
    if options.policies:
        candidates = given_candidates(options.policies, problem.meta.num_experts, clusters, intervals, options.baseline)
    else:
        sizes = (problem.meta.level, has_shared, problem.meta.num_experts)
        candidates = all_candidates(*sizes, clusters, intervals, options.routers, options.baseline)
    check_levels(candidates, problem.meta.level, has_shared)

    def used(candidate: Candidate, moving: bool = False) -> float:
        slots = (problem.meta.num_experts + candidate.redundant) // options.gpus
        moving = moving or candidate.interval is not None
        model = timing.model
        sketches = candidate.stack.reader.resident_bytes(slots, model.hidden, model.intermediate)
        return memory.used(slots, moving) + sketches * (model.moe_layers + moving)

    def runs(system: System, candidate: Candidate) -> bool:
        # A system that plans by itself also rebalances a placement planned once, and needs the memory for that.
        moving = system.plans_itself and not candidate.stack.placement.trivial
        return not system.lacks(candidate.deployment) and used(candidate, moving) <= memory.limit

    candidates = [c for c in candidates if c == candidates[0] or used(c) <= memory.limit]

    def cost(candidate: Candidate) -> tuple[float, int, float, str]:
        rebalances_per_step = 0.0 if candidate.interval is None else 1 / candidate.interval
        return used(candidate), candidate.complexity, rebalances_per_step, candidate.name

    def filter_of(system: System) -> CandidateFilter:
        """Accepts what the system can run, and the baseline unless the system can run only other candidates."""
        only_others = bool(system.lacks(candidates[0].deployment)) and any(runs(system, c) for c in candidates)
        return lambda c: runs(system, c) or (c == candidates[0] and not only_others)

    filters: dict[System | None, CandidateFilter] = {None: lambda c: True}
    filters |= {system: filter_of(system) for system in SYSTEMS}
    rounds = race(problem, candidates, choose, [*filters.values()], cost, options.worth, partial(progress, "choosing"))
    last = rounds[-1].times
    picks = {}
    for system, accepts in filters.items():
        members = {c: times for c, times in last.items() if accepts(c)}
        picks[system] = min(not_slower(problem, members, options.worth), key=cost)
    rebalanced = _best_rebalanced(rounds)
    ranked = sorted(last, key=lambda candidate: last[candidate].mean_us)
    finalists = [candidates[0], *picks.values(), *ranked[:MOST_SHOWN]]
    if rebalanced is not None:
        finalists += [rebalanced, rebalanced.planned_once]
    finalists = list(dict.fromkeys(finalists))
    progress("scoring the finalists on the held-out steps", 0.0)
    step_indices = evenly(report.first, report.last, _affordable_steps(problem, len(finalists)))
    findings = Findings(
        problem=problem,
        candidates=candidates,
        rounds=rounds,
        picks=picks,
        rebalanced=rebalanced,
        intervals=intervals,
        choose=choose,
        report=report,
        finals=Finals(problem, finalists, report, step_indices, lambda c: [f"{amount(used(c))} of weights per GPU"]),
        memory=memory,
        used=used,
        runs=runs,
        worth=options.worth,
        setup=Setup(
            model=options.model_path,
            trace=options.trace_path,
            gpus=options.gpus,
            nodes=options.nodes,
            groups=options.groups,
            decode=timing.kernels != "normal",
            reading=options.reading,
        ),
        quality_loss=options.quality_loss,
    )
    progress("finding when it stops paying", 0.0)
    return _results(findings, options, trace_name)


def _problem(
    trace: StoredTrace, options: TuneOptions, timing: LayerTiming
) -> tuple[Problem, Part, Part, tuple[int, ...]]:
    meta = regrouped_meta(trace.meta, options.gpus)
    timing.check(meta.num_experts, meta.top_k, options.gpus, options.nodes)
    num_steps = trace.num_steps
    if num_steps < FEWEST_STEPS:
        raise ValueError(
            f"the trace holds {num_steps} step{'s' if num_steps > 1 else ''}, but tune plans on the first part of the "
            f"steps, chooses on the second and judges on the third: give a trace of at least {FEWEST_STEPS} steps"
        )
    first = max(round(num_steps * PLAN_SHARE), 2)
    second = max(first + round(num_steps * CHOOSE_SHARE), first + 2)
    choose, report = Part(first, second), Part(second, num_steps)
    most = min(first, (second - first) // 2, (num_steps - second) // 2)
    too_long = next((interval for interval in options.intervals if interval > most), None)
    if too_long is not None:
        raise ValueError(
            f"--interval {too_long}: each part of the {num_steps} steps must hold the interval twice, so it can be at "
            f"most {most}: give a shorter interval or a longer trace"
        )
    intervals = tuple(sorted(set(options.intervals))) or possible_intervals(most)
    ticks = evenly(0, second, TICKS).tolist()
    sums = WindowSums(trace, [*choose.bounds(intervals), *report.bounds(intervals), *ticks])
    for part in (choose, report):
        if not sums.assignments(part.first, part.last):
            raise ValueError(
                f"steps {part.first} to {part.last - 1} of the trace have no tokens, so nothing can be compared: "
                "leave out empty steps with --min-tokens 1"
            )
    tokens = sums.assignments(0, num_steps) / (num_steps * meta.num_layers * meta.top_k)
    cost = options.shared_cost
    if cost is None:
        cost = timing.model.shared_cost if meta.shared_cost is None else meta.shared_cost
    setting = Setting(
        options.seed,
        cost,
        meta.top_k,
        meta.layers,
        backend="cpu",
        rows=True,
        phase=meta.phase,
        num_scores=meta.num_scores,
    )
    base = Cluster(options.gpus, options.nodes, 0, options.groups)
    return Problem(trace, meta, base, timing, setting, sums, options.layer_ms, tokens), choose, report, intervals


def _clusters(problem: Problem, options: TuneOptions, memory: Memory) -> list[Cluster]:
    """One cluster for each number of redundant experts, ascending. Raises ValueError if none fits, or if one that
    the user asks for does not fit."""
    num_experts, gpus = problem.meta.num_experts, options.gpus
    most = memory.most_slots(gpus)
    if not options.redundant:
        return [problem.cluster(redundant) for redundant in redundancies(num_experts, gpus, most)]
    clusters = [problem.cluster(redundant) for redundant in sorted({*options.redundant, -num_experts % gpus})]
    for cluster in clusters:
        slots, room = cluster.num_physical(num_experts) // gpus, min(most, num_experts)
        if slots > room:
            raise ValueError(
                f"--redundant {cluster.num_redundant} makes {slots} slots per GPU and layer "
                f"({amount(memory.used(slots))} of weights), but only {room} fit {amount(memory.limit)}: give at most "
                f"{room * gpus - num_experts}, or a smaller --kv-share"
            )
    return clusters


def _best_rebalanced(rounds: Sequence[Round]) -> Candidate | None:
    """The fastest candidate that rebalances, in the last round with any."""
    for times in (round_.times for round_ in reversed(rounds)):
        members = [candidate for candidate in times if candidate.interval is not None]
        if members:
            return min(members, key=lambda candidate: times[candidate].mean_us)
    return None


def _affordable_steps(problem: Problem, num_finalists: int) -> int:
    return max(int(ROUND_US / (pair_us(problem) * problem.meta.num_layers * num_finalists)), LEAST_STEPS)


def _results(findings: Findings, options: TuneOptions, trace_name: str) -> ResultsData:
    problem, timing = findings.problem, findings.problem.timing
    num_scored = len(findings.finals.times[findings.base].step_us)
    cluster = problem.cluster(findings.to_run().redundant)
    return {
        "schema": SCHEMA_VERSION,
        "kind": "tune",
        "trace": described_trace(trace_name, problem.meta, findings.report.first, num_scored, words.sampled(findings)),
        "setting": {
            **described_cluster(cluster),
            "seed": options.seed,
            "shared_cost": problem.setting.shared_cost,
            "history": words.split(findings),
            "timing": timing.words(),
            "expert_bytes": timing.model.expert_bytes,
            "version": VERSION,
            "command": options.command,
        },
        **findings.finals.results,
        "verdict": words.verdict(findings),
        "tune": entry(findings),
    }
