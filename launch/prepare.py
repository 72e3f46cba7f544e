"""Makes the job that every rank runs from the options. Mistakes in the options are found before a process is
started."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from epsim.cost.calibrated import load_calibration
from epsim.cost.experts_time import ExpertsTime
from epsim.cost.layer_time import LayerTiming
from epsim.launch.options import CONTEXT, RunOptions
from epsim.models.shapes import SHAPES, LayerShape, shape_of, shape_of_config
from epsim.models.spec import ModelSpec
from epsim.placement.base import Cluster, Placement, Target
from epsim.planning import plan_placements
from epsim.policies.stack import PolicyStack, named_stacks
from epsim.replaying import ReplayOptions, planned_steps
from epsim.runtime.job import Job, JobStack
from epsim.traces.importing import open_trace
from epsim.traces.regroup import regroup, regrouped_meta
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock, TraceMeta

TINY = "tiny"
WIDTH = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a job is made from.

    meta: of the trace, with tokens on the job's ranks and only the layers that are run. first, last: the steps to run
    are first..last-1; without a history, placements are planned on the steps before `first`. notes: for the results.
    own_router: whether the model's own router chooses the experts, so that only the trace's numbers of tokens are used.
    """

    options: RunOptions
    trace: StoredTrace
    history: StoredTrace | None
    meta: TraceMeta
    cluster: Cluster
    shape: LayerShape
    policies: tuple[tuple[str, PolicyStack], ...]
    first: int
    last: int
    max_tokens: int
    fingerprint: str
    notes: tuple[str, ...]
    own_router: bool
    timing: LayerTiming | None

    def blocks(self, start: int = 0) -> Iterator[TokenBlock]:
        """The steps to run, without the first `start` of them, with tokens on the ranks of this job."""
        scored = not self.own_router and self.meta.num_scores > 0
        yield from _blocks(self.trace, self.meta, self.first + start, self.last, scored)

    def plan(self) -> list[Placement]:
        """The placement of each stack, for all layers."""
        stacks = [stack for _, stack in self.policies]
        planned_on = self.trace if self.history is None else self.history
        num_steps = self.first if self.history is None else self.history.num_steps
        return plan_placements(stacks, planned_on, num_steps, self.meta, self.cluster, lambda steps: None)

    def job(self, placements: Sequence[Placement]) -> Job:
        stacks = []
        for (name, stack), placement in zip(self.policies, placements, strict=True):
            target = Target(self.cluster, self.meta.layers, stack)
            notes = stack.placement.notes(self.meta.num_experts, target)
            stacks.append(JobStack(name, stack, placement, notes))
        return Job(
            shape=self.shape,
            layers=self.meta.layers,
            stacks=tuple(stacks),
            blocks=self.blocks,
            num_steps=self.last - self.first,
            max_tokens=self.max_tokens,
            seed=self.options.seed,
            exchange=self.options.exchange,
            num_nodes=self.cluster.num_nodes,
            phase=self.meta.phase,
            num_scores=self.meta.num_scores,
        )


def prepare(options: RunOptions, num_ranks: int) -> Prepared:
    """Checks the options against trace, model and cluster. Raises ValueError or FileNotFoundError in one line."""
    if options.ranks not in (None, num_ranks):
        raise ValueError(f"--ranks {options.ranks}, but {num_ranks} processes were started: give --ranks {num_ranks}")
    policies = named_stacks(options.policies)
    for _, stack in policies:
        if stack.reader.acts:
            raise ValueError(f"{str(stack)!r}: a run reads whole experts: leave {stack.reader.name} out")
    cluster = Cluster(num_ranks, options.nodes, options.redundant, options.groups)
    trace = open_trace([Path(options.trace)])
    history = None if options.history is None else open_trace([Path(options.history)])
    if trace.meta.level != "tokens":
        raise ValueError(
            f"{options.trace}: a run needs tokens, but the trace holds only {trace.meta.level.replace('_', ' ')}: "
            "draw a trace of tokens from it with `epsim traces synthesize`"
        )
    acting = next((stack.router.name for _, stack in policies if stack.router.acts), None)
    own_router = is_folder(options.model)
    if acting is not None:
        _check_routed_anew(acting, trace.meta, options, own_router)
    if not own_router and (options.text, options.sequence, options.context) != (None, None, CONTEXT):
        raise ValueError(
            f"--text, --sequence and --context are for a trained model; {options.model} is not the folder of one"
        )
    meta = _first_layers(regrouped_meta(trace.meta, num_ranks), options.layers)
    num_scores = meta.num_experts if own_router else meta.num_scores
    meta = dataclasses.replace(meta, num_scores=num_scores if acting is not None else 0)
    for _, stack in policies:
        stack.placement.redundant(meta.num_experts, cluster)
    shape, notes = fitting_shape(options.model, meta)
    planning = ReplayOptions(cluster, policies, seed=options.seed, plan_share=options.plan_share)
    first = planned_steps(trace, planning, history)
    last = trace.num_steps
    if options.steps is not None:
        if first + options.steps > last:
            before = f" after the {first} that placements are planned on" if first else ""
            raise ValueError(f"--steps {options.steps}: {options.trace} has {last - first} steps{before}; give fewer")
        last = first + options.steps
    max_tokens, fingerprint = _survey(trace, meta, first, last)
    if not max_tokens:
        raise ValueError(f"{options.trace}: no token in the {last - first} steps to run: there is nothing to measure")
    return Prepared(
        options=options,
        trace=trace,
        history=history,
        meta=meta,
        cluster=cluster,
        shape=shape,
        policies=policies,
        first=first,
        last=last,
        max_tokens=max_tokens,
        fingerprint=fingerprint,
        notes=notes,
        own_router=own_router,
        timing=None
        if options.hardware is None
        else layer_timing(options.hardware, shape, meta, cluster, given=not own_router),
    )


def layer_timing(
    hardware: str, shape: LayerShape, meta: TraceMeta, cluster: Cluster, given: bool = True
) -> LayerTiming:
    """The time model of the layers that are run, without attention, as in the measured times.

    given: whether the experts come from a trace, so that no router is computed."""
    model = dataclasses.replace(spec_of(shape), moe_layers=meta.num_layers)
    measured = load_calibration(hardware)
    experts = ExpertsTime(measured.hardware, model, measured.table_for(model), measured.decode_for(model))
    timing = LayerTiming(experts, cluster.num_nodes, measured=measured, given=given)
    timing.check(meta.num_experts, meta.top_k, cluster.num_ranks, cluster.num_nodes)
    return timing


def spec_of(shape: LayerShape) -> ModelSpec:
    """One layer of the shape, in bf16, for the time model."""
    return ModelSpec(
        name=shape.name,
        source="the layers that are run",
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        moe_layers=1,
        weight_bytes=2.0,
        compute="bf16",
        dispatch="bf16",
        rest_parameters=0.0,
        rest_us=0.0,
        shared_intermediate=shape.shared_intermediate,
        groups=shape.groups,
        top_groups=shape.top_groups,
    )


def _check_routed_anew(router: str, meta: TraceMeta, options: RunOptions, own_router: bool) -> None:
    """Raises ValueError if the trace lacks the decode steps or the scores that a router policy needs."""
    if meta.phase in ("prefill", "training"):
        raise ValueError(f"router {router} acts on decode steps, and {options.trace} has phase {meta.phase}")
    if not own_router and not meta.num_scores:
        raise ValueError(
            f"router {router} needs router scores, and {options.trace} holds none: record with num_scores='all', or "
            "give a trained model's folder as --model, whose router makes them"
        )


def fitting_shape(model: str, meta: TraceMeta) -> tuple[LayerShape, tuple[str, ...]]:
    """The layer to run for a trace, and notes. `tiny` takes number of experts, top-k and shared cost from the trace."""
    if model == TINY:
        tiny = SHAPES[TINY]
        cost = meta.shared_cost or 0.0
        # Grouped products on GPUs need widths that are multiples of 16 bytes.
        shared = max(round(cost * tiny.intermediate / WIDTH), 1) * WIDTH if cost else 0
        fitted = dataclasses.replace(
            tiny, num_experts=meta.num_experts, top_k=meta.top_k, shared_intermediate=shared, num_layers=meta.num_layers
        )
        return fitted, _cost_notes(model, fitted, meta)
    shape = model_shape(Path(model)) if is_folder(model) else shape_of(model)
    if (shape.num_experts, shape.top_k) != (meta.num_experts, meta.top_k):
        raise ValueError(
            f"--model {model} has {shape.num_experts} experts, top-{shape.top_k}; the trace {meta.num_experts}, "
            f"top-{meta.top_k}: give a trace of that model, or --model {TINY}, which takes any"
        )
    return shape, _cost_notes(model, shape, meta)


def _cost_notes(model: str, shape: LayerShape, meta: TraceMeta) -> tuple[str, ...]:
    if meta.shared_cost in (None, shape.shared_cost):
        return ()
    return (f"shared cost {shape.shared_cost:g} of {model}, not the trace's {meta.shared_cost:g}",)


def is_folder(model: str) -> bool:
    """Whether --model is the folder of a trained model and not a shape's name."""
    return model not in SHAPES and (Path(model) / "config.json").is_file()


def model_shape(folder: Path) -> LayerShape:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}/config.json: damaged ({str(error)[:80]}): give another folder") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder}/config.json: not a table of settings: give another folder")
    return shape_of_config(config, str(folder))


def _first_layers(meta: TraceMeta, layers: int | None) -> TraceMeta:
    layers = meta.num_layers if layers is None else layers
    if layers > meta.num_layers:
        raise ValueError(f"--layers {layers}: the trace has {meta.num_layers}")
    return dataclasses.replace(meta, num_layers=layers, layers=meta.layers[:layers])


def _blocks(trace: StoredTrace, meta: TraceMeta, first: int, last: int, scored: bool) -> Iterator[TokenBlock]:
    for block in trace.blocks(first, last):
        moved = regroup(block, trace.meta, meta.num_source_ranks)
        assert isinstance(moved, TokenBlock)
        kept = [
            None if values is None or not scored else values[:, : meta.num_layers]
            for values in (moved.scores, moved.score_ids)
        ]
        ids = moved.expert_ids[:, : meta.num_layers]
        yield dataclasses.replace(moved, expert_ids=ids, scores=kept[0], score_ids=kept[1])


def _survey(trace: StoredTrace, meta: TraceMeta, first: int, last: int) -> tuple[int, str]:
    """The most tokens of a rank in a step, and a hash of the steps to run, which ranks compare."""
    most = 0
    digest = hashlib.sha256(json.dumps([meta.num_layers, meta.num_experts, meta.top_k, first, last]).encode())
    for block in _blocks(trace, meta, first, last, scored=False):
        ids = block.expert_ids
        if ids.size and not -1 <= ids.min() <= ids.max() < meta.num_experts:
            raise ValueError(f"a token names an expert outside 0..{meta.num_experts - 1} (or -1 for none)")
        key = block.token_step * meta.num_source_ranks + block.source_rank
        most = max(most, int(np.bincount(key, minlength=1).max()))
        digest.update(block.steps.tobytes() + key.tobytes() + np.ascontiguousarray(block.expert_ids).tobytes())
    return most, digest.hexdigest()[:16]
