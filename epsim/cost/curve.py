"""A measured curve: values at ascending places, and what lies between and beyond them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def check_axis(name: str, axis: Sequence[float]) -> None:
    """Raises ValueError where an axis is not finite, above 0 and ascending."""
    if not axis or not all(math.isfinite(v) and v > 0 for v in axis) or list(axis) != sorted(set(axis)):
        raise ValueError(f"{name} must be ascending and above 0")


def check_times(name: str, times: Sequence[float]) -> None:
    """Raises ValueError where a measured time is not finite and above 0."""
    if not all(math.isfinite(v) and v > 0 for v in times):
        raise ValueError(f"{name} must be above 0")


def curve(at: Sequence[float], times: Sequence[float], where: torch.Tensor) -> torch.Tensor:
    """Times at `at` (ascending, > 0), read at `where` [...] >= 0 -> [...] float64; never falls.

    A time below an earlier one is noise: it takes the earlier one's place. Between places by straight lines in both
    logarithms, below the first place the first time (a fixed cost), beyond the last in proportion to the size.
    """
    x = torch.tensor(at, dtype=torch.float64, device=where.device).log()
    y = torch.tensor(times, dtype=torch.float64, device=where.device).cummax(0).values.log()
    place = where.double().clamp(min=at[0]).log()
    beyond = (place - x[-1]).clamp(min=0)
    if len(at) == 1:
        return (y[0] + beyond).exp()
    left = (torch.searchsorted(x, place) - 1).clamp(0, len(at) - 2)
    weight = ((place - x[left]) / (x[left + 1] - x[left])).clamp(0, 1)
    return (torch.lerp(y[left], y[left + 1], weight) + beyond).exp()
