"""The default shared-expert policy: no dispatch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epsim.kernels.dispatch.rule import SharedRule
from epsim.policies.base import Needs, SharedDispatch, SharedWork
from epsim.traces.trace import Level


@dataclass(frozen=True, slots=True)
class Local(SharedDispatch):
    """Computes the shared expert on the token's own rank."""

    name: ClassVar[str] = "local"
    level: ClassVar[Level] = "counts"
    needs: ClassVar[Needs] = "none"
    complexity: ClassVar[int] = 0
    dispatches: ClassVar[bool] = False
    kernel: ClassVar[SharedRule] = SharedRule("own")
    engines: ClassVar[Mapping[str, str]] = {"sglang": "", "vllm": ""}

    def served(self, work: SharedWork) -> Tensor:
        return torch.diag_embed(work.tokens)

    def token_ranks(self, work: SharedWork) -> Tensor:
        assert work.batch is not None
        return torch.where(work.present(), work.batch.source_rank[:, None], -1)
