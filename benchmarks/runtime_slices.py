"""Parts of benchmarks/runtime.py on more than the GPUs that are there.

slices: an expert-parallel group of 16 ranks whose expert computation is measured rank by rank: each GPU plays one of
the 16 at a time, with exactly the rows that the policies give that rank. Real times of all 16; no exchange.
relocation: what moving experts adds to a step, by the bound on bytes a step.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from runtime_common import SEED, V3, Bench, placement_of, redundant_on, skewed_ids
from runtime_parts import BALANCED, hidden_of

from epsim.models.shapes import LayerShape, shape_of
from epsim.placement.base import Cluster, Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.base import Batch, SharedWork
from epsim.policies.rounding import fixed_point
from epsim.policies.stack import parse_stack
from epsim.runtime.exchange.base import Received
from epsim.runtime.experts import Experts
from epsim.runtime.layer import ExpertParallelMoE, build_layer
from epsim.runtime.phases import PhaseClock
from epsim.runtime.relocation import Relocation
from epsim.runtime.weights import RandomWeights

RANKS, SPARE = 16, 32
STACKS = ("contiguous", "eplb", "eplb+lplb", "eplb+lplb+waterfill", "eplb+lplb(counts=gathered)+waterfill")
FULL = shape_of("deepseek-v3-layer")


def assigned(text: str, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """ids [16 tokens, k], by source rank -> physical ids [T, k], shared ranks [T], slots a rank. On the CPU."""
    placement = placement_of(text, FULL, RANKS, SPARE, nodes=2)
    bound = bind(parse_stack(text), placement, Setting(SEED, FULL.shared_cost, FULL.top_k, (3,)))
    number = len(ids)
    source = torch.arange(RANKS).repeat_interleave(tokens)
    batch = Batch(
        torch.tensor([0]), torch.tensor([3]), torch.zeros(number, dtype=torch.int64), source, ids[:, None],
        torch.arange(tokens).repeat(RANKS),
    )  # fmt: skip
    counts = torch.stack([torch.bincount(part.flatten(), minlength=FULL.num_experts) for part in ids.split(tokens)])
    copies, split = bound.copies, bound.split
    fixed = fixed_point(split.fractions(counts.sum(0)[None, None], copies), copies)
    physical = split.physical_ids(batch, counts[None, None], fixed, copies, SEED)
    ranks = physical // placement.slots_per_rank
    flat = source[:, None] * RANKS + ranks[:, 0]
    by_source = torch.bincount(flat.flatten(), minlength=RANKS**2).view(1, 1, RANKS, RANKS)
    work = SharedWork(
        cost=FULL.shared_cost, seed=SEED, top_k=FULL.top_k, steps=batch.steps, layers=batch.layers,
        routed=by_source.sum(2), routed_by_source=by_source, tokens=torch.full((1, 1, RANKS), tokens),
        node_of_rank=placement.node_of_rank, batch=batch, expert_ranks=ranks,
    )  # fmt: skip
    return physical[:, 0], bound.stack.shared.token_ranks(work)[:, 0], placement.slots_per_rank


def rows_of(rank: int, physical: torch.Tensor, shared: torch.Tensor, per_rank: int, device: torch.device) -> Received:
    """What that rank would receive: a row for each token with any slot there."""
    local = torch.where(physical // per_rank == rank, physical - rank * per_rank, -1)
    local = torch.cat([local, torch.where(shared == rank, per_rank, -1)[:, None]], dim=1)
    local = local[(local >= 0).any(1)].to(device)
    hidden = torch.randn(len(local), FULL.hidden, device=device, dtype=torch.bfloat16)
    return Received(hidden, None, local, torch.rand(local.shape, device=device), None)


def slices(bench: Bench) -> list[dict[str, Any]]:
    per_rank = (FULL.num_experts + SPARE) // RANKS
    weights = RandomWeights(FULL, SEED, bench.device, torch.bfloat16)
    # The same random weights serve every rank played: values do not change times.
    experts = Experts(FULL, 3, list(range(per_rank)), weights, bench.device, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for tokens in (128, 4096):
        ids = skewed_ids(FULL, RANKS * tokens, 17, bench.device).cpu()
        for text in STACKS:
            if text == "contiguous" and per_rank * RANKS != FULL.num_experts + SPARE:
                continue
            physical, shared, slots = assigned(text, ids, tokens)
            assert slots == per_rank
            times = torch.zeros(RANKS, dtype=torch.float64, device=bench.device)
            loads = torch.zeros(RANKS, dtype=torch.float64, device=bench.device)
            for rank in range(bench.rank, RANKS, bench.size):
                received = rows_of(rank, physical, shared, per_rank, bench.device)
                loads[rank] = float((received.slots >= 0).sum())
                times[rank] = _alone(experts, received)
            dist.all_reduce(times)
            dist.all_reduce(loads)
            row = {"tokens_a_rank": tokens, "stack": text, "slowest": float(times.max()), "mean": float(times.mean())}
            row |= {"time_max_over_mean": float(times.max() / times.mean())}
            row |= {"load_max_over_mean": float(loads.max() / loads.mean()), "peak": float(loads.max())}
            rows.append(row | {"times": times.tolist(), "loads": loads.tolist()})
    return rows


def _alone(run: Any, *args: Any, inner: int = 3, repeats: int = 7) -> float:
    """Microseconds a call on this GPU, without the other."""
    run(*args)
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            run(*args)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / inner)
    return statistics.median(found)


@dataclass(frozen=True, slots=True)
class Move:
    """What a relocation moves: at most `changes` experts a rank, under steps of `tokens` tokens a rank. bounds: on the
    bytes into and out of a rank in a step."""

    shape: LayerShape
    redundant: int
    changes: int
    bounds: tuple[int, ...] = (16 << 20, 64 << 20, 256 << 20)
    tokens: int = 256
    exchange: str = "torch"
    dtype: torch.dtype = torch.bfloat16


def relocation(bench: Bench, wanted: Move | None = None) -> list[dict[str, Any]]:
    """A row a bound. layer_before, layer_during: of steps before it and while it goes on. error: how far outputs come
    to be from those before, which no placement may change."""
    move = wanted or Move(V3, redundant_on(bench.size, V3), 24)
    shape, rows = move.shape, []
    old = placement_of("eplb", shape, bench.size, move.redundant)
    history = torch.randint(1, 10_000, (1, 1, shape.num_experts), generator=torch.Generator().manual_seed(9))
    new = parse_stack("eplb").placement.plan(history, Cluster(bench.size, 1, move.redundant, shape.groups))
    new = _mostly(old, new, move.changes)
    for bound in move.bounds:
        rows.append(_relocated(bench, move, old, new, bound))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _relocated(bench: Bench, move: Move, old: Placement, new: Placement, bound: int) -> dict[str, Any]:
    shape = move.shape
    layer = build_layer(
        shape, parse_stack(BALANCED), old, layer=3, seed=SEED, group=None, device=bench.device, dtype=move.dtype,
        exchange=move.exchange, spare_slots=move.changes, clock=PhaseClock(bench.rank, bench.device, timed=True),
    )  # fmt: skip
    hidden = hidden_of(bench, shape, move.tokens, move.dtype)
    first = layer(hidden, step=0).double()
    before = [_layer_us(layer, hidden, step)[1] for step in range(10)]
    begun = time.perf_counter()
    going = Relocation(layer, new, bound)
    planned = 1e6 * (time.perf_counter() - begun)
    moved, step, far = 0, 0, 0.0
    times, during = [], []
    while not going.done:
        output, took = _layer_us(layer, hidden, step)
        during.append(took)
        far = max(far, float((output.double() - first).norm() / first.norm()))
        dist.barrier()
        moved += going.advance(step)
        times.append(sum(layer.clock.times().values()))
        step += 1
    far = max(far, float((layer(hidden, step=step).double() - first).norm() / first.norm()))
    row = {
        "bytes_a_step": bound,
        "steps": step,
        "experts_moved": moved / (shape.expert_bytes // 2 * move.dtype.itemsize),
    }
    row |= {"plan": bench.slowest(planned), "median_step": bench.slowest(statistics.median(times))}
    row |= {"slowest_step": bench.slowest(max(times)), "error": bench.slowest(far)}
    row |= {"layer_before": bench.slowest(statistics.median(before))}
    row |= {"layer_during": bench.slowest(statistics.median(during))}
    row |= {"in_force": layer.balancer.version == new.version, "exchange": layer.exchange.name}
    layer.exchange.close()
    layer.balancer.collective.close()
    return row | {"gb_s": bound / row["median_step"] / 1e3}


def _layer_us(layer: ExpertParallelMoE, hidden: torch.Tensor, step: int) -> tuple[torch.Tensor, float]:
    layer.clock.times()
    output: torch.Tensor = layer(hidden, step=step)
    return output, sum(layer.clock.times().values())


def _mostly(old: Placement, new: Placement, most: int) -> Placement:
    """The old placement with some of the redundant slots as the new one has them: at most `most` changes a rank."""
    slots = old.physical_to_logical[0].clone()
    for rank in range(old.num_ranks):
        first, changed = rank * old.slots_per_rank, 0
        for slot in range(first, first + old.slots_per_rank):
            wanted = int(new.physical_to_logical[0, slot])
            if changed < most and int((slots == slots[slot]).sum()) > 1 and int(slots[slot]) != wanted:
                slots[slot], changed = wanted, changed + 1
    return Placement(slots[None], old.num_experts, old.num_ranks, old.num_nodes)
