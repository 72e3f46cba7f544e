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

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from command import command
from common import RESULTS, table, write
from device_times import timed
from reader_speed import SHAPES, Layers

from epsim.kernels.experts import decode
from epsim.kernels.router import Rule, route_logits

SHAPE, CALLS, REPLAYS, SHARED = "qwen3-30b-a3b", 16, 11, 0.95
EXPERTS, TOP_K, HIDDEN = SHAPES[SHAPE][:3]
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BUDGET = 0.178
PLAIN, OEA = Rule(((1, TOP_K),)), Rule(((2, 4),))
Whole: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def torch_routing(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = logits.softmax(-1).topk(TOP_K, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True)


def by_kernel(rule: Rule) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return lambda logits: route_logits(rule, logits, TOP_K)[:2]


class Stacks:
    def __init__(self) -> None:
        layers = Layers(SHAPES[SHAPE])
        self.whole: list[Whole] = layers.whole
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

    def forms(self) -> dict[str, Callable[[int, torch.Tensor, torch.Tensor], Any]]:
        """Of a layer's number, x and logits."""
        whole, readers = self.whole, self.readers

        def dense(route: Any) -> Callable[[int, torch.Tensor, torch.Tensor], Any]:
            return lambda layer, x, logits: decode(x, *route(logits), *whole[layer])

        def read(route: Any) -> Callable[[int, torch.Tensor, torch.Tensor], Any]:
            return lambda layer, x, logits: readers[layer].read(x, *route(logits))

        plain, oea = by_kernel(PLAIN), by_kernel(OEA)
        return {
            "topk": dense(plain),
            "oea(k0=4)": dense(oea),
            "topk-channels(0.178)": read(plain),
            "oea(k0=4)+topk-channels(0.178)": read(oea),
            "torch routing": dense(torch_routing),
            "routing alone": lambda layer, x, logits: plain(logits),
            "oea alone": lambda layer, x, logits: oea(logits),
        }


def measure(stacks: Stacks, draw: str, batch: int) -> dict[str, Any]:
    given = stacks.inputs(draw, batch)
    row: dict[str, Any] = {"routing": draw, "batch": batch}
    for name, rule in (("read", PLAIN), ("read, oea", OEA)):
        row[name] = float(np.mean([int(route_logits(rule, logits, TOP_K)[2]) for _, logits in given]))
    us = {}
    for name, form in stacks.forms().items():
        calls: list[Callable[[], Any]] = []
        for (x, logits), layer in zip(given, itertools.cycle(range(len(stacks.whole))), strict=False):
            calls.append(lambda f=form, own=(layer, x, logits): f(*own))  # type: ignore[misc]
        us[name] = timed(calls, REPLAYS)
    row["us"] = us
    row["gain"] = {name: us["topk"] / value for name, value in us.items() if "alone" not in name and name != "topk"}
    return row


def same(stacks: Stacks) -> float:
    """The largest difference of plain routing by the kernel and by torch, over batches, in weights of the experts."""
    far = 0.0
    for batch in BATCHES:
        _, logits = stacks.inputs("uniform", batch)[0]
        ids, weights = by_kernel(PLAIN)(logits)
        wanted = torch.zeros_like(logits).scatter_(1, *torch_routing(logits))
        far = max(far, float((torch.zeros_like(logits).scatter_(1, ids, weights) - wanted).abs().max()))
    return far


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "stack_speed.json")
    options = parser.parse_args()
    stacks = Stacks()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": command("stack_speed.py"),
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
