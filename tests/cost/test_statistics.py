"""Summaries against numpy on the whole, and the bootstrap against a literal resampling and against known coverage."""

from __future__ import annotations

import numpy as np
import pytest

from epsim.cost.statistics import NUM_RESAMPLES, BlockBootstrap, Series


def series_of(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], cut: int = 3) -> Series:
    series = Series()
    for part in np.array_split(values, cut):
        series.add(part)
    return series


def test_summary_over_pairs_with_tokens() -> None:
    rng = np.random.default_rng(0)
    values = rng.gamma(2.0, 100.0, size=(50, 7))
    values[rng.random(values.shape) < 0.2] = np.nan
    summary = series_of(values).summary()
    there = values[~np.isnan(values)]
    assert summary is not None
    assert summary["mean"] == pytest.approx(there.mean(), rel=1e-12)
    assert summary["max"] == there.max()
    for key, q in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert summary[key] == pytest.approx(np.percentile(there, q), rel=1e-6)


def test_no_tokens_no_summary() -> None:
    assert series_of(np.full((4, 2), np.nan)).summary() is None


def test_interval_equals_a_literal_resampling_of_blocks() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(1.3, 0.2, (30, 4)), rng.normal(1.5, 0.2, (30, 4))
    ours[3, 2] = theirs[3, 2] = np.nan
    bootstrap = BlockBootstrap(30, seed=5)
    got = bootstrap.difference(series_of(ours), series_of(theirs))
    gaps = ours - theirs
    length = 3  # floor(30 ** (1/3))
    starts = np.random.default_rng(5).integers(30, size=(NUM_RESAMPLES, 10), dtype=np.int32)
    means = [np.nanmean(gaps[(row[:, None] + np.arange(length)).ravel() % 30]) for row in starts]
    assert got["difference"] == pytest.approx(np.nanmean(gaps), rel=1e-12)
    assert got["low"] == pytest.approx(np.percentile(means, 2.5), rel=1e-9)
    assert got["high"] == pytest.approx(np.percentile(means, 97.5), rel=1e-9)


def test_interval_covers_the_truth_for_correlated_steps() -> None:
    """Autoregressive steps with true difference 0: the interval holds 0 nearly as often as it claims."""
    rng = np.random.default_rng(2)
    held = 0
    trials = 150
    for trial in range(trials):
        noise = rng.normal(size=400)
        walk = np.empty(400)
        walk[0] = noise[0]
        for i in range(1, 400):
            walk[i] = 0.5 * walk[i - 1] + noise[i]
        got = BlockBootstrap(400, trial).difference(series_of(walk[:, None]), series_of(np.zeros((400, 1))))
        assert got["low"] is not None
        assert got["high"] is not None
        held += got["low"] <= 0 <= got["high"]
    assert 0.82 <= held / trials <= 1.0


def test_one_step_has_no_interval() -> None:
    one = series_of(np.array([[2.0, 4.0]]), cut=1)
    two = series_of(np.array([[1.0, 1.0]]), cut=1)
    assert BlockBootstrap(1, 0).difference(one, two) == {"difference": 2.0, "low": None, "high": None}


@pytest.mark.parametrize("num_steps", [2, 3, 5, 8])
def test_few_steps_still_spread_around_the_difference(num_steps: int) -> None:
    values = np.arange(num_steps, dtype=np.float64)[:, None]
    got = BlockBootstrap(num_steps, 0).difference(series_of(values, 1), series_of(np.zeros_like(values), 1))
    assert got["low"] is not None
    assert got["high"] is not None
    assert got["difference"] is not None
    assert got["low"] < got["difference"] < got["high"]


def test_identical_stacks_differ_by_nothing() -> None:
    values = np.random.default_rng(3).random((20, 3))
    got = BlockBootstrap(20, 0).difference(series_of(values), series_of(values))
    assert got == {"difference": 0.0, "low": 0.0, "high": 0.0}
