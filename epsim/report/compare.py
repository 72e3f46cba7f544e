"""Compares results.json files: predicted and measured, two policies, two traces, last week and today."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from epsim.report.content import layer_numbers
from epsim.results import ResultsData, read_results
from epsim.score.formulas import METRICS
from epsim.score.statistics import Floats, paired_difference, unpaired_difference
from epsim.score.verdict import label

MEASURED, PREDICTED = "results.json", "predicted.json"
WHOLE_STEPS = ("balancedness_vllm", "throughput_gain")
"""Metrics with one value per step. The others have one per layer with tokens."""
EXACT = 1e-4
SHAPED = {
    "max_over_mean_by_layer", "load_over_mean_by_rank", "load_over_mean_by_step", "load_over_mean_by_layer", "by_step",
}  # fmt: skip
"""Lists that can be drawn together only if all files have the same ranks, steps and layers."""

How: TypeAlias = Literal["paired", "unpaired", "none"]


@dataclass(frozen=True, slots=True)
class Side:
    """One results.json and the name that the user gave it."""

    name: str
    results: ResultsData


@dataclass(frozen=True, slots=True)
class Row:
    """The means of one metric of two stacks; None where a stack has no value.

    difference: second minus first; low, high: its 95% interval, None where the steps do not give one. how: `paired` if
    both have the same steps, `unpaired` if not, `none` without an interval.
    """

    stack: str
    first_file: str
    second_stack: str
    second_file: str
    metric: str
    unit: str
    first: float | None
    second: float | None
    difference: float | None
    low: float | None
    high: float | None
    how: How


def read_sides(paths: Sequence[Path]) -> list[Side]:
    """Reads files, or the results.json of folders. A run's folder alone gives its prediction and its measurement.
    Raises FileNotFoundError or ValueError in one line."""
    if len(paths) == 1 and paths[0].is_dir() and (paths[0] / PREDICTED).exists():
        paths = (paths[0] / PREDICTED, paths[0] / MEASURED)
    files = [path / MEASURED if path.is_dir() else path for path in paths]
    return [Side(str(path), read_results(path)) for path in files]


def compare(sides: Sequence[Side]) -> list[Row]:
    """Compares each later file with the first, stack by stack.

    Stacks with the same name are compared; so are the only stacks of two files. In a single file, every other stack is
    compared with the first. Raises ValueError where there is nothing to compare.
    """
    rows: list[Row] = []
    first, stacks = sides[0], sides[0].results["stacks"]
    if len(sides) == 1:
        if len(stacks) < 2:
            raise ValueError(f"{first.name} has one stack: give another results.json to compare it with")
        for entry in stacks[1:]:
            rows += _rows(first, stacks[0], first, entry)
    for second in sides[1:]:
        for ours, theirs in _pairs(first, second):
            rows += _rows(first, ours, second, theirs)
    return rows


def _pairs(first: Side, second: Side) -> list[tuple[Any, Any]]:
    ours, theirs = first.results["stacks"], second.results["stacks"]
    named = {label(entry): entry for entry in theirs}
    pairs = [(entry, named[label(entry)]) for entry in ours if label(entry) in named]
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(ours[0], theirs[0])]
    if not pairs:
        names = ", ".join(label(entry) for entry in ours)
        raise ValueError(
            f"no stack in common: {names} in {first.name}, {', '.join(named)} in {second.name}: "
            "give stacks the same name with --policy NAME=STACK, or results of one stack each"
        )
    return pairs


def _rows(first: Side, ours: Any, second: Side, theirs: Any) -> list[Row]:
    rows = []
    for key in dict.fromkeys((*ours["metrics"], *theirs["metrics"])):
        values = [entry["metrics"].get(key, {}).get("mean") for entry in (ours, theirs)]
        if values == [None, None]:
            continue
        unit = next(entry["metrics"][key]["unit"] for entry in (ours, theirs) if key in entry["metrics"])
        interval, how = _interval(first.results, ours, second.results, theirs, key)
        if None not in values:
            interval["difference"] = values[1] - values[0]
            num_ranks = max(side.results["setting"]["ranks"] for side in (first, second))
            interval = METRICS[key.removeprefix("routed_")].within(interval, values[1], num_ranks)
        names = (label(ours), first.name, label(theirs), second.name)
        rows.append(
            Row(*names, key, unit, values[0], values[1], interval["difference"], interval["low"], interval["high"], how)
        )
    return rows


def _interval(
    first: ResultsData, ours: Any, second: ResultsData, theirs: Any, key: str
) -> tuple[dict[str, float | None], How]:
    nothing: dict[str, float | None] = dict.fromkeys(("difference", "low", "high"))
    sides = [_by_step(results, entry, key) for results, entry in ((first, ours), (second, theirs))]
    if sides[0] is None or sides[1] is None:
        return nothing, "none"
    (sums, counts), (their_sums, their_counts) = sides[0], sides[1]
    same = first["scored"]["key"] == second["scored"]["key"] and np.array_equal(counts, their_counts)
    seed = first["setting"]["seed"]
    if same:
        found = paired_difference(their_sums - sums, counts, seed)
    else:
        found = unpaired_difference((their_sums, their_counts), (sums, counts), seed)
    return found, "none" if found["low"] is None else "paired" if same else "unpaired"


def _by_step(results: ResultsData, entry: Any, key: str) -> tuple[Floats, Floats] | None:
    """(sums, counts) of a metric by stretch of steps; None where the file lacks them."""
    values, scored = entry.get("by_step", {}).get(key), results.get("scored")
    if not values or scored is None:
        return None
    weights = np.array(scored["busy_steps" if key in WHOLE_STEPS else "busy_layers"], dtype=float)
    means = np.array([np.nan if value is None else value for value in values])
    if len(means) != len(weights):
        return None
    counts = np.where(np.isnan(means), 0.0, weights)
    sums = np.nan_to_num(means) * counts
    mean = entry["metrics"][key]["mean"]
    if not counts.sum() or abs(sums.sum() / counts.sum() - mean) > EXACT * max(abs(mean), EXACT):
        return None  # some layers with tokens lack this metric
    return sums, counts


def combined(sides: Sequence[Side], rows: Sequence[Row], command: str) -> ResultsData:
    """The comparison as results.json: the stacks of all files, named with their file, and the rows."""
    first = sides[0].results
    stacks = []
    shapes = {
        (s.results["setting"]["ranks"], s.results["trace"]["steps_scored"], *layer_numbers(s.results)) for s in sides
    }
    dropped = {"predicted"} | (set() if len(shapes) == 1 else SHAPED)
    for side in sides:
        for entry in side.results["stacks"]:
            name = label(entry) if len(sides) == 1 else f"{label(entry)} ({side.name})"
            kept = {key: value for key, value in entry.items() if key not in dropped}
            # versus_first compares with the first stack of the same file; rows compare files.
            stacks.append(kept | {"name": name} | ({} if len(sides) == 1 else {"versus_first": {}}))
    files = []
    for side in sides:
        trace, setting = side.results["trace"], side.results["setting"]
        file = {"file": side.name, "trace": trace["name"], "origin": trace["origin"], "steps": trace["steps_scored"]}
        file |= {"measured": side.results["kind"] == "run"}
        file |= {key: setting[key] for key in ("seed", "version", "command")}
        files.append(file | {"verdict": side.results["verdict"]})
    note = f"a comparison of {len(sides)} results; trace and setting are those of the first one"
    trace = first["trace"] | ({"notes": [note]} if len(sides) > 1 else {})
    found: ResultsData = {
        "schema": first["schema"],
        "kind": "comparison",
        "trace": trace,
        "setting": first["setting"] | {"command": command},
        "stacks": stacks,
        "verdict": words(rows),
        "comparison": {"files": files, "rows": [asdict(row) for row in rows]},
    }
    keys = {side.results.get("scored", {}).get("key") for side in sides}
    if len(keys) == 1 and "scored" in first:
        found["scored"] = first["scored"]
    return found


def words(rows: Sequence[Row]) -> str:
    """The pair whose peak/mean differs most, and the pair whose layer time differs most."""
    sentences = [_most(rows, "max_over_mean", "Peak/mean", 3), _most(rows, "layer_time_us", "Layer time (us)", 1)]
    return " ".join(filter(None, sentences)) or "No stack has a peak/mean in both files."


def _most(rows: Sequence[Row], key: str, what: str, digits: int) -> str:
    known = [row for row in rows if row.metric == key and row.difference is not None and row.first]
    if not known:
        return ""
    row = max(known, key=lambda one: abs((one.difference or 0.0) / (one.first or 1.0)))
    assert row.first is not None
    assert row.second is not None
    assert row.difference is not None
    who = row.stack if row.stack == row.second_stack else f"{row.second_stack} against {row.stack}"
    if row.difference == 0:
        everyone = f"for each of {len(known)} stacks" if len(known) > 1 else f"for {who}"
        return f"{what} is the same {everyone}."
    change = f"{row.difference / row.first:+.1%}"
    if row.low is not None and row.high is not None:
        change += f", 95% interval {row.low / row.first:+.1%} to {row.high / row.first:+.1%}, {row.how}"
    most = "differs most for" if len(known) > 1 else "of"
    clear = row.low is None or row.high is None or row.low * row.high > 0
    doubt = "" if clear else "; the interval includes zero"
    return f"{what} {most} {who}: {row.second:.{digits}f} against {row.first:.{digits}f} ({change}){doubt}."
