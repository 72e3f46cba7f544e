"""Part `relocation` of benchmarks/runtime.py: what moving experts adds to a step, by the limit on bytes a step."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from runtime_common import SEED, V3, Bench, placement_of, redundant_on
from runtime_parts import BALANCED, hidden_of

from epsim.models.shapes import LayerShape
from epsim.placement.base import Cluster, Placement
from epsim.policies.stack import parse_stack
from epsim.runtime.layer import ExpertParallelMoE, build_layer
from epsim.runtime.phases import PhaseClock
from epsim.runtime.relocation import Relocation


@dataclass(frozen=True, slots=True)
class Move:
    """A relocation of at most `changes` experts per rank, during steps of `tokens` tokens per rank. bounds: limits on
    the bytes into and out of a rank per step."""

    shape: LayerShape
    redundant: int
    changes: int
    bounds: tuple[int, ...] = (16 << 20, 64 << 20, 256 << 20)
    tokens: int = 256
    exchange: str = "torch"
    dtype: torch.dtype = torch.bfloat16


def relocation(bench: Bench, wanted: Move | None = None) -> list[dict[str, Any]]:
    """One row per bound. layer_before, layer_during: the layer's time before and during the relocation. error: the
    largest relative difference of outputs from those before, which no placement may change."""
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
    expert_bytes, median = shape.expert_bytes // 2 * move.dtype.itemsize, statistics.median
    row = {"bytes_a_step": bound, "steps": step, "experts_moved": moved / expert_bytes}
    here = {"plan": planned, "median_step": median(times), "slowest_step": max(times), "error": far}
    here |= {"layer_before": median(before), "layer_during": median(during)}
    row |= {key: bench.slowest(value) for key, value in here.items()}
    row |= {"in_force": layer.balancer.version == new.version, "exchange": layer.exchange.name}
    layer.exchange.close()
    layer.balancer.collective.close()
    return row | {"gb_s": bound / row["median_step"] / 1e3}


def _layer_us(layer: ExpertParallelMoE, hidden: torch.Tensor, step: int) -> tuple[torch.Tensor, float]:
    layer.clock.times()
    output: torch.Tensor = layer(hidden, step=step)
    return output, sum(layer.clock.times().values())


def _mostly(old: Placement, new: Placement, most: int) -> Placement:
    """The old placement with at most `most` redundant slots per rank changed to those of the new one."""
    slots = old.physical_to_logical[0].clone()
    for rank in range(old.num_ranks):
        first, changed = rank * old.slots_per_rank, 0
        for slot in range(first, first + old.slots_per_rank):
            wanted = int(new.physical_to_logical[0, slot])
            if changed < most and int((slots == slots[slot]).sum()) > 1 and int(slots[slot]) != wanted:
                slots[slot], changed = wanted, changed + 1
    return Placement(slots[None], old.num_experts, old.num_ranks, old.num_nodes)
