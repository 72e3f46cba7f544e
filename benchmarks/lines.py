"""Straight lines through latencies, without what a GPU needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit(active: Sequence[float], times: Sequence[float]) -> dict[str, float]:
    """Least squares: fixed (us), slope (us an active expert), r2."""
    slope, fixed = np.polyfit(active, times, 1)
    rest = np.array(times) - (fixed + slope * np.array(active))
    return {"fixed": float(fixed), "slope": float(slope), "r2": float(1 - rest.var() / np.var(times))}
