"""`epsim traces`: import, show and synthesize; and the options by which any command reads foreign recordings."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epsim.files import check_target, printable

if TYPE_CHECKING:
    from epsim.traces.options import ImportOptions

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Import, show and draw traces.")

TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Experts a token chooses, where the recording lacks it.")
]
ExpertsOption = Annotated[int | None, typer.Option("--experts", help="Experts a layer, where the recording lacks it.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Name of the model; known names fill top-k and shared cost.")
]
PhaseOption = Annotated[str | None, typer.Option("--phase", help="prefill, decode, mixed or training.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch", help="Recordings by sequence: places of the composed decode batch.")
]
StepTokensOption = Annotated[int | None, typer.Option("--step-tokens", help="Token logs without steps: tokens a step.")]
ScoreRuleOption = Annotated[
    str | None, typer.Option("--score-rule", help="Router logits: how the model turns them into a choice.")
]
SharedCostOption = Annotated[
    float | None,
    typer.Option(
        "--shared-cost", help="Work of the shared expert in routed assignments; 0 for none. Default: the trace's."
    ),
]
SourceRanksOption = Annotated[int | None, typer.Option("--ranks", help="Source ranks that composed tokens live on.")]


def seed_option(words: str) -> Any:
    return typer.Option("--seed", min=0, max=2**63 - 1, help=words)


def working(words: str) -> AbstractContextManager[object]:
    """A sign of work of unknown length on stderr, shown only where somebody looks."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(words) if console.is_terminal else nullcontext()


def import_options(
    top_k: int | None,
    experts: int | None,
    model: str | None,
    phase: str | None,
    shared_cost: float | None,
    batch: int | None,
    ranks: int | None,
    step_tokens: int | None,
    score_rule: str | None,
) -> ImportOptions:
    from epsim.traces.options import ImportOptions

    given: dict[str, Any] = {
        "top_k": top_k,
        "num_experts": experts,
        "model": model,
        "phase": phase,
        "shared_cost": shared_cost,
        "batch": batch,
        "ranks": ranks,
        "step_tokens": step_tokens,
        "score_rule": score_rule,
    }
    return ImportOptions(**{name: value for name, value in given.items() if value is not None})


@app.command("import")
def import_command(
    sources: Annotated[list[Path], typer.Argument(metavar="SRC...", help="Files of one recording, or their folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="T.parquet", help="The trace to write.")],
    top_k: TopKOption = None,
    experts: ExpertsOption = None,
    model: ModelOption = None,
    phase: PhaseOption = None,
    shared_cost: SharedCostOption = None,
    batch: BatchOption = None,
    ranks: SourceRanksOption = None,
    step_tokens: StepTokensOption = None,
    score_rule: ScoreRuleOption = None,
) -> None:
    """Read another system's recording and store it as a trace."""
    from epsim.traces.importing import import_trace

    check_target(out)
    options = import_options(top_k, experts, model, phase, shared_cost, batch, ranks, step_tokens, score_rule)
    with working("importing"):
        trace = import_trace(sources, out, options)
    meta = trace.meta
    shape = f"{meta.num_layers} layers x {meta.num_experts} experts, {meta.level} level"
    print(f"{printable(str(out))}: {trace.num_steps} steps, {shape}")
    for note in meta.notes:
        print(f"  {printable(note)}")


@app.command("show")
def show_command(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace, any readable recording, or `sample`.")],
    top_k: TopKOption = None,
    experts: ExpertsOption = None,
    model: ModelOption = None,
    phase: PhaseOption = None,
    shared_cost: SharedCostOption = None,
    batch: BatchOption = None,
    ranks: SourceRanksOption = None,
    step_tokens: StepTokensOption = None,
    score_rule: ScoreRuleOption = None,
) -> None:
    """Print what a trace holds, and how skewed each layer is."""
    from epsim.traces.importing import open_trace
    from epsim.traces.show import summarize

    options = import_options(top_k, experts, model, phase, shared_cost, batch, ranks, step_tokens, score_rule)
    with working("reading"):
        summary = summarize(open_trace([Path(trace)], options))
    for name, value in summary.lines():
        print(f"{name}: {printable(value)}")
    print(
        "skew per layer, max / mean over experts: all steps together; mean of the steps; hottest expert; never chosen"
    )
    for row in summary.skew:
        print(f"  layer {row.layer:3}: {row.overall:7.3f} {row.per_step:8.3f}  expert {row.hottest:3} {row.idle:5}")


@app.command("synthesize")
def synthesize_command(
    sources: Annotated[list[Path], typer.Argument(metavar="SRC...", help="Recordings, one a topic.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="T.parquet", help="The trace to write.")],
    steps: Annotated[int, typer.Option("--steps", help="Steps to draw.")] = 100,
    tokens: Annotated[int, typer.Option("--step-tokens", help="Tokens a step.")] = 1024,
    ranks: Annotated[int, typer.Option("--ranks", help="Source ranks that the tokens live on.")] = 16,
    drift: Annotated[
        float, typer.Option("--drift", help="How far the mixture of topics moves from step to step.")
    ] = 0.1,
    top_k: TopKOption = None,
    experts: ExpertsOption = None,
    model: ModelOption = None,
    phase: PhaseOption = None,
    shared_cost: SharedCostOption = None,
    batch: BatchOption = None,
    seed: Annotated[int, seed_option("Seed of the draws.")] = 0,
) -> None:
    """Draw token-level steps with the marginals of recordings; the trace is marked as drawn."""
    from epsim.traces.importing import open_trace
    from epsim.traces.synthesize import SynthesisOptions, synthesize

    drawing = SynthesisOptions(steps, tokens, ranks, drift, seed=seed)
    check_target(out)
    options = import_options(top_k, experts, model, phase, shared_cost, batch, ranks, None, None)
    with working("drawing"):
        topics = [open_trace([source], options) for source in sources]
        trace = synthesize(topics, out, drawing)
    drawn = f"{trace.num_steps} steps of {tokens} tokens drawn from {len(topics)} recording(s), seed {seed}"
    print(f"{printable(str(out))}: {drawn}")
