"""One line of words: which stack wins, by how much, and how far it is from the best possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def label(entry: dict[str, Any]) -> str:
    return str(entry.get("name") or entry["stack"])


def verdict(entries: Sequence[dict[str, Any]]) -> str:
    """entries: the stacks of a results.json; the first is what the others are measured against."""
    scored = [entry for entry in entries if entry["metrics"]["max_over_mean"]["mean"] is not None]
    if not scored:
        return "No step has tokens: there is nothing to compare."
    first = scored[0]
    best = min(scored, key=lambda entry: float(entry["metrics"]["max_over_mean"]["mean"]))
    ratio = best["metrics"]["max_over_mean"]["mean"]
    gap = best["metrics"]["optimality_gap"]["mean"]
    above = f"its peak is {ratio:.3f} x the mean and {gap:.1%} above the least this placement can reach"
    if len(scored) == 1:
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
        if high >= 0:
            words += "; the interval holds zero, so these steps do not settle it"
    return f"{words}; {above}."
