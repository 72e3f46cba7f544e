"""The options of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from epsim.options import About, Options

PARTS = ("experts", "exchange", "all-reduce", "router", "policies")


@dataclass(frozen=True)
class Request(Options):
    """models: names or files for `load_model`; if there are none, the device's type decides. parts: if there are none,
    all. base: "" for the shipped hardware that matches the device's name."""

    out: Annotated[Path, About("Folder for the tables. Finished parts in it are kept.", metavar="DIR")]
    device: Annotated[str, About("auto, cuda or cpu.")] = "auto"
    models: Annotated[
        tuple[str, ...], About("Measure for this shipped model or .toml file; repeatable.", flag="--model", metavar="M")
    ] = ()
    parts: Annotated[
        tuple[str, ...],
        About(
            "Measure only this part: experts, exchange, all-reduce, router or policies; repeatable.",
            flag="--part",
            choices=PARTS,
        ),
    ] = ()
    base: Annotated[str, About("Shipped hardware for numbers not measured. Default: this GPU's.", metavar="H")] = ""
