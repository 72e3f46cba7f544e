"""Times of a mixture-of-experts layer at decode, by the number of experts that a batch reads, and of its router.

    python benchmarks/oea_latency.py [--out benchmarks/results/oea_latency.json]

It needs one CUDA device. The layer is Qwen3-30B-A3B's: 128 experts, top-8, hidden 2048, intermediate 768, bf16. A batch
has 16 tokens unless stated otherwise. To make a batch read exactly T experts, its tokens choose only among T random
experts. All times are microseconds per layer. A CUDA graph of CALLS calls is timed with CUDA events, and divided by
CALLS; the result is the median of REPLAYS replays. Every call has its own routing and the next of LAYERS weight sets.

`latency` compares these implementations ("form") of the layer:

- `ours`: epsim.kernels.experts.decode, from expert ids [B, k] to the layer's output. `triton`: the same in Triton.
- `two grouped products`: torch._grouped_mm, the activation, and torch._grouped_mm again. The rows are sorted by expert
  before the measurement. `grouped layer` also measures the sort of the rows and the sum over each token's experts.
- `batched_mm`, `grouped_mm`, `eager`: the experts of Qwen3-MoE in transformers. `eager` cannot be captured in a CUDA
  graph, so it is called directly.

For each form, `fixed`, `slope` and `r2` describe the least-squares line of time against T. `to 64` is the same line for
T up to 64, which is about the range at decode. The other parts of the report use `ours` or the router's kernel:

- `paper`: T is drawn around the paper's mean for each k0, with standard deviation 4. `normalised` is the time divided
  by the time at k0 = 8.
- `padding`: a batch of 7 tokens; the same batch padded to 8 with a masked row; the same batch padded to 8 with a row
  that chooses experts; a batch of 8 tokens.
- `batches`: the time by batch size, for tokens that choose their experts uniformly.
- `router`: the router's kernel from logits with oea(k0=3) (`logits`), with OEA's general form (`logits, general`), and
  from scores and chosen experts (`choice`). `row` is the time per call in a graph of 20 calls, `alone` that of a graph
  with one call.
- `uniform`: the mean number of experts that a batch reads if its tokens choose k0 of N experts uniformly, by the
  router's kernel over BATCHES batches, and by the formula N (1 - (1 - k0 / N)^B).
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from common import fit, script_parser, write
from device_times import report_head, timed, timed_in_turn

from epsim.kernels.experts import decode, plain
from epsim.kernels.experts.tiles import tiled
from epsim.kernels.router import Rule, reroute, route_logits

EXPERTS, TOP_K, HIDDEN, INTER, BATCH = 128, 8, 2048, 768, 16
LAYERS, CALLS, REPLAYS, BATCHES = 5, 20, 11, 2000
GRID = (8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 80, 96, 112, 128)
PAPER_T = {3: 25.1, 4: 29.9, 5: 35.1, 6: 40.3, 7: 44.4, 8: 48.8}
Form: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""A function of hidden, ids, weights, gate_up and down."""


def forced(active: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    """[B, k] int64 over exactly `active` experts, k <= active <= B k."""
    chosen = torch.randperm(EXPERTS, generator=generator)[:active]
    rounds = -(-batch * TOP_K // active)
    # The same order each round: 8 in a row are 8 different ones.
    return chosen.repeat(rounds)[: batch * TOP_K].reshape(batch, TOP_K)[torch.randperm(batch, generator=generator)]


class Bench:
    def __init__(self) -> None:
        device = torch.Generator("cuda").manual_seed(1)
        self.generator = torch.Generator().manual_seed(2)

        def drawn(*shape: int) -> torch.Tensor:
            values = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            return values.normal_(0, shape[-1] ** -0.5, generator=device)

        self.layers = [(drawn(EXPERTS, 2 * INTER, HIDDEN), drawn(EXPERTS, HIDDEN, INTER)) for _ in range(LAYERS)]
        self.hidden = torch.randn(64, HIDDEN, device="cuda", generator=device).bfloat16()
        self.weights = torch.rand(64, TOP_K, device="cuda", generator=device).softmax(-1)

    def time(self, form: Form, routings: list[torch.Tensor], captured: bool = True, replays: int = REPLAYS) -> float:
        """Microseconds of a call for each routing [B, k], with the layers in turn."""
        inputs = [(self.hidden[: len(ids)], ids.cuda(), self.weights[: len(ids)]) for ids in routings]
        return timed_in_turn(form, inputs, self.layers, replays, captured)

    def routings(self, active: int, batch: int = BATCH, calls: int = CALLS) -> list[torch.Tensor]:
        return [forced(active, batch, self.generator) for _ in range(calls)]

    def error(self, form: Form, batch: int = BATCH) -> float:
        """The largest relative error of a form's output against float32, over four numbers of active experts."""
        found = []
        for active in (8, 25, 50, 100):
            ids = forced(min(active, batch * TOP_K), batch, self.generator).cuda()
            given = (self.hidden[:batch], ids, self.weights[:batch], *self.layers[0])
            wanted = plain(given[0].float(), *given[1:])
            found.append(float((form(*given).float() - wanted).norm() / wanted.norm()))
        return max(found)


def sorted_rows(
    hidden: torch.Tensor, ids: torch.Tensor, num_experts: int = EXPERTS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rows sorted by expert, the order of the pairs, and the index at which each expert's rows end."""
    flat, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(flat, torch.arange(num_experts, device=ids.device), right=True).to(torch.int32)
    return hidden[order // ids.shape[1]], order, ends


def two_products(rows: torch.Tensor, ends: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    grouped: Any = torch._grouped_mm
    gate, up = grouped(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return grouped(F.silu(gate) * up, down.transpose(1, 2), offs=ends)


def grouped_layer(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows, order, ends = sorted_rows(hidden, ids, len(gate_up))
    outputs = two_products(rows, ends, gate_up, down)
    pairs = torch.empty_like(outputs)
    pairs[order] = outputs
    return (pairs.view(*ids.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)


def of_transformers(name: str) -> Form:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=HIDDEN, moe_intermediate_size=INTER
    )
    config._experts_implementation = name
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)

    def run(
        hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
        return experts(hidden, ids, weights.to(hidden.dtype))

    return run


def latency(bench: Bench) -> list[dict[str, Any]]:
    """One row per form: its error, latencies over GRID, and the lines through those up to T = 64 and through all."""
    forms: dict[str, Form] = {"ours": decode, "triton": tiled, "grouped layer": grouped_layer}
    forms |= {name: of_transformers(name) for name in ("grouped_mm", "batched_mm", "eager")}
    rows: list[dict[str, Any]] = []
    for name in (*forms, "two grouped products"):
        row: dict[str, Any] = {"form": name, "T": [], "us": []}
        slow = name in ("eager", "batched_mm")
        try:
            if name in forms:
                row["error"] = bench.error(forms[name])
            for active in GRID[::3] if slow else GRID:
                routings = bench.routings(active, calls=5 if slow else CALLS)
                if name == "two grouped products":
                    inputs = [sorted_rows(bench.hidden[: len(ids)], ids.cuda())[::2] for ids in routings]
                    us = timed_in_turn(two_products, inputs, bench.layers, REPLAYS)
                else:
                    us = bench.time(forms[name], routings, name != "eager", 5 if slow else REPLAYS)
                row["T"].append(active)
                row["us"].append(us)
            row |= fit(row["T"], row["us"])
            few = sum(active <= 64 for active in row["T"])
            row["to 64"] = fit(row["T"][:few], row["us"][:few])
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
    return rows


def at_papers_means(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    draws = np.random.default_rng(3)
    for k0, mean in PAPER_T.items():
        spread = draws.normal(size=100)
        active = np.round(mean + 4 * (spread - spread.mean())).astype(int).clip(TOP_K, EXPERTS)
        routings = [forced(int(t), BATCH, bench.generator) for t in active]
        found[str(k0)] = {"T": float(active.mean()), "us": bench.time(decode, routings)}
    for row in found.values():
        row["normalised"] = row["us"] / found["8"]["us"]
    return found


def padding(bench: Bench) -> dict[str, float]:
    eight = [torch.rand(8, EXPERTS, generator=bench.generator).topk(TOP_K, dim=1).indices for _ in range(3 * CALLS)]
    masked = [torch.cat([ids[:7], torch.full_like(ids[:1], -1)]) for ids in eight]
    cases = {"7": [ids[:7] for ids in eight], "7 padded to 8, masked": masked}
    cases |= {"7 padded to 8, not masked": eight, "8": eight[::-1]}
    return {name: bench.time(decode, routings) for name, routings in cases.items()}


def same_bits(bench: Bench, form: Form, batch: int, runs: int = 30) -> bool:
    """Whether all runs on the same inputs give the same bits."""
    ids = torch.rand(batch, EXPERTS, generator=bench.generator).topk(TOP_K).indices.cuda()
    given = (bench.hidden[:batch], ids, bench.weights[:batch], *bench.layers[1])
    first = form(*given)
    return all(torch.equal(first, form(*given)) for _ in range(runs))


def batches(bench: Bench) -> list[dict[str, Any]]:
    """One row per batch size, under uniform top-8."""
    rows = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        routings = [torch.rand(batch, EXPERTS, generator=bench.generator).topk(TOP_K).indices for _ in range(CALLS)]
        active = float(np.mean([len(ids.unique()) for ids in routings]))
        us = {"ours": bench.time(decode, routings), "triton": bench.time(tiled, routings)}
        bits = same_bits(bench, decode, batch) and same_bits(bench, tiled, batch)
        rows.append({"batch": batch, "T": active, "error": bench.error(decode, batch), "same bits": bits, **us})
    return rows


def router(bench: Bench) -> list[dict[str, Any]]:
    rules = {"logits": Rule(((2, 3),)), "logits, general": Rule(((2, 3),), p=0.7, kmax=9, maxp=32)}
    rows = []
    for experts, batch in [(128, b) for b in (1, 8, 16, 32, 64, 128, 256, 512)] + [(512, 16), (512, 512)]:
        row: dict[str, Any] = {"experts": experts, "batch": batch}
        logits = [2 * torch.randn(batch, experts, device="cuda") for _ in range(20)]
        kinds = {name: [partial(route_logits, rule, x, TOP_K) for x in logits] for name, rule in rules.items()}
        kinds["choice"] = []
        live = torch.ones(batch, dtype=torch.bool, device="cuda")
        for scores in [x.softmax(-1) for x in logits]:
            weights, ids = scores.topk(TOP_K)
            kinds["choice"].append(partial(reroute, rules["logits"], scores, scores, ids, weights, live))
        for name, calls in kinds.items():
            row[name] = {"row": timed(calls, 21), "alone": float(np.median([timed([c], 5) for c in calls]))}
        rows.append(row)
    return rows


def uniform() -> list[dict[str, Any]]:
    rows = []
    logits = torch.rand(BATCHES, BATCH, EXPERTS, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    for k0 in PAPER_T:
        active = route_logits(Rule(((1, k0),)), logits, TOP_K)[2].double()
        error = float(active.std()) / BATCHES**0.5
        wanted = EXPERTS * (1 - (1 - k0 / EXPERTS) ** BATCH)
        rows.append({"k0": k0, "T": float(active.mean()), "error": error, "formula": wanted})
    return rows


def main() -> None:
    parser = script_parser(__doc__, "oea_latency.json")
    options = parser.parse_args()
    bench = Bench()
    found = report_head() | {
        "router": router(bench),
        "uniform": uniform(),
        "latency": latency(bench),
        "paper": at_papers_means(bench),
        "padding": padding(bench),
        "batches": batches(bench),
    }
    for name, rows in found.items():
        print(f"== {name}", *(map(json.dumps, rows) if isinstance(rows, list) else [rows]), sep="\n")
    write(options.out, found)


if __name__ == "__main__":
    main()
