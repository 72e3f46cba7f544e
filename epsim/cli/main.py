"""The command line: `epsim replay`, `plan`, `run`, `compare`, `traces ...`, `model ...`.

Imports lazily: `epsim --help` loads neither torch nor ray. A user's mistake costs one line on stderr and exit code 2.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import epsim
from epsim.cli.calibrate import calibrate_command
from epsim.cli.compare import compare_command, report_command
from epsim.cli.model import app as model_app
from epsim.cli.reader import app as reader_app
from epsim.cli.reproduce import ExpertTableOption, HardwareOption, OverlapOption, reproduce_app, timing_of
from epsim.cli.run import run_command
from epsim.cli.sweep import sweep_command
from epsim.cli.traces import (
    BatchOption,
    ExpertsOption,
    ModelOption,
    PhaseOption,
    ScoreRuleOption,
    SharedCostOption,
    StepTokensOption,
    TopKOption,
    import_options,
    seed_option,
    working,
)
from epsim.cli.traces import app as traces_app
from epsim.cli.tune import tune_command
from epsim.files import check_target, message_line, reason

if TYPE_CHECKING:
    from epsim.policies.stack import PolicyStack
    from epsim.traces.store import StoredTrace

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, help=epsim.__doc__)
app.add_typer(traces_app, name="traces")
app.add_typer(model_app, name="model")
app.add_typer(reproduce_app, name="reproduce")
app.add_typer(reader_app, name="reader")

# Far beyond any cluster, and small enough that what is made for each rank or slot fits the memory.
MOST_SLOTS = 1 << 16
MAX_NAME = 60

RanksOption = Annotated[
    int, typer.Option("--ranks", min=1, max=MOST_SLOTS, help="Ranks (GPUs) of the expert-parallel group.")
]
NodesOption = Annotated[int, typer.Option("--nodes", help="Nodes (hosts) that hold the ranks.")]
RedundantOption = Annotated[
    int,
    typer.Option("--redundant", min=0, max=MOST_SLOTS, help="Physical experts a layer beyond the logical ones."),
]
GroupsOption = Annotated[
    int, typer.Option("--groups", min=1, max=MOST_SLOTS, help="Expert groups of the model's router.")
]


OnlyOption = Annotated[
    str | None, typer.Option("--only", metavar="PHASE", help="Of a trace of several phases: prefill or decode alone.")
]
MinTokensOption = Annotated[int, typer.Option("--min-tokens", min=1, help="Leave out steps with fewer tokens.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"epsim {epsim.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


@app.command("replay")
def replay_command(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace (Parquet), any readable recording, or `sample`.")
    ],
    ranks: RanksOption,
    policy: Annotated[
        list[str],
        typer.Option("--policy", metavar="[NAME=]STACK", help='A policy stack, e.g. "eplb+lplb"; repeatable.'),
    ],
    nodes: NodesOption = 1,
    redundant: RedundantOption = 0,
    groups: GroupsOption = 1,
    history: Annotated[
        str | None,
        typer.Option("--history", metavar="TRACE", help="Plan placements on this trace and score all of TRACE."),
    ] = None,
    plan_share: Annotated[
        float, typer.Option("--plan-share", help="Without --history: the share of first steps to plan on.")
    ] = 0.5,
    only: OnlyOption = None,
    min_tokens: MinTokensOption = 1,
    seed: Annotated[int, seed_option("Seed of all draws.")] = 0,
    shared_cost: SharedCostOption = None,
    device: Annotated[
        str, typer.Option("--device", help="Where splits are solved: cpu or cuda; the results are the same.")
    ] = "cpu",
    hardware: HardwareOption = None,
    overlap: OverlapOption = False,
    expert_table: ExpertTableOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write results.json, report.md and report.html there.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print results.json instead of the table.")] = False,
    top_k: TopKOption = None,
    experts: ExpertsOption = None,
    model: ModelOption = None,
    phase: PhaseOption = None,
    batch: BatchOption = None,
    step_tokens: StepTokensOption = None,
    score_rule: ScoreRuleOption = None,
) -> None:
    """Replay a recorded trace through policy stacks and say which wins, and how far each is from the best possible."""
    named = tuple(named_stack(text) for text in policy)
    check_out(out)

    from epsim.placement.base import Cluster
    from epsim.replay import ReplayOptions, check_device, replay, replay_length
    from epsim.traces.importing import open_trace

    options = ReplayOptions(
        Cluster(ranks, nodes, redundant, groups),
        named,
        seed,
        shared_cost,
        plan_share,
        shlex.join(["epsim", *sys.argv[1:]]),
        check_device(device),
    )
    reading = import_options(top_k, experts, model, phase, shared_cost, batch, ranks, step_tokens, score_rule)
    with working("reading"):
        scored = selected(open_trace([Path(trace)], reading), only, min_tokens)
        planned = None if history is None else selected(open_trace([Path(history)], reading), only, min_tokens)
    timing = timing_of(hardware, model or scored.meta.model, nodes, only or scored.meta.phase, overlap, expert_table)
    with _progress("replaying", replay_length(scored, planned)) as advance:
        results = replay(
            scored,
            replace(options, timing=timing),
            planned,
            trace_name=Path(trace).name,
            history_name="" if history is None else Path(history).name,
            progress=advance,
        )
    if out is not None:
        from epsim.report.write import write_report

        write_report(results, out)
    if json_output:
        import json

        print(json.dumps(results, indent=1))
    else:
        from epsim.report.table import print_table

        print_table(results)


@app.command("plan")
def plan_command(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace (Parquet), any readable recording, or `sample`.")
    ],
    ranks: RanksOption,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The file to write.")],
    nodes: NodesOption = 1,
    redundant: RedundantOption = 0,
    groups: GroupsOption = 1,
    placement: Annotated[
        str, typer.Option("--placement", metavar="NAME", help="contiguous, eplb, searched, ...")
    ] = "eplb",
    format_name: Annotated[str, typer.Option("--format", help="sglang, vllm, trtllm or epsim.")] = "epsim",
    only: OnlyOption = None,
    min_tokens: MinTokensOption = 1,
    top_k: TopKOption = None,
    experts: ExpertsOption = None,
    model: ModelOption = None,
    phase: PhaseOption = None,
    batch: BatchOption = None,
    step_tokens: StepTokensOption = None,
    score_rule: ScoreRuleOption = None,
) -> None:
    """Plan a placement on a trace and write it as SGLang, vLLM or TensorRT-LLM load it."""
    from epsim.placement import placement_policy
    from epsim.placement.base import Cluster
    from epsim.placement.formats import check_format, write_placement
    from epsim.planning import plan_placements
    from epsim.traces.importing import open_trace

    policy = placement_policy(placement)
    check_format(format_name)
    check_target(out)
    cluster = Cluster(ranks, nodes, redundant, groups)
    reading = import_options(top_k, experts, model, phase, None, batch, ranks, step_tokens, score_rule)
    with working("reading"):
        recorded = selected(open_trace([Path(trace)], reading), only, min_tokens)
    with _progress("planning", recorded.num_steps) as advance:
        placements = plan_placements({placement: policy}, recorded, recorded.num_steps, recorded.meta, cluster, advance)
    planned = placements[placement]
    write_placement(planned, out, format_name, recorded.meta.layers)
    print(f"{out}: {placement} for {ranks} ranks, {planned.num_physical} slots a layer, {format_name} format")


app.command("run")(run_command)
app.command("compare")(compare_command)
app.command("report")(report_command)
app.command("sweep")(sweep_command)
app.command("tune")(tune_command)
app.command("calibrate")(calibrate_command)


def selected(trace: StoredTrace, only: str | None, min_tokens: int) -> StoredTrace:
    """The steps of a trace that --only and --min-tokens leave."""
    if only is None and min_tokens <= 1:
        return trace
    from epsim.traces.importing import temporary_path
    from epsim.traces.options import check_phase
    from epsim.traces.select import select_steps

    phase = None if only is None else check_phase("--only", only)
    return select_steps(trace, temporary_path(), phase, min_tokens)


def named_stack(text: str) -> tuple[str, PolicyStack]:
    """`NAME=STACK` or `STACK` -> (name or "", stack); an equals sign inside parentheses belongs to the stack."""
    from epsim.policies.stack import parse_stack

    head, equals, tail = text.partition("=")
    if not equals or "(" in head:
        return "", parse_stack(text)
    name = head.strip()
    if not name or set(name) & set("+.,") or not name.isprintable() or len(name) > MAX_NAME:
        raise ValueError(
            f"--policy {text!r}: a name is 1 to {MAX_NAME} characters that can be printed, none of them + . or ,"
        )
    return name, parse_stack(tail)


def check_out(out: Path | None) -> None:
    """Before any work: a place that cannot be written is said at once."""
    if out is None:
        return
    try:
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out}: is a file; give a folder")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {reason(error)}: give another folder") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out}: not writable; give another folder")
    for name in ("results.json", "report.md", "report.html"):
        check_target(out / name)


@contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, shown only where somebody looks; gives the function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=total)
        yield lambda steps: bar.advance(task, steps)


def main() -> None:
    """The console script. Mistakes of the user: one line, exit code 2. EPSIM_DEBUG=1 shows the traceback."""
    # Threads of OpenMP that spin while they wait take the cores from those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:  # started with stdout closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    stopping = [signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a shell's background
        stopping.append(signal.SIGINT)
    previous = {number: signal.signal(number, _stop) for number in stopping}
    _stopped_by.clear()
    try:
        code = _answer()
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly()
    except OSError as error:
        _fail(error, _of_output(error) or str(error))
    except ValueError as error:
        _fail(error, str(error))
    except MemoryError as error:
        _fail(error, f"more than fits this machine's memory ({error}): give fewer or smaller steps, ranks or experts")
    except KeyboardInterrupt:
        print("epsim: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if type(error).__name__ == "Abort":  # click's form of an interrupt
            print("epsim: interrupted", file=sys.stderr)
            sys.exit(130)
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help, asked for by asking nothing
            print(error.format_message())
            sys.exit(0)
        _fail(error, f"{error.format_message()} (epsim --help and epsim COMMAND --help list what there is)")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    sys.exit(code if isinstance(code, int) else 0)


def _answer() -> object:
    """Whatever comes of a stop is a stop: imports that it interrupts swallow it, and then fail in ways of their own."""
    try:
        return app(standalone_mode=False)
    except Exception:
        if _stopped_by:
            sys.exit(128 + _stopped_by[0])
        raise


_stopped_by: list[int] = []


def _stop(number: int, frame: object) -> None:
    """A termination unwinds like an interrupt, so that unfinished files go."""
    _stopped_by.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _leave_quietly() -> None:
    """Whoever read the output has seen enough, as `head` has. What is left in the buffer goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def _of_output(error: OSError) -> str:
    """What to say where standard output takes no more, not even a line's end; else nothing."""
    if error.filename is not None or error.errno is None:  # of a file, or epsim's own
        return ""
    try:
        print(flush=True)
    except OSError as again:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"standard output: {again.strerror}: direct it elsewhere"
    return ""


def _fail(error: Exception, message: str) -> None:
    if os.environ.get("EPSIM_DEBUG"):
        raise error
    print(f"epsim: {message_line(message)}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
