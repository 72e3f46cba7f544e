"""An expert-parallel mixture-of-experts layer under a policy stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from epsim.placement.base import Placement
from epsim.policies.stack import PolicyStack
from epsim.runtime.exchange.base import Exchange
from epsim.runtime.phases import PhaseClock
from epsim.runtime.shapes import LayerShape


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecord:
    """What a call of a layer did on this rank; tensors are on the layer's device.

    layer: the model's number. placement_version: `Placement.version` of the one in force.
    ids [T, k] int64: logical experts, -1 for none. physical [T, k] int64: physical experts, numbered as the placement's.
    shared_rank [T] int64: the rank that serves each token's shared expert, -1 for none; None without a shared expert.
    received [slots_per_rank] int64: rows that each of this rank's routed slots served, from all ranks; received_shared
    [] int64: of its shared slot.
    """

    step: int
    layer: int
    placement_version: str
    ids: torch.Tensor
    physical: torch.Tensor
    shared_rank: torch.Tensor | None
    received: torch.Tensor
    received_shared: torch.Tensor


class ExpertParallelMoE(torch.nn.Module):
    """Route -> balance -> dispatch -> experts -> combine.

    Attributes: shape, router, balancer, exchange, experts, clock; record: of the last call, None before it;
    observers: called with each record.
    """

    record: LayerRecord | None
    observers: list[Callable[[LayerRecord], None]]

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        step: int,
        token_ids: torch.Tensor | None = None,
        forced_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [T, H] of this rank -> [T, H]. Collective. T may be 0.

        forced_ids [T, k] int64: a trace's experts in place of the router's choice, -1 for none; the router weighs them.
        token_ids [T] int64: for a router that hashes them.
        """
        raise NotImplementedError

    def raise_if_bad(self) -> None:
        """Raises PhaseError where scores of a call since the last check were not numbers."""
        raise NotImplementedError


def build_layer(
    shape: LayerShape,
    stack: PolicyStack,
    placement: Placement,
    *,
    layer: int,
    seed: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
    exchange: str | Exchange = "auto",
    max_tokens: int = 4096,
    weights: Any = None,
    router: Any = None,
    spare_slots: int = 0,
    clock: PhaseClock | None = None,
) -> ExpertParallelMoE:
    """All parts of a layer for one placement [1, P] of it. Collective. See runtime/README.md."""
    raise NotImplementedError
