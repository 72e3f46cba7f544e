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


reproduce_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Published tables beside predictions.")


@reproduce_app.callback()
def _reproduce() -> None: ...


@reproduce_app.command("waterfill-lplb")
def waterfill_lplb_command(
    recordings: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="DeepSeek-V3's recordings: prefill_*.json and decode_*.json.")
    ],
    hardware: Annotated[str, typer.Option("--hardware", metavar="H", help="What the two nodes hold.")] = "h200",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Batches of a workload; thrice that of one alone.")] = 4,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers looked at, evenly spaced.")] = 6,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all draws.")] = 0,
) -> None:
    """SGLang's table of Waterfill and LPLB on DeepSeek-V3 and V4-Flash, 16 GPUs on 2 nodes: published and predicted."""
    from epsim.reproduce.show import show_waterfill_lplb

    show_waterfill_lplb(recordings, hardware, steps, layers, seed)


@reproduce_app.command("deepep")
def deepep_command() -> None:
    """DeepEP's published bandwidths and latencies on H800 beside the exchange model under their conditions."""
    from epsim.reproduce.show import show_deepep

    show_deepep()


@reproduce_app.command("public-tables")
def public_tables_command(
    hardware: Annotated[str, typer.Option("--hardware", metavar="H", help="h100, h200 or b200.")] = "h200",
) -> None:
    """Measured calls of the wheel aiconfigurator-core that no fit has used, beside what is predicted for them."""
    from epsim.reproduce.show import show_held_out

    show_held_out(hardware)
