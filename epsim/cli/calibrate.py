"""`epsim calibrate`: measure the machine at hand."""

from __future__ import annotations

import os

from epsim.calibrate.options import Request


def calibrate_command(request: Request) -> None:
    """Measure this machine for `epsim replay --hardware DIR`. See --part for what is measured.

    Under torchrun (one process a GPU: torchrun --nproc-per-node N -m epsim.cli calibrate ...) exchange and collectives
    are measured on 2, 4, 8, ... ranks, up to all.
    """
    from epsim.calibrate.run import calibrate

    first = os.environ.get("RANK", "0") == "0"
    for line in calibrate(request, _say if first else _nothing):
        if first:
            print(line)


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def _nothing(text: str) -> None: ...
