"""`epsim run` as a user starts it: the measured phases of each layer, and the predicted time.

    python benchmarks/runtime_run.py [--ranks 1] [--out benchmarks/results/runtime_run.json]

With several ranks (one a GPU, under torchrun) every run is made with both exchanges, if deep_ep supports the case.
Numbers of tokens are those of a rank. Tokens are drawn with a skewed popularity of experts that drifts from step to
step. Times are microseconds, medians over steps and layers. `predicted` is the mean of the layer's time by
`--hardware h200`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import command, script_parser, table, write

from epsim.models.shapes import shape_of
from epsim.results import read_results
from epsim.traces.store import TraceWriter
from epsim.traces.trace import TokenBlock, TraceMeta

RUNS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    # shape, layers, tokens of a rank a step, stacks; 16 redundant experts
    ("qwen3-30b-a3b-layer", 2, 256, ("contiguous", "eplb+lplb", "eplb+lplb(counts=gathered)")),
    ("qwen3-30b-a3b-layer", 2, 4096, ("contiguous", "eplb+lplb", "eplb+lplb(counts=gathered)")),
    ("deepseek-v3-layer", 1, 4096, ("contiguous", "eplb+lplb+waterfill")),
)
STEPS = 16
PHASES = ("route", "balance", "dispatch", "experts", "combine")


def draw(path: Path, name: str, layers: int, tokens: int) -> None:
    """Writes the trace of a run; placements are planned on its first half."""
    shape, rng = shape_of(name), np.random.default_rng(5)
    liked = rng.normal(0, 0.9, (layers, shape.num_experts))
    cost = shape.shared_cost
    meta = TraceMeta(
        "tokens", layers, shape.num_experts, shape.top_k, 1, cost, name, "prefill", "drawn", source="drawn"
    )
    source = np.zeros(tokens, dtype=np.int64)
    with TraceWriter(path, meta) as writer:
        for step in range(STEPS):
            drifted = liked + 0.2 * rng.normal(size=liked.shape)
            keys = drifted + rng.gumbel(size=(tokens, *liked.shape))
            ids = np.argpartition(-keys, shape.top_k, axis=2)[..., : shape.top_k].astype(np.int16)
            writer.append(TokenBlock(np.array([step]), source, source, ids))


def measured(
    name: str, layers: int, tokens: int, stacks: tuple[str, ...], ranks: int, exchange: str, folder: Path
) -> list[dict[str, Any]]:
    trace, out = folder / "trace.parquet", folder / "out"
    draw(trace, name, layers, tokens * ranks)
    policies = [part for stack in stacks for part in ("--policy", stack)]
    options = [str(trace), "--model", name, *policies, "--redundant", "16", "--device", "cuda", "--hardware", "h200"]
    launched = ["--launcher", "torchrun", "--ranks", str(ranks)] if ranks > 1 else []
    words = [sys.executable, "-m", "epsim.cli", "run", *options, *launched, "--exchange", exchange, "--out", str(out)]
    subprocess.run(words, check=True, stdout=2)
    results = read_results(out / "results.json")
    run = results["run"]
    rows = []
    for entry in results["stacks"]:
        row = {"ranks": ranks, "shape": name, "tokens": tokens, "stack": entry["stack"]}
        row |= {"layer": entry["metrics"]["layer_time_us"]["p50"], "predicted": entry["predicted"]["layer_time_us"]}
        row |= {phase: value["p50"] for phase, value in entry["phases_us"].items()}
        row |= {key: run[key] for key in ("equals_replay", "exchange", "exchange_why", "device", "dtype", "torch")}
        rows.append(row)
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for run in RUNS:
        for exchange in ("auto", "torch") if options.ranks > 1 else ("auto",):
            if exchange == "torch" and rows and rows[-1]["exchange"] == "torch":
                continue  # what auto chose
            with tempfile.TemporaryDirectory() as folder:
                rows += measured(*run, options.ranks, exchange, Path(folder))
    shown = ("shape", "tokens", "exchange", "stack", "layer", "predicted", *PHASES)
    table("microseconds", [{key: row[key] for key in shown} for row in rows])
    if options.out:
        report = {"command": command(), "device": rows[0]["device"]}
        write(options.out, report | {"runs": rows})


if __name__ == "__main__":
    main()
