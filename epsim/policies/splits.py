"""Splits of an expert's tokens over its copies, other than the interior point method's (`ipm`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from epsim.policies.base import Batch
from epsim.policies.copies import Copies, even_fractions
from epsim.policies.rounding import sampled_ids, systematic_ids, systematic_quotas
from epsim.traces.trace import Level


class Systematic:
    """Fractions become tokens by systematic rounding on every source rank."""

    __slots__ = ()
    by_rank: ClassVar[bool] = True

    def quotas(self, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
        return systematic_quotas(rank_counts, fixed, copies)

    def physical_ids(self, batch: Batch, fixed: torch.Tensor, copies: Copies, seed: int) -> torch.Tensor:
        return systematic_ids(batch, fixed, copies)


class Sampled:
    """Every token draws its copy by the fractions, as SGLang does."""

    __slots__ = ()
    by_rank: ClassVar[bool] = False

    def quotas(self, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
        raise AssertionError("a draw per token has no quotas")

    def physical_ids(self, batch: Batch, fixed: torch.Tensor, copies: Copies, seed: int) -> torch.Tensor:
        return sampled_ids(batch, fixed, copies, seed)


def _even(counts: torch.Tensor, copies: Copies) -> torch.Tensor:
    fractions = copies.once(even_fractions)
    return fractions.expand(*counts.shape[:-2], *fractions.shape)


@dataclass(frozen=True, slots=True)
class Even(Systematic):
    """Equal parts, as EPLB assumes."""

    name: ClassVar[str] = "even"
    level: ClassVar[Level] = "counts"

    def fractions(self, counts: torch.Tensor, copies: Copies) -> torch.Tensor:
        return _even(counts, copies)


@dataclass(frozen=True, slots=True)
class Random(Sampled):
    """Each token draws one of the copies, all equally likely (SGLang's `dynamic`)."""

    name: ClassVar[str] = "random"
    level: ClassVar[Level] = "tokens"

    def fractions(self, counts: torch.Tensor, copies: Copies) -> torch.Tensor:
        return _even(counts, copies)
