"""Parts `exchange` and `all-reduce`: times communication between ranks, for every power of two of ranks.

Collective: every rank of the group calls both. Smaller groups are the first ranks of the first node, or whole nodes.
deep_ep is timed in CUDA graphs with buffers for the worst case: eager calls wait for the host, which would dominate
with few rows. torch's collectives need their sizes from the host and are timed eagerly.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from epsim.calibrate.machine import DTYPE, Machine
from epsim.cost.calibrated import CollectiveCost, ExchangeTable
from epsim.models.spec import ModelSpec
from epsim.runtime.exchange.base import Exchange
from epsim.runtime.exchange.collectives import TorchExchange
from epsim.runtime.exchange.deep_ep import DeepEPExchange, obstacle
from epsim.runtime.peer import choose_collective
from epsim.runtime.seeds import generator

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CPU_TOKENS = (4, 16, 64)
EXCHANGES = ("torch", "deep_ep")
COUNTS = 257
"""How many numbers a layer's counts are: 256 experts and the tokens."""


@dataclass(frozen=True, slots=True)
class Group:
    """The first `size` ranks, on `nodes` nodes. own: whether this rank is one of them."""

    size: int
    nodes: int
    group: dist.ProcessGroup | None
    own: bool


def groups(machine: Machine) -> Iterator[Group]:
    """Groups of 2, 4, 8, ... ranks, within a node or of whole nodes, and of all ranks. Collective over all ranks."""
    local = machine.size // machine.nodes
    wanted = {machine.size} if machine.size > 1 else set()
    size = 2
    while size < machine.size:
        if size <= local or size % local == 0:
            wanted.add(size)
        size *= 2
    for number in sorted(wanted):
        ranks = list(range(number))
        group = None if number == machine.size else dist.new_group(ranks)
        yield Group(number, max(number // local, 1), group, machine.rank < number)


def exchange_tables(
    machine: Machine, model: ModelSpec, known: Collection[tuple[str, int]], progress: Callable[[str], None]
) -> Iterator[ExchangeTable]:
    """Measures every available exchange on every group, except the known (implementation, ranks), which must be equal
    on every rank. Experts are drawn evenly."""
    for group in groups(machine):
        for name in EXCHANGES:
            if group.own and (name, group.size) not in known:
                table = _table(machine, model, group, name)
                progress(f"{name}, {group.size} ranks: " + ("measured" if table else "not available here"))
                if table is not None:
                    yield table
        dist.barrier()


def collective_costs(machine: Machine) -> list[CollectiveCost]:
    """Measures an all-reduce and an all-gather of a layer's counts as the runtime does them: over peer memory in a CUDA
    graph if GPUs can access each other's memory, else with torch, eagerly."""
    found = []
    for group in groups(machine):
        if group.own:
            collective, _ = choose_collective("auto", group.group, machine.device, COUNTS)
            counts = torch.ones(COUNTS, dtype=torch.int64, device=machine.device)
            for name, call in (("all_reduce", collective.all_reduce), ("all_gather", collective.all_gather)):
                timed = machine.captured_together_us if collective.name == "peer" else machine.together_us
                time = timed(lambda call=call, counts=counts: call(counts), group.group)  # type: ignore[misc]
                found.append(CollectiveCost(name, group.size, group.nodes, time))  # type: ignore[arg-type]
            collective.close()
        dist.barrier()
    return found


def _table(machine: Machine, model: ModelSpec, group: Group, name: str) -> ExchangeTable | None:
    per_rank = -(-model.num_experts // group.size)
    tokens = TOKENS if machine.on_gpu else CPU_TOKENS
    fp8 = name == "deep_ep" and model.dispatch == "fp8"
    exchange: Exchange
    if name == "torch":
        exchange = TorchExchange(group.group, per_rank)
    else:
        if obstacle(machine.device, DTYPE, group.size, model.hidden, per_rank, model.top_k) is not None:
            return None
        exchange = DeepEPExchange(group.group, per_rank, model.hidden, max(tokens), fp8, fixed_size=True)
    rows, times = [], []
    for number in tokens:
        hidden, slots, weights = _tokens(machine, model, number)
        if isinstance(exchange, DeepEPExchange):
            exchange.worst = group.size * number  # as an exchange for so many tokens has it
        received = exchange.dispatch(hidden, slots, weights)
        back = torch.zeros_like(received.hidden, dtype=DTYPE)
        sent = torch.stack([(slots // per_rank == rank).any(1).sum() for rank in range(group.size)])
        arriving = sent.clone()
        dist.all_reduce(arriving, group=group.group)
        busiest = torch.maximum(arriving.amax(), sent.sum())
        dist.all_reduce(busiest, dist.ReduceOp.MAX, group=group.group)
        rows.append(float(busiest))
        out = partial(exchange.dispatch, hidden, slots, weights)
        timed = machine.together_us if exchange.host_sync else machine.captured_together_us
        there = timed(out, group.group)
        both = timed(lambda back=back, out=out: exchange.combine(back, out()), group.group)  # type: ignore[misc]
        times.append((there, max(both - there, 0.01 * both)))
    exchange.close()
    width = model.hidden * DTYPE.itemsize
    dispatched = model.dispatch_row_bytes if fp8 else width
    kept = [place for place, row in enumerate(rows) if place == 0 or row > rows[place - 1]]
    return ExchangeTable(
        **machine.described(),
        implementation=name,
        dtype="fp8" if fp8 else "bf16",
        ranks=group.size,
        nodes=group.nodes,
        dispatch_bytes=tuple(rows[place] * dispatched for place in kept),
        dispatch_us=tuple(times[place][0] for place in kept),
        combine_bytes=tuple(rows[place] * width for place in kept),
        combine_us=tuple(times[place][1] for place in kept),
        model=model.name,
        hidden=model.hidden,
        top_k=model.top_k,
        num_experts=model.num_experts,
        graph=not exchange.host_sync,
    )


def _tokens(machine: Machine, model: ModelSpec, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = generator(machine.device, "exchange", machine.rank, number)
    hidden = torch.randn(number, model.hidden, generator=source, device=machine.device).to(DTYPE)
    keys = torch.rand(number, model.num_experts, generator=source, device=machine.device)
    slots = keys.topk(model.top_k, dim=1).indices
    return hidden, slots, torch.rand(tuple(slots.shape), generator=source, device=machine.device)
