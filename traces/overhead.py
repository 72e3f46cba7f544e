"""Measures what recording costs: forward passes with and without it."""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from epsim.traces.record import record


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds per forward pass, best of the rounds: without recording, with recording, and of the writing thread."""

    plain: float
    recorded: float
    writing: float

    def __str__(self) -> str:
        return (
            f"recording adds {self.recorded / self.plain - 1:.1%} to a forward pass of {self.plain * 1e3:.2f} ms; "
            f"in parallel a thread writes for {self.writing * 1e3:.2f} ms per pass"
        )


def measure_overhead(
    model: Any, inputs: dict[str, Any], path: str | os.PathLike[str], rounds: int = 6, **options: Any
) -> Overhead:
    """Times runs of eight passes of `model(**inputs)` with and without `record(model, path, **options)`, in turn.

    Halfway through a run the finished steps go to the writing thread, which works during the second half.
    """

    def run(passes: int) -> float:
        begun = time.perf_counter()
        with torch.no_grad():
            for _ in range(passes):
                model(**inputs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / passes

    run(4)
    plain: list[float] = []
    recorded: list[float] = []
    writing: list[float] = []
    for _ in range(rounds):
        plain.append(run(8))
        with record(model, path, **options) as recorder:
            begun = time.perf_counter()
            run(4)
            recorder.flush()
            run(4)
            recorded.append((time.perf_counter() - begun) / 8)
        writing.append(recorder.seconds_writing / 8)
    return Overhead(min(plain), min(recorded), min(writing))
