"""The speed of a replay at counts level, in (step, layer) pairs a second, and the memory of a long trace.

    python benchmarks/replay.py [--pairs 200000] [--device cuda] [--out benchmarks/results/replay.json]
    python benchmarks/replay.py --against OLD/.venv/bin/python [--pairs 400000]

Each stack is replayed alone in its own process: it reads the trace, plans on the first half, and scores the rest with
every metric, the optimum of each pair included. The baseline is the matrix product of the even split alone, on loads
that are in memory already. No replay can be faster than that here. With `--device cuda` every stack is also replayed
with its splits solved on the GPU; `equal` says whether the results are the same.

`--against` compares with another version instead: a process of each version replays every case of CASES in turn, one
after the other, 9 times. The table has the medians of seconds and of CPU seconds, and of the pairs' ratios.
"""

import argparse
import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import command, least_seconds, machine, script_parser, table, write

LAYERS, EXPERTS, TOP_K, RANKS, NODES, REDUNDANT = 58, 256, 8, 16, 2, 32
TOKENS = 4096
STACKS = ("eplb", "eplb+lplb")
SIX = (
    *("contiguous", "eplb", "eplb+lplb", "eplb+lplb+waterfill"),
    *("searched+lplb", "searched+lplb(counts=gathered)+waterfill"),
)
CASES = (("counts", ("eplb",)), ("counts", ("eplb+lplb",)), ("counts", STACKS), ("tokens", SIX))
ROUNDS = 9


def write_trace(path: Path, pairs: int, seed: int) -> None:
    """Writes counts of steps with a skewed popularity of experts that drifts: multinomial draws of 4,096 tokens x 8."""
    from epsim.traces.store import TraceWriter
    from epsim.traces.trace import CountsBlock, TraceMeta

    rng = np.random.default_rng(seed)
    skew = 0.7 * rng.normal(size=(LAYERS, EXPERTS))
    steps = -(-pairs // LAYERS)
    meta = TraceMeta("counts", LAYERS, EXPERTS, TOP_K, phase="prefill", origin="drawn", source=f"drawn, seed {seed}")
    with TraceWriter(path, meta) as writer:
        for step in range(steps):
            skew = 0.99 * skew + 0.1 * rng.normal(size=skew.shape)
            share = np.exp(skew) / np.exp(skew).sum(1, keepdims=True)
            writer.append(CountsBlock(np.array([step]), rng.multinomial(TOKENS * TOP_K, share)[None]))


def replay_once(path: Path, stack: str, device: str) -> dict[str, Any]:
    """Seconds, pairs and peak resident memory of one replay. Runs in its own process."""
    from epsim.placement.base import Cluster
    from epsim.policies.stack import parse_stack
    from epsim.replaying import ReplayOptions, check_device, replay
    from epsim.traces.store import StoredTrace

    trace = StoredTrace(path)
    cluster = Cluster(RANKS, NODES, REDUNDANT)
    place = check_device(device)
    options = ReplayOptions(cluster, (("", parse_stack(stack)),), device=place)
    replay(trace, options)  # compiles, for blocks of every size
    start = time.perf_counter()
    results = replay(trace, options)
    seconds = time.perf_counter() - start
    metrics = results["stacks"][0]["metrics"]
    return {
        "stack": stack,
        "device": device,
        "results": hashlib.sha256(json.dumps(results).encode()).hexdigest(),
        "pairs_scored": results["trace"]["steps_scored"] * LAYERS,
        "pairs_read": trace.num_steps * LAYERS,
        "seconds": seconds,
        "max_over_mean": metrics["max_over_mean"]["mean"],
        "optimality_gap": metrics["optimality_gap"]["mean"],
        "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def serve(path: Path) -> None:
    """Replays each case from standard input, and prints its seconds and the CPU seconds of all threads."""
    from epsim.cost.layer_time import load_timing
    from epsim.placement.base import Cluster
    from epsim.policies.stack import parse_stack
    from epsim.traces.importing import sample_path
    from epsim.traces.store import StoredTrace

    try:
        from epsim.replaying import ReplayOptions, replay
    except ImportError:  # an older version
        from epsim.replay import ReplayOptions, replay

    for line in sys.stdin:
        level, stacks, timed = json.loads(line)
        trace = StoredTrace(path if level == "counts" else sample_path())
        model = "deepseek-v3" if level == "counts" else "epsim-small"
        timing = load_timing("h200", model, NODES, trace.meta.phase) if timed else None
        policies = tuple(("", parse_stack(text)) for text in stacks)
        begin, before = time.perf_counter(), os.times()
        replay(trace, ReplayOptions(Cluster(RANKS, NODES, REDUNDANT), policies, timing=timing))
        after = os.times()
        cpu = after.user + after.system - before.user - before.system
        print(json.dumps([time.perf_counter() - begin, cpu]), flush=True)


def compare(old: str, path: Path) -> None:
    """Runs every case with both versions in turn."""
    words = (__file__, "--serve", str(path))
    versions = [
        subprocess.Popen([python, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for python in (old, sys.executable)
    ]

    def ask(version: subprocess.Popen[str], case: str) -> tuple[float, float]:
        assert version.stdin is not None
        assert version.stdout is not None
        print(case, file=version.stdin, flush=True)
        wall, cpu = json.loads(version.stdout.readline())
        return wall, cpu

    rows = []
    for (level, stacks), timed in itertools.product(CASES, (False, True)):
        case = json.dumps([level, stacks, timed])
        runs = np.array([[ask(version, case) for version in versions] for _ in range(ROUNDS + 1)])[1:]  # one compiles
        wall, cpu = np.median(runs, axis=0).T
        ratio = np.median(runs[:, 0] / runs[:, 1], axis=0)
        name = stacks[0] if len(stacks) == 1 else f"{len(stacks)} stacks"
        row = {"level": level, "stacks": name, "times": "h200" if timed else "none"}
        row |= {"s old": wall[0], "s new": wall[1], "ratio": ratio[0]}
        rows.append(row | {"CPU old": cpu[0], "CPU new": cpu[1], "CPU ratio": ratio[1]})
    table("seconds", rows)
    for version in versions:
        version.communicate()


def floor_once(pairs: int) -> float:
    """Pairs per second of the matrix product alone."""
    import torch

    shares = torch.rand(LAYERS, EXPERTS, RANKS, dtype=torch.float64)
    counts = torch.rand(pairs // LAYERS, LAYERS, EXPERTS, dtype=torch.float64)
    seconds = least_seconds(lambda: torch.einsum("sle,ler->slr", counts, shares).amax(-1), 3)
    return counts.shape[0] * LAYERS / seconds


def main() -> None:
    parser = script_parser(__doc__, "replay.json")
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stacks", nargs="+", default=STACKS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--against", metavar="PYTHON", help="the other version's")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=3, metavar=("TRACE", "STACK", "DEVICE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        path, stack, device = arguments.one
        print(json.dumps(replay_once(Path(path), stack, device)))
        return
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.against:
        with tempfile.TemporaryDirectory() as folder:
            write_trace(Path(folder, "trace.parquet"), arguments.pairs, arguments.seed)
            compare(arguments.against, Path(folder, "trace.parquet"))
        return
    gpu = None
    if arguments.device == "cuda":
        import torch

        from epsim.replaying import check_device

        check_device("cuda")
        gpu = torch.cuda.get_device_name()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.parquet")
        write_trace(path, arguments.pairs, arguments.seed)
        for stack in arguments.stacks:
            for device in dict.fromkeys(("cpu", arguments.device)):
                alone = [sys.executable, __file__, "--one", str(path), stack, device]
                done = subprocess.run(alone, check=True, stdout=subprocess.PIPE, text=True)
                rows.append(json.loads(done.stdout))
                rows[-1]["equal"] = rows[-1]["results"] == next(r["results"] for r in rows if r["stack"] == stack)
    floor = floor_once(20_000)
    print(f"{LAYERS} layers, {EXPERTS} experts, {RANKS} ranks on {NODES} nodes, {REDUNDANT} redundant; {machine()}")
    for row in rows:
        row["pairs_scored_per_second"] = row["pairs_scored"] / row["seconds"]
        row["pairs_read_per_second"] = row["pairs_read"] / row["seconds"]
        row["ratio_to_product_alone"] = row["pairs_scored_per_second"] / floor
    table("replays", rows)
    report = {
        "command": command(),
        "machine": machine(),
        "gpu": gpu,
        "shape": {"layers": LAYERS, "experts": EXPERTS, "ranks": RANKS, "nodes": NODES, "redundant": REDUNDANT},
        "product_alone_pairs_per_second": floor,
        "rows": rows,
    }
    write(arguments.out, report)


if __name__ == "__main__":
    main()
