"""`epsim run`: a trace through policy stacks on real processes. Launchers and their worker take the same options."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from epsim.launch.options import RunOptions

TraceArgument = Annotated[
    str, typer.Argument(metavar="TRACE", help="A trace of tokens (Parquet), any readable recording, or `sample`.")
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="SPEC",
        help="deepseek-v3-layer, qwen3-30b-a3b-layer, tiny (fits any trace), or a trained model's folder.",
    ),
]
PolicyOption = Annotated[
    list[str], typer.Option("--policy", metavar="[NAME=]STACK", help='A policy stack, e.g. "eplb+lplb"; repeatable.')
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where results.json and telemetry go.")]
StepsOption = Annotated[
    int | None, typer.Option("--steps", help="Steps to run, after those that placements are planned on; else all.")
]
LauncherOption = Annotated[str, typer.Option("--launcher", help="inline (one process), torchrun or ray.")]
RanksOption = Annotated[int | None, typer.Option("--ranks", help="Processes, one a GPU where there are GPUs.")]
NodesOption = Annotated[int, typer.Option("--nodes", help="Nodes (hosts) that placements reckon with.")]
RedundantOption = Annotated[int, typer.Option("--redundant", help="Physical experts a layer beyond the logical ones.")]
GroupsOption = Annotated[int, typer.Option("--groups", help="Expert groups of the model's router.")]
LayersOption = Annotated[int | None, typer.Option("--layers", help="Only the first so many layers of the trace.")]
HistoryOption = Annotated[
    str | None, typer.Option("--history", metavar="TRACE", help="Plan placements on this trace and run all of TRACE.")
]
PlanShareOption = Annotated[
    float, typer.Option("--plan-share", help="Without --history: the share of first steps to plan on.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of all draws and weights.")]
ExchangeOption = Annotated[str, typer.Option("--exchange", help="auto, deep_ep or torch.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto (bfloat16 on GPUs, else float32), float32, bfloat16.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="A rank longer in one phase is taken to hang.")
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="H", help="h100, ..., a .toml file or a calibration's folder: predict layer times too."
    ),
]
TextOption = Annotated[str | None, typer.Option("--text", metavar="FILE", help="Trained model: the text it reads.")]
SequenceOption = Annotated[
    int | None, typer.Option("--sequence", help="Trained model: most tokens of a sequence in a prefill step.")
]
ContextOption = Annotated[
    int, typer.Option("--context", help="Trained model: tokens that a decode step's sequences have read before.")
]
GpusOption = Annotated[int | None, typer.Option("--gpus", help="ray: a rank on each of so many GPUs.")]
CpusOption = Annotated[int | None, typer.Option("--cpus", help="ray: a rank on each of so many CPUs.")]
RestartsOption = Annotated[int, typer.Option("--restarts", help="ray: how often a failed gang goes on.")]


def run_command(
    context: typer.Context,
    trace: TraceArgument,
    model: ModelOption,
    policy: PolicyOption,
    out: OutOption,
    steps: StepsOption = None,
    launcher: LauncherOption = "inline",
    ranks: RanksOption = None,
    nodes: NodesOption = 1,
    redundant: RedundantOption = 0,
    groups: GroupsOption = 1,
    layers: LayersOption = None,
    history: HistoryOption = None,
    plan_share: PlanShareOption = 0.5,
    seed: SeedOption = 0,
    exchange: ExchangeOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    timeout: TimeoutOption = 20.0,
    hardware: HardwareOption = None,
    text: TextOption = None,
    sequence: SequenceOption = None,
    context_tokens: ContextOption = 64,
    gpus: GpusOption = None,
    cpus: CpusOption = None,
    restarts: RestartsOption = 2,
) -> None:
    """Run a recorded trace's tokens through real expert-parallel layers under policy stacks, and measure."""
    from epsim.launch.options import RunOptions

    options = RunOptions(
        trace, model, tuple(policy), out, steps, ranks, nodes, redundant, groups, layers, history, plan_share, seed,
        exchange, device, dtype, timeout, hardware, text, sequence, context_tokens, launcher,
    )  # fmt: skip
    if isinstance(context.obj, list):  # a worker, started already
        context.obj.append(options)
    else:
        _launch(options, gpus, cpus, restarts)


def parse_arguments(arguments: Sequence[str]) -> RunOptions:
    """The worker's command line."""
    found: list[RunOptions] = []
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command()(run_command)
    try:
        code = app(list(arguments), standalone_mode=False, obj=found)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise ValueError(error.format_message()) from None
    if not found:  # --help
        sys.exit(code or 0)
    return found[0]


def _launch(options: RunOptions, gpus: int | None, cpus: int | None, restarts: int) -> None:
    """Starts the job, waits for it, and prints what it found."""
    launcher = options.launcher
    if launcher != "ray" and (gpus, cpus) != (None, None):
        raise ValueError("--gpus and --cpus are for --launcher ray: give --ranks")
    options.make_out()
    # PyTorch's C++ side warns on stderr about every lost connection, which a fault's one line tells better.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if launcher == "inline":
        from epsim.launch.inline import run_inline

        results = run_inline(options)
    elif launcher == "torchrun":
        from epsim.launch.torchrun import run_torchrun

        results = run_torchrun(options)
    else:
        from epsim.launch.ray_job import run_ray

        results = run_ray(options, gpus, cpus, restarts)
    from epsim.report.table import print_table

    print_table(results)
    print(results["run"]["note"])
