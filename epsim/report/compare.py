"""Two results.json side by side: what was predicted and what was measured, or two runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epsim.report.table import PIPE_WIDTH
from epsim.results import Results, read_results
from epsim.verdict import label

MEASURED, PREDICTED = "results.json", "predicted.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One metric's mean of one stack in both files; None where a file has no value."""

    stack: str
    metric: str
    unit: str
    first: float | None
    second: float | None


def find_results(first: Path, second: Path | None) -> tuple[Path, Path]:
    """The two files that are meant: a folder alone stands for what a run predicted and measured, else a folder for its
    results.json. Raises ValueError."""
    if second is None:
        if not first.is_dir():
            raise ValueError(f"{first}: give two results.json, or the folder of a run")
        return first / PREDICTED, first / MEASURED
    return tuple(path / MEASURED if path.is_dir() else path for path in (first, second))  # type: ignore[return-value]


def compare(first: Results, second: Results) -> list[Row]:
    """The stacks that both have, by name, with every metric that either has a value of.

    Raises ValueError where they have no stack in common.
    """
    theirs = {label(entry): entry for entry in second["stacks"]}
    rows = []
    for entry in first["stacks"]:
        if label(entry) not in theirs:
            continue
        other = theirs[label(entry)]["metrics"]
        for key, value in entry["metrics"].items():
            pair = (value["mean"], other.get(key, {"mean": None})["mean"])
            if pair != (None, None):
                rows.append(Row(label(entry), key, value["unit"], *pair))
    if not rows:
        names = ", ".join(label(entry) for entry in first["stacks"])
        raise ValueError(f"no stack in common: {names} on one side, {', '.join(theirs)} on the other")
    return rows


def print_comparison(first: Path, second: Path) -> None:
    """Raises FileNotFoundError or ValueError in one line."""
    rows = compare(read_results(first), read_results(second))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    table = Table()
    for name in ("stack", "metric (mean)", "unit"):
        table.add_column(name, overflow="fold")
    for path in (first, second):
        table.add_column(Text(str(path)), justify="right", overflow="fold")
    table.add_column("second / first - 1", justify="right")
    for row in rows:
        change = ""
        if row.first and row.second is not None:
            change = f"{row.second / row.first - 1:+.2%}"
        cells = (row.stack, row.metric, row.unit, _number(row.first), _number(row.second), change)
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
