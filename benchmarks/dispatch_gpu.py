"""From a rank's top-k ids to physical experts on one CUDA device, without the collective: times by stack and by part.

    python benchmarks/dispatch_gpu.py [--recordings DIR] [--out benchmarks/results/dispatch_gpu.json]

EPLB places 256 experts and redundant ones on a recording of DeepSeek-V3, or on lognormal marginals if there is none.
Tokens draw their top-8 without replacement from a mixture with another recording. The other ranks' counts are made
beforehand. Times are microseconds from replayed CUDA graphs between device events, medians over the inputs.

`alone`: a graph of one count-to-ids, from event to event. `us`: a tenth of ten in a row, each on another layer with ids
of its own. `count`, `solve`, `assign`, `other` (sums and quotas over ranks): that part alone, a tenth of ten in a row.
`host`: the time of the calls on the host without a graph. `torch`: the policies' own tensor form on the same device,
not captured. `equal`: whether both forms give the same ids.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, script_parser, table, write
from device_times import buffers_of, graph, report_head, times_by_input
from split_problems import marginals

from epsim.kernels.dispatch import Dispatcher, Rule
from epsim.kernels.split import prepare
from epsim.placement.base import Placement
from epsim.placement.eplb import rebalance_experts
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.base import Batch, SharedWork
from epsim.policies.nearest import nearest_slots
from epsim.policies.rounding import fixed_point
from epsim.policies.stack import parse_stack

EXPERTS, TOP_K, LAYERS, INPUTS, REPLAYS, RANK = 256, 8, 10, 40, 3, 3
PAIR = ("lplb", "lplb(counts=gathered)")
STACKS = (
    *PAIR, "even", "static", "random", "lplb-sampled", "lplb+waterfill", "lplb+waterfill(candidates=all,counts=local)",
    "lplb(counts=gathered)+waterfill",
)  # fmt: skip
CASES = (
    # ranks, redundant experts, tokens of a rank, stacks
    (16, 32, 4096, STACKS),
    (16, 32, 128, PAIR),
    (16, 32, 16384, ("even", *PAIR)),
    (64, 64, 4096, (*PAIR, "lplb+waterfill")),
)
KERNELS = ("count", "total", "solve", "quotas", "serve", "assign")
OTHER = ("total", "quotas", "serve")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """ids [INPUTS, LAYERS, N, k] of this rank, rows [INPUTS, LAYERS, R, E + 1]: counts and tokens of all ranks."""

    placement: Placement
    ids: torch.Tensor
    rows: torch.Tensor


class InParts(Dispatcher):
    """Launches only the kernels in `only`; the results of others are those of an earlier call."""

    only: tuple[str, ...] = KERNELS
    split: torch.Tensor

    def _launch(self, name: str, grid: tuple[int, ...], early: bool = False) -> None:
        if name in self.only:
            super()._launch(name, grid, early and self.only is KERNELS)

    def _solve(self, loads: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        if "solve" in self.only:
            self.split = super()._solve(loads, layer)
        return self.split


def problem(planned: torch.Tensor, later: torch.Tensor, ranks: int, redundant: int, tokens: int, seed: int) -> Problem:
    generator = torch.Generator("cuda").manual_seed(seed)
    slots, _, _ = rebalance_experts(planned, EXPERTS + redundant, 1, 1, ranks)
    placement = Placement(slots.cuda(), EXPERTS, ranks, 2)
    old, new = ((part / part.sum(1, keepdim=True)).cuda() for part in (planned, later))
    ids, rows = [], []
    for _ in range(INPUTS * LAYERS):
        layer = len(ids) % LAYERS
        part = 0.6 * torch.rand(1, generator=generator, device="cuda")
        noise = 0.3 * torch.randn(EXPERTS, generator=generator, device="cuda")
        popularity = ((1 - part) * old[layer] + part * new[layer]).clamp(min=1e-9).log().float() + noise
        keys = torch.rand(ranks * tokens, EXPERTS, generator=generator, device="cuda").log_().neg_().log_().neg_()
        drawn = keys.add_(popularity).topk(TOP_K).indices.view(ranks, tokens * TOP_K)
        counts = torch.zeros(ranks, EXPERTS + 1, dtype=torch.int64, device="cuda")
        counts.scatter_add_(1, drawn, torch.ones_like(drawn))
        counts[:, -1] = tokens
        ids.append(drawn[RANK].view(tokens, TOP_K).clone())
        rows.append(counts)
    shape = (INPUTS, LAYERS)
    return Problem(placement, torch.stack(ids).unflatten(0, shape), torch.stack(rows).unflatten(0, shape))


def times(run: Callable[[], object], feed: Callable[[int], object]) -> np.ndarray:
    return times_by_input(graph(run), feed, INPUTS, REPLAYS)


def torch_form(bound: BoundStack, ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The policies' own form: of one rank's ids [N, k] and all ranks' counts [R, E + 1], the physical experts [N, k]
    and the shared expert's rank [N]."""
    copies, device = bound.copies, ids.device
    counts = rows[None, None, :, :-1]
    fixed = fixed_point(bound.split.fractions(counts.sum(2), copies), copies)
    steps, layers = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor(bound.setting.layers, device=device)
    token_step = torch.zeros(len(ids), dtype=torch.int64, device=device)
    local = torch.arange(len(ids), device=device)
    batch = Batch(steps, layers, token_step, torch.full_like(local, RANK), ids[:, None], local)
    physical = bound.split.physical_ids(batch, counts, fixed, copies, bound.setting.seed)
    if not bound.stack.shared.dispatches:
        return physical[:, 0], None
    by_source = copies.per_rank(bound.split.quotas(counts, fixed, copies))
    work = SharedWork(
        cost=1.0, seed=bound.setting.seed, top_k=TOP_K, most_experts=TOP_K, steps=steps, layers=layers,
        routed=by_source.sum(2), routed_by_source=by_source, tokens=rows[None, None, :, -1],
        node_of_rank=copies.node_of_rank, batch=batch,
        expert_ranks=torch.where(physical >= 0, physical // copies.placement.slots_per_rank, -1),
    )  # fmt: skip
    return physical[:, 0], bound.stack.shared.token_ranks(work)[:, 0]


def measure(text: str, given: Problem) -> dict[str, Any]:
    placement, tokens = given.placement, given.ids.shape[2]
    stack = parse_stack(text)
    cost = 1.0 if stack.shared.dispatches else 0.0
    numbers = tuple(range(LAYERS))
    whole = bind(stack, placement, Setting(0, cost, TOP_K, numbers))
    rule = Rule.of(whole.split, whole.stack.shared, cost, 0)
    dispatcher = InParts(
        prepare(placement.physical_to_logical.cpu(), placement.num_ranks, EXPERTS), rule, rank=RANK,
        node_of_rank=placement.node_of_rank, layers=numbers, top_k=TOP_K, max_tokens=tokens,
        device=torch.device("cuda"), nearest=nearest_slots(whole.copies) if rule.follow == "nearest" else None,
    )  # fmt: skip
    gathers = rule.collective == "all_gather"
    (ids, counts), feed = buffers_of(given.ids, given.rows if gathers else given.rows.sum(2))

    def one(layer: int) -> Any:
        dispatcher.count(ids[0, layer])
        return dispatcher.assign(layer, counts[0, layer])

    def all_layers() -> None:
        for layer in range(LAYERS):
            one(layer)

    row: dict[str, Any] = {"stack": text, "ranks": placement.num_ranks, "slots": placement.num_physical}
    row |= {"tokens": tokens, "collective": rule.collective}
    row["alone"] = float(np.median(times(lambda: one(0), feed)))
    found = times(all_layers, feed) / LAYERS
    row["us"], row["us_most"] = float(np.median(found)), float(found.max())

    def part(*only: str) -> float:
        dispatcher.only = only
        return float(np.median(times(all_layers, feed))) / LAYERS

    row |= {"count": part("count"), "assign": part("assign"), "other": part(*OTHER) if gathers else 0.0}
    # The split needs this input's sum.
    row["solve"] = part("total", "solve") - (part("total") if gathers else 0.0) if rule.solves else 0.0
    dispatcher.only = KERNELS
    all_layers()
    start_host = time.perf_counter()
    all_layers()
    row["host"] = (time.perf_counter() - start_host) / LAYERS * 1e6

    equal, marks = True, []
    bounds = []
    for layer in range(LAYERS):
        slots = placement.physical_to_logical[layer : layer + 1]
        single = Placement(slots, EXPERTS, placement.num_ranks, placement.num_nodes)
        bounds.append(bind(parse_stack(text), single, Setting(0, cost, TOP_K, (layer,))))
        torch_form(bounds[-1], given.ids[0, layer], given.rows[0, layer])
    for i in range(1, 5):
        for layer in range(LAYERS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            physical, shared = torch_form(bounds[layer], given.ids[i, layer], given.rows[i, layer])
            end.record()
            marks.append((start, end))
            feed(i)
            assigned = one(layer)
            equal = equal and torch.equal(assigned.physical, physical)
            equal = equal and (shared is None or torch.equal(assigned.shared_rank, shared))
    torch.cuda.synchronize()
    row["torch"] = float(np.median([start.elapsed_time(end) for start, end in marks])) * 1e3
    row["equal"] = equal
    return row


def main() -> None:
    parser = script_parser(__doc__, "dispatch_gpu.json")
    parser.add_argument("--recordings", type=Path, default=ROOT / "../shared/traces/deepseek-v3-sglang")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, source = marginals(options.recordings, np.random.default_rng(options.seed))
    planned, later = (torch.from_numpy(part[:LAYERS]) for part in counts)
    print(f"{torch.cuda.get_device_name()}; popularity: {source}")
    rows = []
    for ranks, redundant, tokens, stacks in CASES:
        given = problem(planned, later, ranks, redundant, tokens, options.seed)
        rows += [measure(text, given) for text in stacks]
    table("microseconds", rows)
    write(options.out, report_head() | {"popularity": source, "rows": rows})


if __name__ == "__main__":
    main()
