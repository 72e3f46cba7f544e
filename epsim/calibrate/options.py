"""What a calibration can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from epsim.options import Options, about

PARTS = ("experts", "exchange", "all-reduce", "router", "policies")


@dataclass(frozen=True)
class Request(Options):
    """models: names or files of `load_model`, none for a choice by device. parts: none for all. base: "" for the
    hardware that the device's name tells."""

    out: Path = field(metadata=about("Folder for the tables. Parts that are finished there stay.", metavar="DIR"))
    device: str = field(default="auto", metadata=about("auto, cuda or cpu."))
    models: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "A shipped model or a .toml file whose experts are measured; repeatable.", flag="--model", metavar="SHAPE"
        ),
    )
    parts: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "Measure only this part: experts, exchange, all-reduce, router or policies; repeatable.",
            flag="--part",
            choices=PARTS,
        ),
    )
    base: str = field(
        default="",
        metadata=about(
            "Shipped hardware that gives what is not measured. Default: the one of this device.", metavar="H"
        ),
    )
