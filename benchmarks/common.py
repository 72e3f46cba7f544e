"""What benchmarks share on any machine: rows in columns, reports, straight lines, and the processor's name."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints the rows in columns. Values that are lists or dictionaries are left out."""
    print(f"\n{title}")
    columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], (list, dict))))
    cells = [columns, *[[_shown(row.get(column, "")) for column in columns] for row in rows]]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip(), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(path: Path, report: dict[str, Any]) -> None:
    """Writes the report as JSON, in a folder that is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def fit(active: Sequence[float], times: Sequence[float]) -> dict[str, float]:
    """The least-squares line through times in microseconds: `fixed`, `slope` (us an active expert) and `r2`."""
    slope, fixed = np.polyfit(active, times, 1)
    rest = np.array(times) - (fixed + slope * np.array(active))
    return {"fixed": float(fixed), "slope": float(slope), "r2": float(1 - rest.var() / np.var(times))}


def machine() -> str:
    """The processor, and the number of its cores that this process may use."""
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
