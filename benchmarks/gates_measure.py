"""Expert computation measured on one GPU, for benchmarks/gates.py: what no fit of `epsim calibrate` has seen.

    python benchmarks/gates_measure.py BATCHES.npz --out benchmarks/results/gates_h200.json

`slices`: the GPU plays each rank of a group in turn, with exactly the rows that a stack gives it
(benchmarks/gates_draw.py); of each rank its rows, the assignments of each of its slots (the shared expert's last), and
microseconds. `cells`: sizes between those of the calibration's grid, of several spreads, and other numbers of active
experts. Medians of CUDA graphs between device events.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command import command

from epsim.calibrate.experts import drawn_counts, rank_experts, received_of, shape_for
from epsim.calibrate.machine import DTYPE, Machine
from epsim.cost.model import load_model
from epsim.runtime.exchange.base import Received

MODELS = ("deepseek-v3-bf16", "qwen3-30b-a3b", "gpt-oss-20b")
CELL_US = 15_000.0
CELLS, SEED = 60, 11
SIZES = (3, 6, 12, 24, 48, 80, 112, 160, 224, 320, 448, 640, 900, 1500, 3000)
ACTIVE = (3, 5, 6, 10, 14, 18, 19, 28, 48, 96)
SPREADS = (0.0, 0.3, 0.5, 0.9)


def slices(machine: Machine, path: Path, seconds: float) -> list[dict[str, Any]]:
    found = np.load(path)
    cases = json.loads(str(found["cases"]))
    experts: dict[Any, Any] = {}
    models = {load_model(name).name: load_model(name) for name in MODELS}
    buffer: torch.Tensor | None = None
    begun, rows = time.perf_counter(), []
    for number, case in enumerate(cases):
        if time.perf_counter() - begun > seconds:
            print(f"stopped for time: {number} of {len(cases)} cases", flush=True)
            break
        model = models[case["model"]]
        slots = case["slots"] + (model.shared_intermediate > 0)
        if (model.name, slots) not in experts:
            experts.clear()
            torch.cuda.empty_cache()
            experts[model.name, slots] = rank_experts(machine, shape_for(model), slots)
        held = experts[model.name, slots]
        all_rows = torch.from_numpy(found[f"rows{number}"])
        if buffer is None or buffer.shape[1] != model.hidden or len(buffer) < max(case["rows"]):
            buffer = torch.randn(1 << 16, model.hidden, device=machine.device).to(DTYPE)
        times, loads = [], []
        for part in all_rows.split(case["rows"]):
            local = part.to(machine.device, torch.int64)
            weights = torch.rand(tuple(local.shape), device=machine.device)
            received = Received(buffer[: len(local)], None, local, weights, None)
            times.append(machine.alone_us([partial(held, received)], CELL_US))
            loads.append(torch.bincount(part[part >= 0].to(torch.int64), minlength=slots).tolist())
        rows.append(case | {"us": [round(us, 2) for us in times], "loads": loads})
    return rows


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0, help="for the slices, at most")
    options = parser.parse_args()
    machine = Machine.here("cuda")
    begun = time.perf_counter()
    report: dict[str, Any] = machine.described()
    report["command"] = command("gates_measure.py")
    report["cells"] = cells(machine)
    print(f"{len(report['cells'])} cells, {time.perf_counter() - begun:.0f} s", flush=True)
    report["slices"] = slices(machine, options.batches, options.seconds)
    print(f"{len(report['slices'])} cases, {time.perf_counter() - begun:.0f} s", flush=True)
    options.out.write_text(json.dumps(report, separators=(",", ":")).replace("},{", "},\n{") + "\n")


if __name__ == "__main__":
    main()
