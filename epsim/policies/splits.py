"""Splits of an expert's tokens over its copies. The published interior point method is in `ipm`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from epsim.kernels.dispatch.rule import SplitRule
from epsim.kernels.split import solve_gathered
from epsim.kernels.timed import FEW_COPIES, MOST_NODES, check_costs, solve_timed
from epsim.policies.base import Batch, Needs, Split
from epsim.policies.copies import Copies, even_fractions, split_structure
from epsim.policies.gathered import gathered_quotas, ids_by_quotas
from epsim.policies.rounding import sampled_ids, systematic_ids, systematic_quotas
from epsim.traces.trace import Level


class Systematic(Split):
    """Turns fractions into tokens by systematic rounding on every source rank. A subclass defines `fractions`."""

    __slots__ = ()

    def quotas(self, rank_counts: Tensor, fixed: Tensor, copies: Copies) -> Tensor:
        return systematic_quotas(rank_counts, fixed, copies)

    def physical_ids(self, batch: Batch, rank_counts: Tensor, fixed: Tensor, copies: Copies, seed: int) -> Tensor:
        return systematic_ids(batch, fixed, copies)


class Sampled(Split):
    """Every token draws its copy with the fractions as probabilities, as in SGLang. A subclass defines `fractions`."""

    __slots__ = ()
    level: ClassVar[Level] = "tokens"
    by_rank: ClassVar[bool] = False

    def physical_ids(self, batch: Batch, rank_counts: Tensor, fixed: Tensor, copies: Copies, seed: int) -> Tensor:
        return sampled_ids(batch, fixed, copies, seed)


def _even(counts: Tensor, copies: Copies) -> Tensor:
    fractions = copies.once(even_fractions)
    return fractions.expand(*counts.shape[:-2], *fractions.shape)


@dataclass(frozen=True, slots=True)
class Even(Systematic):
    """Equal parts, as EPLB assumes."""

    name: ClassVar[str] = "even"
    other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dynamic", "round-robin"), "equal parts, as copies in turn"
    )
    needs: ClassVar[Needs] = "none"
    complexity: ClassVar[int] = 0
    kernel: ClassVar[SplitRule] = SplitRule()
    engines: ClassVar[Mapping[str, str]] = {"sglang": "dynamic", "vllm": ""}

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        return _even(counts, copies)


def _least_peak(counts: Tensor, copies: Copies) -> Tensor:
    """counts [..., L, E] -> fractions [..., L, P] of the lowest peak; even if an expert has no tokens."""
    load = copies.per_slot(counts)
    split = copies.least_peak(counts).split
    return torch.where(load > 0, split / load, _even(counts, copies))


@dataclass(frozen=True, slots=True)
class Lplb(Systematic):
    """Minimises the cost of the most expensive rank in each batch: its tokens, solved exactly (`epsim.kernels.split`),
    or its time.

    counts: `reduced`: each source rank knows the sum of counts over ranks and rounds its own tokens systematically.
    `gathered`: it knows the counts of each rank, and the split is in whole tokens, with a peak of exactly
    ceil(optimum).
    objective: `tokens`; or `time`: a rank costs a * tokens + b * active experts, as when reading weights limits the
    speed. `time` is a search over splits in whole tokens (`epsim.kernels.timed`). It is always `gathered`, because
    single tokens decide whether an expert is active, and rounding by each source rank would change that.
    a, b >= 0, with `time` only: the cost of a token and of an active expert, in any one unit.
    Raises ValueError for arguments that contradict each other.
    """

    counts: Literal["reduced", "gathered"] | None = None
    objective: Literal["tokens", "time"] = "tokens"
    a: float | None = None
    b: float | None = None
    name: ClassVar[str] = "lplb"
    other_names: ClassVar[Mapping[str, str]] = {"lp": "solved exactly"}
    examples: ClassVar[tuple[str, ...]] = ("lplb", "lplb(objective=time,a=1,b=20)")
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.objective == "tokens":
            if self.a is not None or self.b is not None:
                raise ValueError("lplb: a and b are for objective=time: add it, or leave them out")
        else:
            if self.a is None or self.b is None:
                raise ValueError(
                    "lplb(objective=time) needs a= and b=, the costs of a token and of an active expert: "
                    "lplb(objective=time,a=1,b=100) if reading an expert takes as long as 100 tokens"
                )
            try:
                check_costs(self.a, self.b)
            except ValueError as error:
                raise ValueError(f"lplb(objective=time): {error}") from None
            if self.counts == "reduced":
                raise ValueError("lplb(objective=time) places whole tokens: leave counts out, or give counts=gathered")
            object.__setattr__(self, "a", float(self.a))
            object.__setattr__(self, "b", float(self.b))
        if self.counts is None:
            object.__setattr__(self, "counts", "reduced" if self.objective == "tokens" else "gathered")

    @property
    def level(self) -> Level:
        # With objective=time, the sum of counts gives the number of tokens of each slot.
        return "rank_counts" if self.counts == "gathered" and self.objective == "tokens" else "counts"

    @property
    def needs(self) -> Needs:
        assert self.counts is not None
        return self.counts

    @property
    def by_fractions(self) -> bool:
        return self.objective == "tokens"

    @property
    def table_key(self) -> str:
        if self.objective == "time":
            return "lplb(objective=time)"
        return "lplb(counts=gathered)" if self.counts == "gathered" else self.name

    @property
    def kernel(self) -> SplitRule | None:
        if self.objective == "time":
            return None
        return SplitRule(solves=True, follow="gathered" if self.counts == "gathered" else "systematic")

    @property
    def work(self) -> tuple[str, ...]:
        return ("timed_us" if self.objective == "time" else "solve_us", "assign_us")

    @property
    def notes(self) -> tuple[str, ...]:
        if self.objective == "tokens":
            return ()
        proven = f"lplb(objective=time) is optimal if at most {FEW_COPIES} copies of replicated experts have tokens"
        return (f"{proven}; otherwise it is the best of a search of {MOST_NODES} nodes, never worse than lplb",)

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        if self.objective == "tokens":
            return _least_peak(counts, copies)
        load = copies.per_slot(counts)
        return torch.where(load > 0, self._whole(counts, copies).double() / load.clamp(min=1), _even(counts, copies))

    def quotas(self, rank_counts: Tensor, fixed: Tensor, copies: Copies) -> Tensor:
        if self.counts == "reduced":
            return Systematic.quotas(self, rank_counts, fixed, copies)
        return gathered_quotas(rank_counts, self._whole(rank_counts.sum(-2), copies), copies)

    def physical_ids(self, batch: Batch, rank_counts: Tensor, fixed: Tensor, copies: Copies, seed: int) -> Tensor:
        if self.counts == "reduced":
            return Systematic.physical_ids(self, batch, rank_counts, fixed, copies, seed)
        return ids_by_quotas(batch, self.quotas(rank_counts, fixed, copies), copies)

    def _whole(self, counts: Tensor, copies: Copies) -> Tensor:
        """counts [..., L, E] int64 -> [..., L, P] int64: whole tokens of each slot."""
        structure = copies.once(split_structure)
        if self.a is None or self.b is None:  # objective=tokens
            return solve_gathered(structure, counts, copies.backend).split
        return solve_timed(structure, counts, self.a, self.b).split


@dataclass(frozen=True, slots=True)
class LplbSampled(Sampled):
    """The fractions of `lplb`. Every token draws its copy with these as probabilities, as in SGLang's `lp`."""

    name: ClassVar[str] = "lplb-sampled"
    other_names: ClassVar[Mapping[str, str]] = {"probability": "a copy for each token by the exact probabilities"}
    work: ClassVar[tuple[str, ...]] = ("solve_us", "assign_us")
    kernel: ClassVar[SplitRule] = SplitRule(solves=True, follow="sampled")

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        return _least_peak(counts, copies)


@dataclass(frozen=True, slots=True)
class Random(Sampled):
    """Each token draws one of the copies, all equally likely (SGLang's `dynamic`)."""

    name: ClassVar[str] = "random"
    other_names: ClassVar[Mapping[str, str]] = {"dynamic": "a random copy for each token"}
    needs: ClassVar[Needs] = "none"
    complexity: ClassVar[int] = 0
    kernel: ClassVar[SplitRule] = SplitRule(follow="sampled")
    engines: ClassVar[Mapping[str, str]] = {"sglang": "dynamic", "vllm": ""}

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        return _even(counts, copies)
