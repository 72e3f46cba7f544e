"""Parts `exchange` and `all-reduce`: times communication between ranks, for every power of two of ranks.

All ranks call these functions together. A smaller group is the first ranks of the first node, or the first whole nodes.
deep_ep is timed in CUDA graphs with buffers for the worst case, because eager calls wait for the host, which takes most
of the time with few rows. torch's collectives need their sizes on the host, so they are timed eagerly.
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
"""Numbers in a layer's counts: one for each of 256 experts, and the number of tokens."""


@dataclass(frozen=True, slots=True)
class Group:
    """The first `size` ranks, on `nodes` nodes. is_member: whether this rank is one of them."""

    size: int
    nodes: int
    group: dist.ProcessGroup | None
    is_member: bool


def groups(machine: Machine) -> Iterator[Group]:
    """Groups of 2, 4, 8, ... ranks, within a node or of whole nodes, and the group of all ranks. Collective."""
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
    """Measures every available exchange on every group. Tokens choose experts uniformly. known: pairs (implementation,
    ranks) to leave out, the same on every rank."""
    for group in groups(machine):
        for name in EXCHANGES:
            if group.is_member and (name, group.size) not in known:
                table = _table(machine, model, group, name)
                progress(f"{name}, {group.size} ranks: " + ("measured" if table else "not available here"))
                if table is not None:
                    yield table
        dist.barrier()


def collective_costs(machine: Machine) -> list[CollectiveCost]:
    """Measures an all-reduce and an all-gather of a layer's counts as the runtime does them: over peer memory in a CUDA
    graph if GPUs can access each other's memory, otherwise eagerly with torch."""
    costs = []
    for group in groups(machine):
        if group.is_member:
            collective, _ = choose_collective("auto", group.group, machine.device, COUNTS)
            counts = torch.ones(COUNTS, dtype=torch.int64, device=machine.device)
            for name, call in (("all_reduce", collective.all_reduce), ("all_gather", collective.all_gather)):
                timed = machine.captured_together_us if collective.name == "peer" else machine.together_us
                time = timed(lambda call=call, counts=counts: call(counts), group.group)  # type: ignore[misc]
                costs.append(CollectiveCost(name, group.size, group.nodes, time))  # type: ignore[arg-type]
            collective.close()
        dist.barrier()
    return costs


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
            exchange.worst = group.size * number  # the worst case for this number of tokens
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
        dispatch_us = timed(out, group.group)
        both = timed(lambda back=back, out=out: exchange.combine(back, out()), group.group)  # type: ignore[misc]
        times.append((dispatch_us, max(both - dispatch_us, 0.01 * both)))
    exchange.close()
    width = model.hidden * DTYPE.itemsize
    dispatched = model.dispatch_row_bytes if fp8 else width
    kept = [index for index, row in enumerate(rows) if index == 0 or row > rows[index - 1]]
    return ExchangeTable(
        **machine.described(),
        implementation=name,
        dtype="fp8" if fp8 else "bf16",
        ranks=group.size,
        nodes=group.nodes,
        dispatch_bytes=tuple(rows[index] * dispatched for index in kept),
        dispatch_us=tuple(times[index][0] for index in kept),
        combine_bytes=tuple(rows[index] * width for index in kept),
        combine_us=tuple(times[index][1] for index in kept),
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
