"""Times of expert computation on one GPU, which no fit of `epsim calibrate` has seen.

    python benchmarks/gates.py measure cells --out benchmarks/results/gates_h200.json
    python benchmarks/gates.py measure slices --batches BATCHES.npz --out benchmarks/results/gates_slices.json

`cells`: sizes between those of the calibration's grid, with several spreads, and other numbers of active experts.
`slices`: the GPU plays each rank of a group in turn, with exactly the rows that a stack gives that rank
(benchmarks/gates/draw.py). Of each rank it writes the rows, the assignments of each slot (the shared expert's last),
the microseconds, and the differences between several passes. Times are medians of CUDA graphs between device events.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command, script_parser, write

from epsim.calibrate.experts import drawn_counts, rank_experts, received_of, shape_for
from epsim.calibrate.machine import DTYPE, Machine
from epsim.models.spec import load_model
from epsim.runtime.exchange.base import Received

MODELS = ("deepseek-v3-bf16", "qwen3-30b-a3b", "gpt-oss-20b")
CELL_US = 15_000.0
CELLS, SEED = 60, 11
SIZES = (3, 6, 12, 24, 48, 80, 112, 160, 224, 320, 448, 640, 900, 1500, 3000)
ACTIVE = (3, 5, 6, 10, 14, 18, 19, 28, 48, 96)
PASSES = 5
SPREADS = (0.0, 0.3, 0.5, 0.9)


def slices(machine: Machine, path: Path, seconds: float, models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Batch by batch, small ones first. Every rank of a batch is captured under every stack. These graphs run in turn,
    PASSES times, so that a drift of the device affects all stacks equally. Times are medians over the passes."""
    found = np.load(path)
    specs = {load_model(name).name: load_model(name) for name in models}
    batches: dict[Any, list[tuple[int, dict[str, Any]]]] = {}
    for number, case in enumerate(json.loads(str(found["cases"]))):
        if case["model"] in specs:
            key = (case["tokens"], case["model"], case["ranks"], case["layer"])
            batches.setdefault(key, []).append((number, case))
    held: dict[Any, Any] = {}
    buffers: dict[int, torch.Tensor] = {}
    begun = time.perf_counter()
    for key, cases in sorted(batches.items(), key=lambda one: one[0]):
        if time.perf_counter() - begun > seconds:
            print(f"stopped for time before {key}", flush=True)
            return
        model = specs[key[1]]
        most = max(max(case["rows"]) for _, case in cases)
        if model.hidden not in buffers or len(buffers[model.hidden]) < most:
            buffers[model.hidden] = torch.randn(most, model.hidden, device=machine.device).to(DTYPE)
        played: list[Callable[[], object]] = []
        parts_of = {number: torch.from_numpy(found[f"rows{number}"]).split(case["rows"]) for number, case in cases}
        slots_of = {number: case["slots"] + (model.shared_intermediate > 0) for number, case in cases}
        for number, slots in slots_of.items():
            if (model.name, slots) not in held:
                held[model.name, slots] = rank_experts(machine, shape_for(model), slots)
            for part in parts_of[number]:
                local = part.to(machine.device, torch.int64)
                weights = torch.rand(tuple(local.shape), device=machine.device)
                received = Received(buffers[model.hidden][: len(local)], None, local, weights, None)
                played.append(partial(held[model.name, slots], received))
        times = machine.in_turn_us(played, PASSES)
        for number, case in cases:
            own, parts = [times.pop(0) for _ in case["rows"]], [part.long() for part in parts_of[number]]
            loads = [torch.bincount(part[part >= 0], minlength=slots_of[number]).tolist() for part in parts]
            us = [round(statistics.median(one), 2) for one in own]
            apart = [round(max(one) / min(one) - 1, 4) for one in own]
            yield case | {"us": us, "apart": apart, "loads": loads}


def cells(machine: Machine) -> list[dict[str, Any]]:
    rows = []
    for name in MODELS:
        model = load_model(name)
        rng = np.random.default_rng(SEED)
        for number in range(CELLS):
            size, active, spread = (rng.choice(axis).item() for axis in (SIZES, ACTIVE, SPREADS))
            if active > model.num_experts or size * active > 100_000:
                continue
            held = rank_experts(machine, shape_for(model), active)
            counts = drawn_counts(active, size, spread, 1000 + number)
            received = received_of(machine, counts, model.top_k, model.hidden, number)
            us = machine.alone_us([partial(held, received)], CELL_US)
            rows.append({"model": model.name, "spread": spread, "loads": counts.tolist(), "us": round(us, 2)})
    return rows


def main(words: list[str]) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("part", choices=("cells", "slices"))
    parser.add_argument("--batches", type=Path, help="of benchmarks/gates/draw.py, for slices")
    parser.add_argument("--model", action="append", choices=MODELS, help="for slices; repeatable, else all")
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no batch of slices is begun")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    machine = Machine.here("cuda")
    report: dict[str, Any] = machine.described() | {"command": command(), options.part: []}
    if options.part == "slices" and options.batches is None:
        parser.error("slices need --batches")
    if options.part == "cells":
        report["cells"] = cells(machine)
        write(options.out, report, row_a_line=True)
        return
    begun = time.perf_counter()
    for row in slices(machine, options.batches, options.seconds, options.model or MODELS):
        report["slices"].append(row)
        write(options.out, report, row_a_line=True)
    print(f"{len(report['slices'])} cases, {time.perf_counter() - begun:.0f} s", flush=True)
