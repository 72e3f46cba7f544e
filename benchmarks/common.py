"""Functions that benchmarks share: options, the command line, tables, reports, line fits, and the processor's name."""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PLACES = ("--recordings", "--batches", "--cache", "--out")
"""Options whose values belong to one machine."""


def script_parser(about: str | None, results: str = "") -> argparse.ArgumentParser:
    """A parser with the script's docstring as help, and --out if `results` names its file in benchmarks/results."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if results:
        parser.add_argument("--out", type=Path, default=RESULTS / results)
    return parser


def command() -> str:
    """The command of this process, without the options of PLACES."""
    places = {at + step for at, word in enumerate(sys.argv) if word in PLACES for step in (0, 1)}
    given = [word for at, word in enumerate(sys.argv) if at and at not in places]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])


def table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows in columns. Values that are lists or dictionaries are left out."""
    print(f"\n{title}")
    columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], (list, dict))))
    cells = [columns, *[[_shown(row.get(column, "")) for column in columns] for row in rows]]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip(), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(path: Path, report: dict[str, Any], row_a_line: bool = False) -> None:
    """Writes the report as JSON, whole or not at all, and makes its folder. row_a_line: for files of many rows."""
    from epsim.files import whole_file  # not above: replay.py --against imports this file beside an older epsim

    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    if row_a_line:
        text = json.dumps(report, separators=(",", ":")).replace("},{", "},\n{")
    with whole_file(path) as temporary:
        temporary.write_text(text + "\n")


def fit(active: Sequence[float], times: Sequence[float]) -> dict[str, float]:
    """The least-squares line through times in microseconds: `fixed`, `slope` (us per active expert) and `r2`."""
    slope, fixed = np.polyfit(active, times, 1)
    rest = np.array(times) - (fixed + slope * np.array(active))
    return {"fixed": float(fixed), "slope": float(slope), "r2": float(1 - rest.var() / np.var(times))}


def least_seconds(run: Callable[[], object], repeats: int = 1) -> float:
    """The lowest time of several calls, because other work on the machine can only add time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def installed(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine() -> str:
    """The processor, and the number of its cores that this process may use."""
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
