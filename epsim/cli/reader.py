"""`epsim reader`: builds sketches for channel readers (docs/reader.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epsim.cli.options import command

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Build sketches for channel readers.")


@command(app, "build")
def build_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder with *.safetensors.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The sketch to write (safetensors).")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="The type that weights are served in: bfloat16, float16 or float32.")
    ] = "bfloat16",
    rank: Annotated[
        int, typer.Option("--rank", min=1, help="Rank of the low-rank map that restores skipped channels.")
    ] = 32,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random signs of the rotations.")] = 0,
    device: Annotated[str, typer.Option("--device", help="Device that builds the sketch: cpu or cuda.")] = "cpu",
) -> None:
    """Build the sketch of a checkpoint: a small copy of its experts. A reader chooses channels with it."""
    from safetensors import SafetensorError

    from epsim.files import CannotWriteError, check_target, whole_file
    from epsim.kernels.reader.store import DTYPES, Checkpoint, build_checkpoint, checkpoint_files, save_sketches

    target = check_target(out)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: choose {', '.join(DTYPES)}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: choose cpu or cuda")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here")
    from rich.console import Console
    from rich.progress import Progress

    if target in [path.resolve() for path in checkpoint_files(checkpoint)]:
        raise ValueError(f"--out {out}: is one of the checkpoint's own files: give another name")
    console = Console(stderr=True)
    total = len(Checkpoint(checkpoint).layers)
    sketches, weights = {}, 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("building", total=total)
        for layer, sketch in build_checkpoint(checkpoint, dtype, seed, rank, device):
            sketches[layer] = sketch
            weights += sketch.num_experts * 3 * sketch.hidden * sketch.intermediate * DTYPES[dtype].itemsize
            bar.advance(task)
    with whole_file(out) as temporary:
        try:
            save_sketches(temporary, sketches, checkpoint, dtype, seed)
        except SafetensorError as error:
            raise CannotWriteError(out, error) from None
    sizes = [sketch.resident_bytes() for sketch in sketches.values()]
    parts = {name: sum(parts_of_layer[name] for parts_of_layer in sizes) for name in ("sketch", "map")}
    shares = ", ".join(
        f"{name} {size / 2**20:.1f} MiB ({size / weights:.2%} of the experts)" for name, size in parts.items()
    )
    print(f"{out}: {len(sketches)} layers; {shares}")
