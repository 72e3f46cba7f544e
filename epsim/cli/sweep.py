"""`epsim sweep`: computes a grid of replays with processes or on a Ray cluster."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epsim.cli.options import working

if TYPE_CHECKING:
    from epsim.sweep.pools import Pool


def sweep_command(
    grid: Annotated[
        Path, typer.Argument(metavar="GRID.toml", help="Traces, clusters and policies to combine (docs/sweep.md).")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for cells and results. Finished cells in it are kept.")
    ],
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Cells computed at once. Default: the number of cores.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Use a Ray cluster: its address, auto, or local (starts one)."),
    ] = None,
    retries: Annotated[int, typer.Option("--retries", min=0, help="Retries of a cell whose worker died.")] = 2,
) -> None:
    """Replay every combination (cell) of a grid. The same command continues an interrupted sweep."""
    from epsim.parallel import cores
    from epsim.policies.stack import named_stack
    from epsim.sweep.cells import plan_cells
    from epsim.sweep.collect import collect
    from epsim.sweep.drive import run_sweep, sweep_folder
    from epsim.sweep.grid import read_grid
    from epsim.sweep.pools import Processes
    from epsim.sweep.show import print_sweep

    if ray is not None and not ray.strip():
        raise ValueError("--ray is empty: give a cluster's address, auto or local")
    content = read_grid(grid, named_stack)
    num_local = min(workers or cores(), cores()) if ray else workers or cores()

    def processes() -> Pool:
        return Processes(num_local, max(1, cores() // num_local))

    def ray_workers() -> Pool:
        from epsim.sweep.ray_pool import RayWorkers

        assert ray is not None
        return RayWorkers(ray, workers)

    with sweep_folder(out):
        with working("reading"):
            plan = plan_cells(content, out.absolute())
        with _progress() as begin:
            sweep = run_sweep(plan, out, processes, ray_workers if ray else processes, retries, _say, begin)
        results = collect(sweep, shlex.join(["epsim", "sweep", grid.name, "--out", "DIR"]))
    print_sweep(sweep, results)
    if sweep.failed:
        raise typer.Exit(1)


def _say(line: str) -> None:
    from epsim.files import message_line

    print(f"epsim: {message_line(line)}", file=sys.stderr, flush=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A progress bar for each stage, on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:

        def begin(words: str, total: int) -> Callable[[int], None]:
            task = bar.add_task(words, total=total)
            return lambda number: bar.advance(task, number)

        yield begin
