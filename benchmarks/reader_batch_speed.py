"""A layer of which a batch reads one set of channels, compared with the layer read whole, on one CUDA device.

    python benchmarks/reader_batch_speed.py [--shapes NAME ...] [--out benchmarks/results/reader_batch_speed.json]

Times are measured as in benchmarks/reader_speed.py. `us`: epsim.kernels.reader.batch.BatchReader, all from x and ids to
the output, at a budget of the bytes of the batch's active experts: 0.178 for every shape, BUDGETS for the first.
`dense`, `products` and `layer` are the dense forms, and gains are over them. `MB`: what the reader reads, in sectors of
32 bytes; `share`: its share of the bytes of the active experts. `floor`: the time of reading these bytes at the rate of
a kernel that only reads; `reached`: `floor` over the time taken. `error`: of the output, relative to float32 arithmetic
with the same channels.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from command import command
from common import RESULTS, table, write
from device_times import read_bandwidth, timed
from reader_speed import BATCHES, BUDGETS, REPLAYS, SHAPES, Given, Layers, dense_times

from epsim.kernels.reader.batch import BatchReader, of_slots
from epsim.kernels.reader.bytes import ReadBytes
from epsim.kernels.reader.layer import GATES
from epsim.kernels.reader.read import Experts, read_output
from epsim.kernels.reader.screen import Batches, Screen

BUDGET = 0.178
NAMES = {"grouped layer": "layer", "two products": "products"}


def bytes_of(reader: BatchReader, ids: torch.Tensor) -> dict[str, float]:
    """Of a batch that chooses as one: as a token of all active experts."""
    sketch = reader.layer.sketch
    active = len(ids.unique())
    sizes = ReadBytes(sketch.hidden, sketch.intermediate, 2, reader.layer.coordinates, sketch.rank)
    read = sizes.token(active, int(reader.kept_of[active]))
    return {"active": active, "MB": read / 1e6, "share": read / (active * sizes.expert)}


def error_of(reader: BatchReader, given: Given) -> float:
    layer, (x, ids, weights) = reader.layer, given
    kept = torch.empty(layer.sketch.num_experts, reader.sizes.padded // 32, dtype=torch.int32, device=x.device)
    found = reader.read(*given, kept=kept)
    experts = Experts(layer.gate_up.float(), layer.down.transpose(1, 2).float(), GATES[layer.gate])
    batches = Batches(torch.zeros(len(x), dtype=torch.int64, device=x.device), 1)
    gate, up = Screen(layer.sketch).estimates(x, ids, layer.coordinates, batches)
    taken = of_slots(kept, ids, layer.sketch.intermediate)
    wanted = read_output(x.float(), ids, weights, experts, taken, experts.activation(gate) * up, layer.sketch)
    return float((found.float() - wanted).norm() / wanted.norm())


def measure(name: str, batches: tuple[int, ...], budgets: tuple[float, ...], rate: float) -> list[dict[str, Any]]:
    layers = Layers(SHAPES[name])
    own_layers = layers.readers(1.0)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        given = layers.inputs(batch)
        dense = {NAMES.get(form, form): us for form, us in dense_times(layers, given).items()}
        for budget in budgets:
            readers = [BatchReader.of(layer, budget) for layer in own_layers]
            us = timed([lambda o=o, g=g: o.read(*g) for g, o in zip(given, itertools.cycle(readers))], REPLAYS)
            row = {"shape": name, "batch": batch, "budget": budget, "us": us} | bytes_of(readers[0], given[0][1])
            row["floor"] = row["MB"] * 1e12 / rate
            row |= {"reached": row["floor"] / us, **dense}
            row |= {f"gain over {form}": dense[form] / us for form in dense}
            if batch <= 16:
                row["error"] = error_of(readers[0], given[0])
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--out", type=Path, default=RESULTS / "reader_batch_speed.json")
    options = parser.parse_args()
    rate = read_bandwidth()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": command("reader_batch_speed.py"),
        "read_bandwidth": rate,
        "rows": [],
    }
    print(f"{found['device']}: a kernel reads {rate / 1e12:.2f} TB/s", flush=True)
    for name in options.shapes:
        budgets = BUDGETS if name == next(iter(SHAPES)) else (BUDGET,)
        rows = measure(name, tuple(options.batches), budgets, rate)
        table(name, rows)
        found["rows"] += rows
        write(options.out, found)


if __name__ == "__main__":
    main()
