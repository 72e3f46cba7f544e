"""`epsim calibrate`: measure the machine at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def calibrate_command(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the tables go; finished parts stay.")],
    device: Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")] = "auto",
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="SHAPE", help="A shipped model or a .toml file whose experts to measure."),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option("--part", help="experts, exchange, all-reduce, router or policies; else all.")
    ] = None,
    base: Annotated[
        str, typer.Option("--base", metavar="H", help="Shipped hardware for what is not measured, else by the device.")
    ] = "",
) -> None:
    """Measure experts, exchange, collectives, routers and policies on this machine, for `epsim replay --hardware DIR`.

    Under torchrun (one process a GPU: torchrun --nproc-per-node N -m epsim.cli calibrate ...) exchange and collectives
    are measured at every power of two of ranks that is there.
    """
    from epsim.calibrate.run import Request, calibrate

    first = os.environ.get("RANK", "0") == "0"
    request = Request(out, device, tuple(model or ()), tuple(part or ()), base)
    for line in calibrate(request, _say if first else _nothing):
        if first:
            print(line)


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def _nothing(text: str) -> None: ...
