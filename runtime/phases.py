"""The phases of a layer, a clock that times them, and errors that name rank, step, layer and phase."""

import time
from typing import Any

import torch

LAYER_PHASES = ("route", "balance", "dispatch", "experts", "combine")
"""The phases of every layer, in order. A relocation is a separate phase `relocate` between steps."""


class PhaseError(ValueError):
    """An error on one rank. Its text begins `rank R, step S, layer L, phase P: `."""

    def __init__(self, rank: int, step: int, layer: int, phase: str, what: str) -> None:
        super().__init__(f"rank {rank}, step {step}, layer {layer}, phase {phase}: {what}")
        self.rank, self.step, self.layer, self.phase = rank, step, layer, phase


class PhaseClock:
    """Tracks the current phase of one rank, shared by its layers.

    phase, step, layer: the current ones (phase "idle" between layers), readable from any thread. timed: whether to
    record times, with events on the current CUDA stream (without synchronization) or with the host's clock.
    """

    def __init__(self, rank: int, device: torch.device, timed: bool = False) -> None:
        self.rank, self.device, self.timed = rank, device, timed
        self.phase, self.step, self.layer = "idle", -1, -1
        self._marks: list[tuple[int, int, str, Any]] = []

    def enter(self, phase: str, step: int | None = None, layer: int | None = None) -> None:
        """Begins the next phase, or "idle" after the last one."""
        if step is not None:
            self.step = step
        if layer is not None:
            self.layer = layer
        self.phase = phase
        if self.timed and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._marks.append((self.step, self.layer, phase, self._now()))

    def error(self, what: str) -> PhaseError:
        return PhaseError(self.rank, self.step, self.layer, self.phase, what)

    def times(self) -> dict[tuple[int, int, str], float]:
        """The times recorded since the last call, in microseconds by (step, layer, phase). Waits for a CUDA device."""
        if self._marks and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        totals: dict[tuple[int, int, str], float] = {}
        for (step, layer, phase, begin), (_, _, _, end) in zip(self._marks, self._marks[1:]):
            if phase != "idle":
                key = (step, layer, phase)
                us = (end - begin) * 1e6 if isinstance(begin, float) else float(begin.elapsed_time(end)) * 1e3
                totals[key] = totals.get(key, 0.0) + us
        self._marks.clear()
        return totals

    def _now(self) -> Any:
        """An event of the device or, for a CPU, the host's time in seconds."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
