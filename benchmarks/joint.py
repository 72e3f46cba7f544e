"""The peak of total load if split and shared expert are solved together, compared with one after the other.

    python benchmarks/joint.py [--recordings ../shared/traces] [--out benchmarks/results/joint.json]

The problems are the second half of the sample, as recorded, and tokens drawn from DeepSeek-V3's recorded marginals
(top-8 without replacement). The placement knows one workload of the recordings, and each step mixes in another
(`drifted_counts`). 16 ranks on 2 nodes, EPLB with redundant experts. Each row is a stack: the mean of peak / mean over
(step, layer) pairs, its difference from `lplb+waterfill(candidates=all)` with a 95% interval over steps, the distance
of the peak from the least possible total peak (the larger of optimum and mean), and the share of shared tokens that are
served away from their own rank.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command, script_parser, table, write

from epsim.kernels.split import prepare, solve_peak
from epsim.kernels.split.problems import drifted_counts
from epsim.placement.base import Cluster, Placement
from epsim.planning import to_counts
from epsim.policies.apply import Setting, bind
from epsim.policies.stack import parse_stack, placement_policy
from epsim.score.statistics import Series, difference
from epsim.traces.importing import sample_path
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock

RANKS, NODES = 16, 2
STACKS = (
    "lplb+local",
    "lplb+waterfill",
    "lplb+waterfill(candidates=all)",
    "lplb(counts=gathered)+waterfill(candidates=all)",
    "lplb+waterfill-joint",
    "lplb(counts=gathered)+waterfill-joint(candidates=visited)",
    "lplb(counts=gathered)+waterfill-joint",
)
BASE = STACKS[2]
PLANNED, LATER = "decode_in1000out1000.json", "decode_in2000out100.json"


def sample_problem(phase: str) -> tuple[Placement, Setting, Iterator[TokenBlock], int]:
    """The steps of one phase in the second half of the sample, with placements planned on the first half."""
    trace = StoredTrace(sample_path())
    meta, half = trace.meta, trace.num_steps // 2
    blocks = [block for step in range(trace.num_steps) for block in trace.blocks(step, step + 1)]
    history = np.concatenate([to_counts(block, meta.num_experts).counts for block in blocks[:half]])
    placement = placement_policy("eplb").plan(torch.from_numpy(history), Cluster(RANKS, NODES, 16))
    scored = [b for b in blocks[half:] if isinstance(b, TokenBlock) and b.phase is not None and b.phase[0] == phase]
    return placement, Setting(0, 1.0, meta.top_k, meta.layers), iter(scored), len(scored)


def drawn_problem(folder: Path, tokens: int, steps: int) -> tuple[Placement, Setting, Iterator[TokenBlock], int]:
    """DeepSeek-V3, every tenth layer, with `tokens` per rank."""
    layers = range(3, 61, 10)
    planned, later = (
        np.array(json.loads((folder / name).read_text())["logical_count"], dtype=np.int64)[list(layers)]
        for name in (PLANNED, LATER)
    )
    placement = placement_policy("eplb").plan(torch.from_numpy(planned)[None], Cluster(RANKS, NODES, 32))
    rng = np.random.default_rng(0)
    marginals = drifted_counts(planned, later, 10**8, steps, rng).numpy()

    def blocks() -> Iterator[TokenBlock]:
        for step in range(steps):
            chance = np.log(marginals[step] + 0.5, dtype=np.float32)
            noise = -np.log(rng.exponential(size=(RANKS * tokens, *chance.shape)).astype(np.float32))
            ids = np.argpartition(-(chance + noise), 8, axis=-1)[..., :8]
            source = np.repeat(np.arange(RANKS), tokens)
            yield TokenBlock(np.array([step]), np.zeros_like(source), source, ids)

    return placement, Setting(0, 1.0, 8, tuple(layers)), blocks(), steps


def score(problem: tuple[Placement, Setting, Iterator[TokenBlock], int]) -> list[dict[str, Any]]:
    placement, setting, blocks, num_steps = problem
    structure = prepare(placement.physical_to_logical, RANKS, placement.num_experts)
    ratio, gap = ({text: Series() for text in STACKS} for _ in range(2))
    away, seconds, tokens = dict.fromkeys(STACKS, 0), dict.fromkeys(STACKS, 0.0), 0.0
    for block in blocks:
        counts = torch.from_numpy(to_counts(block, placement.num_experts).counts)
        flat = counts.reshape(-1, placement.num_experts)
        bound = solve_peak(structure, flat, torch.arange(placement.num_layers).repeat(len(counts))).bound
        for text in STACKS:
            start = time.perf_counter()
            load = bind(parse_stack(text), placement, setting).load(block)
            seconds[text] += time.perf_counter() - start
            peak, mean = load.total.amax(-1), load.total.mean(-1)
            ratio[text].add((peak / mean).numpy())
            gap[text].add((peak / torch.maximum(bound.reshape(mean.shape), mean) - 1).numpy())
            assert load.shared_remote_rank is not None
            away[text] += int(load.shared_remote_rank.sum())
        tokens += float(load.tokens.sum())
    return [
        {
            "stack": text,
            "max_over_mean": ratio[text].summary(),
            "versus_one_after_the_other": difference(ratio[text], ratio[BASE], 0),
            "above_least_total_peak": gap[text].summary(),
            "shared_remote_share": away[text] / tokens,
            "load_ms_a_step": seconds[text] / num_steps * 1e3,
        }
        for text in STACKS
    ]


def main() -> None:
    parser = script_parser(__doc__, "joint.json")
    parser.add_argument("--recordings", type=Path, default=Path("../shared/traces"))
    arguments = parser.parse_args()
    problems = {f"sample, {phase}": sample_problem(phase) for phase in ("decode", "prefill")}
    folder = arguments.recordings / "deepseek-v3-sglang"
    if folder.is_dir():
        for tokens, steps in ((32, 40), (128, 24), (512, 10)):
            problems[f"DeepSeek-V3, drawn, {tokens} tokens a rank"] = drawn_problem(folder, tokens, steps)
    report = []
    for name, problem in problems.items():
        rows = score(problem)
        report.append({"problem": name, "steps": problem[3], "layers": problem[0].num_layers, "rows": rows})
        shown = []
        for row in rows:
            own = {"stack": row["stack"], "peak/mean": row["max_over_mean"]["mean"]} | row["versus_one_after_the_other"]
            own |= {"above least": row["above_least_total_peak"]["mean"], "remote": row["shared_remote_share"]}
            shown.append(own)
        table(f"{name}: {problem[3]} steps x {problem[0].num_layers} layers, against {BASE}", shown)
    document = {
        "command": command(),
        "setting": {"ranks": RANKS, "nodes": NODES, "shared_cost": 1.0, "base": BASE},
        "problems": report,
    }
    write(arguments.out, document)


if __name__ == "__main__":
    main()
