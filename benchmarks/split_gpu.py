"""Times of the exact split on one CUDA device, and a check that its results equal the CPU's bit for bit.

    python benchmarks/split_gpu.py [--recordings DIR] [--out benchmarks/results/split_gpu.json]

A problem is one layer of one batch: how to split each expert's tokens among its copies. The problems are batches drawn
from DeepSeek-V3's recorded counts as in benchmarks/split.py, the sample trace's batches, and random ones. Every problem
is solved on the CPU and on the GPU, and all results are compared (`equal`, `equal_whole`, `equal_warm`).

A measurement goes from int64 counts to the load of every slot. It is a CUDA graph, timed with CUDA events. The host
queues the replays while the device is busy, so times do not include the host's. They are microseconds, except `*_ns`.

- `one`: one problem per launch. A graph has ten launches, and its time is divided by ten. A launch may begin before the
  launch before it has ended.
- `alone`: a graph with one launch of one problem. `empty_us` is the time of such a graph with a trivial kernel.
- `warm`, `warm_alone`: the same, but the solver starts from the split of the batch before. Batches are independent.
- `steady`, `steady_alone`: as `warm`, but every batch resembles the batch before it (`steady_counts`).
- `layers`: all layers of a batch in one launch.
- `batch_ns`: nanoseconds per problem in a launch of at least 50,000 problems. `whole_ns`: the same for the split into
  whole tokens.
- `cpu_us`: microseconds per problem on the CPU with one thread, for a whole set of problems.

For 16 ranks with 16,384 tokens each, 1,000 problems are timed one by one; in all other cases 300.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from common import ROOT, least_seconds, script_parser, table, write
from device_times import buffers_of, graph, report_head, times_by_input
from split_problems import TOP_K, marginals, planned_by_eplb, sample_counts

from epsim.kernels.split import Solution, SplitStructure, prepare, solve, solve_batched, solve_gathered
from epsim.kernels.split.problems import drifted_counts, steady_counts

REPEATS, REPLAYS, BATCH = 10, 3, 50_000
COLUMNS = ("one", "alone", "warm", "steady", "layers")


def quantiles(times: np.ndarray) -> dict[str, float]:
    return {"p50": float(np.median(times)), "p99": float(np.quantile(times, 0.99)), "most": float(times.max())}


def same(left: Solution, right: Solution) -> bool:
    names = ("split", "peak", "bound", "bound_numerator", "bound_size", "sweeps")
    return all(torch.equal(getattr(left, name).cpu(), getattr(right, name).cpu()) for name in names)


def singles(
    structure: SplitStructure, counts: torch.Tensor, start: torch.Tensor | None, most: int, names: tuple[str, str]
) -> dict[str, Any]:
    """Times of single problems: in a row, and alone. counts [N, E] of layers 0, 1, ... in turn; `most` of them are
    timed. start [N, P]."""
    num = min(most, len(counts))
    layers = torch.arange(len(counts), device="cuda") % structure.num_layers
    (loads, layer, *begin), feed = buffers_of(counts, layers, *([] if start is None else [start]))
    run = partial(solve, structure, loads, layer, start=begin[0] if begin else None)
    found = (times_by_input(graph(run, calls), feed, num, REPLAYS) / calls for calls in (REPEATS, 1))
    return dict(zip(names, map(quantiles, found), strict=True))


def measure(
    name: str, tokens: int, structure: SplitStructure, counts: torch.Tensor, steady: torch.Tensor
) -> dict[str, Any]:
    """counts, steady [S, L, E] int64, on the CPU."""
    device_counts = counts.cuda()
    flat = device_counts.flatten(0, 1)
    there = solve_batched(structure, device_counts)
    before = torch.roll(there.split, 1, 0)  # the first batch starts from the last split
    warm = solve_batched(structure, device_counts, start=before)
    row: dict[str, Any] = {
        "name": name,
        "ranks": structure.num_ranks,
        "slots": structure.num_physical,
        "tokens": tokens,
        "problems": len(flat),
        "equal": same(solve_batched(structure, counts), there),
        "equal_whole": same(solve_gathered(structure, counts), solve_gathered(structure, device_counts)),
        "equal_warm": same(solve_batched(structure, counts, start=before.cpu()), warm),
        "unproven": int(there.unproven.sum()),
        "gap_most": float((there.peak / there.bound.clamp_min(1e-300) - 1).max()),
        "sweeps_mean": float(there.sweeps.double().mean()),
        "sweeps_most": int(there.sweeps.max()),
        "warm_sweeps_mean": float(warm.sweeps.double().mean()),
    }
    most = 1000 if (structure.num_ranks, tokens) == (16, 16384) else 300
    row |= singles(structure, flat, None, most, ("one", "alone"))
    row |= singles(structure, flat, before.flatten(0, 1), most, ("warm", "warm_alone"))
    last = solve_batched(structure, steady.cuda()).split[:-1].flatten(0, 1)
    row |= singles(structure, steady[1:].cuda().flatten(0, 1), last, most, ("steady", "steady_alone"))
    row["cpu_us"] = cpu_time(structure, counts)

    (batch,), feed = buffers_of(device_counts)
    layer = torch.arange(structure.num_layers, device="cuda")
    all_layers = graph(lambda: solve(structure, batch[0], layer), REPEATS)
    row["layers"] = quantiles(times_by_input(all_layers, feed, min(len(counts), 50), REPLAYS) / REPEATS)

    many = device_counts.repeat(-(-BATCH // len(flat)), 1, 1)
    num_many = many.shape[0] * many.shape[1]
    for kind, form in (("batch", solve_batched), ("whole", solve_gathered)):
        solve_many = graph(partial(form, structure, many))
        row[f"{kind}_ns"] = float(times_by_input(solve_many, lambda i: None, 1, 7)[0]) / num_many * 1e3
    row["batch_problems"] = num_many
    return row


def cpu_time(structure: SplitStructure, counts: torch.Tensor) -> float:
    """Microseconds per problem on one thread, the least of five runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = least_seconds(lambda: solve_batched(structure, counts), 5)
    torch.set_num_threads(threads)
    return seconds / (counts.shape[0] * counts.shape[1]) * 1e6


Problem: TypeAlias = tuple[str, int, SplitStructure, torch.Tensor, torch.Tensor]
"""Name, tokens per rank, structure, counts, and counts of similar batches."""


def sample_problems() -> Iterator[Problem]:
    counts = sample_counts()
    batches = torch.from_numpy(counts.astype(np.int64))
    for redundant in (16, 32):
        structure = planned_by_eplb(counts.mean(0), 16, redundant)
        yield f"sample, {redundant} redundant", 0, structure, batches, batches


def random_problems(rng: np.random.Generator) -> Iterator[Problem]:
    slots = np.concatenate((np.arange(256), rng.integers(0, 256, 32)))
    placement = torch.from_numpy(np.stack([rng.permutation(slots) for _ in range(58)]))
    counts = torch.from_numpy(rng.multinomial(131072, rng.dirichlet(np.full(256, 0.5), (50, 58))))
    yield "random, 32 redundant", 16384, prepare(placement, 16, 256), counts, counts


def problems(recordings: Path, rng: np.random.Generator) -> Iterator[Problem]:
    (planned, later), source = marginals(recordings, rng)
    print(f"{torch.cuda.get_device_name()}; real problems: {source}")
    clusters = ((16, 32), (16, 32), (16, 16), (16, 64), (8, 32), (32, 32), (32, 64), (64, 64))
    for number, (num_ranks, redundant) in enumerate(clusters):
        tokens = 1024 if number == 1 else 16384
        steps = 20 if num_ranks > 32 else 50
        counts = drifted_counts(planned, later, tokens * TOP_K, steps, rng)
        steady = steady_counts(planned, later, tokens * TOP_K, 20, rng)
        yield f"real, {redundant} redundant", tokens, planned_by_eplb(planned, num_ranks, redundant), counts, steady
    yield from sample_problems()
    yield from random_problems(rng)


def main() -> None:
    parser = script_parser(__doc__, "split_gpu.json")
    parser.add_argument("--recordings", type=Path, default=ROOT / "../shared/traces/deepseek-v3-sglang")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    rows: list[dict[str, Any]] = []
    nothing = torch.zeros(1, device="cuda")
    empty = float(np.median(times_by_input(graph(lambda: nothing.add_(1)), lambda i: None, 50, REPLAYS)))
    for problem in problems(options.recordings, rng):
        row = measure(*problem)
        rows.append(row)
        write(options.out, report_head() | {"empty_us": empty, "rows": rows})
    shown = [{**row, **{f"{kind} p50": row[kind]["p50"] for kind in COLUMNS}} for row in rows]
    table("microseconds", shown)


if __name__ == "__main__":
    main()
