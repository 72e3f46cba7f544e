"""The costs of policies on an H200, from the benchmarks of kernels and collectives, as a table of `epsim calibrate`.

    python benchmarks/calibrated_tables.py

Writes benchmarks/results/calibrated_h200/policies.json. It reads dispatch_gpu.json (times from top-k ids to physical
experts, without the collective) and runtime.json (collectives of two ranks over peer memory, in a CUDA graph).
"""

import json
from collections import defaultdict
from typing import Any

from common import RESULTS
from gates.gate import CALIBRATED
from later_parts import command_of

from epsim.calibrate.folder import write_table
from epsim.cost.calibrated import CollectiveCost, PolicyCost, PolicyTable
from epsim.cost.policy_time import table_key
from epsim.policies.stack import parse_stack

EXPERTS = 256


def policies(measured: dict[str, Any], runtime: dict[str, Any]) -> PolicyTable:
    times: dict[tuple[str, int, int], dict[float, float]] = defaultdict(dict)
    for row in measured["rows"]:
        if "(candidates" in row["stack"]:
            continue
        stack = parse_stack(f"eplb+{row['stack']}")
        key = table_key(stack.split, stack)
        times[key, row["ranks"], row["slots"] - EXPERTS][float(row["tokens"])] = row["us"]
    costs = tuple(
        PolicyCost(key, ranks, redundant, tuple(sorted(found)), tuple(found[tokens] for tokens in sorted(found)))
        for (key, ranks, redundant), found in times.items()
    )
    alone = next(row for row in runtime["parts"]["balance"]
                 if (row["stack"], row["collective"]) == ("(all-reduce alone)", "peer"))  # fmt: skip
    return PolicyTable(
        measured["device"],
        f"{measured['command']}; collectives: {command_of(runtime, 'balance')}",
        costs,
        (CollectiveCost("all_reduce", runtime["num_devices"], 1, alone["graph"]),),
        versions=f"torch {measured['torch']}",
    )


if __name__ == "__main__":
    measured, runtime = (json.loads((RESULTS / name).read_text()) for name in ("dispatch_gpu.json", "runtime.json"))
    write_table(policies(measured, runtime), CALIBRATED / "policies.json")
