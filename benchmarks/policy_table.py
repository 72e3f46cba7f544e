"""The policy table of the calibrated H200, from what the policies' own benchmarks measured there.

    python benchmarks/policy_table.py

benchmarks/results/dispatch_gpu.json (from ids to physical experts, without the collective) and runtime.json
(collectives of two ranks, in a CUDA graph over peer memory) become benchmarks/results/calibrated_h200/policies.json.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from epsim.calibrate.folder import write_hardware, write_table
from epsim.cost.calibrated import CollectiveCost, PolicyCost, PolicyTable, load_calibration
from epsim.cost.hardware import load_hardware
from epsim.cost.policy_time import split_key
from epsim.policies.shared import Local
from epsim.policies.stack import parse_stack

RESULTS = Path(__file__).resolve().parent / "results"
EXPERTS = 256


def main() -> None:
    measured = json.loads((RESULTS / "dispatch_gpu.json").read_text())
    runtime = json.loads((RESULTS / "runtime.json").read_text())
    times: dict[tuple[str, int, int], dict[float, float]] = defaultdict(dict)
    for row in measured["rows"]:
        if "(candidates" in row["stack"]:
            continue
        stack = parse_stack(f"eplb+{row['stack']}")
        key = split_key(stack, redundant=True)
        key = key if isinstance(stack.shared, Local) else f"{key}+{stack.shared.name}"
        times[key, row["ranks"], row["slots"] - EXPERTS][float(row["tokens"])] = row["us"]
    costs = tuple(
        PolicyCost(key, ranks, redundant, tuple(sorted(found)), tuple(found[tokens] for tokens in sorted(found)))
        for (key, ranks, redundant), found in times.items()
    )
    alone = next(row for row in runtime["parts"]["balance"]
                 if (row["stack"], row["collective"]) == ("(all-reduce alone)", "peer"))  # fmt: skip
    folder = RESULTS / "calibrated_h200"
    write_table(
        PolicyTable(
            measured["device"],
            f"{measured['command']}; collectives: {runtime['command']}",
            costs,
            (CollectiveCost("all_reduce", runtime["num_devices"], 1, alone["graph"]),),
            versions=f"torch {measured['torch']}",
        ),
        folder / "policies.json",
    )
    words = "Measured on one NVIDIA H200 by epsim calibrate (experts), benchmarks/dispatch_gpu.py (policies) and, "
    write_hardware(
        folder, load_hardware("h200"), "NVIDIA H200 (calibrated)",
        words + "on two, benchmarks/runtime.py (all-reduce over peer memory, in a graph).",
    )  # fmt: skip
    load_calibration(str(folder))


if __name__ == "__main__":
    main()
