"""Options and commands that need to know what time costs: --hardware of `epsim replay`, `epsim reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from epsim.cost.layer_time import LayerTiming

HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="H",
        help="h100, h200, h800, b200 or a .toml file: predict layer times and gains for --model, or the trace's model.",
    ),
]
OverlapOption = Annotated[bool, typer.Option("--overlap", help="With --hardware: overlap the two halves of a batch.")]
ExpertTableOption = Annotated[
    Path | None, typer.Option("--expert-table", metavar="JSON", help="With --hardware: measured expert times.")
]


def timing_of(
    hardware: str | None, model: str, nodes: int, phase: str, overlap: bool, table: Path | None
) -> LayerTiming | None:
    """None without --hardware. Raises ValueError in one line."""
    if hardware is None:
        if overlap or table is not None:
            raise ValueError("--overlap and --expert-table say how times are predicted: give --hardware")
        return None
    from epsim.cost.layer_time import load_timing

    if model == "unknown":
        raise ValueError("--hardware needs to know the model, which the trace does not tell: give --model")
    return load_timing(hardware, model, nodes, phase, overlap, table)
