"""What the processes of the runtime's tests on GPUs run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from epsim.models.shapes import LayerShape
from epsim.placement.base import Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.stack import parse_stack
from epsim.runtime.exchange.choose import choose_exchange
from epsim.runtime.exchange.collectives import TorchExchange
from epsim.runtime.layer import ExpertParallelMoE, build_layer
from epsim.runtime.peer import PeerCollective
from epsim.runtime.phases import PhaseError
from epsim.runtime.reference import reference_output
from epsim.runtime.weights import RandomWeights
from epsim.traces.trace import TokenBlock

SHAPE = LayerShape("gpu", 1024, 256, 64, 8, 256, "sigmoid-groups", True, 2.5, 8, 4)
LAYER, SEED, MOST = 3, 11, 512
STACKS = (
    "contiguous",
    "eplb+static",
    "eplb+random",
    "eplb+lplb",
    "eplb+lplb-ipm",
    "eplb+lplb-sampled",
    "eplb+lplb+waterfill",
    "eplb+lplb(counts=gathered)+waterfill(candidates=all)",
    "eplb+even+waterfill(counts=local)",
    "eplb+lplb-sampled+waterfill",
)
SLOW_FORMS = (
    "eplb+lplb(counts=gathered)+waterfill-joint",
    "eplb+lplb(counts=gathered)+waterfill-joint(candidates=visited)",
    "eplb+lplb(counts=gathered,objective=time,a=1,b=20)",
    "eplb+one-copy",
)
"""Which no kernel covers: the policies' own form, on the GPU."""
ROUTERS = (
    "eplb+oea(k0=4)+lplb",
    "eplb+oea(k0=3,union=rank,kmax=9)",
    "eplb+oea-ep(k0=3)+one-copy",
    "eplb+lynx(keep=20)+lplb+waterfill",
    "eplb+mask-low-demand(least=3)+lplb(counts=gathered)",
    "eplb+pruned(k0=3)+random",
)
STEPS = (5, 8, 9)


def slots(size: int, redundant: int = 16) -> torch.Tensor:
    rng = np.random.default_rng(0)
    physical = [*range(SHAPE.num_experts), *rng.integers(0, SHAPE.num_experts, redundant)]
    return torch.from_numpy(rng.permutation(physical))[None]


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """Prefill, then decode with an idle rank, then prefill on one rank and decode on the other."""
    tokens = {5: MOST, 8: 7 * rank, 9: (300, 3)[rank % 2]}[step]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    common = torch.randn(SHAPE.hidden, generator=torch.Generator().manual_seed(step))
    return (torch.randn(tokens, SHAPE.hidden, generator=generator) + common).to(device, torch.bfloat16)


def make(rank: int, size: int, text: str, exchange: Any, collective: Any) -> ExpertParallelMoE:
    device = torch.device("cuda", rank)
    return build_layer(
        SHAPE,
        parse_stack(text),
        Placement(slots(size), SHAPE.num_experts, size),
        layer=LAYER,
        seed=SEED,
        group=None,
        device=device,
        dtype=torch.bfloat16,
        exchange=exchange,
        collective=collective,
        max_tokens=MOST,
        weights=RandomWeights(SHAPE, SEED, dtype=torch.bfloat16),
    )


def error(layer: ExpertParallelMoE, hidden: torch.Tensor, output: torch.Tensor) -> float:
    """|output - reference| / |reference|; NaN never passes a comparison."""
    record = layer.record
    assert record is not None
    assert output.shape == hidden.shape
    if not len(hidden):
        return 0.0
    weights = RandomWeights(SHAPE, SEED, dtype=torch.bfloat16)
    wanted = reference_output(SHAPE, weights, LAYER, hidden, record.ids, record.weights, record.shared_weight)
    return float((output.double() - wanted).norm() / wanted.norm())


def run_stacks(
    rank: int, size: int, exchange_name: str, fp8: bool, fixed: bool, collective: str, stacks: tuple[str, ...] = STACKS
) -> list[Any]:
    """Per stack and step: error, ids [T, k], received."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    exchange: Any = exchange_name
    if fp8 or fixed:
        exchange = choose_exchange(
            exchange_name,
            group=None,
            device=torch.device("cuda", rank),
            dtype=torch.bfloat16,
            hidden=SHAPE.hidden,
            slots_per_rank=slots(size).shape[1] // size + 1,
            columns=SHAPE.top_k + 1,
            max_tokens=MOST,
            fp8=fp8,
            fixed_size=fixed,
        )
    found, shared = [], collective
    for text in stacks:
        layer = make(rank, size, text, exchange, shared)
        exchange, shared = layer.exchange, layer.balancer.collective  # type: ignore[assignment]
        assert layer.exchange.name == exchange_name
        for step in STEPS:
            hidden = batch(step, rank, torch.device("cuda", rank))
            output = layer(hidden, step=step)
            record = layer.record
            assert record is not None
            far = error(layer, hidden, output)
            found.append((far, record.ids.cpu().numpy(), int(record.received.sum()), int(record.received_shared)))
    layer.exchange.close()
    layer.balancer.collective.close()
    return found


def rerouted(rank: int, size: int, collective: Any) -> list[Any]:
    """Router policies: per stack and step error, what the model chose and by which scores, received."""
    found = []
    for text in ROUTERS:
        layer = make(rank, size, text, "torch", collective)
        collective = layer.balancer.collective
        for step in STEPS:
            hidden = batch(step, rank, torch.device("cuda", rank))
            output, record = layer(hidden, step=step), layer.record
            assert record is not None
            chosen, scores = record.chosen.cpu().numpy(), record.scores.cpu().numpy()
            found.append((error(layer, hidden, output), chosen, scores, int(record.received.sum())))
    collective.close()
    return found


def through_nccl(rank: int, size: int) -> bool:
    """Every collective that a run makes, on a group of both backends, in a group of one too, where layers make none."""
    device = torch.device("cuda", rank)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert group is not None
    values = torch.arange(257, device=device) + rank
    wanted = torch.stack([torch.arange(257) + other for other in range(size)])
    summed = values.clone()
    dist.all_reduce(summed, group=group)
    gathered = values.new_empty(size, 257)
    dist.all_gather_into_tensor(gathered.view(-1), values, group=group)
    right = torch.equal(summed.cpu(), wanted.sum(0)) and torch.equal(gathered.cpu(), wanted)
    exchange = TorchExchange(group, 3)
    rows = torch.full((2 * size, 64), float(rank), device=device, dtype=torch.bfloat16)
    moved = exchange._moved(rows, [2] * size, [2] * size)
    right &= moved[:, 0].tolist() == [float(other) for other in range(size) for _ in range(2)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return right and objects == list(range(size))


def expected(text: str, size: int, step: int, ids: list[Any]) -> tuple[list[int], list[int]]:
    """The simulator's routed and shared loads by rank."""
    setting = Setting(SEED, SHAPE.shared_cost, SHAPE.top_k, (LAYER,))
    bound = bind(parse_stack(text), Placement(slots(size), SHAPE.num_experts, size), setting)
    source = np.concatenate([np.full(len(part), rank) for rank, part in enumerate(ids)])
    load = bound.load(TokenBlock(np.array([step]), np.zeros_like(source), source, np.concatenate(ids)[:, None]))
    return load.routed[0, 0].tolist(), load.shared_tokens[0, 0].tolist()


def share(rank: int, size: int) -> bool:
    """Sums and gathers over peer memory, eager and replayed, against what every rank knows."""
    device = torch.device("cuda", rank)
    peer = PeerCollective(None, device, 300)
    right = True
    for call in range(200):
        words = 1 + call * 7 % 300
        everyone = [torch.randint(-(2**40), 2**40, (words,), generator=_seeded(call, r)) for r in range(size)]
        mine = everyone[rank].to(device)
        wanted = torch.stack(everyone)
        right &= torch.equal(peer.all_reduce(mine).cpu(), wanted.sum(0))
        right &= torch.equal(peer.all_gather(mine).cpu(), wanted)
    static = torch.zeros(257, dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(3):
            summed = peer.all_reduce(static)
        kept = summed.clone()
    for call in range(50):
        static.fill_(call + rank)
        graph.replay()
        right &= kept.tolist() == [call * size + size * (size - 1) // 2] * 257
    graph.reset()
    peer.close()
    return right


def _seeded(call: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(call * 64 + rank)


def capture(rank: int, size: int, text: str) -> dict[str, Any]:
    """A whole layer with deep_ep: without synchronisation, captured, and replayed on other tokens."""
    device = torch.device("cuda", rank)
    exchange = choose_exchange(
        "deep_ep",
        group=None,
        device=device,
        dtype=torch.bfloat16,
        hidden=SHAPE.hidden,
        slots_per_rank=slots(size).shape[1] // size + 1,
        columns=SHAPE.top_k + 1,
        max_tokens=MOST,
        fixed_size=True,
    )
    layer = make(rank, size, text, exchange, "peer")
    hidden = batch(5, rank, device)
    for step in range(3):
        layer(hidden, step=step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    layer(hidden, step=3)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = layer(hidden, step=0)
    record = layer.record
    assert record is not None
    errors, loads = [], []
    for step in (40, 41):
        hidden.copy_(batch(5, rank, device).flip(0) * (1 + step % 2))
        layer.balancer.begin(step)
        graph.replay()
        torch.cuda.synchronize()
        layer.record = record
        errors.append(error(layer, hidden, output))
        ids = record.ids.cpu().numpy()
        loads.append((step, ids, int(record.received.sum()), int(record.received_shared)))
    graph.reset()
    layer.exchange.close()
    layer.balancer.collective.close()
    return {"errors": errors, "loads": loads}


def not_a_number(rank: int, size: int) -> str:
    """Rank 1's scores are NaN: no rank waits for ever, and rank 1 says so once asked."""
    layer = make(rank, size, "eplb+lplb", "torch", "torch")
    hidden = batch(5, rank, torch.device("cuda", rank))
    layer(hidden, step=0)
    layer.raise_if_bad()
    if rank == 1:
        hidden[7] = torch.nan
    layer(hidden, step=1)
    try:
        layer.raise_if_bad()
    except PhaseError as error:
        layer.raise_if_bad()  # Told once.
        return str(error)
    return ""


def synchronises(rank: int, size: int) -> bool:
    """Whether the check of `capture` can fail: torch's exchange waits for sizes."""
    layer = make(rank, size, "eplb", "torch", "torch")
    hidden = batch(5, rank, torch.device("cuda", rank))
    layer(hidden, step=0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(hidden, step=1)
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return False
