"""Throughput gains and their intervals."""

from dataclasses import dataclass

import numpy as np

from epsim.score.statistics import Floats, paired_ratio

LEAST_GAIN = float(np.nextafter(-1.0, 0.0))
"""Rounding must not turn a gain close to -100% into -100%."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A throughput gain, such as 0.1 for 10% more tokens per second, and its 95% interval. low and high are None if
    there are too few steps for an interval."""

    mean: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def clear(self, worth: float) -> bool:
        """Whether it is a gain of at least `worth`, and the interval has no loss in it."""
        return self.low is not None and self.low > 0 and self.mean >= worth

    def __str__(self) -> str:
        """+3.1% (95% interval +2.9% to +3.3%)."""
        if self.low is None or self.high is None:
            return f"{self.mean:+.1%} (too few steps for an interval)"
        return f"{self.mean:+.1%} (95% interval {self.low:+.1%} to {self.high:+.1%})"


def throughput_gain(ours: Floats, theirs: Floats, seed: int, num_ranks: int) -> Interval:
    """The gain of ours over theirs. Both are times [n] of the same steps; a step without tokens has NaN.

    The gain is the total of theirs over the total of ours, minus 1. This is the mean of the gains of the steps,
    weighted by our times. The busiest rank has at most num_ranks times the mean load, so the interval does not go
    beyond num_ranks times the throughput or 1 / num_ranks of it.
    """
    ratio, *ends = paired_ratio(np.nan_to_num(ours), np.nan_to_num(theirs), seed, num_ranks)
    low, high = (None if end is None else max(end - 1, LEAST_GAIN) for end in ends)
    return Interval(max(ratio - 1, LEAST_GAIN), low, high)
