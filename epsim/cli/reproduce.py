"""`epsim reproduce`: published tables beside predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epsim.cli.options import command

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Published tables beside predictions.")


@app.callback()
def _reproduce() -> None: ...


@command(app, "waterfill-lplb")
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


@command(app, "deepep")
def deepep_command() -> None:
    """DeepEP's published bandwidths and latencies on H800 beside the exchange model under their conditions."""
    from epsim.reproduce.show import show_deepep

    show_deepep()


@command(app, "public-tables")
def public_tables_command(
    hardware: Annotated[str, typer.Option("--hardware", metavar="H", help="h100, h200 or b200.")] = "h200",
) -> None:
    """Measured calls of the wheel aiconfigurator-core that no fit has used, beside what is predicted for them."""
    from epsim.reproduce.show import show_held_out

    show_held_out(hardware)
