"""Prints a sweep to the terminal."""

from collections import Counter
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from epsim.files import printable
from epsim.report.content import counted
from epsim.report.flips import stacks_of_cells
from epsim.report.table import rich_table, terminal
from epsim.results import ResultsData
from epsim.sweep.drive import Sweep

MOST_ROWS = 60


def print_sweep(sweep: Sweep, results: ResultsData | None) -> None:
    """Prints to stdout: one line per cell, the numbers of computed, kept, skipped and failed cells, and the verdict."""
    console = terminal()
    if results is not None:
        console.print(_table(results))
        left = len(results["sweep"]["cells"]) - MOST_ROWS
        if left > 0:
            console.print(Text(f"and {counted(left, 'more cell')}, all in {sweep.out}/results.parquet"))
    for line in summary(sweep):
        console.print(Text(printable(line)))
    if results is not None:
        console.print(Text(printable(results["verdict"]), style="bold"))


def summary(sweep: Sweep) -> Iterator[str]:
    parts = [f"{sweep.computed} computed", f"{sweep.kept} kept from before"]
    parts += [f"{len(sweep.failed)} failed"] if sweep.failed else []
    yield f"{counted(len(sweep.plan.cells), 'cell')}: {', '.join(parts)}"
    if sweep.retried:
        yield f"retries after a worker died: {sweep.retried}"
    if sweep.foreign:
        cells = f"{counted(sweep.foreign, 'finished cell')} in {sweep.out} {'is' if sweep.foreign == 1 else 'are'}"
        yield f"{cells} not part of this grid: kept, not shown"
    if sweep.plan.excluded:
        yield f"{counted(sweep.plan.excluded, 'combination')} removed by [[except]]"
    for reason, times in Counter(reason for _, reason in sweep.plan.skipped).items():
        yield f"{counted(times, 'combination')} skipped: {reason}"
    for reason, times in Counter(sweep.failed.values()).items():
        yield f"{counted(times, 'cell')} failed: {reason}"


def _table(results: ResultsData) -> Table:
    """Peak / mean load of every stack, and the difference of the best stack from the first."""
    axes = list(results["sweep"]["axes"]) or ["trace"]
    entries, rows = stacks_of_cells(results), []
    names = list(dict.fromkeys(entry["of"] for entry in results["stacks"]))
    for cell in results["sweep"]["cells"][:MOST_ROWS]:
        ratios = {entry["of"]: entry["metrics"]["max_over_mean"]["mean"] for entry in entries[cell["key"]]}
        shown = ["-" if ratios.get(name) is None else f"{ratios[name]:.3f}" for name in names]
        known = [value for value in ratios.values() if value is not None]
        first = ratios[next(iter(ratios))]
        gain = f"{min(known) / first - 1:+.1%}" if known and first else "-"
        values = ["-" if cell.get(key) is None else str(cell[key]) for key in axes]
        rows.append([printable(text) for text in (*values, *shown, gain)])
    return rich_table([*axes, *names, "best vs first"], rows, left=(len(axes) + len(names),))
