"""Opportunistic expert activation read literally off the paper's Algorithm 1, a token and an expert at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def ranked(scores: Floats) -> list[int]:
    """Experts by falling score, ties by expert id."""
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))


def base_of(scores: Floats, k0: int, p: float) -> list[int]:
    """Phase 1: the best min(k0, t), t the fewest whose scores reach p of their sum."""
    order = ranked(scores)
    t, share = 0, 0.0
    while t < len(order) and (t == 0 or share < p * scores.sum()):
        share += scores[order[t]]
        t += 1
    return order[: min(k0, t if p < 1 else len(order))]


def two_phases(
    scores: Floats, k0: int, kmax: int, p: float = 1.0, maxp: int | None = None
) -> tuple[list[list[int]], list[dict[int, float]]]:
    """scores [B, E] -> each token's experts, ascending, and their weights."""
    bases = [base_of(row, k0, p) for row in scores]
    loaded = {expert for base in bases for expert in base}
    experts, weights = [], []
    for row, base in zip(scores, bases):
        chosen = list(base)
        for place, expert in enumerate(ranked(row)):
            if expert in chosen or len(chosen) >= kmax or (maxp is not None and place >= maxp):
                continue
            if expert in loaded:
                chosen.append(expert)
        experts.append(sorted(chosen))
        total = sum(row[expert] for expert in chosen)
        weights.append({expert: row[expert] / total for expert in chosen})
    return experts, weights
