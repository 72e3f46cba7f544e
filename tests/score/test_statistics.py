"""Summaries against numpy on the whole, and the bootstrap against a literal resampling and against known coverage."""

from __future__ import annotations

import numpy as np
import pytest

from epsim.score.formulas import METRICS
from epsim.score.statistics import NUM_RESAMPLES, Floats, Series, block_length, difference


def series_of(values: Floats, cut: int = 3) -> Series:
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
    got = difference(series_of(ours), series_of(theirs), seed=5)
    gaps = ours - theirs
    length = 3  # floor(30 ** (1/3)): these steps are not correlated
    assert block_length(np.nansum(gaps, axis=1)) == length
    generator = np.random.default_rng((5, length))
    starts = generator.integers(30, size=(NUM_RESAMPLES, 10), dtype=np.int32)
    means = [np.nanmean(gaps[(row[:, None] + np.arange(length)).ravel() % 30]) for row in starts]
    student = np.sqrt(9 / generator.chisquare(9, NUM_RESAMPLES) * 30 / 27)
    ends = np.nanmean(gaps) + np.percentile((np.array(means) - np.nanmean(gaps)) * student, (2.5, 97.5))
    assert got["difference"] == pytest.approx(np.nanmean(gaps), rel=1e-12)
    assert [got["low"], got["high"]] == pytest.approx(ends, rel=1e-9)


def autoregressive(num_steps: int, correlation: float, seed: int) -> Floats:
    noise = np.random.default_rng(seed).normal(size=num_steps + 200)
    walk = np.zeros(num_steps + 200)
    for i in range(1, len(walk)):
        walk[i] = correlation * walk[i - 1] + noise[i]
    return walk[200:]


@pytest.mark.parametrize(
    ("num_steps", "correlation", "least"),
    [(2, 0.0, 0.88), (3, 0.0, 0.88), (10, 0.0, 0.92), (10, 0.5, 0.82), (100, 0.5, 0.86), (100, 0.9, 0.75)],
)
def test_interval_covers_the_truth_for_correlated_steps(num_steps: int, correlation: float, least: float) -> None:
    """Steps with true difference 0: the interval holds 0 about as often as it claims, as far as the steps can tell."""
    held, trials = 0, 200
    nothing = series_of(np.zeros((num_steps, 1)), 1)
    for trial in range(trials):
        walk = autoregressive(num_steps, correlation, trial)
        got = difference(series_of(walk[:, None], 1), nothing, trial)
        assert got["low"] is not None
        assert got["high"] is not None
        held += got["low"] <= 0 <= got["high"]
    assert least <= held / trials


def test_blocks_grow_with_the_correlation() -> None:
    lengths = [block_length(autoregressive(1000, correlation, 0)) for correlation in (0.0, 0.9)]
    assert lengths[0] <= 12 < 25 <= lengths[1] <= 95  # 3 * sqrt(1000)
    assert block_length(np.ones(1000)) == 10
    assert block_length(np.array([1.0, -1.0])) == 1


def test_steps_without_tokens_do_not_pull_the_interval_to_zero() -> None:
    ours = np.full((40, 2), np.nan)
    ours[[7, 21, 33]] = np.array([[5.0], [5.1], [5.2]])
    got = difference(series_of(ours), series_of(ours * 0), 0)
    assert got["difference"] == pytest.approx(5.1)
    assert got["low"] is not None
    assert 4.5 < got["low"] < 5.1
    ours[[7, 21]] = np.nan
    assert difference(series_of(ours), series_of(ours * 0), 0)["low"] is None


def test_no_percentile_is_above_the_largest_value() -> None:
    summary = series_of(np.full((4, 2), 1.1)).summary()
    assert summary is not None
    assert summary["p50"] <= summary["p99"] <= summary["max"] == 1.1


def test_one_step_has_no_interval() -> None:
    one = series_of(np.array([[2.0, 4.0]]), cut=1)
    two = series_of(np.array([[1.0, 1.0]]), cut=1)
    assert difference(one, two, 0) == {"difference": 2.0, "low": None, "high": None}


@pytest.mark.parametrize("num_steps", [2, 3, 5, 8])
def test_few_steps_still_spread_around_the_difference(num_steps: int) -> None:
    values = np.arange(num_steps, dtype=np.float64)[:, None]
    got = difference(series_of(values, 1), series_of(np.zeros_like(values), 1), 0)
    assert got["low"] is not None
    assert got["high"] is not None
    assert got["difference"] is not None
    assert got["low"] < got["difference"] < got["high"]


def test_identical_stacks_differ_by_nothing() -> None:
    values = np.random.default_rng(3).random((20, 3))
    got = difference(series_of(values), series_of(values), 0)
    assert got == {"difference": 0.0, "low": 0.0, "high": 0.0}


def test_percentiles_of_large_loads_are_exact() -> None:
    """Single precision cannot hold 2^24 + 1."""
    values = 2**24 + np.arange(1.0, 8.0, 2.0)[:, None]
    series = Series(exact=True)
    series.add(values)
    summary = series.summary()
    assert summary is not None
    assert (summary["p50"], summary["max"]) == (2**24 + 4, 2**24 + 7)


def test_no_interval_has_a_value_that_the_metric_cannot_have() -> None:
    """Peak/mean is 1 to R, so a mean of 4 on 4 ranks cannot fall by more than 75%, and cannot rise."""
    rng = np.random.default_rng(0)
    for trial in range(300):
        num_steps, num_ranks = int(rng.integers(2, 6)), int(rng.integers(2, 9))
        ours, theirs = 1 + (num_ranks - 1) * rng.choice([0.0, 0.1, 0.9, 1.0], (2, num_steps, 1))
        if trial == 0:
            num_ranks, ours, theirs = 4, np.array([[2.13], [2.67]]), np.full((2, 1), 4.0)
        plain = difference(series_of(ours, 1), series_of(theirs, 1), trial)
        got = METRICS["max_over_mean"].within(plain, float(ours.mean()), num_ranks)
        assert got["low"] is not None
        assert got["high"] is not None
        assert got["difference"] is not None
        assert 1 - theirs.mean() - 1e-9 <= got["low"] <= got["difference"] <= got["high"]
        assert got["high"] <= num_ranks - theirs.mean() + 1e-9
        assert plain["low"] is not None
        assert got["low"] >= plain["low"]
        if trial == 0:
            assert (got["low"], got["high"]) == (-3.0, 0.0)
    one_step = difference(series_of(ours[:1], 1), series_of(theirs[:1], 1), 0)
    assert METRICS["max_over_mean"].within(one_step, 1.0, 4) == one_step
