"""The min-max split on the CPU beside OR-Tools' linear program and an even split: distance to the optimum, and time.

    python benchmarks/split.py [--steps 40] [--exact 50] [--recordings DIR] [--out benchmarks/results/split_cpu.json]

Real problems: EPLB placements planned on one recording of DeepSeek-V3 (256 experts, 58 layers), batches drawn from a
drifting mixture of that and another recording (`epsim.kernels.split.problems`); where the recordings are absent, from
lognormal marginals, and the table says so. Hard problems: chains, rings, cliques, a hot expert, ties, loads 1 to 1e9.
Gaps are against GLOP's optimum on the first `--exact` problems of a row; `unproven` counts over all of them. Times are
the least of several runs, per problem, in microseconds, from int64 counts to the split in physical experts.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from epsim.kernels.split import SplitStructure, prepare, solve_batched, solve_gathered
from epsim.kernels.split.problems import chain, clique, drifted_counts
from epsim.kernels.split.reference import SplitProgram
from epsim.placement.eplb import rebalance_experts

ROOT = Path(__file__).resolve().parents[1]
PLANNED, LATER = "prefill_in1024.json", "decode_in1000out1000.json"
TOP_K, RUNS = 8, 15


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Gaps are peak / optimum - 1; us_one and us_two: by one and by two threads; us_whole: the
    integral split by one; us_glop: GLOP's solve alone; us_glop_built: with building its model."""

    name: str
    ranks: int
    slots: int
    tokens: int
    gap_mean: float
    gap_p99: float
    gap_worst: float
    even_gap_mean: float
    unproven: int
    sweeps_mean: float
    sweeps_most: int
    us_one: float
    us_two: float
    us_whole: float
    us_glop: float
    us_glop_built: float


def best_time(run: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(
    name: str, tokens: int, structure: SplitStructure, counts: torch.Tensor, exact: int, rng: np.random.Generator
) -> Row:
    """counts [S, L, E]."""
    seconds = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        seconds.append(best_time(lambda: solve_batched(structure, counts)))
    whole = best_time(lambda: solve_gathered(structure, counts))
    found = solve_batched(structure, counts)
    num_problems = found.peak.numel()

    gaps, even_gaps, solving, building = [], [], 0.0, 0.0
    for number in rng.permutation(num_problems)[:exact]:
        step, layer = divmod(int(number), structure.num_layers)
        slots, loads = structure.physical_to_logical[layer], counts[step, layer]
        start = time.perf_counter()
        program = SplitProgram(slots, structure.num_ranks, loads)
        built = time.perf_counter()
        optimum, _ = program.solve()
        solving += time.perf_counter() - built
        building += built - start
        share = loads.double() / torch.bincount(slots, minlength=structure.num_experts)
        even = float(share[slots].reshape(structure.num_ranks, -1).sum(1).max())
        gaps.append(float(found.peak[step, layer]) / optimum - 1)
        even_gaps.append(even / optimum - 1)
    per_problem = 1e6 / num_problems
    return Row(
        name=name,
        ranks=structure.num_ranks,
        slots=structure.num_physical,
        tokens=tokens,
        gap_mean=float(np.mean(gaps)),
        gap_p99=float(np.quantile(gaps, 0.99)),
        gap_worst=max(gaps),
        even_gap_mean=float(np.mean(even_gaps)),
        unproven=int(found.unproven.sum()),
        sweeps_mean=float(found.sweeps.double().mean()),
        sweeps_most=int(found.sweeps.max()),
        us_one=seconds[1] * per_problem,
        us_two=seconds[0] * per_problem,
        us_whole=whole * per_problem,
        us_glop=solving / len(gaps) * 1e6,
        us_glop_built=(solving + building) / len(gaps) * 1e6,
    )


def marginals(recordings: Path, rng: np.random.Generator) -> tuple[list[npt.NDArray[np.float64]], str]:
    """Counts [L, E] to plan on and to drift to, and where they are from."""
    if (recordings / PLANNED).exists():
        texts = [json.loads((recordings / name).read_text())["logical_count"] for name in (PLANNED, LATER)]
        counts = [np.array(text, dtype=np.float64) for text in texts]
        return [c[c.sum(1) > 0] for c in counts], f"DeepSeek-V3, {PLANNED} drifting to {LATER}"
    skew = rng.normal(size=(2, 58, 256))
    return [np.exp(0.7 * skew[0]), np.exp(0.7 * skew[0] + 0.3 * skew[1])], "lognormal marginals, sigma 0.7"


def real_problems(
    planned: npt.NDArray[np.float64], later: npt.NDArray[np.float64], num_steps: int, rng: np.random.Generator
) -> Iterator[tuple[str, int, SplitStructure, torch.Tensor]]:
    for num_ranks in (8, 16, 32, 64):
        for redundant in (0, 16, 32, 64):
            if (256 + redundant) % num_ranks:
                continue
            slots, _, _ = rebalance_experts(torch.from_numpy(planned), 256 + redundant, 1, 1, num_ranks)
            structure = prepare(slots, num_ranks, 256)
            for tokens in (64, 1024, 16384, 262144):
                counts = drifted_counts(planned, later, tokens * TOP_K, num_steps, rng)
                yield f"real, {redundant} redundant", tokens, structure, counts


def hard_problems(rng: np.random.Generator) -> Iterator[tuple[str, int, SplitStructure, torch.Tensor]]:
    everywhere = torch.stack((torch.zeros(64, dtype=torch.int64), torch.arange(1, 65)), dim=1).flatten()[None]
    shapes = (
        ("chain", chain(64), 64),
        ("ring", chain(64, ring=True), 64),
        ("clique", clique(16), 16),
        ("hot expert on every rank", everywhere, 64),
        ("chain of 512", chain(512), 512),
    )
    for name, slots, num_ranks in shapes:
        structure = prepare(slots, num_ranks)
        size = (500, 1, structure.num_experts)
        wide = np.floor(10 ** (9 * rng.random(size)))
        ties = rng.integers(0, 3, size)
        ties[..., 0] += 1000
        for kind, loads in (("1 to 1e9", wide), ("ties, zeros, one hot", ties)):
            yield f"{name}, {kind}", 0, structure, torch.from_numpy(loads.astype(np.int64))


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="batches of 58 layers a row")
    parser.add_argument("--exact", type=int, default=50, help="problems of a row that GLOP solves as well")
    parser.add_argument("--recordings", type=Path, default=ROOT / "../shared/traces/deepseek-v3-sglang")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/split_cpu.json")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    (planned, later), source = marginals(options.recordings, rng)
    print(f"{cpu_model()}; real problems: {source}")
    head = "ranks slots tokens | gap mean    p99  worst   even | sweeps | one    two  whole | GLOP  built (us)"
    print(f"{'problems':40} {head}")
    rows = []
    for problem in (*real_problems(planned, later, options.steps, rng), *hard_problems(rng)):
        row = measure(*problem, options.exact, rng)
        rows.append(row)
        print(
            f"{row.name:40} {row.ranks:5} {row.slots:5} {row.tokens:6} | {row.gap_mean:8.1e} {row.gap_p99:6.0e} "
            f"{row.gap_worst:6.0e} {row.even_gap_mean:6.3f} | {row.sweeps_mean:6.1f} | "
            f"{row.us_one:5.1f} {row.us_two:5.1f} {row.us_whole:5.1f} | {row.us_glop:5.0f} {row.us_glop_built:5.0f}"
            + " UNPROVEN"
            * bool(row.unproven),
            flush=True,
        )
    result = {
        "command": shlex.join(["python", "benchmarks/split.py", *sys.argv[1:]]),
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "source": source,
        "rows": [asdict(row) for row in rows],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
