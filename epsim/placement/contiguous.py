"""Experts in order, as serving systems place them at the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from epsim.placement.base import Cluster, Placement, PlacementPolicy


@dataclass(frozen=True, slots=True)
class Contiguous(PlacementPolicy):
    """Slot p holds expert p mod E. This is the trivial map of SGLang and vLLM; redundant slots start again at expert 0.

    The slots of a rank are consecutive, so it holds no expert twice unless it has more slots than there are experts.
    """

    name: ClassVar[str] = "contiguous"
    other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(("trivial", "linear"), "experts in order")
    complexity: ClassVar[int] = 0
    trivial: ClassVar[bool] = True
    needs_history: ClassVar[bool] = False
    engines: ClassVar[Mapping[str, str]] = {"sglang": "", "vllm": ""}

    def plan(self, history: torch.Tensor, cluster: Cluster) -> Placement:
        """history [S, L, E]: only its layers and experts are read; S may be 0."""
        num_layers, num_experts = history.shape[-2:]
        slots = torch.arange(cluster.num_physical(num_experts), device=history.device) % num_experts
        return Placement(slots.repeat(num_layers, 1), num_experts, cluster.num_ranks, cluster.num_nodes)
