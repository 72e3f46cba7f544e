"""What benchmarks measured of the calibrated H200 that `epsim calibrate` has not measured there yet, as its tables.

    python benchmarks/calibrated_tables.py

Into benchmarks/results/calibrated_h200, each until a calibration has written it:
policies.json   of kernels, by dispatch_gpu.json (from ids to physical experts, without the collective), and
                runtime.json (collectives of two ranks, in a CUDA graph over peer memory)
router-*.json   by gates_layers.json: routers that are given the experts, each by itself in a CUDA graph
experts-*.json  gets cells of rows as of two ranks, by runtime.json (its phases that take over HOST_US, in which a GPU
                does not wait for its host), and the fits of grid and cells
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from later_parts import command_of
from runtime_common import QWEN, REDUNDANT, V3, placement_of, skewed_ids

from epsim.calibrate.experts import FEW_CELLS, with_fit
from epsim.calibrate.folder import write_hardware, write_table
from epsim.cost.calibrated import CollectiveCost, PolicyCost, PolicyTable, load_calibration, read_table
from epsim.cost.experts_time import ExpertCell, ExpertTable
from epsim.cost.policy_time import split_key
from epsim.cost.router_time import RouterTable
from epsim.machines.hardware import load_hardware
from epsim.models.shapes import LayerShape
from epsim.models.spec import load_model
from epsim.policies.shared import Local
from epsim.policies.stack import parse_stack

RESULTS = Path(__file__).resolve().parent / "results"
FOLDER = RESULTS / "calibrated_h200"
EXPERTS, SMS = 256, 132
HOST_US = 1000.0
"""A host needs some 0.6 ms to launch a layer's experts eagerly."""
MODELS = {"deepseek-v3-bf16": V3, "qwen3-30b-a3b": QWEN, "gpt-oss-20b": None}
ROUTER = ("hidden", "num_experts", "top_k", "groups", "top_groups")


def policies(measured: dict[str, Any], runtime: dict[str, Any]) -> PolicyTable:
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
    return PolicyTable(
        measured["device"],
        f"{measured['command']}; collectives: {command_of(runtime, 'balance')}",
        costs,
        (CollectiveCost("all_reduce", runtime["num_devices"], 1, alone["graph"]),),
        versions=f"torch {measured['torch']}",
    )


def routers(layers: dict[str, Any]) -> Iterator[tuple[str, RouterTable]]:
    times: dict[tuple[int, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in layers["rows"]:
        times[tuple(row["shape"][name] for name in ROUTER)][row["tokens"]].append(row["parts"]["route"])
    for shape, by_tokens in times.items():
        tokens = sorted(by_tokens)
        us = tuple(statistics.median(by_tokens[number]) for number in tokens)
        told = {"versions": layers["versions"], "date": layers["date"]}
        table = RouterTable(
            layers["device"], layers["command"] + " (parts)", *shape, tuple(map(float, tokens)), (), us, **told
        )
        yield f"router-{shape[0]}-{shape[1]}.json", table


def cells(runtime: dict[str, Any], shape: LayerShape) -> Iterator[ExpertCell]:
    """Of the slowest rank of two; routing is drawn anew as benchmarks/runtime_common.py does, on another generator: the
    loads are alike, not the same."""
    placement = placement_of("eplb", shape, 2, REDUNDANT[shape.name])
    slots = placement.physical_to_logical[0]
    for row in runtime["parts"]["phases"]:
        if row["shape"] != shape.name or row["experts"] < HOST_US:
            continue
        tokens = row["tokens"]
        ids = torch.cat([skewed_ids(shape, tokens, 400 + rank, torch.device("cpu")) for rank in range(2)])
        copies = torch.bincount(slots, minlength=shape.num_experts)
        share = (
            (torch.bincount(ids.flatten(), minlength=shape.num_experts).double() / copies)[slots].round().view(2, -1)
        )
        shared = tokens * shape.has_shared
        busiest = max(share.sum(1).tolist()) + shared
        active = int((share > 0).sum(1).amax()) + shape.has_shared
        yield ExpertCell(busiest / active, active, busiest / (2 * tokens), row["experts"])


def main() -> None:
    measured, runtime, layers = (
        json.loads((RESULTS / name).read_text()) for name in ("dispatch_gpu.json", "runtime.json", "gates_layers.json")
    )
    write_table(policies(measured, runtime), FOLDER / "policies.json")
    there = [one for path in sorted(FOLDER.glob("*.json")) if isinstance(one := read_table(path), RouterTable)]
    for name, table in routers(layers):
        if any(one.us and all(getattr(one, key) == getattr(table, key) for key in ROUTER) for one in there):
            (FOLDER / name).unlink(missing_ok=True)
        else:
            write_table(table, FOLDER / name)
    for name, shape in MODELS.items():
        model = load_model(name)
        path = next(
            path
            for path in sorted(FOLDER.glob("experts-*.json"))
            if isinstance(one := read_table(path), ExpertTable)
            and (one.hidden, one.intermediate, one.implementation) == (model.hidden, model.intermediate, "grouped")
        )
        found = read_table(path)
        assert isinstance(found, ExpertTable)
        if len(found.cells) >= FEW_CELLS:
            continue
        beside = () if shape is None else tuple(cells(runtime, shape))
        # Before tables told their columns, rows had those of top-k.
        found = dataclasses.replace(found, cells=beside, columns=found.columns or model.top_k)
        of_cells = f"; cells: {command_of(runtime, 'phases')}" if beside else ""
        command = found.command.partition("; cells: ")[0] + of_cells
        write_table(with_fit(dataclasses.replace(found, command=command), model, SMS), path)
    words = (
        "Measured on NVIDIA H200 by epsim calibrate (experts, exchange, policies of two and of 16 ranks) and, where "
    )
    write_hardware(
        FOLDER, load_hardware("h200"), "NVIDIA H200 (calibrated)",
        words + "its tables say so, by the benchmarks that benchmarks/calibrated_tables.py names.",
    )  # fmt: skip
    load_calibration(str(FOLDER))


if __name__ == "__main__":
    main()
