"""The content that table, Markdown and page share: columns, rows, and the words around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epsim.cost.formulas import METRICS
from epsim.results import Results
from epsim.traces.files import printable
from epsim.verdict import label


@dataclass(frozen=True, slots=True)
class Column:
    """key: metric; statistic: which of its summary; header and cell: how it is printed."""

    key: str
    statistic: str
    header: str
    cell: Callable[[float], str]


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:.1f}"


COLUMNS = (
    Column("max_over_mean", "mean", "peak/mean", _ratio),
    Column("max_over_mean", "p95", "p95", _ratio),
    Column("optimality_gap", "mean", "gap", _percent),
    Column("gap_placement", "mean", "placement", _percent),
    Column("gap_split", "mean", "split", _percent),
    Column("gap_rounding", "mean", "rounding", _percent),
    Column("gap_shared", "mean", "shared", _percent),
    Column("active_experts", "mean", "active", _number),
    Column("remote_rank_share", "mean", "off rank", _percent),
    Column("remote_node_share", "mean", "off node", _percent),
)


def shown_columns(results: Results) -> list[Column]:
    """Those for which at least one stack has a value."""
    return [c for c in COLUMNS if any(e["metrics"][c.key][c.statistic] is not None for e in results["stacks"])]


def headers(results: Results) -> list[str]:
    return ["stack", *(column.header for column in shown_columns(results)), "vs first (95% interval)"]


def rows(results: Results) -> list[list[str]]:
    columns = shown_columns(results)
    base = results["stacks"][0]["metrics"]["max_over_mean"]["mean"]
    table = []
    for number, entry in enumerate(results["stacks"]):
        cells = [label(entry)]
        for column in columns:
            value = entry["metrics"][column.key][column.statistic]
            cells.append("-" if value is None else column.cell(value))
        cells.append("-" if number == 0 else _versus(entry, base))
        table.append(cells)
    return table


def _versus(entry: dict[str, Any], base: float | None) -> str:
    interval = entry["versus_first"].get("max_over_mean")
    if interval is None or not base:
        return "-"
    words = f"{interval['difference'] / base:+.1%}"
    if interval["low"] is None:
        return f"{words} (one step)"
    return f"{words} ({interval['low'] / base:+.1%} to {interval['high'] / base:+.1%})"


def facts(results: Results) -> list[tuple[str, str]]:
    """What the figures stand on."""
    trace, setting = results["trace"], results["setting"]
    shape = f"{trace['num_layers']} layers x {trace['num_experts']} experts, top-{trace['top_k']}"
    cluster = (
        f"{setting['ranks']} ranks on {setting['nodes']} node(s), {setting['redundant']} redundant experts a layer"
    )
    shared = f"costs {setting['shared_cost']:g} routed assignments a token" if setting["shared_cost"] else "none"
    said = [
        (
            "trace",
            f"{trace['name']} ({trace['origin']}, {trace['level']} level, {trace['phase']}), model {trace['model']}",
        ),
        ("shape", shape),
        ("steps", f"{trace['steps_scored']} scored"),
        ("placements", setting["history"]),
        ("cluster", cluster),
        ("shared expert", shared),
        *((f"stack {label(entry)}", entry["stack"]) for entry in results["stacks"] if entry.get("name")),
        ("seed, version", f"{setting['seed']}, epsim {setting['version']}"),
        ("command", setting["command"]),
        *(("note", note) for note in trace.get("notes", [])),
        *_stack_notes(results),
    ]
    return [(name, printable(value)) for name, value in said]


def _stack_notes(results: Results) -> list[tuple[str, str]]:
    """Notes on stacks; what is said of all of them is said once."""
    said: dict[str, list[str]] = {}
    for entry in results["stacks"]:
        for note in entry.get("notes", []):
            said.setdefault(note, []).append(label(entry))
    num_stacks = len(results["stacks"])
    return [("note" if len(on) == num_stacks else f"note on {', '.join(on)}", note) for note, on in said.items()]


def key_headers(results: Results) -> list[str]:
    return ["metric (mean)", "formula", *(label(entry) for entry in results["stacks"])]


def key_rows(results: Results) -> list[list[str]]:
    """Every metric that has a value, its formula beside the means of every stack; `reasons` tells of the others."""
    table = []
    for key in results["stacks"][0]["metrics"]:
        values = [entry["metrics"][key]["mean"] for entry in results["stacks"]]
        if all(value is None for value in values):
            continue
        metric = METRICS[key.removeprefix("routed_")]
        formula = "as above, on routed load alone" if key.startswith("routed_") else metric.formula
        table.append([key, formula, *("-" if value is None else _figure(value, metric.unit) for value in values)])
    return table


def reasons(results: Results) -> list[tuple[str, str]]:
    """Why a metric has no value: (metrics, reason), metrics of one reason together."""
    missing: dict[str, dict[str, None]] = {}
    for entry in results["stacks"]:
        for key, value in entry["metrics"].items():
            if "reason" in value:
                missing.setdefault(value["reason"], {})[key] = None
    return [(", ".join(keys), reason) for reason, keys in missing.items()]


def _figure(value: float, unit: str) -> str:
    return f"{value:.4f}" if unit in ("ratio", "share") else f"{value:,.2f}"
