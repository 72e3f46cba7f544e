"""The time of EPLB compared with the same algorithm in plain loops, and the search compared with EPLB in balance.

    python benchmarks/placement.py [--recordings DIR]

DIR holds SGLang's DeepSeek-V3 expert counts, JSON files of {"logical_count": [61][256]}. Without it only synthetic
counts are used.
"""

import argparse
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ROOT, least_seconds, processor, table, write

from epsim.placement.balance import even_balance
from epsim.placement.base import Cluster
from epsim.placement.eplb import rebalance_experts
from epsim.policies.stack import placement_policy

# layers, experts, slots, groups, nodes, ranks
SIZES = [(61, 256, 288, 1, 1, 32), (61, 256, 288, 8, 4, 32), (58, 256, 288, 1, 1, 16), (24, 32, 40, 1, 1, 8)]


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The least time of several calls, after one that is not timed."""
    run()
    return 1e3 * least_seconds(run, repeats)


def eplb_speed() -> list[dict[str, Any]]:
    reading = runpy.run_path(str(ROOT / "tests/placement/eplb_reading.py"))["rebalance"]
    rows = []
    for layers, experts, slots, groups, nodes, ranks in SIZES:
        weight = (torch.rand(layers, experts, generator=torch.Generator().manual_seed(0)) ** 3 * 1e6).long()
        sizes = (weight, slots, groups, nodes, ranks)
        ours = milliseconds(lambda: rebalance_experts(*sizes), 21)  # noqa: B023
        plain = milliseconds(lambda: reading(*sizes), 3)  # noqa: B023
        name = f"{layers} x {experts} -> {slots}, {ranks} ({nodes})"
        rows.append({"case": name, "ours_ms": ours, "plain_loops_ms": plain, "ratio": plain / ours})
    table("layers x experts -> slots, ranks (nodes)", rows)
    return rows


def search_balance(folder: Path) -> list[dict[str, Any]]:
    """Peak / mean rank load, averaged over layers, on each file, planned on all other files or on one other file."""
    counts = {}
    for path in sorted(folder.glob("*.json")):
        recorded = torch.tensor(json.loads(path.read_text())["logical_count"], dtype=torch.float64).long()
        counts[path.stem] = recorded[recorded.sum(-1) > 0]
    cluster = Cluster(num_ranks=16, num_nodes=2, num_redundant=32)
    searched, eplb = placement_policy("searched"), placement_policy("eplb")
    rows: list[dict[str, Any]] = []
    for planned, scored in [("all others", name) for name in counts] + [(name, "") for name in counts]:
        others = [name for name in counts if name != scored] if scored else [planned]
        history = torch.stack([counts[name] for name in others])
        start = time.perf_counter()
        ours = searched.plan(history, cluster)
        seconds = time.perf_counter() - start
        theirs = eplb.plan(history, cluster)
        for name in [scored] if scored else [name for name in counts if name != planned]:
            before, after = (float(even_balance(counts[name], p).mean()) for p in (theirs, ours))
            rows.append({"planned": planned, "scored": name, "eplb": before, "searched": after, "seconds": seconds})
    table("peak over mean load", rows)
    for kind in ("all others", "one other file"):
        chosen = [r for r in rows if (r["planned"] == "all others") == (kind == "all others")]
        wins = sum(r["searched"] < r["eplb"] for r in chosen)
        mean = statistics.mean(r["searched"] - r["eplb"] for r in chosen)
        print(f"planned on {kind}: searched wins {wins} of {len(chosen)}, mean change {mean:+.4f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path)
    arguments = parser.parse_args()
    command = "python benchmarks/placement.py" + (" --recordings DIR" if arguments.recordings else "")
    machine = {"cpu": processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    result: dict[str, Any] = {"command": command, "machine": machine, "python": sys.version.split()[0]}
    result["eplb"] = eplb_speed()
    if arguments.recordings:
        result["searched"] = search_balance(arguments.recordings)
    write(RESULTS / "placement.json", result)


if __name__ == "__main__":
    main()
