"""Statistics of metrics over a replay: summaries over (step, layer), and intervals of the difference of two stacks."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000
MIN_STEPS = 2


class Series:
    """One metric of one stack, gathered block by block.

    Keeps every value in single precision for the percentiles (4 bytes a value: a million pairs stay small), and sums
    and counts per step in double precision for means and intervals.
    """

    def __init__(self) -> None:
        self._values: list[npt.NDArray[np.float32]] = []
        self._sums: list[Floats] = []
        self._counts: list[Floats] = []
        self._max = -np.inf

    def add(self, values: Floats) -> None:
        """values [S, L] or [S]; NaN where a layer has no tokens."""
        values = values.reshape(len(values), -1)
        there = ~np.isnan(values)
        self._sums.append(np.where(there, values, 0.0).sum(axis=1))
        self._counts.append(there.sum(axis=1).astype(np.float64))
        flat = values[there]
        self._values.append(flat.astype(np.float32))
        self._max = max(self._max, float(flat.max(initial=-np.inf)))

    @property
    def step_sums(self) -> Floats:
        """[S]."""
        return np.concatenate(self._sums)

    @property
    def step_counts(self) -> Floats:
        """[S]: layers with tokens in each step."""
        return np.concatenate(self._counts)

    def summary(self) -> dict[str, float] | None:
        """mean, p50, p95, p99, max over (step, layer) with tokens; None where there are none."""
        total = float(self.step_counts.sum())
        if not total:
            return None
        p50, p95, p99 = np.percentile(np.concatenate(self._values), (50, 95, 99)).tolist()
        mean = float(self.step_sums.sum()) / total
        return {"mean": mean, "p50": p50, "p95": p95, "p99": p99, "max": self._max}


class BlockBootstrap:
    """Moving-block bootstrap over steps, paired: the same resampled steps serve every metric and every stack.

    Steps follow one another (the same requests decode on), so blocks of floor(S ** (1/3)) successive steps are drawn
    (Künsch 1989, "The jackknife and the bootstrap for general stationary observations"), the last step followed by the
    first, so that every step is as likely as any other (Politis and Romano 1992, "A circular block-resampling procedure
    for stationary data").
    """

    def __init__(self, num_steps: int, seed: int) -> None:
        self.num_steps = num_steps
        self.length = max(int(np.floor(num_steps ** (1 / 3) + 1e-9)), 1)
        num_blocks = -(-num_steps // self.length)
        rng = np.random.default_rng(seed)
        self._starts = rng.integers(num_steps, size=(NUM_RESAMPLES, num_blocks), dtype=np.int32)

    def difference(self, ours: Series, theirs: Series) -> dict[str, float | None]:
        """Difference of the means (ours - theirs) and its 95% percentile interval, null for a single step."""
        counts = ours.step_counts
        assert np.array_equal(counts, theirs.step_counts)
        gaps = ours.step_sums - theirs.step_sums
        total = float(counts.sum())
        difference = float(gaps.sum()) / total if total else 0.0
        if self.num_steps < MIN_STEPS or not total:
            return {"difference": difference, "low": None, "high": None}
        resampled = self._block_sums(gaps) / np.maximum(self._block_sums(counts), 1.0)
        low, high = np.percentile(resampled, (2.5, 97.5)).tolist()
        return {"difference": difference, "low": low, "high": high}

    def _block_sums(self, per_step: Floats) -> Floats:
        """[NUM_RESAMPLES]: sums over the steps of each resample's blocks."""
        around = np.concatenate(([0.0], per_step, per_step[: self.length - 1])).cumsum()
        blocks = around[self.length :] - around[: -self.length]
        sums: Floats = blocks[self._starts].sum(axis=1)
        return sums
