"""What each figure draws, from results.json alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from epsim.report.draw import DASHES, FAINT, INK, MARKERS, NARROW, SERIES, WIDE, Figure, colour
from epsim.report.frontiers import frontier_figures
from epsim.report.sweeps import sweep_figures
from epsim.results import Results
from epsim.score.verdict import best_of, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    Drawing: TypeAlias = Callable[[Results, Canvas, bool], None]

CAUSES = {"gap_placement": "placement", "gap_split": "split", "gap_rounding": "rounding", "gap_shared": "shared"}
PHASES = ("route", "balance", "dispatch", "experts", "combine")
BAR = 0.34
MOST_PLACEMENTS = 4
MOST_MARKS = 128


def figures(results: Results) -> list[Figure]:
    """Those that the results have values for, in the page's order."""
    frontiers = frontier_figures(results)
    if "sweep" in results:
        return sweep_figures(results) + frontiers
    stacks = results["stacks"]
    bars = (1.1 + 0.42 * len(stacks), 1.6 + 0.42 * len(stacks))
    lines = (2.8 + 0.19 * -(-len(stacks) // 2), 3.1 + 0.19 * len(stacks))
    hot = bool(results.get("scored", {}).get("hot_experts")) and _any(stacks, "hot_copies")
    every: list[tuple[bool, Drawing, str, str, str, tuple[float, float]]] = [
        (
            any(entry["metrics"][key]["mean"] for entry in stacks for key in CAUSES), _causes, "causes",
            "What peak over mean is made of",
            "x: product of the mean gaps + 1, by cause (1: perfectly balanced; of means, so near the mean peak over "
            "mean, not equal to it); y: stacks", bars,
        ),
        (
            _any(stacks, "load_over_mean_by_step"), _heat, "heat",
            "Load of every rank over the steps, before and after",
            "x: step; y: rank; colour: load over the mean load of the layer, mean over layers", (2.6, 3.6),
        ),
        (
            _any(stacks, "max_over_mean_quantiles"), _ecdf, "ecdf", "Distribution of peak over mean",
            "x: peak over mean of a layer in a step; y: share of layers and steps with at most that", lines,
        ),
        (
            results["trace"]["steps_scored"] > 1 and _any(stacks, "by_step"), _steps, "steps",
            "Peak over mean as the steps go by",
            "x: step; y: peak over mean, mean over layers (and over a stretch of steps where there are many)", lines,
        ),
        (
            any(len(entry.get("max_over_mean_by_tokens", [])) > 1 for entry in stacks), _tokens, "tokens",
            "Peak over mean by batch size",
            "x: tokens a rank in a step, by powers of two; y: peak over mean, mean over those steps and layers", lines,
        ),
        (
            results["trace"]["num_layers"] > 1 and _any(stacks, "max_over_mean_by_layer"), _layers, "layers",
            "Layer by layer",
            "x: layer of the model; y: peak over mean, mean over steps", lines,
        ),
        (
            _any(stacks, "load_over_mean_by_rank"), _ranks, "ranks", "Rank by rank",
            "x: rank; y: load over the mean load, mean over steps and layers", lines,
        ),
        (
            _any(stacks, "phases_us"), _phases, "phases", "Where the time of a layer goes",
            "x: microseconds of a layer, mean over steps and layers, each phase its slowest rank's; y: stacks", bars,
        ),
        (
            any(entry["metrics"]["kept_mass"]["mean"] is not None for entry in stacks), _kept, "kept",
            "Quality kept against what is read",
            "x: active experts of the busiest rank, bytes it reads, layer time (means); y: router probability kept",
            lines,
        ),
        (
            hot, _hot, "hot", "The hottest experts and the ranks that hold their copies",
            "x: rank; y: layer and expert, with its load over the mean expert's; a mark is a copy",
            (3.4, 0.4 + 2.9 * len(_placements(results))),
        ),
    ]  # fmt: skip
    return [
        Figure(key, title, axes, partial(draw, results), *size, live=draw is _heat)
        for there, draw, key, title, axes, size in every
        if there
    ] + frontiers


def _any(stacks: Sequence[Any], key: str) -> bool:
    return any(entry.get(key) for entry in stacks)


def _legend(canvas: Canvas, axes: Axes, narrow: bool) -> None:
    handles, names = axes.get_legend_handles_labels()
    columns = 1 if narrow else 2
    canvas.legend(handles, names, loc="outside lower left", ncols=columns, borderaxespad=0, columnspacing=1.2)


def _name(entry: dict[str, Any], narrow: bool = False) -> str:
    text = label(entry)
    return text if not narrow or len(text) <= 46 else text[:45] + "…"


def _bars(
    axes: Axes, results: Results, parts: Sequence[tuple[str, Sequence[float]]], start: float, digits: int, narrow: bool
) -> None:
    """Stacked bars, a stack's name over its bar. parts: (name, lengths by stack)."""
    stacks = results["stacks"]
    left = np.full(len(stacks), start)
    for number, (name, lengths) in enumerate(parts):
        axes.barh(range(len(stacks)), lengths, BAR, left=left, label=name, color=SERIES[number])
        left = left + np.asarray(lengths)
    for number, entry in enumerate(stacks):
        axes.annotate(
            _name(entry, narrow), (start, number), (0, 11), textcoords="offset points", va="center", fontsize=8.5
        )
        axes.annotate(
            f"{left[number]:.{digits}f}", (left[number], number), (3, 0), textcoords="offset points", va="center"
        )
    axes.set_ylim(len(stacks) - 0.7, -0.75)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_color(INK)
    axes.set_xlim(start, start + max(1e-9, float((left - start).max())) * 1.12)


def _bar_legend(canvas: Canvas, axes: Axes, narrow: bool) -> None:
    handles, names = axes.get_legend_handles_labels()
    canvas.legend(
        handles, names, loc="outside lower left", ncols=3 if narrow else 5, borderaxespad=0, columnspacing=1.2
    )


def _causes(results: Results, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    left = np.ones(len(results["stacks"]))
    parts = []
    # Causes multiply, so their bars are stacked as successive factors: each is drawn from the product so far.
    for key, cause in CAUSES.items():
        gaps = np.array([entry["metrics"][key]["mean"] or 0.0 for entry in results["stacks"]])
        if gaps.any():
            parts.append((cause, (left * gaps).tolist()))
        left = left * (1 + gaps)
    _bars(axes, results, parts, 1.0, 3, narrow)
    axes.set_xlabel("peak / mean, as the product of mean gaps + 1")
    _bar_legend(canvas, axes, narrow)


def _phases(results: Results, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    there = [entry.get("phases_us", {}) for entry in results["stacks"]]
    parts = [(p, [one.get(p, {}).get("mean", 0.0) for one in there]) for p in PHASES if any(p in one for one in there)]
    _bars(axes, results, parts, 0.0, 1, narrow)
    axes.set_xlabel("microseconds a layer")
    _bar_legend(canvas, axes, narrow)


def before_and_after(results: Results) -> tuple[int, int]:
    """Places of the stacks that the heat map shows at first: the first, and the best of the others."""
    best = best_of(results["stacks"]) or 0
    return 0, best if best else min(1, len(results["stacks"]) - 1)


def _heat(results: Results, canvas: Canvas, narrow: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    shown = list(dict.fromkeys(before_and_after(results)))
    maps = [np.array(results["stacks"][n].get("load_over_mean_by_step") or [[np.nan]], dtype=float).T for n in shown]
    # One colour scale for all, so that before and after can be compared.
    low, high = min(float(np.nanmin(m)) for m in maps), max(float(np.nanmax(m)) for m in maps)
    shape = (len(shown), 1) if narrow else (1, len(shown))
    every = canvas.subplots(*shape, squeeze=False).ravel()
    for axes, values, number in zip(every, maps, shown, strict=True):
        image = axes.imshow(
            values,
            aspect="auto",
            cmap="cividis",
            vmin=low,
            vmax=high,
            interpolation="nearest",
            extent=(0, results["trace"]["steps_scored"], len(values) - 0.5, -0.5),
        )
        axes.set_title(_name(results["stacks"][number], narrow))
        axes.set_xlabel("step")
        axes.set_ylabel("rank")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.grid(visible=False)
    bar = canvas.colorbar(image, ax=list(every))
    bar.set_label("load / mean")


def _ecdf(results: Results, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    for number, entry in enumerate(results["stacks"]):
        values = entry.get("max_over_mean_quantiles") or []
        if values:
            shares = np.linspace(0, 1, len(values))
            axes.plot(values, shares, DASHES[number % 4], color=colour(number), label=_name(entry, narrow))
    axes.set_ylim(0, 1)
    axes.set_xlabel("peak / mean")
    axes.set_ylabel("share at most that")
    _legend(canvas, axes, narrow)


def _steps(results: Results, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    steps = results["trace"]["steps_scored"]
    for number, entry in enumerate(results["stacks"]):
        values = _numbers(entry.get("by_step", {}).get("max_over_mean"))
        if len(values):
            at = (np.arange(len(values)) + 0.5) * steps / len(values)
            axes.plot(at, values, DASHES[number % 4], color=colour(number), linewidth=1.1, label=_name(entry, narrow))
    axes.set_xlabel("step")
    axes.set_ylabel("peak / mean")
    _legend(canvas, axes, narrow)


def _tokens(results: Results, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    lows = sorted({size["low"] for entry in results["stacks"] for size in entry.get("max_over_mean_by_tokens", [])})
    for number, entry in enumerate(results["stacks"]):
        sizes = entry.get("max_over_mean_by_tokens", [])
        places = [lows.index(size["low"]) for size in sizes]
        _line(axes, number, entry, places, [size["mean"] for size in sizes], narrow)
    axes.set_xticks(range(len(lows)), [f"{low:g}-{max(2 * low, 1):g}" for low in lows])
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel("peak / mean")
    _legend(canvas, axes, narrow)


def _layers(results: Results, canvas: Canvas, narrow: bool) -> None:
    layers = results["trace"].get("layers") or list(range(results["trace"]["num_layers"]))
    _lines(results, "max_over_mean_by_layer", layers, ("layer", "peak / mean"), canvas, narrow)


def _ranks(results: Results, canvas: Canvas, narrow: bool) -> None:
    _lines(
        results, "load_over_mean_by_rank", range(results["setting"]["ranks"]), ("rank", "load / mean"), canvas, narrow
    )


def _lines(
    results: Results, key: str, places: Sequence[int], words: tuple[str, str], canvas: Canvas, narrow: bool
) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = canvas.subplots()
    for number, entry in enumerate(results["stacks"]):
        values = _numbers(entry.get(key))
        if len(values):
            _line(axes, number, entry, places, values, narrow)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(words[0])
    axes.set_ylabel(words[1])
    _legend(canvas, axes, narrow)


def _line(axes: Axes, number: int, entry: Any, places: Sequence[float], values: Any, narrow: bool) -> None:
    marker = MARKERS[number % 8] if len(places) <= MOST_MARKS else ""
    dash = DASHES[number % 4]
    axes.plot(places, values, dash, marker=marker, color=colour(number), label=_name(entry, narrow))


def _numbers(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([np.nan if value is None else value for value in values or []], dtype=float)


def _kept(results: Results, canvas: Canvas, narrow: bool) -> None:
    stacks = results["stacks"]
    measures = [("active_experts", "active experts"), ("bytes_read", "bytes read"), ("layer_time_us", "layer us")]
    measures = [m for m in measures if any(entry["metrics"][m[0]]["mean"] is not None for entry in stacks)]
    shape = (len(measures), 1) if narrow and len(measures) > 1 else (1, len(measures))
    every = canvas.subplots(*shape, sharey=True, squeeze=False).ravel()
    for axes, (key, words) in zip(every, measures, strict=True):
        for number, entry in enumerate(stacks):
            kept = entry["metrics"]["kept_mass"]["mean"]
            value = entry["metrics"][key]["mean"]
            if value is not None:  # without a router every token keeps its model's choice
                axes.plot(
                    [value], [1.0 if kept is None else kept], MARKERS[number % 8], color=colour(number), markersize=7,
                    label=_name(entry, narrow),
                )  # fmt: skip
        axes.set_xlabel(words)
        axes.set_ylabel("router probability kept" if axes is every[0] or narrow else "")
    _legend(canvas, every[0], narrow)


def _placements(results: Results) -> list[tuple[str, list[list[int]]]]:
    """Copies of the hot experts by distinct placement, with the names of its stacks."""
    found: dict[str, tuple[list[str], list[list[int]]]] = {}
    for entry in results["stacks"]:
        copies = entry.get("hot_copies")
        if copies:
            found.setdefault(str(copies), ([], copies))[0].append(label(entry))
    first = list(found.values())[:MOST_PLACEMENTS]
    return [(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), copies) for names, copies in first]


def _hot(results: Results, canvas: Canvas, narrow: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    hot, placements = results["scored"]["hot_experts"], _placements(results)
    layers = results["trace"].get("layers") or list(range(results["trace"]["num_layers"]))
    names = [f"layer {layers[one['layer']]}, {one['expert']}: {one['load_over_mean']:.1f}x" for one in hot]
    shape = (len(placements), 1) if narrow else (1, len(placements))
    every = canvas.subplots(*shape, sharey=True, squeeze=False).ravel()
    for number, (axes, (title, copies)) in enumerate(zip(every, placements, strict=True)):
        at = [(rank, row) for row, ranks in enumerate(copies) for rank in ranks]
        axes.scatter([x for x, _ in at], [y for _, y in at], 26, color=colour(number), marker="s")
        room = (NARROW if narrow else WIDE / len(placements)) * 8
        axes.set_title(title if len(title) <= room else title[: int(room) - 1] + "…")
        axes.set_xlim(-0.7, results["setting"]["ranks"] - 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_yticks(range(len(hot)), names)
        axes.set_ylim(len(hot) - 0.4, -0.6)
        axes.set_xlabel("rank")
        axes.spines["left"].set_color(FAINT)
