"""What the processes of calibrate's tests run."""

from __future__ import annotations

from pathlib import Path

import torch

from epsim.calibrate.machine import Machine
from epsim.calibrate.run import Request, calibrate


def measure(rank: int, out: str, model: str) -> list[str]:
    machine = Machine.in_group(torch.device("cpu"))
    assert machine.rank == rank
    return calibrate(Request(Path(out), "cpu", (model,), ("exchange", "all-reduce")), lambda text: None, machine)
