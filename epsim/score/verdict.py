"""The verdict of a replay or a run: which stack to use, its gain, and how far its peak is from the lowest possible."""

from collections.abc import Sequence
from typing import Any


def label(entry: dict[str, Any]) -> str:
    """The stack's name, or its text form if it has no name."""
    return str(entry.get("name") or entry["stack"])


def best_of(entries: Sequence[dict[str, Any]]) -> int | None:
    """The index of the stack with the lowest mean of peak / mean load; None if no stack has a value."""
    ratios = [entry["metrics"]["max_over_mean"]["mean"] for entry in entries]
    scored = [index for index, ratio in enumerate(ratios) if ratio is not None]
    return min(scored, key=lambda index: float(ratios[index]), default=None)


def verdict(entries: Sequence[dict[str, Any]], tied: Sequence[str] = (), measured: bool = False) -> str:
    """The verdict in plain sentences: the advice, the gain, and how the ratio is computed.

    entries: the stacks of a results.json; the others are compared with the first. tied: names of the stacks that these
    steps cannot separate from the best one (`summary.tied_with_best`). measured: whether a run measured the loads.
    """
    index = best_of(entries)
    if index is None:
        return "No step has tokens: there is nothing to compare."
    first, best = entries[0], entries[index]
    ratio, base = (entry["metrics"]["max_over_mean"]["mean"] for entry in (best, first))
    digits = 3 if best is not first and f"{ratio:.2f}" == f"{base:.2f}" else 2
    carries = f"the busiest rank {'carried' if measured else 'carries'} {ratio:.{digits}f}x the mean load"
    if len(entries) == 1:
        advice = f"{label(best)}: {carries}"
    elif best is first:
        advice = f"Keep {label(first)}: no other stack has a lower peak load; {carries}"
    else:
        interval = best["versus_first"]["max_over_mean"]
        change = f"{carries} instead of {base:.{digits}f}x{_change(interval, ratio, base)}"
        advice = f"Use {label(best)}: {change}"
        if interval["high"] is not None and interval["high"] >= 0:
            advice = f"Keep {label(first)}: these steps show no clear gain; with {label(best)} {change}"
    sentences = [
        advice,
        f"That is {best['metrics']['optimality_gap']['mean']:.1%} above the lowest peak that this placement allows",
    ]
    others = [name for name in tied if best is first or name != label(first)]
    if others:
        sentences.append(f"These steps show no clear difference from {' or '.join(others)}")
    loads = "measured peak load / mean load" if measured else "peak load / mean load"
    sentences.append(f"The ratio is {loads} of a layer, averaged over steps and layers")
    return ". ".join(sentences) + "."


def _change(interval: dict[str, Any], ratio: float, base: float) -> str:
    """The relative change and its interval, as text. Changes below 10% are shown with one more digit."""
    change = ratio / base - 1
    digits = 0 if abs(change) >= 0.1 else 1
    if interval["low"] is None:
        return f" ({change:+.{digits}%}; no interval from one step)"
    low, high = interval["low"] / base, interval["high"] / base
    return f" ({change:+.{digits}%}, 95% interval {low:+.{digits}%} to {high:+.{digits}%})"
