"""The default router: the model's own choice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from epsim.policies.base import Routed, Router, RouterWork
from epsim.traces.trace import Level


@dataclass(frozen=True, slots=True)
class TopK(Router):
    """Every token keeps the experts that were recorded."""

    name: ClassVar[str] = "topk"
    other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("biased-grouped-topk", "fused-topk", "grouped-topk"), "the experts that the model chose, by any rule"
    )
    level: ClassVar[Level] = "counts"
    complexity: ClassVar[int] = 0
    acts: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    engines: ClassVar[Mapping[str, str]] = {"sglang": "", "vllm": ""}

    def route(self, work: RouterWork) -> Routed:
        return Routed(work.expert_ids, work.weights)
