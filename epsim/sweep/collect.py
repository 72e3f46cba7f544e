"""Collects a sweep's results: results.json, and a table with one row per cell, stack and metric."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from epsim.files import whole_file
from epsim.report.content import counted
from epsim.results import SCHEMA_VERSION, ResultsData, write_results
from epsim.score.verdict import best_of, label
from epsim.sweep.drive import Sweep, cell_path
from epsim.sweep.grid import Values

RESULTS, TABLE = "results.json", "results.parquet"
NUMBERS = ("ranks", "nodes", "redundant", "slots_per_rank", "ranks_per_node", "groups", "seed", "steps", "step_tokens")
STATISTICS = ("mean", "p50", "p95", "p99", "max")
INTERVAL = ("difference", "low", "high")
AXES: Mapping[str, Any] = {
    **dict.fromkeys(("trace", "path", "draw"), pa.string()),
    **dict.fromkeys((*NUMBERS, "draw_seed", "batch", "min_tokens"), pa.int64()),
    **dict.fromkeys(("drift", "plan_share", "shared_cost"), pa.float64()),
    **dict.fromkeys(("only", "model", "phase", "history", "hardware", "expert_table", "score_rule"), pa.string()),
    "overlap": pa.bool_(),
    **dict.fromkeys(("top_k", "experts"), pa.int64()),
}
RESULT_COLUMNS: Mapping[str, Any] = {
    **dict.fromkeys(("origin", "level"), pa.string()),
    **dict.fromkeys(("num_experts", "steps_scored"), pa.int64()),
    "tokens": pa.float64(),
    "place": pa.int64(),
    **dict.fromkeys(("stack", "name", "metric", "unit"), pa.string()),
    **dict.fromkeys((*STATISTICS, *INTERVAL), pa.float64()),
    "reason": pa.string(),
}
SCHEMA = pa.schema([("key", pa.string()), *AXES.items(), *RESULT_COLUMNS.items()])


def collect(sweep: Sweep, command: str) -> ResultsData | None:
    """Writes results.json and results.parquet of the finished cells into the sweep's folder. Returns the results. If no
    cell is finished, it removes both files and returns None. The content depends only on the cells, not on how or when
    they were computed. Raises CannotWriteError.
    """
    if not any(key not in sweep.failed for key in sweep.plan.cells):
        for name in (RESULTS, TABLE):
            (sweep.out / name).unlink(missing_ok=True)
        return None
    results = combined(sweep, command)
    write_results(results, sweep.out / RESULTS)
    with whole_file(sweep.out / TABLE) as temporary:
        _write_table(sweep, temporary)
    return results


def finished(sweep: Sweep) -> Iterator[ResultsData]:
    """Yields the results of the finished cells in the grid's order. The entry `cell` holds the cell's grid values."""
    for key in sweep.plan.cells:
        if key not in sweep.failed:
            yield json.loads(cell_path(sweep.out, key).read_bytes())


def varying(sweep: Sweep) -> dict[str, list[Any]]:
    """The keys that have several values among the grid's cells, with these values in the grid's order."""
    values: dict[str, list[Any]] = {key: [] for key in AXES if key not in ("path", "draw")}
    for cell in sweep.plan.cells.values():
        for key, seen in values.items():
            value = cell.axes.get(key)
            if value is not None and value not in seen:
                seen.append(value)
    return {key: seen for key, seen in values.items() if len(seen) > 1}


def tokens_of(results: ResultsData) -> float | None:
    """Mean tokens per step, computed as routed assignments / top-k; None without tokens."""
    metrics = results["stacks"][0]["metrics"]
    mean = metrics.get("routed_mean_load", metrics["mean_load"])["mean"]
    return None if mean is None else mean * results["setting"]["ranks"] / results["trace"]["top_k"]


def combined(sweep: Sweep, command: str) -> ResultsData:
    axes = varying(sweep)
    first: ResultsData | None = None
    cells, stacks = [], []
    best: Counter[str] = Counter()
    for results in finished(sweep):
        first = first or results
        cell = results["cell"]
        about = {key: results["trace"][key] for key in ("origin", "level", "steps_scored")}
        cells.append({**cell, **about, "tokens": tokens_of(results), "verdict": results["verdict"]})
        entries = results["stacks"]
        best_index = best_of(entries)
        if best_index is not None:
            best[label(entries[best_index])] += 1
        for entry in entries:
            shown = {"name": f"{label(entry)}{_suffix(cell, axes)}", "of": label(entry), "cell": cell["key"]}
            kept = {key: entry[key] for key in ("stack", "metrics", "versus_first", "notes") if key in entry}
            stacks.append({**kept, **shown})
    assert first is not None
    note = (
        f"A sweep of {len(cells)} cells. Trace and cluster here are those of the first cell; sweep.cells lists all. "
        "versus_first compares with the first stack of the same cell."
    )
    trace = {**first["trace"], "notes": [note, *first["trace"].get("notes", [])] if len(cells) > 1 else []}
    unfinished = [(sweep.plan.cells[key], reason) for key, reason in sweep.failed.items()]
    return {
        "schema": SCHEMA_VERSION,
        "kind": "sweep",
        "trace": trace,
        "setting": {**first["setting"], "command": command},
        "stacks": stacks,
        "verdict": verdict_of(best, len(cells), len(unfinished)),
        "sweep": {
            "axes": axes,
            "cells": cells,
            "failed": [{"key": cell.key, **cell.axes, "reason": reason} for cell, reason in unfinished],
            "skipped": [{**point, "reason": reason} for point, reason in sweep.plan.skipped],
            "excluded": sweep.plan.excluded,
        },
    }


def verdict_of(best: Counter[str], num_cells: int, num_failed: int) -> str:
    if not best:
        return f"None of {counted(num_cells, 'cell')} has a step with tokens."
    (first, wins), *others = best.most_common()
    more = "".join(f", {name} in {number}" for name, number in others)
    failed = f"; {counted(num_failed, 'cell')} failed" if num_failed else ""
    return f"{first} has the lowest peak load in {wins} of {counted(num_cells, 'cell')}{more}{failed}."


def _suffix(cell: Values, axes: Mapping[str, Any]) -> str:
    words = [f"{key} {cell[key]}" for key in axes if cell.get(key) is not None]
    return f" [{', '.join(words)}]" if words else ""


def _write_table(sweep: Sweep, path: Path) -> None:
    """Writes one row group per cell, so that only one cell is in memory at a time."""
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for results in finished(sweep):
            writer.write_table(pa.Table.from_pylist(list(_rows(results)), SCHEMA))


def _rows(results: ResultsData) -> Iterator[Values]:
    cell, trace = results["cell"], results["trace"]
    draw = ", ".join(cell["draw"]) if "draw" in cell else None
    common = {"key": cell["key"], **{key: cell.get(key) for key in AXES}, "draw": draw}
    common |= {"origin": trace["origin"], "level": trace["level"], "num_experts": trace["num_experts"]}
    common |= {"model": trace["model"], "phase": trace["phase"], "shared_cost": results["setting"]["shared_cost"]}
    common |= {"steps_scored": trace["steps_scored"], "tokens": tokens_of(results)}
    for index, entry in enumerate(results["stacks"]):
        for key, value in entry["metrics"].items():
            yield {
                **common,
                "place": index,
                "stack": entry["stack"],
                "name": label(entry),
                "metric": key,
                "unit": value["unit"],
                **{statistic: value[statistic] for statistic in STATISTICS},
                **dict.fromkeys(INTERVAL),
                **entry["versus_first"].get(key, {}),
                "reason": value.get("reason"),
            }
