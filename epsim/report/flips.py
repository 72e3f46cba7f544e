"""Under which conditions the verdict flips: by another measure, in some layers, at some times, at some batch sizes."""

from __future__ import annotations

from typing import Any

from epsim.report.comparison import number
from epsim.results import Results
from epsim.score.verdict import best_of, label

MEASURES = (
    ("max_over_mean", "p95", "95th percentile of peak over mean", False),
    ("max_over_mean", "max", "largest peak over mean", False),
    ("layer_time_us", "mean", "mean layer time", False),
    ("throughput_gain", "mean", "throughput", True),
    ("active_experts", "mean", "active experts of the busiest rank", False),
    ("remote_node_share", "mean", "share leaving the node", False),
)
TUNE_CONDITIONS = ("does not pay", "limits")
SAME = 1e-3
"""A relative difference below this is none."""


def flips(results: Results) -> list[str]:
    """One sentence a condition; none where there is one stack, or nothing to compare."""
    stacks = results["stacks"]
    if "sweep" in results:
        return _cells(results)
    if "tune" in results:  # which says so in its own words
        return [line["text"] for line in results["tune"]["words"] if line["about"] in TUNE_CONDITIONS]
    place = best_of(stacks)
    if place is None or len(stacks) < 2 or len(results.get("comparison", {}).get("files", ())) > 1:
        return []
    said = [*_measures(stacks, place), *_layers(results, place), *_steps(results, place), *_tokens(stacks, place)]
    if not said:
        said = ["Nothing in these results turns it around: no other measure, layer, stretch of steps or batch size."]
    if results["trace"]["origin"] == "drawn":
        said.append("Tokens were drawn from recorded counts: what depends on single tokens may differ on real ones.")
    if "hindsight" in results["setting"]["history"]:
        said.append("Placements were planned in hindsight: on steps not seen before they will do less well.")
    return said


def _cells(results: Results) -> list[str]:
    """Of a sweep: where in the grid which stack is ahead, where it is not the same everywhere."""
    axes = results["sweep"]["axes"]
    by_cell: dict[str, list[Any]] = {}
    for entry in results["stacks"]:
        by_cell.setdefault(entry["cell"], []).append(entry)
    ahead: dict[str, list[Any]] = {}
    for cell in results["sweep"]["cells"]:
        own = by_cell[cell["key"]]
        place = best_of(own)
        if place is not None:
            ahead.setdefault(own[place]["of"], []).append(cell)
    said = _apart(results, by_cell)
    if len(ahead) < 2:
        return [f"{winner} is ahead in every cell." for winner in ahead] + said
    told_apart, said = said, []
    for winner, cells in sorted(ahead.items(), key=lambda item: -len(item[1])):
        # What all its cells share, where that is not what every cell has.
        shared = {key: [value for value in axes[key] if value in {cell.get(key) for cell in cells}] for key in axes}
        told = [f"{key} {' or '.join(map(str, own))}" for key, own in shared.items() if 0 < len(own) < len(axes[key])]
        where = f", all with {', '.join(told)}" if told else ""
        said.append(f"{winner} is ahead in {len(cells)} of {len(results['sweep']['cells'])} cells{where}.")
    return said + told_apart


def _apart(results: Results, by_cell: dict[str, list[Any]]) -> list[str]:
    """From where to where the best stack's gain over its cell's first goes, and in how many cells it is none."""
    gains, doubtful = [], []
    for cell in results["sweep"]["cells"]:
        own = by_cell[cell["key"]]
        place = best_of(own)
        interval = own[place]["versus_first"].get("max_over_mean") if place else None
        if place and interval and own[0]["metrics"]["max_over_mean"]["mean"]:
            gains.append(interval["difference"] / own[0]["metrics"]["max_over_mean"]["mean"])
            if interval["low"] is not None and interval["low"] <= 0 <= interval["high"]:
                doubtful.append(cell)
    if not gains:
        return []
    said = [f"Peak over mean of the best against the first stack: from {min(gains):+.1%} to {max(gains):+.1%} by cell."]
    if doubtful:
        axes = results["sweep"]["axes"]
        shared = [f"{key} {doubtful[0][key]}" for key in axes if len(axes[key]) > 1 and _one(doubtful, key)]
        where = f", all with {', '.join(shared)}" if shared else ""
        count = f"{len(doubtful)} of {len(results['sweep']['cells'])}"
        said.append(f"In {count} cells the steps do not tell the best from the first{where}.")
    return said


def _one(cells: list[Any], key: str) -> bool:
    """Whether all have the same value there."""
    return all(key in cell and cell[key] == cells[0].get(key) for cell in cells)


def _measures(stacks: list[dict[str, Any]], place: int) -> list[str]:
    said = []
    for key, statistic, words, larger in MEASURES:
        values = [entry["metrics"].get(key, {}).get(statistic) for entry in stacks]
        known = [number for number, value in enumerate(values) if value is not None]
        if place not in known or len(known) < 2:
            continue
        first = max(known, key=lambda n: values[n] if larger else -values[n])
        if first != place and _differ(values[first], values[place]):
            theirs, own = _short(values[first], key), _short(values[place], key)
            said.append(f"By {words}, {label(stacks[first])} is ahead: {theirs} against {own}.")
    return said


def _layers(results: Results, place: int) -> list[str]:
    stacks, layers = results["stacks"], results["trace"].get("layers")
    by_layer = [entry.get("max_over_mean_by_layer") or [] for entry in stacks]
    ahead: dict[int, list[int]] = {}
    for layer in range(len(by_layer[place])):
        winner = _winner([values[layer] for values in by_layer if len(values) > layer], place)
        if winner is not None:
            ahead.setdefault(winner, []).append(layers[layer] if layers else layer)
    return [
        f"In {len(found)} of {len(by_layer[place])} layers ({_list(found)}) {label(stacks[winner])} is ahead."
        for winner, found in ahead.items()
    ]


def _steps(results: Results, place: int) -> list[str]:
    stacks = results["stacks"]
    series = [entry.get("by_step", {}).get("max_over_mean") or [] for entry in stacks]
    ahead: dict[int, int] = {}
    for step in range(len(series[place])):
        winner = _winner([values[step] for values in series if len(values) > step], place)
        if winner is not None:
            ahead[winner] = ahead.get(winner, 0) + 1
    if not ahead:
        return []
    joined = "steps" if len(series[place]) == results["trace"]["steps_scored"] else "stretches of steps"
    who = ", ".join(f"{label(stacks[winner])} in {found}" for winner, found in ahead.items())
    return [f"In {sum(ahead.values())} of {len(series[place])} {joined} another stack is ahead: {who}."]


def _tokens(stacks: list[dict[str, Any]], place: int) -> list[str]:
    said = []
    sizes = [{size["low"]: size for size in entry.get("max_over_mean_by_tokens", [])} for entry in stacks]
    for low, size in sizes[place].items():
        winner = _winner([one[low]["mean"] if low in one else None for one in sizes], place)
        if winner is not None:
            theirs = sizes[winner][low]["mean"]
            said.append(
                f"At {low:g} to {size['high']:g} tokens a rank ({int(size['steps'])} steps) {label(stacks[winner])} is "
                f"ahead: {theirs:.3f} against {size['mean']:.3f}."
            )
    return said


def _winner(values: list[float | None], place: int) -> int | None:
    """The stack of the least value, where it is not the one at `place`."""
    own = values[place] if place < len(values) else None
    if own is None:
        return None
    least, winner = min((value, n) for n, value in enumerate(values) if value is not None)
    return winner if winner != place and _differ(least, own) else None


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > SAME * max(abs(one), abs(other))


def _short(value: float, key: str) -> str:
    return f"{value:.1%}" if key in ("throughput_gain", "remote_node_share") else number(value)


def _list(numbers: list[int]) -> str:
    words = ", ".join(str(number) for number in numbers[:8])
    return words + (", ..." if len(numbers) > 8 else "")
