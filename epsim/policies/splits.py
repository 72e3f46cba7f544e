"""Splits of an expert's tokens over its copies, other than the interior point method's (`ipm`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from epsim.kernels.split import SplitStructure, prepare, solve_batched, solve_gathered
from epsim.policies.base import Batch
from epsim.policies.copies import Copies, even_fractions
from epsim.policies.gathered import gathered_quotas, ids_by_quotas
from epsim.policies.rounding import sampled_ids, systematic_ids, systematic_quotas
from epsim.traces.trace import Level


class Systematic:
    """Fractions become tokens by systematic rounding on every source rank."""

    __slots__ = ()
    by_rank: ClassVar[bool] = True
    by_fractions: ClassVar[bool] = True

    def quotas(self, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
        return systematic_quotas(rank_counts, fixed, copies)

    def physical_ids(
        self, batch: Batch, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies, seed: int
    ) -> torch.Tensor:
        return systematic_ids(batch, fixed, copies)


class Sampled:
    """Every token draws its copy by the fractions, as SGLang does."""

    __slots__ = ()
    by_rank: ClassVar[bool] = False
    by_fractions: ClassVar[bool] = True

    def quotas(self, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
        raise AssertionError("a draw per token has no quotas")

    def physical_ids(
        self, batch: Batch, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies, seed: int
    ) -> torch.Tensor:
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


def _structure(copies: Copies) -> SplitStructure:
    return prepare(copies.placement.physical_to_logical, copies.placement.num_ranks, copies.placement.num_experts)


def _least_peak(counts: torch.Tensor, copies: Copies) -> torch.Tensor:
    """counts [..., L, E] -> fractions [..., L, P] of the least peak; even where an expert has no tokens."""
    load = copies.per_slot(counts)
    split = solve_batched(copies.once(_structure), counts, backend=copies.backend).split
    return torch.where(load > 0, split / load.clamp(min=1), _even(counts, copies))


@dataclass(frozen=True, slots=True)
class Lplb(Systematic):
    """The least largest rank load of each batch, solved exactly (`epsim.kernels.split`).

    counts: `reduced`, each source rank knows the sum over ranks and rounds its own tokens systematically; `gathered`,
    it knows every rank's counts, and the split itself is whole, its peak exactly ceil(optimum).
    """

    counts: Literal["reduced", "gathered"] = "reduced"
    name: ClassVar[str] = "lplb"

    @property
    def level(self) -> Level:
        return "rank_counts" if self.counts == "gathered" else "counts"

    def fractions(self, counts: torch.Tensor, copies: Copies) -> torch.Tensor:
        return _least_peak(counts, copies)

    def quotas(self, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
        if self.counts == "reduced":
            return systematic_quotas(rank_counts, fixed, copies)
        whole = solve_gathered(copies.once(_structure), rank_counts.sum(-2), copies.backend).split
        return gathered_quotas(rank_counts, whole, copies)

    def physical_ids(
        self, batch: Batch, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies, seed: int
    ) -> torch.Tensor:
        if self.counts == "reduced":
            return systematic_ids(batch, fixed, copies)
        return ids_by_quotas(batch, self.quotas(rank_counts, fixed, copies), copies)


@dataclass(frozen=True, slots=True)
class LplbSampled(Sampled):
    """The fractions of `lplb`, from which every token draws its copy, as in SGLang's `lp`."""

    name: ClassVar[str] = "lplb-sampled"
    level: ClassVar[Level] = "tokens"

    def fractions(self, counts: torch.Tensor, copies: Copies) -> torch.Tensor:
        return _least_peak(counts, copies)


@dataclass(frozen=True, slots=True)
class Random(Sampled):
    """Each token draws one of the copies, all equally likely (SGLang's `dynamic`)."""

    name: ClassVar[str] = "random"
    level: ClassVar[Level] = "tokens"

    def fractions(self, counts: torch.Tensor, copies: Copies) -> torch.Tensor:
        return _even(counts, copies)
