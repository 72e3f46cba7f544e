"""`epsim tune`: what to run on a cluster, under a memory limit."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epsim.cli.reproduce import ExpertTableOption, OverlapOption
from epsim.cli.traces import (
    BatchOption,
    ExpertsOption,
    PhaseOption,
    ScoreRuleOption,
    SharedCostOption,
    StepTokensOption,
    TopKOption,
    import_options,
    seed_option,
    working,
)

if TYPE_CHECKING:
    from epsim.traces.store import StoredTrace

MOST_GPUS = 1 << 14


def tune_command(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace (Parquet), any readable recording, or `sample`.")
    ],
    model: Annotated[str, typer.Option("--model", metavar="M", help="A shipped model, such as deepseek-v3, or .toml.")],
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="H", help="h100, h200, h800, b200, a .toml file or a calibration.")
    ],
    gpus: Annotated[
        int, typer.Option("--gpus", min=1, max=MOST_GPUS, help="GPUs (ranks) of the expert-parallel group.")
    ],
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Hosts that hold them; else as many as the hardware needs.")
    ] = None,
    memory_per_gpu: Annotated[
        str | None, typer.Option("--memory-per-gpu", metavar="SIZE", help="141GB; else what the hardware has.")
    ] = None,
    kv_share: Annotated[
        float, typer.Option("--kv-share", help="Share of the memory kept free for KV cache and activations.")
    ] = 0.2,
    redundant: Annotated[
        list[int] | None,
        typer.Option("--redundant", min=0, metavar="N", help="Redundant experts a layer to try; repeatable."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="STACK", help='Stacks to try instead of all, e.g. "eplb+lplb"; repeatable.'),
    ] = None,
    interval: Annotated[
        list[int] | None,
        typer.Option("--interval", metavar="STEPS", help="Rebalance intervals to try; repeatable."),
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router", metavar="ROUTER", help='Routers to try as well, e.g. "oea(k0=4)"; they change outputs.'
        ),
    ] = None,
    quality_loss: Annotated[
        str,
        typer.Option("--quality-loss", metavar="WORDS", help="With a router or reader: the loss accepted, in words."),
    ] = "",
    worth: Annotated[
        float, typer.Option("--worth", help="Gains below this share are not worth memory or moving parts.")
    ] = 0.005,
    rebalance_layer_ms: Annotated[
        float | None,
        typer.Option("--rebalance-layer-ms", help="Host's work of a rebalance a layer, beside the bytes (10)."),
    ] = None,
    groups: Annotated[
        int | None, typer.Option("--groups", min=1, help="Expert groups of the model's router; else the model's.")
    ] = None,
    overlap: OverlapOption = False,
    expert_table: ExpertTableOption = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PHASE", help="Of several phases: prefill or decode alone.")
    ] = None,
    min_tokens: Annotated[int, typer.Option("--min-tokens", min=1, help="Leave out steps with fewer tokens.")] = 1,
    seed: Annotated[int, seed_option("Seed of all draws.")] = 0,
    model_path: Annotated[
        str | None, typer.Option("--model-path", help="Where serving systems find the model (commands).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write results.json, report.md and report.html there.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print results.json instead of the answers.")] = False,
    top_k: TopKOption = None,
    experts: ExpertsOption = None,
    phase: PhaseOption = None,
    shared_cost: SharedCostOption = None,
    batch: BatchOption = None,
    step_tokens: StepTokensOption = None,
    score_rule: ScoreRuleOption = None,
) -> None:
    """Say what to run: redundancy, placement, stack and rebalancing under a memory limit, what it gains and costs."""
    from epsim.cli.main import check_out, selected
    from epsim.cost.layer_time import load_timing
    from epsim.policies.stack import parse_stack
    from epsim.traces.importing import open_trace
    from epsim.tune.memory import GB, parse_memory
    from epsim.tune.migration import LAYER_MS
    from epsim.tune.tune import TuneOptions, tune

    timing = load_timing(hardware, model, 1, "unknown", overlap, expert_table)
    spec, machine = timing.model, timing.hardware
    num_nodes = nodes or -(-gpus // machine.ranks_per_node)
    stated = None if trace == "sample" else spec.name
    read = {"only": only, "min-tokens": min_tokens if min_tokens > 1 else None, "top-k": top_k, "experts": experts}
    read |= {"model": None if trace.endswith(".parquet") else stated, "phase": phase, "batch": batch}
    read |= {"step-tokens": step_tokens, "score-rule": score_rule}
    options = TuneOptions(
        gpus=gpus,
        nodes=num_nodes,
        groups=groups or spec.groups,
        memory=machine.memory_gb * GB if memory_per_gpu is None else parse_memory(memory_per_gpu),
        kv_share=kv_share,
        redundant=tuple(redundant or ()),
        policies=tuple(parse_stack(text) for text in policy or ()),
        intervals=tuple(interval or ()),
        routers=tuple(router or ()),
        quality_loss=quality_loss,
        worth=worth,
        layer_ms=LAYER_MS if rebalance_layer_ms is None else rebalance_layer_ms,
        seed=seed,
        shared_cost=shared_cost,
        model_path=model_path or "MODEL",
        trace_path=trace,
        reading=tuple(word for key, value in read.items() if value is not None for word in (f"--{key}", str(value))),
        command=shlex.join(["epsim", *sys.argv[1:]]),
    )
    check_out(out)
    reading = import_options(top_k, experts, stated, phase, shared_cost, batch, gpus, step_tokens, score_rule)
    with working("reading"):
        recorded: StoredTrace = selected(open_trace([Path(trace)], reading), only, min_tokens)
    timing = load_timing(hardware, model, num_nodes, only or recorded.meta.phase, overlap, expert_table)
    with _progress() as progress:
        results = tune(recorded, options, timing, trace_name=Path(trace).name, progress=progress)
    if out is not None:
        from epsim.report.write import write_report

        write_report(results, out)
    if json_output:
        import json

        print(json.dumps(results, indent=1))
    else:
        from epsim.tune.show import print_tune

        print_tune(results)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A sign of work on stderr, shown only where somebody looks; gives the function that tells of it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda words, share: bar.update(task, description=words, completed=share)
