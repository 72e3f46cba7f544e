"""Runs a sweep: gives unfinished cells to workers, and writes each result as soon as it is complete."""

import contextlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from epsim.files import folder_for_results, whole_file
from epsim.results import ResultsData, check_results, read_results
from epsim.stops import at_end
from epsim.sweep.cells import Cell, Plan
from epsim.sweep.pools import Pool
from epsim.sweep.sources import TRACES, Making
from epsim.sweep.work import Died, Done, Failed, Job

CELLS = "cells"
DEFAULT_RETRIES = 2

Report: TypeAlias = Callable[[str], None]
Advance: TypeAlias = Callable[[int], None]


@dataclass(slots=True)
class Sweep:
    """The outcome of a plan. kept: number of cells finished earlier. computed: number of cells finished now. failed:
    reasons by cell key, in the plan's order. retried: number of retries after a worker died. foreign: number of
    finished cells in the folder that are not part of this grid."""

    out: Path
    plan: Plan
    kept: int = 0
    computed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    retried: int = 0
    foreign: int = 0


def run_sweep(
    plan: Plan,
    out: Path,
    makers: Callable[[], Pool],
    workers: Callable[[], Pool],
    retries: int = DEFAULT_RETRIES,
    report: Report = lambda line: None,
    begin: Callable[[str, int], Advance] = lambda words, total: lambda number: None,
) -> Sweep:
    """Computes the plan's cells that are missing in `out`. The folder must be locked (`sweep_folder`).

    makers, workers: start the pools that make traces and replay cells; they are called only if there is work. report:
    is called with a line for each failure and retry. begin: is called with the name and size of a stage; returns a
    function to call with the number of jobs done. Raises OSError if a file cannot be written, and ValueError
    if all cells in the folder belong to another grid.
    """
    sweep = Sweep(out, plan)
    finished = finished_cells(out)
    missing = [cell for key, cell in plan.cells.items() if key not in finished]
    sweep.kept = len(plan.cells) - len(missing)
    sweep.foreign = len(finished) - sweep.kept
    if finished and not sweep.kept:
        raise ValueError(
            f"--out {out}: its {len(finished)} finished cells are of another grid, other files or another version of "
            "epsim: give another folder"
        )
    needed = [cell.trace.path for cell in missing] + [cell.history.path for cell in missing if cell.history]
    makings = [plan.makings[path] for path in dict.fromkeys(needed) if path in plan.makings and not path.exists()]
    unmade: dict[Path, str] = {}
    if makings:
        (out / TRACES).mkdir(exist_ok=True)
        advance = begin("making traces", len(makings))
        for job, line in _work(makings, makers, retries, sweep, report):
            advance(1)
            if isinstance(line, Failed):
                assert isinstance(job, Making)
                unmade[job.target] = line.line
    ready = []
    for cell in missing:
        why = next((unmade[opening.path] for opening in cell.openings if opening.path in unmade), None)
        if why is None:
            ready.append(cell)
        else:
            sweep.failed[cell.key] = why
            report(f"{words_of(cell)}: {why}")
    advance = begin("replaying", len(plan.cells))
    advance(sweep.kept + len(missing) - len(ready))
    for job, outcome in _work(ready, workers, retries, sweep, report):
        assert isinstance(job, Cell)
        advance(1)
        if isinstance(outcome, Failed):
            sweep.failed[job.key] = outcome.line
            report(f"{words_of(job)}: {outcome.line}")
        else:
            assert outcome.results is not None
            keep_cell(out, job, outcome.results)
            sweep.computed += 1
    sweep.failed = {key: sweep.failed[key] for key in plan.cells if key in sweep.failed}
    return sweep


def _work(
    jobs: Sequence[Job], pool_of: Callable[[], Pool], retries: int, sweep: Sweep, report: Report
) -> Iterator[tuple[Job, Done | Failed]]:
    """Yields each job's outcome as it completes. If the worker dies, the job is retried, at most `retries` times."""
    if not jobs:
        return
    pool = pool_of()
    try:
        waiting = deque(jobs)
        idle = list(range(pool.num_workers))
        at: dict[int, Job] = {}
        deaths: Counter[int] = Counter()
        while waiting or at:
            while waiting and idle:
                worker = idle.pop(0)
                at[worker] = waiting.popleft()
                pool.give(worker, at[worker])
            for worker, outcome in pool.wait():
                job = at.pop(worker)
                idle.append(worker)
                if isinstance(outcome, Failed) and outcome.ends_sweep:
                    raise OSError(outcome.line)
                if not isinstance(outcome, Died):
                    yield job, outcome
                    continue
                deaths[id(job)] += 1
                if deaths[id(job)] > retries:
                    yield job, Failed(f"{outcome.line} ({deaths[id(job)]} times)")
                else:
                    sweep.retried += 1
                    report(f"{words_of(job)}: {outcome.line}; retry {deaths[id(job)]} of {retries}")
                    waiting.appendleft(job)
    finally:
        pool.close()


def words_of(job: Job) -> str:
    if isinstance(job, Making):
        return f"{TRACES}/{job.target.name}"
    axes = ", ".join(f"{key} {job.axes[key]}" for key in ("trace", "ranks", "redundant", "seed"))
    return f"cell {job.key} ({axes})"


def cell_path(out: Path, key: str) -> Path:
    return out / CELLS / f"{key}.json"


def keep_cell(out: Path, cell: Cell, results: ResultsData) -> None:
    """Writes one cell's results, completely or not at all. Raises CannotWriteError."""
    check_results(results)
    text = json.dumps({**results, "cell": {"key": cell.key, **cell.axes}}, indent=1, allow_nan=False) + "\n"
    with whole_file(cell_path(out, cell.key)) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def finished_cells(out: Path) -> set[str]:
    """Keys of the cells in the folder whose files are complete and follow their schema."""
    keys = set()
    for path in (out / CELLS).glob("*.json"):
        with contextlib.suppress(ValueError, OSError):
            if read_results(path).get("cell", {}).get("key") == path.stem:
                keys.add(path.stem)
    return keys


@contextlib.contextmanager
def sweep_folder(out: Path) -> Iterator[None]:
    """Makes the sweep's folder and reserves it, as `folder_for_results` does. A new folder without a finished cell is
    removed at the end. Raises ValueError if the folder holds the results of another command."""
    made = not out.exists()
    if (out / "results.json").exists() and not (out / CELLS).is_dir():
        raise ValueError(f"--out {out}: holds the results of another command: give another folder")

    def remove_if_empty() -> None:
        for folder in (out / CELLS, out / TRACES, *([out] if made else ())):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()

    with folder_for_results(out):
        at_end(remove_if_empty)
        try:
            (out / CELLS).mkdir(exist_ok=True)
            for stale in [*(out / CELLS).glob(".*.part"), *(out / TRACES).glob(".*.part"), *out.glob(".*.part")]:
                stale.unlink(missing_ok=True)
            yield
        finally:
            remove_if_empty()
