"""Interpolates and extrapolates measured times over an ascending axis."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_axis(name: str, axis: Sequence[float]) -> None:
    """Raises ValueError unless an axis is finite, above 0 and ascending."""
    if not axis or not all(math.isfinite(v) and v > 0 for v in axis) or list(axis) != sorted(set(axis)):
        raise ValueError(f"{name} must be ascending and above 0")


def check_times(name: str, times: Sequence[float]) -> None:
    """Raises ValueError unless all times are finite and above 0."""
    if not all(math.isfinite(v) and v > 0 for v in times):
        raise ValueError(f"{name} must be above 0")


def curve(at: Sequence[float], times: Sequence[float], where: Tensor) -> Tensor:
    """Times [...] float64 at `where` [...] >= 0, from measured `times` at `at` (ascending, > 0). The curve never falls.

    Falling times are noise and are replaced by their mean (`rising`). The curve consists of straight lines, because a
    transfer takes a fixed time plus a time per byte, until another limit sets in. Between two points the curve is the
    higher of two lines: the segment before and the segment after, both extended. It stays between the left point's time
    and the straight line through both points. Below the first point the first time holds. Beyond the last point the
    last segment continues; if it is flat, the slope from the first point to the last is used.
    """
    x = torch.tensor(at, dtype=torch.float64, device=where.device)
    y = rising(torch.tensor(times, dtype=torch.float64)).to(where.device)
    query = where.double().clamp(min=at[0])
    if len(at) == 1:
        return y[0] * query / x[0]
    slope = y.diff() / x.diff()
    left = (torch.searchsorted(x, query, right=True) - 1).clamp(0, len(at) - 2)
    straight = y[left] + slope[left] * (query - x[left])
    before, after = (left - 1).clamp(min=0), (left + 1).clamp(max=len(slope) - 1)
    kink = torch.maximum(
        y[left] + slope[before] * (query - x[left]), y[left + 1] - slope[after] * (x[left + 1] - query)
    )
    inner = (left > 0) & (left < len(slope) - 1)
    between = torch.where(inner, torch.minimum(straight, torch.maximum(kink, y[left])), straight)
    rise = slope[-1] if slope[-1] > 0 else (y[-1] - y[0]) / (x[-1] - x[0])
    return torch.where(query > x[-1], y[-1] + rise * (query - x[-1]), between)


def rising(times: Tensor) -> Tensor:
    """Isotonic regression: the non-decreasing times [n] closest to times [n], by least squares of logarithms."""
    pools: list[tuple[float, int]] = []
    for value in times.log().tolist():
        pool = (value, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, number = pools.pop()
            together = number + pool[1]
            pool = ((mean * number + pool[0] * pool[1]) / together, together)
        pools.append(pool)
    pooled = torch.tensor([mean for mean, number in pools for _ in range(number)], dtype=torch.float64).exp()
    alone = torch.tensor([number == 1 for _, number in pools for _ in range(number)])
    return torch.where(alone, times, pooled)
