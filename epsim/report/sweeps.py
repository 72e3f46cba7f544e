"""Figures of a sweep: the change from the first stack by each numeric axis of the grid, such as redundancy or ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from epsim.report.draw import DASHES, MARKERS, Figure, colour, cut, legend
from epsim.results import ResultsData

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MEASURES = (
    ("max_over_mean", "change of peak/mean from the first stack", "peak/mean, vs first"),
    ("throughput_gain", "tokens per second / those of the first stack - 1", "throughput, vs first"),
)
WORDS = {
    "redundant": "redundant experts per layer", "slots_per_rank": "slots per rank", "ranks": "ranks", "nodes": "nodes",
    "ranks_per_node": "ranks per node", "batch": "sequences per batch", "drift": "drift",
    "step_tokens": "tokens per step",
}  # fmt: skip


def sweep_figures(results: ResultsData) -> list[Figure]:
    """One figure for each numeric axis and measure."""
    stacks = results["stacks"]
    names = list(dict.fromkeys(entry["of"] for entry in stacks))
    size = (2.8 + 0.19 * -(-len(names) // 2), 3.1 + 0.19 * len(names))
    found = []
    for axis, values in results["sweep"]["axes"].items():
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            continue
        words = WORDS.get(axis, axis.replace("_", " "))
        for key, meaning, short in MEASURES:
            if all(entry["metrics"][key]["mean"] is None for entry in stacks):
                continue
            bars = "points are means over the cells with this value, bars reach from the smallest to the largest"
            draw, name = partial(_gain, results, axis, key, (words, short)), f"{axis}-{key.replace('_', '-')}"
            title = f"{short} by {words}".capitalize()
            found.append(Figure(name, title, f"x: {words}; y: {meaning}; {bars}", draw, *size))
    return found


def gains(results: ResultsData, axis: str, key: str) -> dict[str, dict[float, list[float]]]:
    """{stack: {value of the axis: change from the first stack in each cell}}."""
    places = {cell["key"]: cell.get(axis) for cell in results["sweep"]["cells"]}
    first: dict[str, Any] = {}
    found: dict[str, dict[float, list[float]]] = {}
    for entry in results["stacks"]:
        base = first.setdefault(entry["cell"], entry)["metrics"][key]["mean"]
        own, place = entry["metrics"][key]["mean"], places[entry["cell"]]
        if own is None or place is None or base is None or (key == "max_over_mean" and not base):
            continue
        change = own / base - 1 if key == "max_over_mean" else own
        found.setdefault(entry["of"], {}).setdefault(float(place), []).append(change)
    return found


def _gain(results: ResultsData, axis: str, key: str, words: tuple[str, str], canvas: Canvas, narrow: bool) -> None:
    from matplotlib.ticker import PercentFormatter

    axes = canvas.subplots()
    for number, (name, places) in enumerate(gains(results, axis, key).items()):
        at = sorted(places)
        middle = np.array([np.mean(places[place]) for place in at])
        spread = [middle - [min(places[place]) for place in at], [max(places[place]) for place in at] - middle]
        axes.errorbar(
            at, middle, yerr=np.maximum(spread, 0), marker=MARKERS[number % 8], linestyle=DASHES[number % 4],
            color=colour(number), label=cut(name, 46) if narrow else name, elinewidth=0.8,
        )  # fmt: skip
    if len(places_of_axis := results["sweep"]["axes"][axis]) <= 8:
        axes.set_xticks(sorted(places_of_axis), [f"{place:g}" for place in sorted(places_of_axis)])
    axes.set_xlabel(words[0])
    axes.set_ylabel(words[1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend(canvas, axes, 1 if narrow else 2)
