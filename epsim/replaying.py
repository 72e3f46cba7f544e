"""Replay of a recorded trace under several policy stacks: which has the lowest peak load, and by how much."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from epsim.cost.layer_time import LayerTiming
from epsim.kernels.split import cuda
from epsim.models.spec import load_model
from epsim.options import PlanningOptions
from epsim.parallel import in_parallel
from epsim.placement.base import Cluster, Target
from epsim.planning import BLOCK_BYTES, Progress, plan_placements
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.copies import Copies
from epsim.policies.stack import PolicyStack
from epsim.results import SCHEMA_VERSION, ResultsData, described_cluster, described_trace
from epsim.score.block import BlockScore, score_block
from epsim.score.collect import ScoredStacks
from epsim.score.summary import StackSummary
from epsim.traces.regroup import regroup, regrouped_meta
from epsim.traces.store import StoredTrace
from epsim.traces.trace import Block, Ints, TraceMeta
from epsim.version import VERSION

COUNTS_BYTES = 32 * 2**20

Device: TypeAlias = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class ReplayOptions(PlanningOptions):
    """policies: (name or "", stack) in the order of the report. The others are compared with the first.

    shared_cost: the shared expert's work in routed assignments; None for the trace's. plan_share: the share of the
    steps that placements are planned on if there is no history; only the other steps are scored. device: where splits
    are solved, with the same results bit for bit. Everything else runs on the CPU, where sums have a fixed order.
    timing: the model that predicts times; None for no times.
    """

    cluster: Cluster
    policies: tuple[tuple[str, PolicyStack], ...]
    shared_cost: float | None = None
    command: str = ""
    device: Device = "cpu"
    timing: LayerTiming | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policies:
            raise ValueError("there is no policy to replay: give --policy STACK at least once")
        names = [name or str(stack) for name, stack in self.policies]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"--policy {twice} is given twice: give each a name with NAME=STACK")


def check_device(name: str) -> Device:
    """The device of that name. Raises ValueError if the machine has none."""
    if name == "cpu":
        return "cpu"
    if name != "cuda":
        raise ValueError(f"--device {name}: choose cpu or cuda")
    if not cuda.available():
        raise ValueError(
            "--device cuda needs a CUDA device that PyTorch sees, and CuPy (pip install epsim[gpu]): "
            "leave out --device to solve on the CPU, with the same results"
        )
    return "cuda"


def replay(
    trace: StoredTrace,
    options: ReplayOptions,
    history: StoredTrace | None = None,
    *,
    trace_name: str = "trace",
    history_name: str = "",
    progress: Progress = lambda steps: None,
) -> ResultsData:
    """Scores every stack of `options` on the trace and returns the results (docs/results.md).

    history: the trace that placements are planned on. Without one they are planned on the first `plan_share` of the
    trace's steps, and only the other steps are scored. If the history contains the scored steps, under any file name
    and format, the results call it hindsight. progress: called with numbers of steps, which sum to `replay_length`.

    Raises ValueError if a stack needs a finer trace, or if cluster, history and trace do not fit together.
    """
    cluster = options.cluster
    meta = regrouped_meta(trace.meta, cluster.num_ranks)
    shared_cost, shared_note = _shared_cost(meta, options)
    for _, stack in options.policies:
        redundant = stack.placement.redundant(meta.num_experts, cluster)
        stack.check_level(meta.level, redundant > 0, shared_cost > 0)
    num_planned = planned_steps(trace, options, history)
    stacks = [stack for _, stack in options.policies]
    planned_on, num_history = (trace, num_planned) if history is None else (history, history.num_steps)
    history_keys: list[Ints] = []
    keys_wanted = history_keys if history is not None else None
    placements = plan_placements(stacks, planned_on, num_history, meta, cluster, progress, keys_wanted)
    num_scored = trace.num_steps - num_planned
    timing = options.timing
    if timing is not None:
        timing.check(meta.num_experts, meta.top_k, cluster.num_ranks, cluster.num_nodes)
    setting = Setting(
        options.seed,
        shared_cost,
        meta.top_k,
        meta.layers,
        backend=options.device,
        phase=meta.phase,
        num_scores=meta.num_scores,
        rows=timing is not None,
        tile=0 if timing is None else timing.experts.tile,
    )
    bound_stacks: list[BoundStack] = []
    summaries: list[StackSummary] = []
    copies: dict[str, Copies] = {}
    for (name, stack), placement in zip(options.policies, placements, strict=True):
        bound = bind(stack, placement, setting, copies)
        notes = (*stack.placement.notes(meta.num_experts, Target(cluster, meta.layers, stack)), *bound.notes)
        bound_stacks.append(bound)
        summaries.append(StackSummary(name, stack, notes, num_scored))
    collected = ScoredStacks(summaries, options.seed)

    def score(block: Block) -> BlockScore:
        return score_block([regroup(block, trace.meta, cluster.num_ranks)] * len(stacks), bound_stacks, timing)

    num_physical = max(placement.num_physical for placement in placements)
    max_steps = _steps_a_block(meta, num_physical, cluster.num_ranks)
    blocks = trace.blocks(num_planned, trace.num_steps, max_bytes=BLOCK_BYTES, max_steps=max_steps)
    for scored in in_parallel(score, blocks):
        collected.add(scored.stacks, scored.seen)
        progress(len(scored.seen.keys))

    planned = num_history if any(stack.placement.needs_history for stack in stacks) else 0
    return {
        "schema": SCHEMA_VERSION,
        "kind": "replay",
        "trace": described_trace(trace_name, meta, planned, num_scored, [*shared_note, *collected.warnings]),
        "setting": {
            **described_cluster(cluster),
            "seed": options.seed,
            "shared_cost": shared_cost,
            "history": _history_words(num_planned, history_name, history_keys, collected.steps.keys),
            **({} if timing is None else {"timing": timing.words()}),
            **_expert_bytes(meta, timing),
            "version": VERSION,
            "command": options.command,
        },
        **collected.results([bound.copies.placement for bound in bound_stacks]),
    }


def _steps_a_block(meta: TraceMeta, num_physical: int, num_ranks: int) -> int:
    """The number of steps whose counts by source rank and physical expert fit COUNTS_BYTES; at least one."""
    ranks = 1 if meta.level == "counts" else num_ranks
    step_bytes = 8 * meta.num_layers * num_physical * ranks
    return max(1, COUNTS_BYTES // step_bytes)


def planned_steps(trace: StoredTrace, options: ReplayOptions, history: StoredTrace | None) -> int:
    """The number of first steps that placements are planned on, and that are not scored."""
    if trace.num_steps < 1:
        raise ValueError("the trace has no steps: there is nothing to score")
    if history is not None or not any(stack.placement.needs_history for _, stack in options.policies):
        return 0
    if trace.num_steps < 2:
        raise ValueError(
            "the trace has only one step, which cannot be used both for planning and for scoring: give --history TRACE "
            "(the same file is allowed; the results then call it hindsight)"
        )
    return min(max(round(trace.num_steps * options.plan_share), 1), trace.num_steps - 1)


def replay_length(trace: StoredTrace, history: StoredTrace | None) -> int:
    """The largest number of steps that `replay` reports to `progress`: those of the trace and of the history."""
    return trace.num_steps + (history.num_steps if history is not None else 0)


def _shared_cost(meta: TraceMeta, options: ReplayOptions) -> tuple[float, list[str]]:
    if options.shared_cost is not None:
        return options.shared_cost, []
    if meta.shared_cost is not None:
        return meta.shared_cost, []
    if options.timing is not None:
        return options.timing.model.shared_cost, []
    return 0.0, [
        "the recording does not say whether there is a shared expert: none is assumed; --shared-cost changes that"
    ]


def _expert_bytes(meta: TraceMeta, timing: LayerTiming | None) -> ResultsData:
    """The memory of one redundant expert, if the model is known."""
    model = None if timing is None else timing.model
    if model is None and not meta.model.endswith(".toml"):  # a file that a trace names is never read
        with suppress(ValueError, OSError):  # no specification describes the model
            model = load_model(meta.model)
    fits = model is not None and model.num_experts == meta.num_experts
    return {"expert_bytes": model.expert_bytes} if model is not None and fits else {}


def _history_words(num_planned: int, history_name: str, history_keys: Sequence[Ints], scored: Ints) -> str:
    """What placements were planned on. history_keys: `step_keys` of the history, empty without one. scored [S]: those
    of the scored steps. They show whether the history contains the scored steps or sums to the same counts."""
    if num_planned:
        return f"placements planned on the first {num_planned} steps, which are not scored"
    if not history_keys:
        return "no placement needs a history"
    known, scored = np.concatenate(history_keys), scored[scored != 0]
    again = int(np.isin(scored, known).sum())
    if again == len(scored) > 0:
        return f"hindsight: placements planned on the same steps that they are scored on ({history_name})"
    if again:
        return f"partly hindsight: placements planned on {history_name}, with {again} of the {len(scored)} scored steps"
    if len(scored) and known.sum() == scored.sum():
        return f"hindsight: placements planned on counts with the same sum as the scored steps ({history_name})"
    return f"placements planned on {history_name}"
