"""Balancing on a GPU with the kernels of `epsim.kernels.dispatch`.

The results are the same integers as those of the policies. A call is a few launches and does not wait for the device.
"""

from dataclasses import replace

import torch

from epsim.kernels.dispatch import Assigned, Dispatcher, Rule, available
from epsim.kernels.split import prepare
from epsim.placement.base import Placement
from epsim.policies.apply import Setting
from epsim.policies.copies import Copies
from epsim.policies.nearest import nearest_slots
from epsim.policies.stack import PolicyStack
from epsim.runtime.balance import Balancer
from epsim.runtime.collective import Collective


def uncovered(stack: PolicyStack, setting: Setting, device: torch.device) -> str | None:
    """The reason why the kernels do not support this stack, or None if they do."""
    if device.type != "cuda" or not available():
        return "they need a GPU of compute capability 9.0, and CuPy"
    return Rule.of(stack.split, stack.shared, setting.shared_cost, setting.seed).uncovered()


class KernelBalancer(Balancer):
    """A `Balancer` on the GPU. Each call of `assign` overwrites the result of the previous one.

    Random draws depend on the step number, which `begin` writes to the device. `assign` calls `begin`, except while a
    CUDA graph is captured. Then the caller must call `begin` before each replay of the graph.
    """

    def __init__(
        self, stack: PolicyStack, placement: Placement, setting: Setting, collective: Collective, max_tokens: int
    ) -> None:
        super().__init__(stack, placement, setting, collective)
        self.max_tokens = max_tokens
        on_cpu = replace(placement, physical_to_logical=placement.physical_to_logical.cpu())
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
            device=placement.physical_to_logical.device,
            nearest=nearest_slots(copies) if rule.follow == "nearest" else None,
        )

    def on(self, placement: Placement) -> Balancer:
        return KernelBalancer(self.bound.stack, placement, self.bound.setting, self.collective, self.max_tokens)

    def begin(self, step: int) -> None:
        self._dispatcher.step.fill_(step)

    def assign(self, ids: torch.Tensor, step: int) -> Assigned:
        dispatcher, collective = self._dispatcher, self.collective
        if ids.shape[1] != dispatcher.top_k:  # A router policy may give tokens more experts than the model does.
            return super().assign(ids, step)
        if not torch.cuda.is_current_stream_capturing():
            self.begin(step)
        ids = ids.contiguous()  # a view of all layers' ids if they come from a trace
        counts = dispatcher.count(ids)
        if dispatcher.rule.collective == "all_reduce":
            counts = collective.all_reduce(counts)
        elif dispatcher.rule.collective == "all_gather":
            counts = collective.all_gather(counts)
        return dispatcher.assign(0, counts)


def make_balancer(
    stack: PolicyStack, placement: Placement, setting: Setting, collective: Collective, max_tokens: int
) -> Balancer:
    """A balancer that uses the kernels if they support the stack, else the PyTorch code of the policies."""
    if uncovered(stack, setting, placement.physical_to_logical.device) is None:
        return KernelBalancer(stack, placement, setting, collective, max_tokens)
    return Balancer(stack, placement, setting, collective)
