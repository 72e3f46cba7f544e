"""What the processes of the runtime's tests on GPUs run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from epsim.placement.base import Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.stack import parse_stack
from epsim.runtime.exchange.choose import choose_exchange
from epsim.runtime.layer import ExpertParallelMoE, build_layer
from epsim.runtime.peer import PeerCollective
from epsim.runtime.phases import PhaseError
from epsim.runtime.reference import reference_output
from epsim.runtime.shapes import LayerShape
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


def run_stacks(rank: int, size: int, exchange_name: str, fp8: bool, fixed: bool, collective: str) -> list[Any]:
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
    for text in STACKS:
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
    return found


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
    layer.exchange.close()
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
