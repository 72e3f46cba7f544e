"""When another stack is better than the best one: by another metric, or in some layers, steps or batch sizes."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from epsim.report.comparison import number
from epsim.results import ResultsData
from epsim.score.verdict import best_of, label

MEASURES = (
    ("max_over_mean", "p95", "the 95th percentile of peak/mean", False),
    ("max_over_mean", "max", "the largest peak/mean", False),
    ("layer_time_us", "mean", "mean layer time", False),
    ("throughput_gain", "mean", "throughput", True),
    ("active_experts", "mean", "active experts of the busiest rank", False),
    ("remote_node_share", "mean", "the share of assignments that leave the node", False),
)
"""(metric, statistic, words, whether larger is better)."""
TIE = 1e-3
"""Values whose relative difference is smaller are equal."""


def flips_of_stacks(results: ResultsData) -> list[str]:
    """A sentence for each case; no sentence if there is only one stack, or nothing to compare."""
    stacks = results["stacks"]
    best = best_of(stacks)
    if best is None or len(stacks) < 2:
        return []
    sentences = [
        *_by_metric(stacks, best),
        *_by_layer(results, best),
        *_by_step(results, best),
        *_by_size(stacks, best),
    ]
    if not sentences:
        sentences = ["No other stack is better in any layer, step or batch size, or by any other metric compared here."]
    if results["trace"]["origin"] == "drawn":
        sentences.append(
            "Tokens were drawn from recorded counts. Results that depend on single tokens may differ for real tokens."
        )
    if "hindsight" in results["setting"]["history"]:
        sentences.append(
            "Placements were planned in hindsight, on the scored steps. On new steps their load will be less balanced."
        )
    return sentences


def flips_by_cell(results: ResultsData) -> list[str]:
    """Which stack is best in which cells of a sweep, and how much it gains."""
    axes, cells = results["sweep"]["axes"], results["sweep"]["cells"]
    stacks_of = stacks_of_cells(results)
    won: dict[str, list[Any]] = {}
    for cell in cells:
        stacks = stacks_of[cell["key"]]
        best = best_of(stacks)
        if best is not None:
            won.setdefault(stacks[best]["of"], []).append(cell)
    if len(won) == 1:
        return [f"{winner} is best in every cell." for winner in won] + _gains(results, stacks_of)
    sentences = []
    for winner, own in sorted(won.items(), key=lambda item: -len(item[1])):
        # The values that the cells of this winner have in common, without those that all cells have.
        common = {axis: [value for value in axes[axis] if value in [cell.get(axis) for cell in own]] for axis in axes}
        parts = [f"{axis} {' or '.join(map(str, v))}" for axis, v in common.items() if 0 < len(v) < len(axes[axis])]
        where = f", all with {', '.join(parts)}" if parts else ""
        sentences.append(f"{winner} is best in {len(own)} of {len(cells)} cells{where}.")
    return sentences + _gains(results, stacks_of)


def stacks_of_cells(results: ResultsData) -> dict[str, list[Any]]:
    """The stacks of each cell of a sweep, by the cell's key."""
    stacks_of: dict[str, list[Any]] = {}
    for entry in results["stacks"]:
        stacks_of.setdefault(entry["cell"], []).append(entry)
    return stacks_of


def _gains(results: ResultsData, stacks_of: dict[str, list[Any]]) -> list[str]:
    """The range of the best stack's change from the first over cells, and where its interval includes zero."""
    axes, cells = results["sweep"]["axes"], results["sweep"]["cells"]
    gains, doubtful = [], []
    for cell in cells:
        stacks = stacks_of[cell["key"]]
        best = best_of(stacks)
        interval = stacks[best]["versus_first"].get("max_over_mean") if best else None
        base = stacks[0]["metrics"]["max_over_mean"]["mean"]
        if interval and base:
            gains.append(interval["difference"] / base)
            if interval["low"] is not None and interval["low"] <= 0 <= interval["high"]:
                doubtful.append(cell)
    if not gains:
        return []
    sentences = [f"From the first stack to the best, peak/mean changes by {min(gains):+.1%} to {max(gains):+.1%}."]
    if doubtful:
        varying = [axis for axis in axes if len(axes[axis]) > 1 and axis in doubtful[0]]
        common = [axis for axis in varying if all(cell.get(axis) == doubtful[0][axis] for cell in doubtful)]
        where = f", all with {', '.join(f'{axis} {doubtful[0][axis]}' for axis in common)}" if common else ""
        sentences.append(f"This change's 95% interval includes zero in {len(doubtful)} of {len(cells)} cells{where}.")
    return sentences


def _by_metric(stacks: list[dict[str, Any]], best: int) -> list[str]:
    sentences = []
    for key, statistic, words, larger in MEASURES:
        values = [entry["metrics"].get(key, {}).get(statistic) for entry in stacks]
        known = [place for place, value in enumerate(values) if value is not None]
        if best not in known or len(known) < 2:
            continue
        winner = max(known, key=lambda place: values[place] if larger else -values[place])
        if winner != best and _differ(values[winner], values[best]):
            theirs, ours = _value(values[winner], key), _value(values[best], key)
            sentences.append(f"By {words}, {label(stacks[winner])} is better: {theirs} against {ours}.")
    return sentences


def _by_layer(results: ResultsData, best: int) -> list[str]:
    stacks, layers = results["stacks"], results["trace"].get("layers")
    by_layer = [entry.get("max_over_mean_by_layer") or [] for entry in stacks]
    won: dict[int, list[int]] = {}
    for layer, winner in _wins(by_layer, best):
        won.setdefault(winner, []).append(layers[layer] if layers else layer)
    return [
        f"In {len(own)} of {len(by_layer[best])} layers ({_list(own)}), {label(stacks[winner])} has a lower peak/mean."
        for winner, own in won.items()
    ]


def _by_step(results: ResultsData, best: int) -> list[str]:
    stacks = results["stacks"]
    by_step = [entry.get("by_step", {}).get("max_over_mean") or [] for entry in stacks]
    won = Counter(winner for _, winner in _wins(by_step, best))
    if not won:
        return []
    what = "steps" if len(by_step[best]) == results["trace"]["steps_scored"] else "groups of steps"
    who = ", ".join(f"{label(stacks[winner])} in {times}" for winner, times in won.items())
    return [f"In {sum(won.values())} of {len(by_step[best])} {what}, another stack has a lower peak/mean: {who}."]


def _by_size(stacks: list[dict[str, Any]], best: int) -> list[str]:
    sentences = []
    sizes = [{size["low"]: size for size in entry.get("max_over_mean_by_tokens", [])} for entry in stacks]
    for low, size in sizes[best].items():
        winner = _winner([own[low]["mean"] if low in own else None for own in sizes], best)
        if winner is not None:
            sentences.append(
                f"With {low:g} to {size['high']:g} tokens per rank ({int(size['steps'])} steps), peak/mean is "
                f"lower with {label(stacks[winner])}: {sizes[winner][low]['mean']:.3f} instead of {size['mean']:.3f}."
            )
    return sentences


def _wins(values_of: list[list[float | None]], best: int) -> Iterator[tuple[int, int]]:
    """(position, stack) wherever another stack than the best one is better. values_of [stacks][positions]."""
    for place in range(len(values_of[best])):
        winner = _winner([values[place] if values else None for values in values_of], best)
        if winner is not None:
            yield place, winner


def _winner(values: list[float | None], best: int) -> int | None:
    """The stack with the lowest value, unless that is the best one or a tie with it."""
    own = values[best]
    if own is None:
        return None
    lowest, winner = min((value, place) for place, value in enumerate(values) if value is not None)
    return winner if winner != best and _differ(lowest, own) else None


def _differ(first: float, second: float) -> bool:
    return abs(first - second) > TIE * max(abs(first), abs(second))


def _value(value: float, key: str) -> str:
    return f"{value:.1%}" if key in ("throughput_gain", "remote_node_share") else number(value)


def _list(layers: list[int]) -> str:
    words = ", ".join(str(layer) for layer in layers[:8])
    return words + (", ..." if len(layers) > 8 else "")
