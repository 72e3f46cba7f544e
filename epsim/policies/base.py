"""What a policy is: a small frozen dataclass whose fields are its arguments, and methods on tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch

from epsim.policies.copies import Copies
from epsim.traces.trace import Level


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of S steps and L layers, on all source ranks or on one; every policy gives a token the same either way.

    steps [S] int64: the steps' numbers. layers [L] int64: the model's layer numbers.
    token_step [T] int64: each token's place in `steps`. source_rank [T] int64.
    expert_ids [T, L, k] int64: logical experts, -1 for an empty slot.
    local [T] int64: a token's index among those of its step and source rank (`local_index`).
    """

    steps: torch.Tensor
    layers: torch.Tensor
    token_step: torch.Tensor
    source_rank: torch.Tensor
    expert_ids: torch.Tensor
    local: torch.Tensor


def local_index(token_step: torch.Tensor, source_rank: torch.Tensor) -> torch.Tensor:
    """[T] int64, [T] int64 -> [T] int64: each token's index among the tokens of its step and source rank, in order."""
    width = int(source_rank.max()) + 1 if source_rank.numel() else 1
    return ordinal(token_step * width + source_rank)


def ordinal(group: torch.Tensor) -> torch.Tensor:
    """[N] int64 -> [N] int64: each element's index among those of the same group, in order."""
    ordered, order = group.sort(stable=True)
    place = torch.arange(len(group), device=group.device)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    start = torch.where(starts, place, 0).cummax(0).values if len(group) else place
    return torch.empty_like(place).scatter_(0, order, place - start)


def alone(counts: torch.Tensor) -> torch.Tensor:
    """The sum over a group of one source rank."""
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class RouterWork:
    """What a router may look at: batches of B tokens of one layer each, over any leading axes.

    scores [..., B, E] float32: what the model chose by, -inf where not known.
    weight_basis [..., B, E] float32 >= 0: what its weights are proportional to, in most models the scores themselves.
    expert_ids [..., B, k] int64: the model's choice, -1 for an empty slot; a row of -1 only is padding and activates no
    expert. weights [..., B, k] float32: the weights of the choice.
    decode [..., B] bool: tokens to route anew; the others (prefill) keep their choice.
    holds [..., E, R] bool, broadcast over leading axes: which rank has a copy of which expert; None where not known.
    total: an int64 tensor of this source rank -> its sum over all source ranks of the batch, one collective a call;
    where the tokens are all here, the identity.
    """

    scores: torch.Tensor
    weight_basis: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    decode: torch.Tensor
    holds: torch.Tensor | None = None
    total: Callable[[torch.Tensor], torch.Tensor] = alone


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """expert_ids [..., B, k'] int64: by falling preference, -1 behind them for fewer than k'; weights [..., B, k']
    float32, 0 there."""

    expert_ids: torch.Tensor
    weights: torch.Tensor


class Router(Protocol):
    """Which experts a token takes, given the other tokens of its batch. One object serves the simulator, the runtime
    and a live model.

    acts: whether it changes anything, and so needs scores. whole_batch: whether it looks at the tokens of all source
    ranks of a step (by `RouterWork.total`), or each source rank's tokens are a batch of their own.
    notes: what a reader of results under it should know.
    """

    name: ClassVar[str]
    level: ClassVar[Level]
    acts: ClassVar[bool]

    @property
    def whole_batch(self) -> bool: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def route(self, work: RouterWork) -> Routed:
        """Raises ValueError where the arguments do not fit the model."""
        ...


class Reader(Protocol):
    """What of an expert's weights is read. acts: whether less than all of them. notes: what a reader of results under
    it should know."""

    name: ClassVar[str]
    level: ClassVar[Level]
    acts: ClassVar[bool]

    @property
    def notes(self) -> tuple[str, ...]: ...

    def bytes_read(
        self,
        tokens: torch.Tensor,
        active: torch.Tensor,
        hidden: int,
        intermediate: int,
        weight_bytes: float,
        top_k: int,
    ) -> torch.Tensor:
        """tokens [...]: assignments of a rank, active [...]: its experts with any -> bytes [...] float64 of their
        weights, or of what is read in their place."""
        ...

    def resident_bytes(self, num_experts: int, hidden: int, intermediate: int) -> int:
        """Kept in memory of a layer of so many experts beside their weights."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """What a policy for the shared expert may look at, for S steps and L layers.

    cost: the shared expert's work in routed assignments, > 0. seed: of the draws. top_k: k.
    steps [S], layers [L] int64: their numbers.
    routed [S, L, R] int64: assignments that each rank serves, from all source ranks.
    routed_by_source [S, L, R, R] int64: the same by source rank; a rank that acts alone needs only its own right.
    tokens [S, L, R] int64: tokens of each source rank.
    node_of_rank [R] int64.
    batch, expert_ranks [T, L, k] int64: the tokens and the ranks that serve their routed experts, -1 for an empty slot;
    None at rank-count level, where a source rank's tokens are all alike. The batch may be one source rank's alone.
    """

    cost: float
    seed: int
    top_k: int
    steps: torch.Tensor
    layers: torch.Tensor
    routed: torch.Tensor
    routed_by_source: torch.Tensor
    tokens: torch.Tensor
    node_of_rank: torch.Tensor
    batch: Batch | None
    expert_ranks: torch.Tensor | None

    def present(self) -> torch.Tensor:
        """[T, L] bool: whether a layer has the token, that is any routed expert for it."""
        assert self.batch is not None
        return (self.batch.expert_ids >= 0).any(-1)


Needs: TypeAlias = Literal["none", "reduced", "gathered"]


class SharedDispatch(Protocol):
    """Where a token's shared expert is computed. `level`: the coarsest trace it works on; where that is `tokens`, it
    looks at the ranks of a token's routed experts. `notes`: what a reader of results under it should know.

    needs: what a source rank must know of the others to place its own tokens: nothing; `reduced`, the routed load and
    the tokens of every rank; `gathered`, also which source ranks a load is from (`SharedWork.routed_by_source`).
    """

    name: ClassVar[str]
    notes: ClassVar[tuple[str, ...]]

    @property
    def level(self) -> Level: ...

    @property
    def needs(self) -> Needs: ...

    def served(self, work: SharedWork) -> torch.Tensor:
        """-> [S, L, R, R] int64: shared-expert tokens by source rank and the rank that serves them."""
        ...

    def token_ranks(self, work: SharedWork) -> torch.Tensor:
        """-> [T, L] int64: the rank that serves the shared expert of each of the batch's tokens, -1 where the layer has
        no such token. `work` needs the batch, of all source ranks or of one: a token goes to the same rank either way,
        and `served` counts them."""
        ...


class Split(Protocol):
    """How an expert's tokens divide over its copies. `level`: the coarsest trace it works on.

    by_rank: whether the number of a source rank's tokens for a copy follows from counts, without looking at tokens.
    by_fractions: whether tokens follow the fractions; if not, the split has no real-valued form, and tokens follow from
    counts alone. needs: which counts of other ranks it looks at. notes: what a reader of results under it should know.
    """

    name: ClassVar[str]
    by_rank: ClassVar[bool]

    @property
    def level(self) -> Level: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def by_fractions(self) -> bool: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def fractions(self, counts: torch.Tensor, copies: Copies) -> torch.Tensor:
        """counts [..., L, E] int64 of all source ranks -> [..., L, P] float64: each slot's share of its expert."""
        ...

    def quotas(self, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies) -> torch.Tensor:
        """rank_counts [..., L, R, E] int64, fixed-point fractions [..., L, P] -> assignments per slot [..., L, R, P].

        Only for splits `by_rank`.
        """
        ...

    def physical_ids(
        self, batch: Batch, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies, seed: int
    ) -> torch.Tensor:
        """batch, rank_counts [S, L, R, E], fixed-point fractions [S, L, P] -> [T, L, k] int64: physical experts, -1 for
        an empty slot. Of rank_counts a split with `counts=gathered` needs those of all ranks, any other none."""
        ...


@dataclass(frozen=True, slots=True)
class TopK:
    """Every token keeps the experts that were recorded."""

    name: ClassVar[str] = "topk"
    level: ClassVar[Level] = "counts"
    acts: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()

    def route(self, work: RouterWork) -> Routed:
        return Routed(work.expert_ids, work.weights)


@dataclass(frozen=True, slots=True)
class Dense:
    """An active expert's weights are read whole."""

    name: ClassVar[str] = "dense"
    level: ClassVar[Level] = "counts"
    acts: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()

    def bytes_read(
        self,
        tokens: torch.Tensor,
        active: torch.Tensor,
        hidden: int,
        intermediate: int,
        weight_bytes: float,
        top_k: int,
    ) -> torch.Tensor:
        return active.double() * (3 * hidden * intermediate * weight_bytes)

    def resident_bytes(self, num_experts: int, hidden: int, intermediate: int) -> int:
        return 0
