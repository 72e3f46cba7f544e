"""What a calibration can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from epsim.options import About, Options

PARTS = ("experts", "exchange", "all-reduce", "router", "policies")


@dataclass(frozen=True)
class Request(Options):
    """models: names or files of `load_model`, none for a choice by device. parts: none for all. base: "" for the
    hardware that the device's name tells."""

    out: Annotated[Path, About("Folder for the tables. Finished parts in it are kept.", metavar="DIR")]
    device: Annotated[str, About("auto, cuda or cpu.")] = "auto"
    models: Annotated[
        tuple[str, ...],
        About(
            "A shipped model or a .toml file whose experts are measured; repeatable.", flag="--model", metavar="SHAPE"
        ),
    ] = ()
    parts: Annotated[
        tuple[str, ...],
        About(
            "Measure only this part: experts, exchange, all-reduce, router or policies; repeatable.",
            flag="--part",
            choices=PARTS,
        ),
    ] = ()
    base: Annotated[str, About("Shipped hardware for what is not measured. Default: this device's.", metavar="H")] = ""
