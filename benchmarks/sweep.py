"""The speed of a sweep: cells per minute with processes and with Ray workers, and seconds per cell by number of ranks.

    python benchmarks/sweep.py [--cells 24] [--workers 1 2] [--out benchmarks/results/sweep.json]

The grid has token-level steps of 256 experts, top-8, drawn from skewed marginals, under three stacks at 16 and 32
ranks. Rates count from the first finished cell to the last, so that they leave out the start of interpreters or of a
cluster; `whole_s` counts everything. Results are compared byte for byte with those of the same cells replayed one after
the other in one process. CPU seconds are those of the sweep and its workers.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import command, machine, script_parser, table, write

LAYERS, EXPERTS, TOP_K, TOKENS = 8, 256, 8, 2048
STACKS = ("eplb", "eplb+lplb", "eplb+lplb(counts=gathered)")
RANKS = (16, 32, 64, 128, 256, 512, 1024)


def write_source(path: Path) -> None:
    """Writes counts with lognormal popularity, from which the grid's traces are drawn."""
    from epsim.traces.store import TraceWriter
    from epsim.traces.trace import CountsBlock, TraceMeta

    rng = np.random.default_rng(0)
    share = np.exp(0.7 * rng.normal(size=(LAYERS, EXPERTS)))
    counts = rng.multinomial(1 << 20, share / share.sum(1, keepdims=True))
    meta = TraceMeta("counts", LAYERS, EXPERTS, TOP_K, origin="drawn", source="lognormal marginals, seed 0")
    with TraceWriter(path, meta) as writer:
        writer.append(CountsBlock(np.array([0]), counts[None]))


def write_grid(folder: Path, name: str, ranks: tuple[int, ...], seeds: int, steps: int, stacks: Sequence[str]) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(
        f"policies = {json.dumps(list(stacks))}\nranks = {list(ranks)}\nranks_per_node = 8\n"
        f"redundant = {'64' if max(ranks) <= 64 else chr(34) + 'fill' + chr(34)}\nseed = {list(range(seeds))}\n"
        f'[[trace]]\ndraw = "source.parquet"\ndraw_seed = 0\nsteps = {steps}\nstep_tokens = {TOKENS}\n'
    )
    return path


def sweep(grid: Path, out: Path, options: list[str]) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.time()
    command = [sys.executable, "-m", "epsim.cli", "sweep", str(grid), "--out", str(out), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole = time.time() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    stamps = sorted(path.stat().st_mtime for path in (out / "cells").iterdir())
    return {
        "options": shlex.join(options),
        "cells": len(stamps),
        "cells_per_minute": 60 * (len(stamps) - 1) / (stamps[-1] - stamps[0]),
        "first_cell_s": stamps[0] - start,
        "whole_s": whole,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def one_by_one(grid: Path, out: Path) -> list[dict[str, Any]]:
    """Replays the cells in this process and makes their trace."""
    from epsim.policies.stack import named_stack
    from epsim.sweep.cells import plan_cells
    from epsim.sweep.drive import keep_cell, locked_folder
    from epsim.sweep.grid import read_grid
    from epsim.sweep.work import replay_cell

    rows = []
    with locked_folder(out):
        plan = plan_cells(read_grid(grid, named_stack), out.absolute())
        for making in plan.makings.values():
            making.target.parent.mkdir(exist_ok=True)
            making.make()
        replay_cell(next(iter(plan.cells.values())))  # compiles
        for cell in plan.cells.values():
            start, cpu = time.perf_counter(), time.process_time()
            results = replay_cell(cell)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            keep_cell(out, cell, results)
            metrics = results["stacks"][-1]["metrics"]
            row = {key: cell.axes[key] for key in ("ranks", "redundant")} | {"seconds": seconds, "cpu_s": cpu}
            row["resident_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            rows.append(row | {key: metrics[key]["mean"] for key in ("max_over_mean", "optimality_gap")})
    return rows


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "cells").iterdir()}


def serial(grid: Path, out: Path) -> list[dict[str, Any]]:
    """`one_by_one` in its own process, with the threads of one worker."""
    limits = dict.fromkeys(("EPSIM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    command = [sys.executable, __file__, "--serial", str(grid), str(out)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **limits})
    return json.loads(done.stdout)


def main() -> None:
    parser = script_parser(__doc__, "sweep.json")
    parser.add_argument("--cells", type=int, default=24)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--serial", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serial:
        print(json.dumps(one_by_one(*arguments.serial)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_source(folder / "source.parquet")
        grid = write_grid(folder, "grid", (16, 32), max(arguments.cells // 2, 1), 16, STACKS)
        load = os.getloadavg()[0]
        alone = serial(grid, folder / "serial")
        expected = contents(folder / "serial")
        for kind in ("processes", "Ray"):
            for workers in arguments.workers:
                out = folder / f"{kind}-{workers}"
                options = ["--workers", str(workers)] + (["--ray", "local"] if kind == "Ray" else [])
                rows.append({"kind": kind, "workers": workers, **sweep(grid, out, options)})
                rows[-1]["equal"] = contents(out) == expected
        by_ranks = serial(write_grid(folder, "ranks", RANKS, 1, 4, ("eplb", "eplb+lplb")), folder / "ranks")
    found = {
        "machine": machine(),
        "command": command(),
        "shape": {"layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "tokens": TOKENS, "stacks": list(STACKS)},
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "serial_cells_per_minute": 60 * len(alone) / sum(row["seconds"] for row in alone),
        "serial_cpu_s_per_cell": sum(row["cpu_s"] for row in alone) / len(alone),
        "rows": rows,
        "by_ranks": {"steps": 4, "stacks": ["eplb", "eplb+lplb"], "rows": by_ranks},
    }
    print(f"{found['machine']}; load {found['load_before']:.1f} before, {found['load_after']:.1f} after")
    print(f"one by one: {found['serial_cells_per_minute']:.0f} cells a minute", end=", ")
    print(f"{found['serial_cpu_s_per_cell']:.2f} s CPU each")
    table("workers", rows)
    table("by ranks, one by one", by_ranks)
    write(arguments.out, found)


if __name__ == "__main__":
    main()
