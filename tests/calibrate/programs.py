"""What the processes of calibrate's tests run."""

from __future__ import annotations

from pathlib import Path

import torch

from epsim.calibrate.machine import Machine
from epsim.calibrate.options import Request
from epsim.calibrate.run import calibrate


def measure(rank: int, out: str, model: str) -> list[str]:
    machine = Machine.in_group(torch.device("cpu"))
    assert machine.rank == rank
    return calibrate(Request(Path(out), "cpu", (model,), ("exchange", "all-reduce")), lambda text: None, machine)


def refused(rank: int, out: str, model: str) -> list[str]:
    """What each of several demands ends with, and then the lines of one that is met."""
    machine, told = Machine.in_group(torch.device("cpu")), []
    for part in ("experts", "router", "exchange"):
        try:
            calibrate(Request(Path(out) / part, "cpu", (model,), (part,)), lambda text: None, machine)
        except ValueError as error:
            told.append(str(error))
    return told + calibrate(Request(Path(out) / "kept", "cpu", (model,), ("all-reduce",)), lambda text: None, machine)
