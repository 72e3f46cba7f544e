"""The functions of `import epsim`. Each does the same as the command of its name, and returns a Python object.

Nothing heavy is imported before a function is called.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epsim.options import AnyPath, Options, Progress, StepOptions, command_words, takes
from epsim.requests import LaunchOptions, LoadRequest, PlanRequest, ReplayRequest, TuneRequest
from epsim.traces.options import ImportOptions, ReadOptions, RecordingOptions

if TYPE_CHECKING:
    from epsim.cost.layer_time import LayerTiming
    from epsim.planning import Plan
    from epsim.report.results import Results
    from epsim.traces.store import StoredTrace


@takes(LoadRequest)
def load(request: LoadRequest) -> StoredTrace:
    """Opens a trace, or imports a recording into a temporary file that is deleted when Python exits.

    >>> trace = epsim.load("sample")
    >>> trace.num_steps, trace.meta.num_experts, trace.meta.level
    (360, 64, 'tokens')

    Raises ValueError or FileNotFoundError in one line that says what is wrong and what to do.
    """
    return _opened(request.trace, request)


@takes(ReplayRequest)
def replay(request: ReplayRequest) -> Results:
    """Replays a trace through policy stacks. Returns how well each balances the load, and the best of them.

    >>> results = epsim.replay("sample", ["eplb", "best=eplb+lplb"], ranks=16, nodes=2, redundant=32)
    >>> results.stacks["best"].metrics.max_over_mean.mean < results.stacks["eplb"].metrics.max_over_mean.mean
    True

    A policy is a text (docs/contract.md, section 3) or a `PolicyStack`. Raises ValueError or FileNotFoundError in one
    line that says what is wrong and what to do.
    """
    from epsim.placement.base import Cluster
    from epsim.policies.stack import named_stacks
    from epsim.replaying import ReplayOptions, check_device, replay, replay_length
    from epsim.report.results import Results

    options = ReplayOptions(
        Cluster(request.ranks, request.nodes, request.redundant, request.groups),
        named_stacks(request.policies),
        request.shared_cost,
        request.command or _command("replay", request),
        check_device(request.device),
        seed=request.seed,
        plan_share=request.plan_share,
    )
    request.progress("reading", 0.0)
    trace = _opened(request.trace, request)
    history = None if request.history is None else _opened(request.history, request)
    timing = _timing(request, request.model or trace.meta.model, request.only or trace.meta.phase)
    advance = _counting(request.progress, "replaying", replay_length(trace, history))
    return Results(
        replay(
            trace,
            replace(options, timing=timing),
            history,
            trace_name=trace.name,
            history_name="" if history is None else history.name,
            progress=advance,
        )
    )


@takes(PlanRequest)
def plan(request: PlanRequest) -> Plan:
    """Plans a placement of experts on all steps of a trace. `write` saves it in the format of a serving system.

    >>> placement = epsim.plan("sample", "eplb", ranks=16, redundant=32)
    >>> placement.physical_to_logical.shape
    torch.Size([4, 96])
    >>> placement.write("placement.json", format="sglang")

    Raises ValueError or FileNotFoundError in one line that says what is wrong and what to do.
    """
    from epsim.placement.base import Cluster
    from epsim.planning import Plan, plan_placements
    from epsim.policies.stack import parse_stack, placement_policy

    placement_policy(request.placement)  # raises ValueError for a text without a placement
    stack = parse_stack(request.placement)
    cluster = Cluster(request.ranks, request.nodes, request.redundant, request.groups)
    request.progress("reading", 0.0)
    trace = _opened(request.trace, request)
    advance = _counting(request.progress, "planning", trace.num_steps)
    (placed,) = plan_placements([stack], trace, trace.num_steps, trace.meta, cluster, advance)
    shape = (placed.num_experts, placed.num_ranks, placed.num_nodes)
    return Plan(placed.physical_to_logical, *shape, layers=trace.meta.layers)


@takes(TuneRequest)
def tune(request: TuneRequest) -> Results:
    """Recommends what to run within a cluster's memory: redundant experts, placement, policies, rebalancing interval.

    >>> tuned = epsim.tune("sample", model="epsim-small", hardware="h200", gpus=8, policies=["eplb", "eplb+lplb"])
    >>> tuned.answers.names
    ['any', 'sglang', 'vllm']

    Raises ValueError or FileNotFoundError in one line that says what is wrong and what to do.
    """
    from epsim.cost.layer_time import load_timing
    from epsim.policies.stack import named_stacks, parse_stack
    from epsim.report.results import Results
    from epsim.traces.store import StoredTrace
    from epsim.tuning.memory import GB, parse_memory
    from epsim.tuning.migration import LAYER_MS
    from epsim.tuning.tune import TuneOptions, tune

    table = None if request.expert_table is None else Path(request.expert_table)
    timing = load_timing(request.hardware, request.model, 1, "unknown", request.overlap, table)
    spec, machine, layer_ms = timing.model, timing.hardware, request.rebalance_layer_ms
    nodes = request.nodes or -(-request.gpus // machine.ranks_per_node)
    name = os.fspath(request.trace)
    # A loaded trace and the sample name their model.
    stated = None if name == "sample" or isinstance(request.trace, StoredTrace) else spec.name
    reading = ImportOptions.of(request, model=None if name.endswith(".parquet") else stated)
    memory = request.memory_per_gpu
    options = TuneOptions(
        gpus=request.gpus,
        nodes=nodes,
        groups=request.groups or spec.groups,
        memory=machine.memory_gb * GB if memory is None else parse_memory(memory),
        kv_share=request.kv_share,
        redundant=tuple(request.redundant),
        policies=tuple(stack for _, stack in named_stacks(request.policies)),
        intervals=tuple(request.intervals),
        routers=tuple(request.routers),
        quality_loss=request.quality_loss,
        baseline=None if request.baseline is None else parse_stack(request.baseline),
        worth=request.worth,
        layer_ms=LAYER_MS if layer_ms is None else layer_ms,
        seed=request.seed,
        shared_cost=request.shared_cost,
        model_path=request.model_path or "MODEL",
        trace_path=name,
        reading=(*command_words(request, StepOptions), *command_words(reading, RecordingOptions, ReadOptions)),
        command=request.command or _command("tune", request),
    )
    request.progress("reading", 0.0)
    trace = _opened(request.trace, request, model=stated, ranks=request.gpus)
    phase = request.only or trace.meta.phase
    timing = load_timing(request.hardware, request.model, nodes, phase, request.overlap, table)
    return Results(tune(trace, options, timing, trace_name=trace.name, progress=request.progress))


@takes(LaunchOptions)
def run(options: LaunchOptions) -> Results:
    """Runs the tokens of a trace through real expert-parallel layers under policy stacks. Measures loads and times.

    >>> measured = epsim.run("sample", ["contiguous"], model="tiny", out="run", steps=1, device="cpu")
    >>> measured.data["run"]["equals_replay"]
    True

    Raises ValueError or FileNotFoundError in one line that says what is wrong and what to do. If a rank fails, the
    reason is printed on stderr and SystemExit is raised.
    """
    if options.launcher != "ray" and (options.gpus, options.cpus) != (None, None):
        raise ValueError("--gpus and --cpus are for --launcher ray: give --ranks")
    # PyTorch's C++ code would warn about every lost connection. epsim's own message names the cause.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from epsim.files import folder_for_results
    from epsim.report.results import Results

    with folder_for_results(options.out):
        if options.launcher == "inline":
            from epsim.launch.inline import run_inline

            return Results(run_inline(options))
        if options.launcher == "torchrun":
            from epsim.launch.torchrun import run_torchrun

            return Results(run_torchrun(options))
        from epsim.launch.ray_job import run_ray

        return Results(run_ray(options, options.gpus, options.cpus, options.restarts))


def compare(*results: Results | AnyPath, command: str = "") -> Results:
    """Compares each of the later results with the first, stack by stack.

    >>> today = epsim.replay("sample", ["eplb+lplb"], ranks=16, redundant=32)
    >>> last_week = epsim.replay("sample", ["eplb+lplb"], ranks=16, redundant=16)
    >>> comparison = epsim.compare(last_week, today)
    >>> comparison.rows["eplb+lplb max_over_mean"].difference < 0
    True

    results: `Results`, results.json files or their folders. For a single one, its stacks are compared with its first
    stack. For the folder of a single run, the measurement is compared with the prediction.

    Raises ValueError or FileNotFoundError in one line that says what is wrong and what to do.
    """
    from epsim.report.compare import combined, compare
    from epsim.report.results import Results

    sides = sides_of(results)
    names = [side.name for side in sides]
    return Results(combined(sides, compare(sides), command or shlex.join(["epsim", "compare", *names])))


def sides_of(results: Sequence[Results | AnyPath]) -> list[Any]:
    """The sides of a comparison. `Results` that were not read from a file are named by their number."""
    from epsim.report.compare import Side, read_sides
    from epsim.report.results import Results

    if not results:
        raise ValueError("nothing to compare: give results")
    paths = [Path(given) for given in results if not isinstance(given, Results)]
    if len(paths) == len(results):
        return read_sides(paths)
    sides = []
    for number, given in enumerate(results, start=1):
        sides += [Side(f"results {number}", given.data)] if isinstance(given, Results) else read_sides([Path(given)])
    return sides


def _opened(trace: AnyPath | Sequence[AnyPath], request: Any, **changed: Any) -> StoredTrace:
    """Opens or imports the trace and selects steps, by the options of the request."""
    from epsim.traces.importing import open_trace, selected
    from epsim.traces.store import StoredTrace

    opened = selected(open_trace(trace, ImportOptions.of(request, **changed)), request.only, request.min_tokens)
    if isinstance(trace, StoredTrace):
        opened.name = trace.name
    elif isinstance(trace, str | os.PathLike):
        opened.name = Path(trace).name
    return opened


def _timing(request: ReplayRequest, model: str, phase: str) -> LayerTiming | None:
    """The time model; None without --hardware."""
    if request.hardware is None:
        if request.overlap or request.expert_table is not None:
            raise ValueError("--overlap and --expert-table say how times are predicted: give --hardware")
        return None
    from epsim.cost.layer_time import load_timing

    if model == "unknown":
        raise ValueError("--hardware needs the model, which the trace does not name: give --model")
    table = None if request.expert_table is None else Path(request.expert_table)
    return load_timing(request.hardware, model, request.nodes, phase, request.overlap, table)


def _counting(progress: Progress, words: str, total: int) -> Callable[[int], None]:
    """A function that takes the number of steps just finished, and reports the share of `total` that is done."""
    done = 0

    def advance(steps: int) -> None:
        nonlocal done
        done += steps
        progress(words, done / total)

    return advance


def _command(name: str, request: Options) -> str:
    """The command line that does the same as the function `name` with this request."""
    return shlex.join(["epsim", name, *command_words(request)])
