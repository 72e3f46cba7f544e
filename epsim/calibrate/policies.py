"""Part `policies`: times the runtime's balancers (counting, solving, assigning) on one device, as one rank of a group.

No collective is called: all other ranks are assumed to have this rank's counts. Balancers with kernels are timed in a
CUDA graph. All others wait for the device, so they are timed eagerly; slow ones are timed only once.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch

from epsim.calibrate.machine import SLOW_US, Call, Machine
from epsim.cost.calibrated import PolicyCost
from epsim.cost.policy_time import table_key
from epsim.models.spec import ModelSpec
from epsim.placement.base import Cluster, Placement
from epsim.policies.apply import Setting
from epsim.policies.base import RouterWork
from epsim.policies.one_copy import held_by_rank
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.runtime.balance import Balancer
from epsim.runtime.balance_cuda import KernelBalancer, make_balancer
from epsim.runtime.collective import Collective
from epsim.runtime.seeds import generator

STACKS = (
    "eplb", "eplb+static", "eplb+random", "eplb+lplb", "eplb+lplb(counts=gathered)", "eplb+lplb-sampled",
    "eplb+lplb-ipm", "eplb+waterfill", "eplb+lplb+waterfill", "eplb+lplb(counts=gathered)+waterfill",
    "eplb+lplb-ipm+waterfill", "eplb+lplb+waterfill-joint", "eplb+lplb(counts=gathered)+waterfill-joint",
    "eplb+lplb(objective=time,a=1,b=100)", "eplb+one-copy",
)  # fmt: skip
ROUTERS = ("pruned(k0=2)", "oea(k0=2)", "oea-ep(k0=2)", "lynx(keep=32)", "mask-low-demand(least=2)")
RANKS = (2, 16, 8, 32)
TOKENS = (16, 128, 1024, 4096)
CPU_RANKS, CPU_TOKENS = (4,), (8, 64)
DRAWS = 4
MOST_ROUTED = 256
"""The most tokens per rank for routers, because they act only on decode steps, which are small."""


class Played(Collective):
    """Computes what a rank of `size` ranks would receive if all ranks had the same values. Sends nothing."""

    name = "played"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values.mul_(self.size)

    def loads_and_tokens(self, loads: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.all_reduce(loads.clone()), tokens.repeat(self.size)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.expand(self.size, *values.shape).contiguous()


def group_sizes(machine: Machine, model: ModelSpec) -> Iterator[tuple[int, int]]:
    """Yields (ranks, redundant) to simulate, first for this machine's number of ranks. redundant: an eighth of the
    experts, rounded up to a multiple of the ranks."""
    for ranks in dict.fromkeys((machine.size, *RANKS) if machine.on_gpu else CPU_RANKS):
        if ranks == 1:
            continue
        redundant = -(-model.num_experts // 8 // ranks) * ranks
        if ranks <= model.num_experts and (model.num_experts + redundant) % ranks == 0:
            yield ranks, redundant


def policy_costs(
    machine: Machine,
    model: ModelSpec,
    ranks: int,
    redundant: int,
    known: Collection[str],
    progress: Callable[[str], None],
) -> Iterator[PolicyCost]:
    """Measures every stack and router that fits the model, except the known ones, and yields each cost at once."""
    tokens = TOKENS if machine.on_gpu else CPU_TOKENS
    for text in STACKS:
        stack = parse_stack(text)
        if stack.shared.dispatches and not model.shared_intermediate:
            continue
        key = table_key(stack.split, stack)
        if key in known:
            continue
        measure = partial(_balance_us, machine, model, stack, ranks, redundant)
        times = {tokens[0]: measure(tokens[0])}
        # A slow policy spends its time in a solver, whose time hardly depends on tokens: measure the two ends.
        times |= {number: measure(number) for number in (tokens[1:] if times[tokens[0]] < SLOW_US else tokens[-1:])}
        progress(f"{key}, {ranks} ranks: {times[tokens[0]]:,.0f} to {times[tokens[-1]]:,.0f} us")
        yield PolicyCost(key, ranks, redundant, tuple(map(float, times)), tuple(times.values()))
    for text in ROUTERS:
        stack = parse_stack(f"eplb+{text}")
        key = stack.router.table_key
        if key in known:
            continue
        sizes = [number for number in tokens if number <= MOST_ROUTED]
        router_us = tuple(_route_us(machine, model, stack, ranks, redundant, number) for number in sizes)
        progress(f"{key}, {ranks} ranks: {router_us[0]:,.0f} to {router_us[-1]:,.0f} us")
        yield PolicyCost(key, ranks, redundant, tuple(map(float, sizes)), router_us)


def _balance_us(
    machine: Machine, model: ModelSpec, stack: PolicyStack, ranks: int, redundant: int, tokens: int
) -> float:
    balancer = _balancer(machine, model, stack, ranks, redundant, tokens)
    batches = [_chosen(machine, model, tokens, draw)[1] for draw in range(DRAWS)]
    calls: list[Call] = [lambda ids=ids: balancer.assign(ids, 0) for ids in batches]  # type: ignore[misc]
    captured = isinstance(balancer, KernelBalancer)
    return machine.alone_us(calls) if captured else machine.eager_us(calls)


def _route_us(machine: Machine, model: ModelSpec, stack: PolicyStack, ranks: int, redundant: int, tokens: int) -> float:
    balancer = _balancer(machine, model, stack, ranks, redundant, tokens)
    holds, total = balancer.bound.copies.once(held_by_rank)[0], balancer.collective.all_reduce
    decode = torch.ones(tokens, dtype=torch.bool, device=machine.device)
    calls: list[Call] = []
    for draw in range(DRAWS):
        scores, ids = _chosen(machine, model, tokens, draw)
        work = RouterWork(scores, scores, ids, scores.gather(1, ids), decode, holds, total)
        calls.append(partial(stack.router.route, work))
    return machine.eager_us(calls)


def _balancer(
    machine: Machine, model: ModelSpec, stack: PolicyStack, ranks: int, redundant: int, tokens: int
) -> Balancer:
    history = (_popularity(model) * 1e4).to(torch.int64)[None, None]
    planned = stack.placement.plan(history, Cluster(ranks, 1, redundant, 1))
    placement = Placement(planned.physical_to_logical.to(machine.device), model.num_experts, ranks)
    setting = Setting(seed=0, shared_cost=model.shared_cost, top_k=model.top_k, layers=(0,))
    return make_balancer(stack, placement, setting, Played(ranks // 2, ranks), tokens)


def _popularity(model: ModelSpec) -> torch.Tensor:
    source = generator(torch.device("cpu"), "popularity", model.num_experts)
    return torch.randn(model.num_experts, generator=source, dtype=torch.float64).mul(0.9).exp()


def _chosen(machine: Machine, model: ModelSpec, tokens: int, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [T, E] and chosen experts [T, k]. The popularity of experts has drifted since the placement was planned,
    by lognormal noise with a spread of 0.2."""
    source = generator(torch.device("cpu"), "tokens", tokens, draw)
    liked = _popularity(model).log() + 0.2 * torch.randn(model.num_experts, generator=source, dtype=torch.float64)
    noise = torch.rand(tokens, model.num_experts, generator=source).clamp_(1e-9, 1 - 1e-7)
    scores = (liked.float() - torch.log(-torch.log(noise))).softmax(1).to(machine.device)
    return scores, scores.topk(model.top_k, dim=1).indices
