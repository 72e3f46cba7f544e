"""The figures of a page about policy stacks, drawn from results.json alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from epsim.report.draw import DASHES, FAINT, INK, MARKERS, NARROW, SERIES, WIDE, Figure, colour
from epsim.results import ResultsData
from epsim.score.verdict import best_of, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    Drawing: TypeAlias = Callable[[ResultsData, Canvas, bool], None]

CAUSES = {"gap_placement": "placement", "gap_split": "split", "gap_rounding": "rounding", "gap_shared": "shared"}
PHASES = ("route", "balance", "dispatch", "experts", "combine")
BAR = 0.34
MOST_PLACEMENTS = 4
MOST_MARKS = 128


def stack_figures(results: ResultsData) -> list[Figure]:
    """The figures that the results have values for, in the page's order."""
    stacks, trace = results["stacks"], results["trace"]
    bars = (1.1 + 0.42 * len(stacks), 1.6 + 0.42 * len(stacks))
    lines = (2.8 + 0.19 * -(-len(stacks) // 2), 3.1 + 0.19 * len(stacks))
    hot = bool(results.get("scored", {}).get("hot_experts")) and _any(stacks, "hot_copies")
    every: list[tuple[bool, Drawing, str, str, str, tuple[float, float]]] = [
        (
            any(entry["metrics"][key]["mean"] for entry in stacks for key in CAUSES), _causes, "causes",
            "Where the imbalance comes from",
            "x: product of (1 + mean gap) over the causes, close to the mean of peak/mean (1 is perfect balance); "
            "y: stacks", bars,
        ),
        (
            _any(stacks, "load_over_mean_by_step"), _heat, "heat", "Load of every rank over the steps",
            "x: step; y: rank; colour: load / mean load, averaged over layers", (2.6, 3.6),
        ),
        (
            _any(stacks, "max_over_mean_quantiles"), _ecdf, "ecdf", "Distribution of peak/mean",
            "x: peak/mean of one layer in one step; y: share of layers and steps with at most this value", lines,
        ),
        (
            trace["steps_scored"] > 1 and _any(stacks, "by_step"), _steps, "steps", "Peak/mean by step",
            "x: step; y: peak/mean, averaged over layers (in a long trace also over successive steps)", lines,
        ),
        (
            any(len(entry.get("max_over_mean_by_tokens", [])) > 1 for entry in stacks), _tokens, "tokens",
            "Peak/mean by batch size",
            "x: tokens per rank in a step, in powers of two; y: peak/mean, averaged over these steps and their layers",
            lines,
        ),
        (
            trace["num_layers"] > 1 and _any(stacks, "max_over_mean_by_layer"), _layers, "layers", "Peak/mean by layer",
            "x: layer of the model; y: peak/mean, averaged over steps", lines,
        ),
        (
            _any(stacks, "load_over_mean_by_rank"), _ranks, "ranks", "Load by rank",
            "x: rank; y: load / mean load, averaged over steps and layers", lines,
        ),
        (
            _any(stacks, "phases_us"), _phases, "phases", "Time of a layer by phase",
            "x: microseconds per layer, averaged over steps and layers; each phase is that of its slowest rank; "
            "y: stacks", bars,
        ),
        (
            any(entry["metrics"]["kept_mass"]["mean"] is not None for entry in stacks), _kept, "kept",
            "Router probability kept, and what is read",
            "x: active experts of the busiest rank, bytes it reads, time of a layer (means); y: router probability of "
            "the experts used / of the model's choice", lines,
        ),
        (
            hot, _hot, "hot", "The hottest experts and the ranks that hold their copies",
            "x: rank; y: layer and expert, with its load / mean load of an expert; each mark is a copy",
            (3.4, 0.4 + 2.9 * len(_placements(results))),
        ),
    ]  # fmt: skip
    return [
        Figure(key, title, axes, partial(draw, results), *size, live=draw is _heat)
        for has_values, draw, key, title, axes, size in every
        if has_values
    ]


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
    axes: Axes,
    results: ResultsData,
    parts: Sequence[tuple[str, Sequence[float]]],
    start: float,
    digits: int,
    narrow: bool,
) -> None:
    """Stacked bars with the stack's name above each. parts: (name, length by stack)."""
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


def _causes(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    left = np.ones(len(results["stacks"]))
    parts = []
    # Causes multiply: each bar begins at the product of those before it.
    for key, cause in CAUSES.items():
        gaps = np.array([entry["metrics"][key]["mean"] or 0.0 for entry in results["stacks"]])
        if gaps.any():
            parts.append((cause, (left * gaps).tolist()))
        left = left * (1 + gaps)
    _bars(axes, results, parts, 1.0, 3, narrow)
    axes.set_xlabel("peak/mean, as the product of 1 + mean gap")
    _bar_legend(canvas, axes, narrow)


def _phases(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    of_stacks = [entry.get("phases_us", {}) for entry in results["stacks"]]
    known = [phase for phase in PHASES if any(phase in phases for phases in of_stacks)]
    parts = [(phase, [phases.get(phase, {}).get("mean", 0.0) for phases in of_stacks]) for phase in known]
    _bars(axes, results, parts, 0.0, 1, narrow)
    axes.set_xlabel("microseconds per layer")
    _bar_legend(canvas, axes, narrow)


def before_and_after(results: ResultsData) -> tuple[int, int]:
    """Indices of the stacks that the heat map shows at first: the first stack and the best one."""
    best = best_of(results["stacks"]) or 0
    return 0, best if best else min(1, len(results["stacks"]) - 1)


def _heat(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    shown = list(dict.fromkeys(before_and_after(results)))
    maps = [np.array(results["stacks"][n].get("load_over_mean_by_step") or [[np.nan]], dtype=float).T for n in shown]
    # The same colour scale for all, so that they can be compared.
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
    bar.set_label("load / mean load")


def _ecdf(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    for number, entry in enumerate(results["stacks"]):
        values = entry.get("max_over_mean_quantiles") or []
        if values:
            shares = np.linspace(0, 1, len(values))
            axes.plot(values, shares, DASHES[number % 4], color=colour(number), label=_name(entry, narrow))
    axes.set_ylim(0, 1)
    axes.set_xlabel("peak/mean")
    axes.set_ylabel("share of layers and steps")
    _legend(canvas, axes, narrow)


def _steps(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    steps = results["trace"]["steps_scored"]
    for number, entry in enumerate(results["stacks"]):
        values = _numbers(entry.get("by_step", {}).get("max_over_mean"))
        if len(values):
            at = (np.arange(len(values)) + 0.5) * steps / len(values)
            axes.plot(at, values, DASHES[number % 4], color=colour(number), linewidth=1.1, label=_name(entry, narrow))
    axes.set_xlabel("step")
    axes.set_ylabel("peak/mean")
    _legend(canvas, axes, narrow)


def _tokens(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    axes = canvas.subplots()
    lows = sorted({size["low"] for entry in results["stacks"] for size in entry.get("max_over_mean_by_tokens", [])})
    for number, entry in enumerate(results["stacks"]):
        sizes = entry.get("max_over_mean_by_tokens", [])
        places = [lows.index(size["low"]) for size in sizes]
        _line(axes, number, entry, places, [size["mean"] for size in sizes], narrow)
    axes.set_xticks(range(len(lows)), [f"{low:g}-{max(2 * low, 1):g}" for low in lows])
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("peak/mean")
    _legend(canvas, axes, narrow)


def _layers(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    layers = results["trace"].get("layers") or list(range(results["trace"]["num_layers"]))
    _lines(results, "max_over_mean_by_layer", layers, ("layer", "peak/mean"), canvas, narrow)


def _ranks(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    _lines(
        results,
        "load_over_mean_by_rank",
        range(results["setting"]["ranks"]),
        ("rank", "load / mean load"),
        canvas,
        narrow,
    )


def _lines(
    results: ResultsData, key: str, places: Sequence[int], words: tuple[str, str], canvas: Canvas, narrow: bool
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


def _kept(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    stacks = results["stacks"]
    measures = [
        ("active_experts", "active experts"),
        ("bytes_read", "bytes read"),
        ("layer_time_us", "microseconds per layer"),
    ]
    measures = [m for m in measures if any(entry["metrics"][m[0]]["mean"] is not None for entry in stacks)]
    shape = (len(measures), 1) if narrow and len(measures) > 1 else (1, len(measures))
    every = canvas.subplots(*shape, sharey=True, squeeze=False).ravel()
    for axes, (key, words) in zip(every, measures, strict=True):
        for number, entry in enumerate(stacks):
            kept = entry["metrics"]["kept_mass"]["mean"]
            value = entry["metrics"][key]["mean"]
            if value is not None:  # without a router policy every token keeps the model's choice
                axes.plot(
                    [value], [1.0 if kept is None else kept], MARKERS[number % 8], color=colour(number), markersize=7,
                    label=_name(entry, narrow),
                )  # fmt: skip
        axes.set_xlabel(words)
        axes.set_ylabel("router probability kept" if axes is every[0] or narrow else "")
    _legend(canvas, every[0], narrow)


def _placements(results: ResultsData) -> list[tuple[str, list[list[int]]]]:
    """(names of the stacks, ranks that hold copies of each hot expert) for each distinct placement."""
    distinct: dict[str, tuple[list[str], list[list[int]]]] = {}
    for entry in results["stacks"]:
        copies = entry.get("hot_copies")
        if copies:
            distinct.setdefault(str(copies), ([], copies))[0].append(label(entry))
    first = list(distinct.values())[:MOST_PLACEMENTS]
    return [(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), copies) for names, copies in first]


def _hot(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    hot, placements = results["scored"]["hot_experts"], _placements(results)
    layers = results["trace"].get("layers") or list(range(results["trace"]["num_layers"]))
    names = [f"layer {layers[e['layer']]}, expert {e['expert']}: {e['load_over_mean']:.1f}x" for e in hot]
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
