"""Balancing on a GPU by the kernels of `epsim.kernels.dispatch`: the policies' integers, a few launches, no waiting."""

from __future__ import annotations

import torch

from epsim.kernels.dispatch import Dispatcher, Rule, available
from epsim.kernels.split import prepare
from epsim.placement.base import Placement
from epsim.policies.apply import Setting
from epsim.policies.copies import Copies
from epsim.policies.nearest import nearest_slots
from epsim.policies.stack import PolicyStack
from epsim.runtime.balance import Assignment, Balancer
from epsim.runtime.collective import Collective


def uncovered(stack: PolicyStack, setting: Setting, device: torch.device) -> str | None:
    """Why the kernels cannot balance this stack, or None."""
    if device.type != "cuda" or not available():
        return "they need a GPU of compute capability 9.0, and CuPy"
    return Rule.of(stack.split, stack.shared, setting.shared_cost, setting.seed).uncovered()


class KernelBalancer(Balancer):
    """As `Balancer`; what `assign` returns is overwritten by the next call.

    Draws depend on the step's number, which `begin` writes to the device: `assign` does so itself, except where it is
    being captured in a CUDA graph, before whose replays the caller must.
    """

    def __init__(
        self, stack: PolicyStack, placement: Placement, setting: Setting, collective: Collective, max_tokens: int
    ) -> None:
        super().__init__(stack, placement, setting, collective)
        self.max_tokens = max_tokens
        device, there = placement.physical_to_logical.device, placement
        on_cpu = Placement(there.physical_to_logical.cpu(), there.num_experts, there.num_ranks, there.num_nodes)
        copies = Copies(on_cpu)
        rule = Rule.of(stack.split, stack.shared, setting.shared_cost, setting.seed)
        self._dispatcher = Dispatcher(
            prepare(on_cpu.physical_to_logical, on_cpu.num_ranks, on_cpu.num_experts),
            rule,
            rank=collective.rank,
            node_of_rank=on_cpu.node_of_rank,
            layers=setting.layers,
            top_k=setting.top_k,
            max_tokens=max_tokens,
            device=device,
            nearest=nearest_slots(copies) if rule.follow == "nearest" else None,
        )

    def on(self, placement: Placement) -> Balancer:
        return KernelBalancer(self.bound.stack, placement, self.bound.setting, self.collective, self.max_tokens)

    def begin(self, step: int) -> None:
        self._dispatcher.step.fill_(step)

    def assign(self, ids: torch.Tensor, step: int) -> Assignment:
        dispatcher, collective = self._dispatcher, self.collective
        if ids.shape[1] != dispatcher.top_k:  # A router policy that gives tokens more experts than the model does.
            return super().assign(ids, step)
        if not torch.cuda.is_current_stream_capturing():
            self.begin(step)
        ids = ids.contiguous()  # a trace's are one layer's of all
        counts = dispatcher.count(ids)
        if dispatcher.rule.collective == "all_reduce":
            counts = collective.all_reduce(counts)
        elif dispatcher.rule.collective == "all_gather":
            counts = collective.all_gather(counts)
        assigned = dispatcher.assign(0, counts)
        return Assignment(assigned.physical, assigned.shared_rank, assigned.slots)


def make_balancer(
    stack: PolicyStack, placement: Placement, setting: Setting, collective: Collective, max_tokens: int
) -> Balancer:
    """By the kernels where they can, else by the policies' own form."""
    if uncovered(stack, setting, placement.physical_to_logical.device) is None:
        return KernelBalancer(stack, placement, setting, collective, max_tokens)
    return Balancer(stack, placement, setting, collective)
