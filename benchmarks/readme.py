"""Writes the README's figures from the JSON files in benchmarks/results, so that none is typed by hand.

    python benchmarks/readme.py [--check]

What stands between the two marks in README.md is replaced. A file that is not there leaves its lines out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from readme_gates import gates_table
from readme_gpu import gpu_lines

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- figures: python benchmarks/readme.py -->"
END = "<!-- end of figures -->"
NAMES = {
    "ours, GPU": "`lplb`, GPU",
    "ours, CPU": "`lplb`, CPU",
    "ours, whole tokens, CPU": "`lplb(counts=gathered)`, whole tokens",
    "OR-Tools GLOP": "OR-Tools GLOP",
    "HiGHS": "HiGHS",
    "LPLB, true maximum": "LPLB's five steps, step length mended",
    "LPLB as published": "LPLB's five steps, as published",
    "lplb-ipm (SGLang's form)": "`lplb-ipm`, SGLang's form of it",
    "pairwise edges": "pairwise edge balancing",
    "even": "even split",
    "ours, sampled per token": "`lplb-sampled`: the exact split, sampled per token",
    "lplb-ipm, sampled per token": "`lplb-ipm`, sampled per token",
    "even, sampled per token": "`random`: sampled per token",
}


def load(name: str) -> Any:
    path = ROOT / "benchmarks/results" / name
    return json.loads(path.read_text()) if path.exists() else None


def percent(part: float | None) -> str:
    """Two digits that count; what is below a millionth of a percent is a sum's rounding."""
    if part is None:
        return "-"
    if abs(part) < 1e-8:
        return "0"
    number = 100 * part
    return f"{number:.0f}%" if number >= 99.5 else f"{number:#.2g}".rstrip(".") + "%"


def micro(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def row_of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def note(found: dict[str, Any]) -> str:
    return f"; {found['note']}" if "note" in found else ""


def line(what: str, figure: str, command: str) -> str:
    return f"| {what} | {figure} | `{command}` |"


def replay_lines() -> Iterator[str]:
    found = load("replay.json")
    if found is None:
        return
    even, exact = (row_of(found["rows"], stack=stack) for stack in ("eplb", "eplb+lplb"))
    shape, resident = found["shape"], max(row["resident_mib"] for row in found["rows"]) / 1024
    yield line(
        f"replay, counts level, {shape['experts']} experts, {shape['ranks']} ranks, {shape['redundant']} redundant, "
        f"{even['pairs_read']:,} (step, layer) pairs; {found['machine']}",
        f"`eplb` {even['pairs_scored_per_second']:,.0f} pairs scored a second, `eplb+lplb` "
        f"{exact['pairs_scored_per_second']:,.0f}, the optimum of every pair included; {resident:.2f} GiB resident",
        found["command"],
    )
    there = load("replay_gpu.json")
    if there is not None:
        rates = [
            f"`{row['stack']}` {row['pairs_scored_per_second']:,.0f} by "
            + ("the CPU" if row["device"] == "cpu" else "the GPU")
            for row in there["rows"]
        ]
        same = "the same results" if all(row["equal"] for row in there["rows"]) else "RESULTS DIFFER"
        yield line(
            f"the same with splits on the CPU or the GPU, {there['rows'][0]['pairs_read']:,} pairs; "
            f"{there['machine']}, {there['gpu']}",
            f"pairs scored a second: {', '.join(rates)}; {same}{note(there)}",
            there["command"],
        )


def split_cpu_lines() -> Iterator[str]:
    found = load("split.json")
    if found is None:
        return
    timed = found["times of"]["real"]
    wanted = {"solver": "ours, CPU", "name": timed["name"], "tokens": timed["tokens"]}
    by_ranks: dict[int, list[str]] = {}
    glop = row_of(found["rows"], **timed, solver="OR-Tools GLOP")
    for row in found["rows"]:
        if row["redundant"] and all(row[key] == value for key, value in wanted.items()):
            by_ranks.setdefault(row["ranks"], []).append(f"{micro(row['us_batch'])} ({row['redundant']})")
    times = "; ".join(f"{ranks} ranks {', '.join(texts)}" for ranks, texts in by_ranks.items())
    yield line(
        f"one exact split, by one core in batches, 256 experts, {timed['tokens']:,} tokens a rank; {found['cpu']}",
        f"us, by redundant experts: {times} (aim: 5 us); OR-Tools GLOP {micro(glop['us_alone'])} at {timed['ranks']} "
        f"ranks and {timed['redundant']}, {micro(glop['us_with_model'])} with its model's build",
        "python benchmarks/split.py",
    )


def split_gpu_lines() -> Iterator[str]:
    found = load("split_gpu.json")
    row = None if found is None else row_of(found["rows"], ranks=16, slots=288, tokens=16384)
    if found is None or row is None:
        return
    equal = all(r["equal"] and r["equal_whole"] and r["equal_warm"] for r in found["rows"])
    problems = sum(r["problems"] for r in found["rows"])
    steady = ""
    if "steady" in row:
        steady = f" ({row['steady']['p50']:.1f} and {row['steady']['p99']:.1f} where batches are like the last one)"
    yield line(
        f"one exact split on one {found['device']}, 256 experts, 16 ranks, 32 redundant; "
        + ("bit for bit the CPU's" if equal else "NOT THE CPU'S BITS")
        + f" on all of {problems:,} problems, {sum(r['unproven'] for r in found['rows'])} unproven",
        f"one problem a launch, in a row: p50 {row['one']['p50']:.1f} us, p99 {row['one']['p99']:.1f} us cold, "
        f"{row['warm']['p50']:.1f} and {row['warm']['p99']:.1f} us begun with the last batch's split{steady}; "
        f"{row['alone']['p50']:.1f} and {row['alone']['p99']:.1f} us for a graph of one launch, "
        f"{found['empty_us']:.1f} for one that does nothing; all 58 layers in one "
        f"launch {row['layers']['p50']:.1f} us; in batches {row['batch_ns']:.1f} ns a problem "
        f"(aims: 12, 40, 45 us and 20 ns){note(found)}",
        found["command"],
    )


def dispatch_lines() -> Iterator[str]:
    found = load("dispatch_gpu.json")
    if found is None:
        return
    shown = []
    for stack in ("lplb", "lplb(counts=gathered)", "lplb+waterfill"):
        row = row_of(found["rows"], stack=stack, ranks=16, tokens=4096)
        if row is not None:
            shown.append(
                f"`{stack}` {row['us']:.1f} us ({row['alone']:.1f})" + " NOT THE POLICY'S IDS" * (not row["equal"])
            )
    yield line(
        f"from top-8 ids to physical experts on one {found['device']}, 4,096 tokens, 16 ranks, 32 redundant, "
        "without the collective",
        "ten in a row (a graph of one): " + ", ".join(shown) + "; aims: 25 us, gathered 40 us",
        found["command"],
    )


def oea_lines() -> Iterator[str]:
    found = load("oea_latency.json")
    if found is None:
        return
    shown = []
    for form, name in (
        ("ours", "ours"),
        ("triton", "in Triton"),
        ("grouped layer", "`torch._grouped_mm`, whole layer"),
    ):
        row = row_of(found["latency"], form=form)
        if row is not None:
            shown.append(f"{name} {row['fixed']:.1f} + {row['slope']:.2f} T us (R^2 {row['r2']:.4f})")
    low, high = (found["paper"][k0]["normalised"] for k0 in ("3", "5"))
    yield line(
        f"experts of a decode batch of 16 that reads T of 128 experts, Qwen3-30B-A3B's layer, one {found['device']}",
        f"{'; '.join(shown)}; at the mean T of `oea` k0=3 and 5 {low:.3f} and {high:.3f} of plain routing "
        "(aims: 12 us, 2.3 us, R^2 0.99, 0.58 and 0.75)",
        found["command"],
    )
    row = row_of(found["router"], experts=128, batch=16)
    if row is not None:
        yield line(
            f"`oea(k0=3)` of a batch of 16 over 128 experts in one launch, one {found['device']}",
            f"{row['logits']['row']:.1f} us from logits, {row['choice']['row']:.1f} us from a choice made, in a row; "
            f"{row['logits']['alone']:.1f} and {row['choice']['alone']:.1f} us for a graph of one launch (aim: 6 us)",
            found["command"],
        )


def placement_lines() -> Iterator[str]:
    found = load("placement.json")
    if found is None:
        return
    case = found["eplb"][0]
    yield line(
        "`eplb`, 61 layers x 256 -> 288 slots on 32 ranks",
        f"{case['ours_ms']:.1f} ms, against {case['plain_loops_ms']:,.0f} ms for the same algorithm in plain loops",
        "python benchmarks/placement.py",
    )
    searched = found.get("searched", [])
    if not searched:
        return

    def gains(rows: list[dict[str, Any]]) -> tuple[int, int, float, float]:
        better = [row["eplb"] - row["searched"] for row in rows]
        return sum(gain > 0 for gain in better), len(better), sum(better) / len(better), -min(better)

    others = gains([row for row in searched if row["planned"] == "all others"])
    single = gains([row for row in searched if row["planned"] != "all others"])
    yield line(
        "`searched` on DeepSeek-V3, 16 ranks, 32 redundant, planned on seven recordings and scored on the eighth",
        f"better than `eplb` on {others[0]} of {others[1]}: mean peak/mean {others[2]:.3f} lower; planned on a single "
        f"aggregate {single[0]} of {single[1]}, {single[2]:.3f} lower, at worst {single[3]:.3f} higher",
        found["command"],
    )


def tune_lines() -> Iterator[str]:
    found = load("tune.json")
    if found is None:
        return
    shape = found["shape"]
    yield line(
        f"`epsim tune`, {shape['steps']:,} steps at counts level, {shape['layers']} layers x {shape['experts']} "
        f"experts, {shape['gpus']} GPUs, {found['candidates']} candidates; {found['machine']}, load average "
        f"{found['load_average']:.0f}",
        f"{found['seconds']:.0f} s, {found['core_seconds']:.0f} s of cores (aim: 300 s); "
        f"{found['resident_mib'] / 1024:.2f} GiB resident",
        found["command"],
    )


def sweep_lines() -> Iterator[str]:
    found = load("sweep.json")
    if found is None:
        return
    rates = [f"{row['cells_per_minute']:.0f} with {row['workers']} ({row['kind']})" for row in found["rows"]]
    same = "the same bytes" if all(row["equal"] for row in found["rows"]) else "RESULTS DIFFER"
    ranks = found["by_ranks"]["rows"]
    yield line(
        f"`epsim sweep`, {found['rows'][0]['cells']} cells of {len(found['shape']['stacks'])} stacks; "
        f"{found['machine']}, load average {found['load_before']:.0f} to {found['load_after']:.0f}",
        f"cells a minute: {found['serial_cells_per_minute']:.0f} without workers, {', '.join(rates)}; {same}; "
        f"a cell of {ranks[0]['ranks']} ranks {ranks[0]['cpu_s']:.2f} s of cores, of {ranks[-1]['ranks']:,} "
        f"{ranks[-1]['cpu_s']:.1f} s",
        found["command"],
    )


def figures_table() -> str:
    makers: tuple[Callable[[], Iterator[str]], ...] = (
        replay_lines,
        split_cpu_lines,
        split_gpu_lines,
        dispatch_lines,
        oea_lines,
        lambda: gpu_lines(load, line),
        placement_lines,
        tune_lines,
        sweep_lines,
    )
    lines = [text for make in makers for text in make()]
    return "\n".join(["| what | figure | command |", "|---|---|---|", *lines])


def split_tables() -> str:
    """A line a solver: gaps and times on real problems; then on pairs of copies and on hard problems."""
    found = load("split.json")
    if found is None:
        return ""
    on_gpu = load("split_h200.json")
    parts = [part for part in (on_gpu or {"summary": []})["summary"] if part["solver"] == "ours, GPU"]
    parts = sorted(parts + found["summary"], key=lambda part: list(NAMES).index(part["solver"]))
    kinds = {kind: [part for part in parts if part["kind"] == kind] for kind in ("real", "pairs", "hard")}
    real, timed = kinds["real"], found["times of"]["real"]
    places = f"one core of {found['cpu']}" + (
        "" if on_gpu is None else f", the first line launches on one {on_gpu['gpu']}"
    )
    lines = [
        f"Real problems, {real[-1]['sets']} sets of placements and loads; times of 256 experts, "
        f"{timed['ranks']} ranks, {timed['redundant']} redundant, {timed['tokens']:,} tokens a rank, {places}, "
        "Python's call included on the CPU:",
        "",
        "| split of a batch | gap: mean | p99 | worst | infeasible | one problem, us | in batches, us |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in real:
        alone = "-" if "us_alone" not in part else micro(part["us_alone"])
        if "us_with_model" in part:
            alone += f" ({micro(part['us_with_model'])} with its model)"
        if "us_alone_p99" in part:
            alone += f" (p99 {micro(part['us_alone_p99'])})"
        batch = "-" if "us_batch" not in part else micro(part["us_batch"])
        lines.append(
            f"| {NAMES[part['solver']]} | {percent(part['gap_mean'])} | {percent(part['gap_p99'])} | "
            f"{percent(part['gap_worst'])} | {part['infeasible']:,} of {part['answered']:,} | {alone} | {batch} |"
        )
    lines += [
        "",
        "Placements in pairs of copies, as LPLB makes them, and hard problems (chains, rings, one expert everywhere; "
        "loads from 1 to 1e9, ties, zeros, all on one expert):",
        "",
        "| split of a batch | pairs: mean | worst | infeasible | hard: mean | worst | infeasible |",
        "|---|---|---|---|---|---|---|",
    ]
    for solver in dict.fromkeys(part["solver"] for part in real):
        cells = [NAMES[solver]]
        for kind in ("pairs", "hard"):
            part = row_of(kinds[kind], solver=solver) or {}
            cells += [percent(part.get("gap_mean")), percent(part.get("gap_worst"))]
            cells.append(f"{part['infeasible']:,} of {part['answered']:,}" if part else "-")
        lines.append(f"| {' | '.join(cells)} |")
    own = [part for part in parts if part["solver"] in ("ours, CPU", "ours, GPU")]
    unproven = sum(part["unproven"] for part in own)
    other = ""
    if on_gpu is not None and all(part["solver"] != "HiGHS" for part in on_gpu["summary"]):
        other = " (on the GPU the proven lower bound, so that no gap is shown smaller than it is)"
    lines += [
        "",
        f"The optimum is GLOP's{other}; "
        f"HiGHS's differs by at most {found['largest difference of GLOP and HiGHS']:.0e}; "
        f"{unproven} of our {sum(part['answered'] for part in own):,} answers are unproven.",
    ]
    return "\n".join(lines)


def figures() -> str:
    return "\n\n".join(part for part in (figures_table(), split_tables(), gates_table(load("gates.json"))) if part)


def with_figures(readme: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{figures()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether README.md is up to date")
    options = parser.parse_args()
    path = ROOT / "README.md"
    old = path.read_text()
    new = with_figures(old)
    if options.check:
        sys.exit(None if new == old else "README.md is not what the results give: python benchmarks/readme.py")
    path.write_text(new)


if __name__ == "__main__":
    main()
