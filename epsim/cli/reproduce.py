"""`epsim reproduce`: compares published tables with predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epsim.cli.options import command

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Compare published tables with predictions.")


@command(app, "waterfill-lplb")
def waterfill_lplb_command(
    recordings: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="DeepSeek-V3's recordings: prefill_*.json and decode_*.json.")
    ],
    hardware: Annotated[str, typer.Option("--hardware", metavar="H", help="GPU type of the two nodes.")] = "h200",
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=1, help="Batches per workload (three times as many for a model with only one workload)."
        ),
    ] = 4,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Number of layers used, evenly spaced.")] = 6,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all draws.")] = 0,
) -> None:
    """Compare SGLang's table of Waterfill and LPLB. The table has DeepSeek-V3 and V4-Flash on 2 nodes with 16 GPUs."""
    from epsim.reproduce.show import show_waterfill_lplb

    show_waterfill_lplb(recordings, hardware, steps, layers, seed)


@command(app, "deepep")
def deepep_command() -> None:
    """Compare DeepEP's published figures on H800. The figures are bandwidths and latencies."""
    from epsim.reproduce.show import show_deepep

    show_deepep()


@command(app, "public-tables")
def public_tables_command(
    hardware: Annotated[str, typer.Option("--hardware", metavar="H", help="h100, h200 or b200.")] = "h200",
) -> None:
    """Compare public tables of GPU times. Only sizes that the fit has not used are predicted."""
    from epsim.reproduce.show import show_held_out

    show_held_out(hardware)
