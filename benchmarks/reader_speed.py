"""The time of a mixture-of-experts layer read by channels, compared with the dense layer, on one CUDA device.

    python benchmarks/reader_speed.py [--shapes NAME ...] [--out benchmarks/results/reader_speed.json]

Times are microseconds a layer: a CUDA graph of CALLS layers in a row between device events, each with the next of
LAYERS sets of weights and its own uniform routing and input; the median of REPLAYS. For each budget (a share of the
bytes of a token's experts) `us` is the reader's time, all from x and ids to the output. `dense`:
epsim.kernels.experts.decode. `two products`: torch._grouped_mm twice and the activation, on rows sorted beforehand;
`grouped layer`: the same with sort and sum. Dense forms use SiLU throughout. `token` and `union`: bytes that a token
and the batch read, for the first input, in sectors of 32. `floor`: the time of reading the union's bytes at the rate of
a kernel that only reads (4 GiB, same run); `reached`: `floor` over the time taken.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import script_parser, write
from device_times import read_bandwidth, report_head, timed, timed_in_turn
from oea_latency import grouped_layer, sorted_rows, two_products

from epsim.kernels.experts import decode
from epsim.kernels.reader.build import build_layer
from epsim.kernels.reader.bytes import ReadBytes, token_bytes, union_bytes
from epsim.kernels.reader.layer import GATES, Gate, ReaderLayer, from_words
from epsim.kernels.reader.read import Experts, read_output
from epsim.kernels.reader.rotate import rotated
from epsim.kernels.reader.screen import Batches, Screen, coordinates

LAYERS, CALLS, REPLAYS = 4, 64, 11
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
BUDGETS = (0.128, 0.178, 0.28)
SHAPES: dict[str, tuple[int, int, int, int, Gate]] = {
    # experts, top-k, hidden, intermediate, gate
    "qwen3-30b-a3b": (128, 8, 2048, 768, "silu"),
    "gemma-4-26b-a4b": (128, 8, 2816, 704, "gelu"),
    "qwen3.5-35b-a3b": (256, 8, 2048, 512, "silu"),
    "own": (64, 8, 512, 256, "silu"),
}


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layers:
    """LAYERS layers of a shape, dense and with sketches. All have the same values, each in its own memory."""

    def __init__(self, shape: tuple[int, int, int, int, Gate]) -> None:
        self.experts, self.top_k, self.hidden, self.inter, self.gate = shape
        self.source = torch.Generator("cuda").manual_seed(1)
        gate_up = self.drawn(self.experts, 2 * self.inter, self.hidden) / self.hidden**0.5
        down = self.drawn(self.experts, self.hidden, self.inter) / self.inter**0.5
        self.sketch = build_layer(gate_up, down)
        self.whole = [(gate_up.clone(), down.clone()) for _ in range(LAYERS)]

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self.source, dtype=torch.bfloat16)

    def readers(self, budget: float) -> list[ReaderLayer]:
        first = ReaderLayer.of(self.sketch, *self.whole[0], self.top_k, budget, self.gate)
        copies = []
        for gate_up, _ in self.whole:
            sketch = type(self.sketch)(**{name: tensor.clone() for name, tensor in first.sketch.tensors().items()})
            copies.append(ReaderLayer(sketch, gate_up, first.down.clone(), first.kept_of, self.gate))
        return copies

    def inputs(self, batch: int) -> list[Given]:
        found = []
        for _ in range(CALLS):
            chosen = torch.rand(batch, self.experts, device="cuda", generator=self.source).topk(self.top_k)
            found.append((self.drawn(batch, self.hidden), chosen.indices, chosen.values.softmax(-1)))
        return found


def read_once(layer: ReaderLayer, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the channels that were read."""
    x, ids, _ = given
    kept = torch.empty(len(x), layer.sizes(ids.shape[1]).words, dtype=torch.int32, device=x.device)
    output = layer.read(*given, kept)
    return output, from_words(kept, ids.shape[1], layer.sketch.intermediate)


def error_of(
    layer: ReaderLayer, given: Given, output: torch.Tensor, taken: torch.Tensor, batches: Batches | None = None
) -> float:
    """The error of an output, relative to float32 arithmetic with the same channels `taken`."""
    x, ids, weights = given
    experts = Experts(layer.gate_up.float(), layer.down.transpose(1, 2).float(), GATES[layer.gate])
    gate, up = Screen(layer.sketch).estimates(x, ids, layer.coordinates, batches)
    wanted = read_output(x.float(), ids, weights, experts, taken, experts.activation(gate) * up, layer.sketch)
    return float((output.float() - wanted).norm() / wanted.norm())


def bytes_of(layer: ReaderLayer, x: torch.Tensor, ids: torch.Tensor, taken: torch.Tensor) -> dict[str, float]:
    sizes = ReadBytes(layer.sketch.hidden, layer.sketch.intermediate, 2, layer.coordinates)
    seen = coordinates(rotated(x.float(), layer.sketch.signs), layer.coordinates)
    token = token_bytes(sizes, ids, taken)
    return {
        "token": float(token.double().mean()),
        "share": float(token.max()) / (ids.shape[1] * sizes.expert),
        "union": float(union_bytes(sizes, ids, taken, seen, layer.sketch.num_experts)),
        "active": float(len(ids.unique())),
    }


def dense_times(layers: Layers, given: list[Given]) -> dict[str, float]:
    """Microseconds of the whole layer, by form."""
    found = {"dense": timed_in_turn(decode, given, layers.whole, REPLAYS)} if len(given[0][0]) <= 64 else {}
    found["grouped layer"] = timed_in_turn(grouped_layer, given, layers.whole, REPLAYS)
    presorted = [sorted_rows(x, ids, layers.experts)[::2] for x, ids, _ in given]
    return found | {"two products": timed_in_turn(two_products, presorted, layers.whole, REPLAYS)}


def read_time(readers: Sequence[Any], given: list[Given]) -> float:
    """Microseconds of a layer by the readers in turn."""
    return timed([partial(reader.read, *g) for g, reader in zip(given, itertools.cycle(readers))], REPLAYS)


def measure(name: str, batches: tuple[int, ...], budgets: tuple[float, ...], rate: float) -> list[dict[str, Any]]:
    layers = Layers(SHAPES[name])
    readers = {budget: layers.readers(budget) for budget in budgets}
    rows = []
    for batch in batches:
        given = layers.inputs(batch)
        row: dict[str, Any] = {"shape": name, "batch": batch} | dense_times(layers, given)
        for budget in budgets:
            us, layer = read_time(readers[budget], given), readers[budget][0]
            output, taken = read_once(layer, given[0])
            read = bytes_of(layer, *given[0][:2], taken)
            floor = read["union"] / rate * 1e6
            own = {"us": us, **read, "floor": floor, "reached": floor / us}
            own["gain"] = {f: row[f] / us for f in ("dense", "grouped layer", "two products") if f in row}
            if batch <= 16:
                own["error"] = error_of(layer, given[0], output, taken)
            row[f"{budget:g}"] = own
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def reader_parser(about: str | None, results: str) -> argparse.ArgumentParser:
    parser = script_parser(about, results)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    return parser


def main() -> None:
    parser = reader_parser(__doc__, "reader_speed.json")
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS))
    options = parser.parse_args()
    rate = read_bandwidth()
    found = report_head() | {"bandwidth": rate, "rows": []}
    print(f"{found['device']}: a kernel that only reads, {rate / 1e12:.2f} TB/s")
    for name in options.shapes:
        found["rows"] += measure(name, tuple(options.batches), tuple(options.budgets), rate)
        write(options.out, found)


if __name__ == "__main__":
    main()
