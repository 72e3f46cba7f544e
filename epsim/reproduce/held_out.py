"""Predicts those sizes of the public tables that a fit leaves out, for each kind of call."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epsim.cost.curve import curve
from epsim.cost.experts_time import ExpertsTime
from epsim.cost.public_tables import ExpertPoint, exchange_points, expert_points, expert_table
from epsim.machines.hardware import Hardware
from epsim.models.spec import ModelSpec
from epsim.reproduce.deepep import visited

MEDIAN, P95 = 0.05, 0.15
FEW_TOKENS = 16
"""Below this number of tokens per rank an exchange takes only its fixed time."""


@dataclass(frozen=True, slots=True)
class Check:
    """The errors (predicted / measured - 1) on `sizes` calls that the fit does not use."""

    what: str
    sizes: int
    median: float
    p95: float

    @property
    def holds(self) -> bool:
        return self.median <= MEDIAN and self.p95 <= P95


def held_out(device: str, hardware: Hardware, model: ModelSpec) -> list[Check]:
    """Fits every other size and predicts the sizes between them. Also checks the roofline, which needs no fit. Raises
    ValueError if the tables are not installed."""
    points = expert_points(device)
    # Sizes are powers of two. Even exponents make the table; odd ones are predicted.
    sizes = sorted({p.tokens / p.active for p in points})
    kept = set(sizes[::2]) | {sizes[-1]}
    table = expert_table([p for p in points if p.tokens / p.active in kept], hardware, model)
    left = [p for p in points if p.tokens / p.active not in kept]
    checks = []
    tokens, active, measured = _numbers(left)
    predicted_us = ExpertsTime(hardware, model, table).us(tokens, active)
    checks.append(check("expert GEMM, table of every other size", (predicted_us / measured).numpy()))
    tokens, active, measured = _numbers(points)
    # These tables were measured under even routing, so the number of whole tiles is known.
    tiles = active * (tokens / active / hardware.tile).ceil()
    predicted_us = ExpertsTime(hardware, model).roofline(tokens, active, tiles=tiles)
    checks.append(check("expert GEMM, roofline alone", (predicted_us / measured).numpy()))
    for nodes in (1, 2, 4, 8):
        try:
            calls = [p for p in exchange_points(device, nodes) if p.tokens >= FEW_TOKENS]
        except ValueError:
            continue
        rows = visited(model, 8 * nodes, nodes)[1]
        for way, width in (("dispatch", model.dispatch_row_bytes), ("combine", model.combine_row_bytes)):
            size, times = [p.tokens * rows * width for p in calls], [getattr(p, f"{way}_us") for p in calls]
            predicted = curve(size[::2], times[::2], torch.tensor(size[1::2]).double()).numpy()
            checks.append(check(f"{way}, {8 * nodes} ranks", predicted / times[1::2]))
    return checks


def _numbers(points: Sequence[ExpertPoint]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assignments, active experts and microseconds of the points, [n] float64 each."""
    tokens, active, us = (torch.tensor([getattr(p, n) for p in points]).double() for n in ("tokens", "active", "us"))
    return tokens, active, us


def check(what: str, ratios: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Check:
    """The errors of one kind of call. ratios [n]: predicted / measured."""
    errors = np.abs(np.asarray(ratios) - 1)
    return Check(what, len(errors), float(np.median(errors)), float(np.percentile(errors, 95)))
