"""Parts of benchmarks/runtime.py that measure a layer.

outputs: the distance of the layer's output from a float64 reference, for both exchanges, bfloat16 and float8 dispatch,
and an idle rank.
exchange: dispatch and combine through our interface, with both exchanges, and deep_ep called directly; GB/s of the rows
that ranks receive.
balance: from expert ids to physical ids and shared ranks, collective included, in a graph; by stack and collective.
phases: the time of each phase of a layer.
graph: the whole layer, eager and as a graph, with and without balancing.
"""

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from runtime_common import QWEN, SEED, V3, Bench, placement_of, redundant_on, skewed_ids

from epsim.models.shapes import LayerShape
from epsim.placement.base import Placement
from epsim.policies.apply import Setting
from epsim.policies.stack import parse_stack
from epsim.runtime.balance_cuda import make_balancer
from epsim.runtime.collective import Collective
from epsim.runtime.exchange.collectives import TorchExchange
from epsim.runtime.exchange.deep_ep import DeepEPExchange
from epsim.runtime.layer import ExpertParallelMoE, build_layer
from epsim.runtime.peer import PeerCollective
from epsim.runtime.phases import PhaseClock
from epsim.runtime.reference import reference_output
from epsim.runtime.weights import RandomWeights

MOST = 4096
BALANCED = "eplb+lplb+waterfill"
PLAIN = "eplb"


def slots_of(bench: Bench, shape: LayerShape) -> int:
    """The slots of a rank, including the shared expert's."""
    return (shape.num_experts + redundant_on(bench.size, shape)) // bench.size + shape.has_shared


def exchanges(bench: Bench, shape: LayerShape) -> dict[str, Any]:
    slots = slots_of(bench, shape)
    found: dict[str, Any] = {"torch": TorchExchange(None, slots)}
    if bench.has_deep_ep:
        found["deep_ep"] = DeepEPExchange(None, slots, shape.hidden, MOST)
        found["deep_ep fp8"] = DeepEPExchange(None, slots, shape.hidden, MOST, True)
    return found


def layer_of(bench: Bench, shape: LayerShape, text: str, exchange: Any, most: int = MOST) -> ExpertParallelMoE:
    placement = placement_of(text, shape, bench.size, redundant_on(bench.size, shape))
    return build_layer(
        shape, parse_stack(text), placement, layer=3, seed=SEED, group=None, device=bench.device, dtype=torch.bfloat16,
        exchange=exchange, max_tokens=most, clock=PhaseClock(bench.rank, bench.device, timed=False),
    )  # fmt: skip


def like(layer: ExpertParallelMoE, exchange: Any) -> ExpertParallelMoE:
    """The same layer and weights with another exchange."""
    clock = PhaseClock(layer.clock.rank, layer.clock.device)
    return ExpertParallelMoE(layer.shape, layer.layer, layer.router, layer.balancer, exchange, layer.experts, clock)


def by_exchange(bench: Bench, routed: str) -> Iterator[tuple[str, ExpertParallelMoE]]:
    """The layer of each shape with each exchange, which is closed afterwards. routed: the stack of layers without a
    shared expert; the others have BALANCED."""
    for shape in (V3, QWEN):
        known = exchanges(bench, shape)
        first = layer_of(bench, shape, BALANCED if shape.has_shared else routed, next(iter(known.values())))
        for name, one in known.items():
            yield name, like(first, one)
            one.close()
        del first
        torch.cuda.empty_cache()


def hidden_of(bench: Bench, shape: LayerShape, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(bench.device).manual_seed(bench.rank + 1)
    return torch.randn(num_tokens, shape.hidden, generator=generator, device=bench.device).to(dtype)


def outputs(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    for name, layer in by_exchange(bench, BALANCED):
        shape, worst = layer.shape, 0.0
        weights = RandomWeights(shape, SEED, bench.device, torch.bfloat16)
        for num_tokens in (48, 0 if bench.rank else 32):
            hidden = hidden_of(bench, shape, num_tokens)
            output, record = layer(hidden, step=num_tokens), layer.record
            assert record is not None
            if num_tokens:
                wanted = reference_output(shape, weights, 3, hidden, record.ids, record.weights, record.shared_weight)
                far = float((output.double() - wanted).norm() / wanted.norm())
                worst = max(worst, far) if far == far else float("inf")
        row = {"shape": shape.name, "experts": shape.num_experts, "exchange": name}
        rows.append(row | {"error": bench.slowest(worst)})
    return rows


def exchange(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    per_rank = slots_of(bench, V3)
    for num_sms in (20, 24, 32, 64) if bench.has_deep_ep else (20,):
        known: dict[str, Any] = {"torch": TorchExchange(None, per_rank)} if num_sms == 20 else {}
        if bench.has_deep_ep:
            known["deep_ep"] = DeepEPExchange(None, per_rank, V3.hidden, MOST, num_sms=num_sms)
            known["fp8"] = DeepEPExchange(None, per_rank, V3.hidden, MOST, True, num_sms=num_sms)
        for num_tokens in (128, 1024, 4096):
            slots, weights = _slots(bench, num_tokens)
            hidden = hidden_of(bench, V3, num_tokens)
            row: dict[str, Any] = {"sms": num_sms, "tokens": num_tokens}
            for name, one in known.items():
                received = one.dispatch(hidden, slots, weights)
                given = (one, hidden, slots, weights, received.hidden.bfloat16())
                row |= _beside_bare(bench, *given) if name == "deep_ep" else {name: bench.time(_there_and_back, *given)}
                row[f"{name}_dispatch"] = bench.time(one.dispatch, hidden, slots, weights)
                row["received_mb"] = len(received.hidden) * V3.hidden * 2 / 1e6
            if "deep_ep" in row:
                fixed = DeepEPExchange(None, per_rank, V3.hidden, num_tokens, False, True, num_sms=num_sms)
                back = torch.zeros(fixed.worst, V3.hidden, dtype=torch.bfloat16, device=bench.device)
                row |= _beside_bare(bench, fixed, hidden, slots, weights, back, graph=True)
                row["dispatch_gb_s"] = row["received_mb"] / row["deep_ep_dispatch"] * 1e3
                fixed.close()
            rows.append(row)
        for one in known.values():
            one.close()
    return rows


def _beside_bare(bench: Bench, one: DeepEPExchange, *given: torch.Tensor, graph: bool = False) -> dict[str, float]:
    """Our exchange and plain deep_ep in turn, the least time of each, because other work disturbs a host."""
    time = bench.time_graph if graph else bench.time
    bare = ours = float("inf")
    for _ in range(3):
        bare = min(bare, time(_bare, one, *given))
        ours = min(ours, time(_there_and_back, one, *given))
    end = "_graph" if graph else ""
    return {f"bare{end}": bare, f"deep_ep{end}": ours, f"over_bare{end}": ours / bare - 1}


def _slots(bench: Bench, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [T, k + 1] of the experts' first copies and of the rank's own shared expert, and weights."""
    ids = skewed_ids(V3, num_tokens, 100 + bench.rank, bench.device)
    home = placement_of(PLAIN, V3, bench.size, redundant_on(bench.size, V3))
    physical = home.logical_to_physical()[0, :, 0].to(bench.device)[ids]
    slots = physical + physical // home.slots_per_rank
    own = torch.full_like(slots[:, :1], (bench.rank + 1) * (home.slots_per_rank + 1) - 1)
    slots = torch.cat([slots, own], dim=1)
    return slots, torch.rand(slots.shape, device=bench.device)


def _bare(
    ours: DeepEPExchange, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor
) -> Any:
    buffer = ours.buffer
    tokens, _, experts, inside, _ = buffer.get_dispatch_layout(slots, ours.size * ours.slots_per_rank)
    _, _, _, _, handle, _ = buffer.dispatch(
        hidden, num_tokens_per_rank=tokens, is_token_in_rank=inside, num_tokens_per_expert=experts, topk_idx=slots,
        topk_weights=weights, num_worst_tokens=ours.worst, config=ours.configs[0],
    )  # fmt: skip
    return buffer.combine(rows, handle, config=ours.configs[1])


def _there_and_back(
    one: Any, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor
) -> Any:
    return one.combine(rows, one.dispatch(hidden, slots, weights))


def balance(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    collectives: dict[str, Collective] = {
        "nccl": Collective(),
        "peer": PeerCollective(None, bench.device, V3.num_experts + 1),
    }
    counts = torch.ones(V3.num_experts + 1, dtype=torch.int64, device=bench.device)
    for name, collective in collectives.items():
        row: dict[str, Any] = {"stack": "(all-reduce alone)", "collective": name}
        row["graph"] = bench.time_graph(collective.all_reduce, counts)
        row["eager"] = bench.time(collective.all_reduce, counts)
        rows.append(row)
    stacks = ("eplb", "eplb+lplb", "eplb+lplb+waterfill", "eplb+lplb(counts=gathered)+waterfill")
    for text in stacks:
        for num_tokens in (128, 4096):
            batches = [skewed_ids(V3, num_tokens, 200 + 10 * n + bench.rank, bench.device) for n in range(8)]
            for name, collective in collectives.items():
                placement = placement_of(text, V3, bench.size, redundant_on(bench.size, V3))
                here = Placement(placement.physical_to_logical.to(bench.device), V3.num_experts, bench.size)
                setting = Setting(SEED, V3.shared_cost, V3.top_k, (3,))
                balancer = make_balancer(parse_stack(text), here, setting, collective, MOST)
                times = [bench.time_graph(balancer.assign, ids, 0) for ids in batches]
                row = {"stack": text, "tokens": num_tokens, "collective": name, "graph": statistics.median(times)}
                row |= {"graph_most": max(times), "eager": bench.time(balancer.assign, batches[0], 0)}
                row["kernels"] = type(balancer).__name__ == "KernelBalancer"
                rows.append(row)
    for collective in collectives.values():
        collective.close()
    return rows


def phases(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    for name, layer in by_exchange(bench, "eplb+lplb"):
        shape = layer.shape
        layer.clock.timed = True
        for num_tokens in (128, 4096):
            hidden = hidden_of(bench, shape, num_tokens)
            ids = skewed_ids(shape, num_tokens, 300 + bench.rank, bench.device)
            for step in range(40):
                if step == 10:
                    dist.barrier()
                    layer.clock.times()
                layer(hidden, step=step, forced_ids=ids)
            by_phase: dict[str, list[float]] = {}
            for (_, _, phase), microseconds in layer.clock.times().items():
                by_phase.setdefault(phase, []).append(microseconds)
            row: dict[str, Any] = {"shape": shape.name, "exchange": name, "tokens": num_tokens}
            row |= {phase: bench.slowest(statistics.median(times)) for phase, times in by_phase.items()}
            record = layer.record
            assert record is not None
            assignments = int(record.received.sum() + record.received_shared)
            work = 6 * shape.hidden * shape.intermediate * assignments / (row["experts"] * 1e6)
            rows.append(row | {"tflop_s": work})
    return rows


def graph(bench: Bench) -> list[dict[str, Any]]:
    if not bench.has_deep_ep:
        return [{"skipped": "no deep_ep"}]
    rows, most = [], 512
    one = DeepEPExchange(None, slots_of(bench, V3), V3.hidden, most, fixed_size=True)
    plain = layer_of(bench, V3, PLAIN, one, most)
    balanced = layer_of(bench, V3, BALANCED, one, most)
    for num_tokens in (64, 128, 512):
        hidden = hidden_of(bench, V3, num_tokens)
        ids = skewed_ids(V3, num_tokens, 400 + bench.rank, bench.device)
        for text, layer in ((PLAIN, plain), (BALANCED, balanced)):
            step = partial(layer, hidden, step=0, forced_ids=ids)
            torch.cuda.synchronize()
            step()
            torch.cuda.set_sync_debug_mode("error")
            step()
            torch.cuda.set_sync_debug_mode("default")
            eager = step().clone()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                output = step()
            output.zero_()
            captured.replay()
            torch.cuda.synchronize()
            row: dict[str, Any] = {"stack": text, "tokens": num_tokens}
            row["differs_from_eager"] = bench.slowest(float((output - eager).abs().max()))
            row["graph"] = bench.time(captured.replay, inner=10, repeats=20)
            row["eager"] = bench.time(step)
            captured.reset()
            rows.append(row)
    one.close()
    for layer in (plain, balanced):
        layer.balancer.collective.close()
    return rows
