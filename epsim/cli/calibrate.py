"""`epsim calibrate`: measures this machine."""

from __future__ import annotations

import os

from epsim.calibrate.options import Request


def calibrate_command(request: Request) -> None:
    """Measure this machine for `epsim replay --hardware DIR`. See --part for what is measured.

    Exchange and collectives need torchrun with one process per GPU: torchrun --nproc-per-node N -m epsim.cli calibrate
    ... They are measured on 2, 4, 8, ... ranks, and on all ranks.
    """
    from epsim.calibrate.run import calibrate

    first = os.environ.get("RANK", "0") == "0"
    for line in calibrate(request, _say if first else lambda text: None):
        if first:
            print(line)


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
