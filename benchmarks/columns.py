"""Rows printed in columns."""

from __future__ import annotations

from typing import Any


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Lists and dictionaries among the values are left out."""
    print(f"\n{title}")
    columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], (list, dict))))
    cells = [columns, *[[_shown(row.get(column, "")) for column in columns] for row in rows]]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
