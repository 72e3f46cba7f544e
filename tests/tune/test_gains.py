"""Throughput gains: intervals that are possible and contain the estimate, for any times of any steps."""

from __future__ import annotations

import numpy as np
import pytest

from epsim.tuning.gains import Interval, throughput_gain
from tests.tune.cases import Floats


def drawn_times(rng: np.random.Generator) -> tuple[Floats, Floats, int]:
    """Our and their times of the same steps, and the number of ranks: few steps in most cases, and steps whose sizes or
    ratios are equal, unequal or extremely unequal. Some steps have no tokens."""
    num_steps = int(rng.choice([1, 2, 3, 4, 5, 8, 20, 60]))
    size_sigma, ratio_sigma = rng.choice([0.0, 0.1, 1.0, 4.0, 12.0], 2)
    shift = rng.choice([0.0, 0.3, -0.3, 3.0, -20.0, 40.0])
    ours = 1e3 * np.exp(size_sigma * rng.normal(size=num_steps))
    theirs = ours * np.exp(shift + ratio_sigma * rng.normal(size=num_steps))
    if rng.random() < 0.2:
        ours[rng.integers(num_steps)] *= 1e9
    empty = rng.random(num_steps) < rng.choice([0.0, 0.3])
    ours[empty] = theirs[empty] = np.nan
    return ours, theirs, int(rng.choice([1, 4, 16, 16384]))


@pytest.mark.parametrize("cases", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_every_interval_is_possible_and_contains_the_gain(cases: int) -> None:
    rng = np.random.default_rng(0)
    with_interval = 0
    for case in range(cases):
        ours, theirs, num_ranks = drawn_times(rng)
        gain = throughput_gain(ours, theirs, case, num_ranks)
        busy = ~np.isnan(ours)
        if busy.sum() < 2:
            assert gain.low is None
            assert gain.high is None
            continue
        with_interval += 1
        assert gain.low is not None
        assert gain.high is not None
        assert -1 < gain.low <= gain.mean <= gain.high < np.inf
        ratios = theirs[busy] / ours[busy]
        assert gain.mean == pytest.approx(theirs[busy].sum() / ours[busy].sum() - 1)
        # No end is beyond what a placement can change, except where a step is.
        assert gain.low + 1 >= min(ratios.min(), 1 / num_ranks) * (1 - 1e-9) - 1e-12
        assert gain.high + 1 <= max(ratios.max(), num_ranks) * (1 + 1e-9)
    assert with_interval > cases / 2


def test_a_gain_that_all_steps_share_is_certain_however_unequal_the_steps_are() -> None:
    ours = np.array([3.0, 61.0, 0.001, 1e12])
    gain = throughput_gain(ours, ours * 1.25, 0, 16)
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.25, 0.25, 0.25))


def test_steps_of_very_unequal_size_that_all_gain_have_a_clear_gain() -> None:
    """91%, 92% and 114% on steps of 3 to 61 million tokens."""
    ours = np.array([3.0, 61.0, 12.0])
    gain = throughput_gain(ours, ours * np.array([1.91, 1.92, 2.14]), 0, 16)
    assert gain.clear(0.005)
    assert gain.mean == pytest.approx((3 * 1.91 + 61 * 1.92 + 12 * 2.14) / 76 - 1)
    assert gain.low is not None
    assert gain.low > 0.5


def test_two_steps_say_little_but_nothing_impossible() -> None:
    gain = throughput_gain(np.array([1.0, 1.0]), np.array([1.0, 3.5]), 0, 4)
    assert (gain.low, gain.high) == pytest.approx((-0.75, 3.0))
    assert not gain.excludes_zero


def test_short_steps_beside_a_long_one_keep_their_ratios() -> None:
    """A resample without the long step has the ratio of the short ones, to full precision."""
    ours = np.array([1e15, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    gain = throughput_gain(ours, ours * 1.5, 0, 4)
    assert (gain.low, gain.high) == pytest.approx((0.5, 0.5))


def test_the_gain_of_swapped_times_is_the_inverse() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = rng.lognormal(1, 1, (2, 9))
    one, other = throughput_gain(ours, theirs, 0, 64), throughput_gain(theirs, ours, 0, 64)
    assert 1 / (1 + one.mean) == pytest.approx(1 + other.mean)
    assert not one.excludes_zero
    assert not other.excludes_zero


@pytest.mark.parametrize(
    ("num_steps", "sigma", "least"), [(2, 0.0, 0.9), (3, 0.0, 0.88), (3, 2.0, 0.86), (10, 2.0, 0.88), (30, 1.0, 0.9)]
)
def test_coverage_with_few_and_unequal_steps(num_steps: int, sigma: float, least: float) -> None:
    """The interval contains the true gain about as often as docs/tune.md says."""
    rng, covered, trials = np.random.default_rng(1), 0, 300
    for trial in range(trials):
        ours = np.exp(sigma * rng.normal(size=num_steps))
        gain = throughput_gain(ours, ours * np.exp(0.3 + 0.1 * rng.normal(size=num_steps)), trial, 64)
        assert gain.low is not None
        assert gain.high is not None
        covered += gain.low <= np.exp(0.3 + 0.1**2 / 2) - 1 <= gain.high
    assert least <= covered / trials <= 0.995


def test_a_gain_as_text() -> None:
    assert str(Interval(0.031, 0.029, 0.033)) == "+3.1% (95% interval +2.9% to +3.3%)"
    assert str(Interval(0.031, None, None)) == "+3.1% (too few steps for an interval)"
    assert not Interval(0.1, -0.1, 0.3).excludes_zero
    assert not Interval(0.004, 0.003, 0.005).clear(0.005)
    assert not Interval(0.1, None, None).clear(0.005)
