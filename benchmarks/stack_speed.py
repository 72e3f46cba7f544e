"""Stacks of a router and a reader compared with plain routing and whole experts, from logits to output, on one GPU.

    python benchmarks/stack_speed.py [--out benchmarks/results/stack_speed.json]

The layer is Qwen3-30B-A3B's (128 experts, top-8, hidden 2048, intermediate 768, bf16) at decode, without the product
with the router's matrix. Times are microseconds a layer: a CUDA graph of CALLS layers in a row between device events,
each with the next of LAYERS sets of weights and its own logits and input; the median of REPLAYS. Routing is one launch
of the router's kernel (`route_logits`; with k0 = k it is plain top-k). Experts are `epsim.kernels.experts.decode` or
`epsim.kernels.reader.layer`. `torch routing` is plain top-k as softmax, topk and division.

Logits are `uniform` (independent and normal) or `alike`: SHARED times a normal popularity that all tokens of the batch
share, plus a normal of their own. At a batch of 16, `alike` reads 48.0 experts on average without a policy and 29.9
with k0 = 4; the paper's Qwen3-30B-A3B reads 48.8 and 29.9 (arXiv 2511.02237). `read`: experts that a batch reads, the
mean over CALLS batches.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from common import script_parser, table, write
from device_times import report_head, timed_in_turn
from reader_speed import SHAPES, Layers

from epsim.kernels.experts import decode
from epsim.kernels.router import Rule, route_logits

SHAPE, CALLS, REPLAYS, SHARED = "qwen3-30b-a3b", 16, 11, 0.95
EXPERTS, TOP_K, HIDDEN = SHAPES[SHAPE][:3]
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BUDGET = 0.178
PLAIN, OEA = Rule(((1, TOP_K),)), Rule(((2, 4),))
Form: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], Any]
"""A function of x, logits and the number of the layer."""


def torch_routing(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = logits.softmax(-1).topk(TOP_K, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True)


def by_kernel(rule: Rule) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return lambda logits: route_logits(rule, logits, TOP_K)[:2]


class Stacks:
    def __init__(self) -> None:
        layers = Layers(SHAPES[SHAPE])
        self.whole = layers.whole
        self.readers = layers.readers(BUDGET)
        self.source = torch.Generator("cuda").manual_seed(5)

    def inputs(self, draw: str, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """x [B, H], logits [B, E] of each call."""

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=self.source)

        common = SHARED if draw == "alike" else 0.0
        return [
            (normal(batch, HIDDEN).bfloat16(), common * normal(1, EXPERTS) + normal(batch, EXPERTS))
            for _ in range(CALLS)
        ]

    def forms(self) -> dict[str, Form]:
        whole, readers = self.whole, self.readers

        def dense(route: Any) -> Form:
            return lambda x, logits, layer: decode(x, *route(logits), *whole[layer])

        def read(route: Any) -> Form:
            return lambda x, logits, layer: readers[layer].read(x, *route(logits))

        plain, oea = by_kernel(PLAIN), by_kernel(OEA)
        return {
            "topk": dense(plain),
            "oea(k0=4)": dense(oea),
            "topk-channels(0.178)": read(plain),
            "oea(k0=4)+topk-channels(0.178)": read(oea),
            "torch routing": dense(torch_routing),
            "routing alone": lambda x, logits, layer: plain(logits),
            "oea alone": lambda x, logits, layer: oea(logits),
        }


def measure(stacks: Stacks, draw: str, batch: int) -> dict[str, Any]:
    given = stacks.inputs(draw, batch)
    row: dict[str, Any] = {"routing": draw, "batch": batch}
    for name, rule in (("read", PLAIN), ("read, oea", OEA)):
        row[name] = float(np.mean([int(route_logits(rule, logits, TOP_K)[2]) for _, logits in given]))
    layers = [(number,) for number in range(len(stacks.whole))]
    us = {name: timed_in_turn(form, given, layers, REPLAYS) for name, form in stacks.forms().items()}
    row["us"] = us
    row["gain"] = {name: us["topk"] / value for name, value in us.items() if "alone" not in name and name != "topk"}
    return row


def same(stacks: Stacks) -> float:
    """The largest difference between expert weights of plain routing by the kernel and by torch, over batches."""
    far = 0.0
    for batch in BATCHES:
        _, logits = stacks.inputs("uniform", batch)[0]
        ids, weights = by_kernel(PLAIN)(logits)
        wanted = torch.zeros_like(logits).scatter_(1, *torch_routing(logits))
        far = max(far, float((torch.zeros_like(logits).scatter_(1, ids, weights) - wanted).abs().max()))
    return far


def main() -> None:
    parser = script_parser(__doc__, "stack_speed.json")
    options = parser.parse_args()
    stacks = Stacks()
    found = report_head() | {
        "shape": SHAPE,
        "routing differs by": same(stacks),
        "rows": [measure(stacks, draw, batch) for draw in ("uniform", "alike") for batch in BATCHES],
    }
    for kind in ("us", "gain"):
        names = ("routing", "batch", "read", "read, oea")
        table(kind, [{**{name: row[name] for name in names}, **row[kind]} for row in found["rows"]])
    write(options.out, found)


if __name__ == "__main__":
    main()
