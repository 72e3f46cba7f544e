"""What a stack's policies add to a layer: as a calibration measured it, else as the hardware's specification states."""

from __future__ import annotations

import torch

from epsim.cost.calibrated import PolicyTable
from epsim.kernels.dispatch.rule import Rule
from epsim.machines.hardware import PolicyCosts
from epsim.policies.ipm import LplbIpm
from epsim.policies.joint import WaterfillJoint
from epsim.policies.shared import Local
from epsim.policies.splits import Even, Lplb
from epsim.policies.stack import PolicyStack


def split_key(stack: PolicyStack, redundant: bool) -> str:
    """How a split is named where its cost is looked up: arguments that are numbers do not count."""
    split = stack.split if redundant or isinstance(stack.split, LplbIpm) else Even()
    if isinstance(split, Lplb) and split.objective == "time":
        return "lplb(objective=time)"
    return "lplb(counts=gathered)" if isinstance(split, Lplb) and split.counts == "gathered" else split.name


def assumed_us(costs: PolicyCosts, stack: PolicyStack, redundant: bool, across: bool) -> float:
    """By the specification alone. LPLB as published reduces and solves even without redundancy. across: nodes."""
    collective = costs.all_reduce_nodes_us if across else costs.all_reduce_us
    key = split_key(stack, redundant)
    published, solved = isinstance(stack.split, LplbIpm), key.startswith("lplb")
    placed = not isinstance(stack.shared, Local)
    time = 0.0
    if stack.router.acts:
        time += costs.of_router + stack.router.whole_batch * collective
    if solved or (placed and getattr(stack.shared, "counts", "global") == "global"):
        time += collective
    if solved:
        solve = costs.of_timed if key == "lplb(objective=time)" else costs.solve_us
        time += (costs.published_solve_us if published else solve) + costs.assign_us
    if placed:
        time += costs.of_joint if isinstance(stack.shared, WaterfillJoint) else costs.waterfill_us
    return time


def policy_us(
    costs: PolicyCosts,
    measured: PolicyTable | None,
    stack: PolicyStack,
    redundant: bool,
    ranks: int,
    nodes: int,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """tokens [...] of a rank -> microseconds [...]. A shared policy measured with redundant experts alone costs as much
    without them; what a measured table lacks comes from the specification."""
    assumed = torch.full_like(tokens, assumed_us(costs, stack, redundant, nodes > 1))
    if measured is None:
        return assumed
    placed = not isinstance(stack.shared, Local)
    split = split_key(stack, redundant)
    time = measured.us(f"{split}+{stack.shared.name}" if placed else split, ranks, tokens)
    if time is None and placed and not redundant:
        split = split_key(stack, redundant=True)
        time = measured.us(f"{split}+{stack.shared.name}", ranks, tokens)
    if time is None:
        return assumed
    time = time + _collectives_us(costs, measured, stack, split, ranks, nodes)
    if stack.router.acts:
        router = measured.us(stack.router.name, ranks, tokens)
        time = time + (costs.of_router if router is None else router)
        if stack.router.whole_batch:
            time = time + _collective_us(costs, measured, "all_reduce", ranks, nodes)
    return time


def _collectives_us(
    costs: PolicyCosts, measured: PolicyTable, stack: PolicyStack, split: str, ranks: int, nodes: int
) -> float:
    """The kernels make one collective; policies without a kernel one for the split and one for the shared expert."""
    policy = Even() if split == "even" else stack.split
    rule = Rule.of(policy, stack.shared, 1.0, 0)
    needs: list[str]
    if rule.uncovered() is None:
        needs = [rule.collective]
    else:
        shared = "none" if isinstance(stack.shared, Local) else stack.shared.needs
        names = {"none": "none", "reduced": "all_reduce", "gathered": "all_gather"}
        needs = [names[policy.needs], names[shared]]
    return sum(_collective_us(costs, measured, name, ranks, nodes) for name in needs if name != "none")


def _collective_us(costs: PolicyCosts, measured: PolicyTable, name: str, ranks: int, nodes: int) -> float:
    found = measured.collective_us(name, ranks, nodes)
    if found is not None:
        return found
    return costs.all_reduce_nodes_us if nodes > 1 else costs.all_reduce_us
