"""The time that a stack's policies add to a layer, from a calibration or from the hardware's specification.

Every policy states its own work (`BatchPolicy.work_us`), the collective that it needs and its key in measured tables.
"""

import torch
from torch import Tensor

from epsim.cost.calibrated import PolicyTable
from epsim.kernels.dispatch.rule import Rule
from epsim.machines.hardware import PolicyCosts
from epsim.policies.base import Split
from epsim.policies.registry import default_policy
from epsim.policies.stack import PolicyStack

COLLECTIVES = {"none": "none", "reduced": "all_reduce", "gathered": "all_gather"}


def acting_split(stack: PolicyStack, redundant: bool) -> Split:
    """The stack's split, or `even` if there are no redundant experts and the split needs copies to do anything."""
    split: Split = stack.split if redundant or stack.split.works_without_copies else default_policy("split")
    return split


def table_key(split: Split, stack: PolicyStack) -> str:
    """The key in measured tables of a split and the stack's shared policy. It leaves out numbers in arguments."""
    return f"{split.table_key}+{stack.shared.table_key}" if stack.shared.dispatches else split.table_key


def assumed_us(
    costs: PolicyCosts, stack: PolicyStack, redundant: bool, ranks: int, nodes: int, tokens: Tensor
) -> Tensor:
    """Microseconds [...] from the hardware's specification alone, for tokens [...] per rank. Split and shared policy
    together need one collective."""
    collective = _collective_us(costs, None, "all_reduce", ranks, nodes)
    split, router, shared = acting_split(stack, redundant), stack.router, stack.shared
    time: float | Tensor = 0.0
    if router.acts:
        time += router.work_us(costs, tokens, ranks) + router.whole_batch * collective
    if split.needs != "none" or shared.needs != "none":
        time += collective
    time += split.work_us(costs, tokens, ranks)
    time += shared.work_us(costs, tokens, ranks)
    return torch.zeros_like(tokens) + time + _others_us(costs, None, stack, ranks, nodes, tokens)


def _others_us(
    costs: PolicyCosts, measured: PolicyTable | None, stack: PolicyStack, ranks: int, nodes: int, tokens: Tensor
) -> float | Tensor:
    """The work of readers and of further kinds of policies, and the collectives that they need."""
    time: float | Tensor = 0.0
    for policy in stack.batch_policies:
        if policy not in (stack.router, stack.split, stack.shared):
            time += policy.work_us(costs, tokens, ranks)
            if policy.needs != "none":
                time += _collective_us(costs, measured, COLLECTIVES[policy.needs], ranks, nodes)
    return time


def policy_us(
    costs: PolicyCosts,
    measured: PolicyTable | None,
    stack: PolicyStack,
    redundant: bool,
    ranks: int,
    nodes: int,
    tokens: Tensor,
) -> Tensor:
    """Microseconds [...] that policies add, for tokens [...] per rank. What the measured table lacks comes from the
    specification. A shared policy measured only with redundant experts is assumed to take as long without them."""
    assumed = assumed_us(costs, stack, redundant, ranks, nodes, tokens)
    if measured is None:
        return assumed
    split = acting_split(stack, redundant)
    time = measured.us(table_key(split, stack), ranks, tokens)
    if time is None and stack.shared.dispatches and not redundant:
        split = stack.split
        time = measured.us(table_key(split, stack), ranks, tokens)
    if time is None:
        return assumed
    time = time + _collectives_us(costs, measured, stack, split, ranks, nodes)
    router = stack.router
    if router.acts:
        routing = measured.us(router.table_key, ranks, tokens)
        time = time + (router.work_us(costs, tokens, ranks) if routing is None else routing)
        if router.whole_batch:
            time = time + _collective_us(costs, measured, "all_reduce", ranks, nodes)
    return time + _others_us(costs, measured, stack, ranks, nodes, tokens)


def _collectives_us(
    costs: PolicyCosts, measured: PolicyTable, stack: PolicyStack, split: Split, ranks: int, nodes: int
) -> float:
    """Microseconds of the collectives. Kernels need one. Policies without kernels need one for the split and one for
    the shared expert."""
    rule = Rule.of(split, stack.shared, 1.0, 0)
    if rule.uncovered() is None:
        needs: list[str] = [rule.collective]
    else:
        needs = [COLLECTIVES[policy.needs] for policy in (split, stack.shared)]
    return sum(_collective_us(costs, measured, name, ranks, nodes) for name in needs if name != "none")


def _collective_us(costs: PolicyCosts, measured: PolicyTable | None, name: str, ranks: int, nodes: int) -> float:
    us = None if measured is None else measured.collective_us(name, ranks, nodes)
    if us is not None:
        return us
    return costs.all_reduce_nodes_us if nodes > 1 else costs.all_reduce_us
