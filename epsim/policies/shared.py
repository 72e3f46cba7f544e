"""Where the shared expert of each token is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from epsim.policies.base import Needs, SharedWork
from epsim.traces.trace import Level


@dataclass(frozen=True, slots=True)
class Local:
    """On the token's own rank."""

    name: ClassVar[str] = "local"
    notes: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Needs] = "none"

    @property
    def level(self) -> Level:
        return "counts"

    def served(self, work: SharedWork) -> torch.Tensor:
        return torch.diag_embed(work.tokens)

    def token_ranks(self, work: SharedWork) -> torch.Tensor:
        assert work.batch is not None
        return torch.where(work.present(), work.batch.source_rank[:, None], -1)
