"""The figures of a page about policy stacks, drawn from results.json alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from epsim.report.content import layer_numbers
from epsim.report.draw import DASHES, FAINT, INK, MARKERS, NARROW, SERIES, WIDE, Figure, colour, cut, legend
from epsim.results import ResultsData
from epsim.score.verdict import best_of, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    Drawing: TypeAlias = Callable[[ResultsData, Canvas, bool], None]
    Curve: TypeAlias = Callable[[dict[str, Any]], tuple[Any, Any] | None]

CAUSES = {"gap_placement": "placement", "gap_split": "split", "gap_rounding": "rounding", "gap_shared": "shared"}
PHASES = ("route", "balance", "dispatch", "experts", "combine")
COSTS = (
    ("active_experts", "active experts"), ("bytes_read", "bytes read"), ("layer_time_us", "microseconds per layer"),
)  # fmt: skip
BAR = 0.34
MOST_PLACEMENTS = 4
MOST_MARKS = 128


def stack_figures(results: ResultsData) -> list[Figure]:
    """The figures that the results have values for, in the page's order."""
    stacks, trace = results["stacks"], results["trace"]
    bars = (1.1 + 0.42 * len(stacks), 1.6 + 0.42 * len(stacks))
    lines = (2.8 + 0.19 * -(-len(stacks) // 2), 3.1 + 0.19 * len(stacks))
    hot = bool(results.get("scored", {}).get("hot_experts")) and _any(stacks, "hot_copies")
    by_layer = partial(_by_number, axis="layer", y="peak/mean", key="max_over_mean_by_layer")
    by_rank = partial(_by_number, axis="rank", y="load / mean load", key="load_over_mean_by_rank")
    every: list[tuple[bool, Drawing, str, str, str, tuple[float, float]]] = [
        (
            any(entry["metrics"][key]["mean"] for entry in stacks for key in CAUSES), _causes, "causes",
            "Where the imbalance comes from",
            "x: product of (1 + mean gap) of the four causes, which is close to peak/mean (1 is perfect balance); "
            "y: stacks", bars,
        ),
        (
            _any(stacks, "load_over_mean_by_step"), _heat, "heat", "Load of every rank over the steps",
            "x: step; y: rank; colour: load / mean load, averaged over layers", (2.6, 3.6),
        ),
        (
            _any(stacks, "max_over_mean_quantiles"), _ecdf, "ecdf", "Distribution of peak/mean",
            "x: peak/mean of one layer in one step; y: share of (step, layer) pairs with at most this value", lines,
        ),
        (
            trace["steps_scored"] > 1 and _any(stacks, "by_step"), _steps, "steps", "Peak/mean by step",
            "x: step; y: peak/mean, averaged over layers (in a long trace also over successive steps)", lines,
        ),
        (
            any(len(entry.get("max_over_mean_by_tokens", [])) > 1 for entry in stacks), _tokens, "tokens",
            "Peak/mean by batch size",
            "x: tokens per rank in a step, in powers of two; y: peak/mean, averaged over the steps of this size",
            lines,
        ),
        (
            trace["num_layers"] > 1 and _any(stacks, "max_over_mean_by_layer"), by_layer, "layers",
            "Peak/mean by layer", "x: layer of the model; y: peak/mean, averaged over steps", lines,
        ),
        (
            _any(stacks, "load_over_mean_by_rank"), by_rank, "ranks", "Load by rank",
            "x: rank; y: load / mean load, averaged over steps and layers", lines,
        ),
        (
            _any(stacks, "phases_us"), _phases, "phases", "Time of a layer by phase",
            "x: microseconds per layer, averaged over steps and layers; each phase is the time on its slowest rank; "
            "y: stacks", bars,
        ),
        (
            any(entry["metrics"]["kept_mass"]["mean"] is not None for entry in stacks), _kept, "kept",
            "Router probability kept, and expert weights read",
            "x: active experts of the busiest rank, bytes it reads, time of a layer (means); y: router probability of "
            "the experts used / of the model's choice", lines,
        ),
        (
            hot, _hot, "hot", "The hottest experts and the ranks that hold their copies",
            "x: rank; y: layer and expert, with its load / mean load of an expert in its layer; each mark is a copy",
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


def _name(entry: dict[str, Any], narrow: bool) -> str:
    return cut(label(entry), 46) if narrow else label(entry)


def _bars(
    results: ResultsData, canvas: Canvas, narrow: bool, parts: Sequence[tuple[str, Any]], start: float, words: str
) -> None:
    """Stacked bars that begin at start, with the stack's name above each. parts: (name, lengths [stacks])."""
    axes, stacks = canvas.subplots(), results["stacks"]
    left = np.full(len(stacks), start)
    for number, (name, lengths) in enumerate(parts):
        axes.barh(range(len(stacks)), lengths, BAR, left=left, label=name, color=SERIES[number])
        left = left + np.asarray(lengths)
    beside: Any = {"textcoords": "offset points", "va": "center"}
    for number, entry in enumerate(stacks):
        axes.annotate(_name(entry, narrow), (start, number), (0, 11), fontsize=8.5, **beside)
        text = f"{left[number]:.3f}" if start else f"{left[number]:.1f}"
        axes.annotate(text, (left[number], number), (3, 0), **beside)
    axes.set_ylim(len(stacks) - 0.7, -0.75)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_color(INK)
    axes.set_xlim(start, start + max(1e-9, float((left - start).max())) * 1.12)
    axes.set_xlabel(words)
    legend(canvas, axes, 3 if narrow else 5, columnspacing=1.2)


def _causes(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    left = np.ones(len(results["stacks"]))
    parts = []
    # Causes multiply: each bar begins at the product of those before it.
    for key, cause in CAUSES.items():
        gaps = np.array([entry["metrics"][key]["mean"] or 0.0 for entry in results["stacks"]])
        if gaps.any():
            parts.append((cause, left * gaps))
        left = left * (1 + gaps)
    _bars(results, canvas, narrow, parts, 1.0, "peak/mean, as the product of (1 + mean gap)")


def _phases(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    of_stacks = [entry.get("phases_us", {}) for entry in results["stacks"]]
    known = [phase for phase in PHASES if any(phase in phases for phases in of_stacks)]
    parts = [(phase, [phases.get(phase, {}).get("mean", 0.0) for phases in of_stacks]) for phase in known]
    _bars(results, canvas, narrow, parts, 0.0, "microseconds per layer")


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
            values, aspect="auto", cmap="cividis", vmin=low, vmax=high, interpolation="nearest",
            extent=(0, results["trace"]["steps_scored"], len(values) - 0.5, -0.5),
        )  # fmt: skip
        axes.set_title(_name(results["stacks"][number], narrow))
        axes.set_xlabel("step")
        axes.set_ylabel("rank")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.grid(visible=False)
    bar = canvas.colorbar(image, ax=list(every))
    bar.set_label("load / mean load")


def _curves(
    results: ResultsData, canvas: Canvas, narrow: bool, words: tuple[str, str], curve: Curve, **style: Any
) -> Axes:
    """One line per stack. words: of the axes; curve: gives x and y of an entry, or None."""
    axes = canvas.subplots()
    for number, entry in enumerate(results["stacks"]):
        if (found := curve(entry)) is not None:
            axes.plot(
                *found, DASHES[number % 4], color=colour(number), label=_name(entry, narrow),
                **{"marker": MARKERS[number % 8] if len(found[0]) <= MOST_MARKS else "", **style},
            )  # fmt: skip
    axes.set_xlabel(words[0])
    axes.set_ylabel(words[1])
    legend(canvas, axes, 1 if narrow else 2, columnspacing=1.2)
    return axes


def _ecdf(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    def curve(entry: dict[str, Any]) -> tuple[Any, Any] | None:
        values = entry.get("max_over_mean_quantiles")
        return (values, np.linspace(0, 1, len(values))) if values else None

    _curves(results, canvas, narrow, ("peak/mean", "share of (step, layer) pairs"), curve, marker="").set_ylim(0, 1)


def _steps(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    steps = results["trace"]["steps_scored"]

    def curve(entry: dict[str, Any]) -> tuple[Any, Any] | None:
        values = _numbers(entry.get("by_step", {}).get("max_over_mean"))
        return ((np.arange(len(values)) + 0.5) * steps / len(values), values) if len(values) else None

    _curves(results, canvas, narrow, ("step", "peak/mean"), curve, marker="", linewidth=1.1)


def _tokens(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    lows = sorted({size["low"] for entry in results["stacks"] for size in entry.get("max_over_mean_by_tokens", [])})

    def curve(entry: dict[str, Any]) -> tuple[Any, Any]:
        sizes = entry.get("max_over_mean_by_tokens", [])
        return [lows.index(size["low"]) for size in sizes], [size["mean"] for size in sizes]

    axes = _curves(results, canvas, narrow, ("tokens per rank", "peak/mean"), curve)
    axes.set_xticks(range(len(lows)), [f"{low:g}-{max(2 * low, 1):g}" for low in lows])


def _by_number(results: ResultsData, canvas: Canvas, narrow: bool, *, axis: str, y: str, key: str) -> None:
    """One value per layer or rank (`axis`). y: what the values are; key: their list in a stack's entry."""
    from matplotlib.ticker import MaxNLocator

    numbers = layer_numbers(results) if axis == "layer" else range(results["setting"]["ranks"])

    def curve(entry: dict[str, Any]) -> tuple[Any, Any] | None:
        values = _numbers(entry.get(key))
        return (numbers, values) if len(values) else None

    axes = _curves(results, canvas, narrow, (axis, y), curve)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _numbers(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([np.nan if value is None else value for value in values or []], dtype=float)


def _kept(results: ResultsData, canvas: Canvas, narrow: bool) -> None:
    stacks = results["stacks"]
    measures = [m for m in COSTS if any(entry["metrics"][m[0]]["mean"] is not None for entry in stacks)]
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
    legend(canvas, every[0], 1 if narrow else 2, columnspacing=1.2)


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
    layers = layer_numbers(results)
    names = [f"layer {layers[e['layer']]}, expert {e['expert']}: {e['load_over_mean']:.1f}x" for e in hot]
    shape = (len(placements), 1) if narrow else (1, len(placements))
    every = canvas.subplots(*shape, sharey=True, squeeze=False).ravel()
    for number, (axes, (title, copies)) in enumerate(zip(every, placements, strict=True)):
        at = [(rank, row) for row, ranks in enumerate(copies) for rank in ranks]
        axes.scatter([x for x, _ in at], [y for _, y in at], 26, color=colour(number), marker="s")
        room = (NARROW if narrow else WIDE / len(placements)) * 8
        axes.set_title(cut(title, int(room)))
        axes.set_xlim(-0.7, results["setting"]["ranks"] - 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_yticks(range(len(hot)), names)
        axes.set_ylim(len(hot) - 0.4, -0.6)
        axes.set_xlabel("rank")
        axes.spines["left"].set_color(FAINT)
