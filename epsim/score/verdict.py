"""One line of words: which stack wins, by how much, and how far it is from the best possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def label(entry: dict[str, Any]) -> str:
    return str(entry.get("name") or entry["stack"])


def best_of(entries: Sequence[dict[str, Any]]) -> int | None:
    """Place of the stack with the least mean of peak over mean; None where none has a value."""
    ratios = [entry["metrics"]["max_over_mean"]["mean"] for entry in entries]
    scored = [place for place, ratio in enumerate(ratios) if ratio is not None]
    return min(scored, key=lambda place: float(ratios[place]), default=None)


def verdict(entries: Sequence[dict[str, Any]], tied: Sequence[str] = ()) -> str:
    """entries: the stacks of a results.json; the first is what the others are measured against.

    tied: names of the stacks whose 95% interval against the best one holds zero.
    """
    place = best_of(entries)
    if place is None:
        return "No step has tokens: there is nothing to compare."
    first, best = entries[0], entries[place]
    ratio = best["metrics"]["max_over_mean"]["mean"]
    gap = best["metrics"]["optimality_gap"]["mean"]
    above = f"its peak is {ratio:.3f} x the mean and {gap:.1%} above the least this placement can reach"
    if tied:
        above += f"; these steps do not tell {' or '.join(tied)} from it"
    if len(entries) == 1:
        return f"{label(best)}: {above}."
    if best is first:
        return f"None of the others beats {label(first)}: {above}."
    base = first["metrics"]["max_over_mean"]["mean"]
    interval = best["versus_first"]["max_over_mean"]
    words = f"{label(best)} makes the slowest rank least slow: peak over mean {ratio:.3f} against {base:.3f} with "
    words += f"{label(first)} ({ratio / base - 1:+.1%}"
    if interval["low"] is None:
        words += ", one step, no interval)"
    else:
        low, high = interval["low"] / base, interval["high"] / base
        words += f", 95% interval {low:+.1%} to {high:+.1%})"
    return f"{words}; {above}."
