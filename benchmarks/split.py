"""The exact split compared with other ways to split a batch: distance from the optimum, invalid answers, and time.

    python benchmarks/split.py [--problems 100] [--recordings DIR] [--solvers NAME ...] [--out FILE]

The problems are in benchmarks/split_problems.py: EPLB's placements of DeepSeek-V3 under batches drawn from its recorded
counts, which drift away from what was planned on (8 to 64 ranks, 0 to 64 redundant experts, 64 to 16,384 tokens a
rank); recorded batches of the sample and, if their recordings exist, of SmartMoE, gpt-oss-20b and Qwen1.5-MoE;
placements in pairs of copies, as LPLB has them; and hard shapes. The solvers are in benchmarks/split_solvers.py. All
solvers get the same problems of a set, and one function checks all their answers. The optimum is GLOP's. Without
OR-Tools it is HiGHS's, and without both it is the proven lower bound.

gap: peak / optimum - 1 over the valid answers. Answers in whole tokens are compared with the optimum rounded up.
infeasible: answers that are not finite, that leave the range 0 to the expert's load, or that do not add up to it. Times
are microseconds a problem on one thread. `alone`: one call of one problem, the median over problems, with Python's
share; for GLOP and HiGHS the solve without building the model. `with_model`: the same with building the model. `batch`:
one call for a whole set. On a GPU `alone` is a launch of one problem in a CUDA graph, with its 99th percentile, and
`batch` is a launch of at least 50,000 problems.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import split_baselines as baselines
import split_problems as problems
import torch
from common import ROOT, command, installed, processor, script_parser, table, write
from split_problems import TOP_K as TOP_K
from split_problems import ProblemSet, marginals
from split_solvers import GLOP, HIGHS, OURS, Answer, Asked, Flags, Floats, solvers

from epsim.kernels.split import solve

HARD_STEPS = 40
DRAWN_STEPS = 20
TIMED = {
    "real": {"name": "DeepSeek-V3, drawn", "ranks": 16, "redundant": 32, "tokens": 1024},
    "pairs": {"name": "pairs of copies", "ranks": 16, "redundant": 32, "tokens": 1024},
    "hard": {"name": "chain of 64: 1 to 1e9", "ranks": 64, "redundant": 63, "tokens": 0},
}
"""The set of each kind whose times the summary shows."""


def optimum_of(asked: Asked, answers: dict[str, Answer], judged: dict[str, tuple[Floats, Flags]]) -> Floats:
    """The optimum [B]: GLOP's peak if its answer is feasible, else HiGHS's, else the proven bound."""
    found = solve(asked.structure, torch.from_numpy(asked.loads), torch.from_numpy(asked.layer)).bound.numpy()
    for name in (HIGHS, GLOP):
        if name in answers:
            peak, feasible = judged[name]
            found = np.where(feasible, peak, found)
    return found


def gap_figures(gaps: Floats) -> dict[str, float | None]:
    """Statistics of the gaps [N] of feasible answers."""
    if not len(gaps):
        return {"gap_mean": None, "gap_p99": None, "gap_worst": None}
    return {"gap_mean": float(gaps.mean()), "gap_p99": float(np.quantile(gaps, 0.99)), "gap_worst": float(gaps.max())}


def measure(asked: Asked, chosen: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Floats], Floats]:
    """One row per solver, each solver's gaps, and the relative differences of GLOP and HiGHS."""
    answers = {name: solver(asked) for name, solver in chosen.items()}
    judged = {
        name: baselines.judge(asked.structure, asked.loads, asked.layer, answer.split)
        for name, answer in answers.items()
    }
    optimum = optimum_of(asked, answers, judged)
    one = asked.problems
    each = {"kind": one.kind, "name": one.name, "ranks": one.structure.num_ranks, "redundant": one.redundant}
    each |= {"tokens": one.tokens, "problems": len(optimum)}
    rows, gaps = [], {}
    for name, answer in answers.items():
        peak, feasible = judged[name]
        good = feasible & answer.answered
        # GLOP and HiGHS differ by far less than 1e-12.
        least = np.ceil(optimum * (1 - 1e-12)) if answer.whole else optimum
        # Without load there is no gap.
        gaps[name] = np.divide(peak, least, out=np.ones(len(peak)), where=optimum > 0)[good] - 1
        row = each | {"solver": name, "answered": int(answer.answered.sum())}
        row["infeasible"] = int((answer.answered & ~feasible).sum())
        row |= gap_figures(gaps[name]) | {f"us_{key}": value for key, value in answer.times.items()}
        rows.append(row if answer.unproven is None else row | {"unproven": answer.unproven})
    apart = np.zeros(0)
    if GLOP in judged and HIGHS in judged:
        both = judged[GLOP][1] & judged[HIGHS][1] & (optimum > 0)
        apart = abs(judged[HIGHS][0][both] / judged[GLOP][0][both] - 1)
    return rows, gaps, apart


def summarize(rows: Sequence[dict[str, Any]], gaps: dict[tuple[str, str], list[Floats]]) -> list[dict[str, Any]]:
    """One row per kind and solver: gaps over all sets with redundant experts, times of one of them."""
    summary = []
    for (kind, solver), parts in gaps.items():
        own = [row for row in rows if (row["kind"], row["solver"]) == (kind, solver) and row["redundant"]]
        line = {"kind": kind, "solver": solver, "sets": len(own)}
        line |= {key: sum(row[key] for row in own) for key in ("problems", "answered", "infeasible")}
        line |= gap_figures(np.concatenate(parts))
        if all("unproven" in row for row in own):
            line["unproven"] = sum(row["unproven"] for row in own)
        shown = [row for row in own if all(row[key] == value for key, value in TIMED[kind].items())]
        line |= {key: value for row in shown for key, value in row.items() if key.startswith("us_")}
        summary.append(line)
    return summary


def shortened(value: Any) -> Any:
    """JSON with floats of four significant digits."""
    if isinstance(value, dict):
        return {key: shortened(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shortened(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def sets(recordings: Path, seed: int) -> tuple[list[ProblemSet], str]:
    rng = np.random.default_rng(seed)
    (planned, later), source = marginals(recordings / "deepseek-v3-sglang", rng)
    found = [*problems.drawn_problems(planned, later, DRAWN_STEPS, rng), *problems.recorded_problems(recordings)]
    found += problems.paired_problems(planned, later, DRAWN_STEPS, rng)
    return found + list(problems.hard_problems(HARD_STEPS, rng)), source


def main() -> None:
    parser = script_parser(__doc__, "split.json")
    parser.add_argument("--problems", type=int, default=100, help="problems of a set, the same for all solvers")
    parser.add_argument("--recordings", type=Path, default=ROOT / "../shared/traces")
    parser.add_argument("--solvers", nargs="*", default=[], help="beginnings of their names; all by default")
    parser.add_argument("--kinds", nargs="*", default=[], help="real, pairs, hard; all by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.perf_counter()
    torch.set_num_threads(1)
    found, source = sets(options.recordings, options.seed)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(f"{processor()}{f', {gpu}' if gpu else ''}; drawn problems: {source}")
    rows: list[dict[str, Any]] = []
    gaps: dict[tuple[str, str], list[Floats]] = defaultdict(list)
    apart = [np.zeros(0)]
    with solvers() as known:
        chosen = {
            name: solver
            for name, solver in known.items()
            if not options.solvers or any(name.startswith(begin) for begin in options.solvers)
        }
        for number, one in enumerate(found):
            if options.kinds and one.kind not in options.kinds:
                continue
            rng = np.random.default_rng((options.seed, number))  # of the set alone, whatever else is solved
            pick = rng.permutation(one.counts.shape[0] * one.counts.shape[1])[: options.problems]
            own, own_gaps, own_apart = measure(Asked(one, pick, rng), chosen)
            rows += own
            apart.append(own_apart)
            for name, values in own_gaps.items():
                if one.redundant:
                    gaps[one.kind, name].append(values)
            worst = next((row["gap_worst"] for row in own if row["solver"] == OURS), None)
            print(
                f"{one.kind:5} {one.name:48} {one.structure.num_ranks:3} ranks {one.redundant:3} redundant "
                f"{one.tokens:6} tokens"
                + ("" if worst is None else f" | ours worst {worst:8.1e}")
                + "".join(f" {row['gap_mean']:7.4f} {row['solver']}" for row in own if row["solver"] == "even"),
                flush=True,
            )
    summary = summarize(rows, gaps)
    for kind in dict.fromkeys(line["kind"] for line in summary):
        table(f"{kind} problems", [line for line in summary if line["kind"] == kind])
    disagreement = float(np.concatenate(apart).max(initial=0.0))
    if len(np.concatenate(apart)):
        print(f"\nlargest difference of GLOP's and HiGHS's optimum: {disagreement:.1e}")
    result = {
        "command": command(),
        "cpu": processor(),
        "gpu": gpu,
        "versions": installed("torch", "numba", "ortools", "highspy"),
        "drawn from": source,
        "seconds": round(time.perf_counter() - begun),
        "times of": TIMED,
        "largest difference of GLOP and HiGHS": disagreement,
        "summary": summary,
        "rows": rows,
    }
    write(options.out, shortened(result), row_a_line=True)


if __name__ == "__main__":
    main()
