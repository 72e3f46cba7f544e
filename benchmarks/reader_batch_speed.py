"""The time of a layer if a batch reads one set of channels, compared with the dense layer, on one CUDA device.

    python benchmarks/reader_batch_speed.py [--shapes NAME ...] [--out benchmarks/results/reader_batch_speed.json]

Times are measured as in benchmarks/reader_speed.py. `us`: epsim.kernels.reader.batch.BatchReader, all from x and ids to
the output, at a budget of the bytes of the batch's active experts: 0.178 for every shape, BUDGETS for the first.
`dense`, `products` and `layer` are the dense forms, and gains are over them. `MB`: what the reader reads, in sectors of
32 bytes; `share`: its share of the bytes of the active experts. `floor`: the time of reading these bytes at the rate of
a kernel that only reads; `reached`: `floor` over the time taken. `error`: of the output, relative to float32 arithmetic
with the same channels.
"""

from typing import Any

import torch
from common import table, write
from device_times import read_bandwidth, report_head
from reader_speed import BUDGETS, SHAPES, Given, Layers, dense_times, error_of, read_time, reader_parser

from epsim.kernels.reader.batch import BatchReader, of_slots
from epsim.kernels.reader.bytes import ReadBytes
from epsim.kernels.reader.screen import Batches

BUDGET = 0.178
NAMES = {"grouped layer": "layer", "two products": "products"}


def bytes_of(reader: BatchReader, ids: torch.Tensor) -> dict[str, float]:
    """The bytes of a batch that chooses one set of channels: those of one token with all active experts."""
    sketch = reader.layer.sketch
    active = len(ids.unique())
    sizes = ReadBytes(sketch.hidden, sketch.intermediate, 2, reader.layer.coordinates, sketch.rank)
    read = sizes.token(active, int(reader.kept_of[active]))
    return {"active": active, "MB": read / 1e6, "share": read / (active * sizes.expert)}


def batch_error(reader: BatchReader, given: Given) -> float:
    layer, (x, ids, _) = reader.layer, given
    kept = torch.empty(layer.sketch.num_experts, reader.sizes.padded // 32, dtype=torch.int32, device=x.device)
    output = reader.read(*given, kept=kept)
    batches = Batches(torch.zeros(len(x), dtype=torch.int64, device=x.device), 1)
    return error_of(layer, given, output, of_slots(kept, ids, layer.sketch.intermediate), batches)


def measure(name: str, batches: tuple[int, ...], budgets: tuple[float, ...], rate: float) -> list[dict[str, Any]]:
    layers = Layers(SHAPES[name])
    own_layers = layers.readers(1.0)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        given = layers.inputs(batch)
        dense = {NAMES.get(form, form): us for form, us in dense_times(layers, given).items()}
        for budget in budgets:
            readers = [BatchReader.of(layer, budget) for layer in own_layers]
            us = read_time(readers, given)
            row = {"shape": name, "batch": batch, "budget": budget, "us": us} | bytes_of(readers[0], given[0][1])
            row["floor"] = row["MB"] * 1e12 / rate
            row |= {"reached": row["floor"] / us, **dense}
            row |= {f"gain over {form}": dense[form] / us for form in dense}
            if batch <= 16:
                row["error"] = batch_error(readers[0], given[0])
            rows.append(row)
    return rows


def main() -> None:
    options = reader_parser(__doc__, "reader_batch_speed.json").parse_args()
    rate = read_bandwidth()
    found = report_head() | {"read_bandwidth": rate, "rows": []}
    print(f"{found['device']}: a kernel reads {rate / 1e12:.2f} TB/s", flush=True)
    for name in options.shapes:
        budgets = BUDGETS if name == next(iter(SHAPES)) else (BUDGET,)
        rows = measure(name, tuple(options.batches), budgets, rate)
        table(name, rows)
        found["rows"] += rows
        write(options.out, found)


if __name__ == "__main__":
    main()
