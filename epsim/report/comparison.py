"""The table of a comparison, for the terminal, report.md and report.html."""

from collections.abc import Sequence

from epsim.report.compare import Row
from epsim.score.formulas import metric_name

HEADERS = (
    "stack", "metric (mean)", "unit", "files", "first", "second", "second - first (95% interval)", "change", "steps",
)  # fmt: skip


def comparison_rows(rows: Sequence[Row], files: Sequence[str]) -> list[list[str]]:
    """files: their names in order. A row refers to its two files by number."""
    table = []
    for row in rows:
        stack = row.stack if row.stack == row.second_stack else f"{row.stack} -> {row.second_stack}"
        pair = f"{files.index(row.first_file) + 1}, {files.index(row.second_file) + 1}"
        change = "-"
        if row.first and row.difference is not None:
            change = f"{row.difference / row.first:+.2%}"
        numbers = [number(row.first), number(row.second), _difference(row), change]
        table.append([stack, metric_name(row.metric), row.unit, pair, *numbers, row.how])
    return table


def _difference(row: Row) -> str:
    if row.difference is None:
        return "-"
    words = f"{row.difference:+.4g}"
    return words if row.low is None or row.high is None else f"{words} ({row.low:+.4g} to {row.high:+.4g})"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
