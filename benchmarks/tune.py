"""The time and memory that `epsim tune` takes on a trace of DeepSeek-V3's shape.

    python benchmarks/tune.py FOLDER

FOLDER holds DeepSeek-V3's recordings (prefill_*.json, decode_*.json). Steps are drawn at counts level from their
marginals, mixed by the walk of `epsim traces synthesize`: 58 layers, 256 experts, 65,536 tokens a step.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import command, machine, script_parser, write

from epsim.traces.importing import open_trace
from epsim.traces.options import ImportOptions
from epsim.traces.store import TraceWriter
from epsim.traces.synthesize import marginals, mixture_walk
from epsim.traces.trace import CountsBlock, TraceMeta

TOKENS, TOP_K, BLOCK = 65536, 8, 50


def draw(folder: Path, target: Path, num_steps: int, drift: float) -> None:
    """Writes a trace of counts: multinomial draws from a mixture of the recordings that changes by step."""
    sources = [open_trace([file], ImportOptions(model="DeepSeek-V3")) for file in sorted(folder.glob("*.json"))]
    if not sources:
        raise SystemExit(f"{folder}: no recordings")
    shares = np.stack([marginals(source) for source in sources]).astype(np.float64)
    shares /= shares.sum(-1, keepdims=True)
    rng = np.random.default_rng(0)
    weights = mixture_walk(num_steps, len(shares), drift, 1.0, rng)
    first = sources[0].meta
    meta = TraceMeta(
        "counts", first.num_layers, first.num_experts, TOP_K, shared_cost=1.0, model="DeepSeek-V3", phase="prefill",
        origin="drawn", layers=first.layers, source=first.source,
    )  # fmt: skip
    with TraceWriter(target, meta) as writer:
        for start in range(0, num_steps, BLOCK):
            mixed = np.einsum("sm,mle->sle", weights[start : start + BLOCK], shares)
            counts = rng.multinomial(TOKENS * TOP_K, mixed).astype(np.int64)
            writer.append(CountsBlock(np.arange(start, start + len(counts)), counts))


def main() -> None:
    parser = script_parser(__doc__, "tune.json")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--drift", type=float, default=0.05)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--hardware", default="h200")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.parquet")
        draw(arguments.folder, trace, arguments.steps, arguments.drift)
        words = [sys.executable, "-m", "epsim.cli", "tune", str(trace), "--model", "deepseek-v3"]
        words += ["--hardware", arguments.hardware, "--gpus", str(arguments.gpus), "--json"]
        begin = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    results = json.loads(done.stdout)
    tuned = results["tune"]
    report = {
        "command": command().replace(str(arguments.folder), "FOLDER"),
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "shape": {"steps": arguments.steps, "layers": 58, "experts": 256, "tokens": TOKENS, "gpus": arguments.gpus},
        "candidates": len(tuned["candidates"]),
        "rounds": tuned["rounds"],
        "seconds": seconds,
        "core_seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "resident_mib": used.ru_maxrss / 1024,
        "verdict": results["verdict"],
    }
    print(f"{report['machine']}, load average {report['load_average']:.1f}")
    print(f"{report['candidates']} candidates, {arguments.steps} steps: {seconds:.0f} s", end="")
    print(f" ({report['core_seconds']:.0f} s of cores), {report['resident_mib']:,.0f} MiB resident")
    for number, one in enumerate(tuned["rounds"], 1):
        print(f"  round {number}: {one['candidates']} candidates on {one['steps']} steps, {one['layers']} layers")
    print(report["verdict"])
    write(arguments.out, report)


if __name__ == "__main__":
    main()
