"""`epsim traces`: imports recordings, shows their content, and draws traces from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from epsim.cli.options import command, working
from epsim.files import check_target, printable
from epsim.traces.options import ImportOptions, RecordingOptions, SharedCostOptions, SynthesisOptions

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Import, show and draw traces.")

OutFileOption = Annotated[Path, typer.Option("-o", "--out", metavar="T.parquet", help="The trace to write.")]


@dataclass(frozen=True, kw_only=True)
class TopicOptions(RecordingOptions, SharedCostOptions):
    """How recordings of topics are read."""


@command(app, "import")
def import_command(
    sources: Annotated[list[Path], typer.Argument(metavar="SRC...", help="Files of one recording, or their folder.")],
    out: OutFileOption,
    options: ImportOptions,
) -> None:
    """Read another system's recording and store it as a trace."""
    from epsim.traces.importing import import_trace

    check_target(out)
    with working("importing"):
        trace = import_trace(sources, out, options)
    meta = trace.meta
    shape = f"{meta.num_layers} layers x {meta.num_experts} experts, {meta.level} level"
    print(f"{printable(str(out))}: {trace.num_steps} steps, {shape}")
    for note in meta.notes:
        print(f"  {printable(note)}")


@command(app, "show")
def show_command(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace, any readable recording, or `sample`.")],
    options: ImportOptions,
) -> None:
    """Print the content of a trace, and how uneven the load of its experts is."""
    from epsim.traces.importing import open_trace
    from epsim.traces.show import summarize

    with working("reading"):
        summary = summarize(open_trace([Path(trace)], options))
    for name, value in summary.lines():
        print(f"{name}: {printable(value)}")
    print(
        "skew of each layer (max / mean load of experts): over all steps; mean over single steps; hottest expert; "
        "number of experts that no token chose"
    )
    for row in summary.skew:
        print(f"  layer {row.layer:3}: {row.overall:7.3f} {row.per_step:8.3f}  expert {row.hottest:3} {row.idle:5}")


@command(app, "synthesize")
def synthesize_command(
    sources: Annotated[list[Path], typer.Argument(metavar="SRC...", help="Recordings, one for each topic.")],
    out: OutFileOption,
    drawing: SynthesisOptions,
    topic: TopicOptions,
) -> None:
    """Draw a trace of tokens with the statistics of recordings. It is marked as drawn."""
    from epsim.traces.importing import open_trace
    from epsim.traces.synthesize import synthesize

    check_target(out)
    options = ImportOptions.of(topic, ranks=drawing.num_ranks)
    with working("drawing"):
        topics = [open_trace([source], options) for source in sources]
        trace = synthesize(topics, out, drawing)
    recordings = f"{len(topics)} recording{'s' if len(topics) > 1 else ''}, seed {drawing.seed}"
    print(f"{printable(str(out))}: {trace.num_steps} steps of {drawing.tokens_per_step} tokens drawn from {recordings}")
