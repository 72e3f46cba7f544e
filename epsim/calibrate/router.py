"""Part `router`: times a model's own router as the runtime's layer calls it, on one device.

The time includes small operations that the layer does between its other phases: the sum that checks scores for NaN,
the shared expert's weight, and the counts that the layer records.
"""

from functools import partial

import torch

from epsim.calibrate.machine import DTYPE, Machine
from epsim.cost.router_time import RouterTable
from epsim.models.shapes import LayerShape, RouterRule
from epsim.models.spec import ModelSpec
from epsim.runtime.routers import Router, make_router
from epsim.runtime.seeds import generator

TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192)
CPU_TOKENS = (4, 16, 64)


def router_table(machine: Machine, model: ModelSpec) -> RouterTable:
    rule: RouterRule = "sigmoid-groups" if model.groups > 1 else "softmax"
    shape = LayerShape(
        model.name, model.hidden, model.intermediate, model.num_experts, model.top_k, model.shared_intermediate, rule,
        groups=model.groups, top_groups=model.top_groups,
    )  # fmt: skip
    router = make_router(shape, 0, 0, machine.device, DTYPE)
    tokens = TOKENS if machine.on_gpu else CPU_TOKENS
    times = [_times(machine, shape, router, number) for number in tokens]
    return RouterTable(
        **machine.described(),
        hidden=model.hidden,
        num_experts=model.num_experts,
        top_k=model.top_k,
        groups=model.groups,
        top_groups=model.top_groups,
        tokens=tuple(map(float, tokens)),
        us=tuple(chosen for chosen, _ in times),
        given_us=tuple(given for _, given in times),
    )


def _times(machine: Machine, shape: LayerShape, router: Router, number: int) -> tuple[float, float]:
    """Microseconds of a router that chooses the experts, and of a router that is given the experts."""
    source = generator(machine.device, "router's tokens", number)
    hidden = torch.randn(number, shape.hidden, generator=source, device=machine.device).to(DTYPE)
    ids = torch.rand(number, shape.num_experts, generator=source, device=machine.device).topk(shape.top_k).indices
    total = torch.zeros((), device=machine.device)
    counts = torch.ones(shape.num_experts, dtype=torch.int64, device=machine.device)

    def call(forced: torch.Tensor | None) -> object:
        routing = router(hidden, None, forced)
        total.add_(routing.shared_weight[0])
        weights = routing.weights
        if shape.has_shared:
            weights = torch.cat([weights, routing.shared_weight[:, None]], dim=1)
        return weights, counts[-1:].sum()

    return machine.alone_us([partial(call, None)]), machine.alone_us([partial(call, ids)])
