"""Figures of quality against cost, measured on a small model by benchmarks/oea_quality.py and reader_quality.py."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epsim.files import check_source
from epsim.report.draw import MARKERS, Figure, colour, legend
from epsim.results import ResultsData

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LOSS = "cross-entropy minus that of the unchanged model, in nats per token"
MOST_POINTS = 2000
LINEAR = 0.01
"""The scale is linear below this loss and logarithmic above it."""


def read_frontiers(path: Path) -> list[ResultsData]:
    """Entries of `frontiers` of results.json, from the output of either benchmark. Raises FileNotFoundError or
    ValueError in one line."""
    check_source(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        where = {"origin": f"measured on {content['machine']}", "command": content.get("command", "unknown")}
        routers = "points" in content
        points = list(_of_routers(content) if routers else _of_readers(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not what benchmarks/oea_quality.py or benchmarks/reader_quality.py writes ({error!r})"
        ) from None
    if not 0 < len(points) <= MOST_POINTS:
        raise ValueError(f"{path}: {len(points)} points, from 1 to {MOST_POINTS} can be shown")
    title = "Routers: loss against active experts" if routers else "Channel readers: loss against bytes read"
    x = "active experts per layer" if routers else "share of the experts' bytes that are read"
    return [{"title": title, "x": x, "y": LOSS, **where, "points": points}]


def _of_routers(content: Any) -> Any:
    for point in content["points"]:
        yield {
            "family": f"{point['family']}, batch {int(point['batch_size'])}",
            "label": str(point["router"]),
            "x": float(point["active_experts"]["1"]),
            "y": float(point["delta"]),
            "error": _error(point["delta_standard_error"]),
        }


def _of_readers(content: Any) -> Any:
    """Trials have names such as "reader 0.2", with the budget last."""
    for name, figures in content["trials"].items():
        family, _, budget = name.rpartition(" ")
        try:
            share = float(budget)
        except ValueError:
            continue  # another kind of trial, without a budget
        loss, error = float(figures["loss"]), _error(figures["loss_standard_error"])
        yield {"family": family, "label": name, "x": share, "y": loss, "error": error}


def _error(value: Any) -> float:
    """0 where a single sequence gives no error (NaN)."""
    return float(value) if float(value) == float(value) else 0.0


def frontier_figures(results: ResultsData) -> list[Figure]:
    found = []
    for number, frontier in enumerate(results.get("frontiers", ())):
        families = {point["family"] for point in frontier["points"]}
        axes = f"x: {frontier['x']}; y: {frontier['y']} (bars: two standard errors; logarithmic above {LINEAR:g}); "
        axes += f"{frontier['origin']} by {frontier['command']}"
        size = (3.4 + 0.19 * -(-len(families) // 3), 3.4 + 0.19 * len(families))
        found.append(Figure(f"frontier-{number}", frontier["title"], axes, partial(_draw, frontier), *size))
    return found


def _draw(frontier: Any, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    families: dict[str, list[Any]] = {}
    for point in frontier["points"]:
        families.setdefault(point["family"], []).append(point)
    for number, (family, points) in enumerate(families.items()):
        points = sorted(points, key=lambda point: point["x"])
        xs, ys = [point["x"] for point in points], [point["y"] for point in points]
        errors = [2 * point["error"] for point in points]
        style: Any = {"marker": MARKERS[number % 8], "linewidth": 0.9, "elinewidth": 0.6}
        axes.errorbar(xs, ys, yerr=errors, color=colour(number), label=family, **style)
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set_xlabel(frontier["x"])
    axes.set_ylabel("loss minus that of the unchanged model, nats")
    legend(canvas, axes, 1 if narrow else 3)
