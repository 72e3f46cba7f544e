"""What a policy of each kind is: a base class with defaults, so that a policy states only what differs from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from epsim.kernels.dispatch.rule import SharedRule, SplitRule
from epsim.machines.hardware import PolicyCosts
from epsim.placement.base import Policy, Stack
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

    steps: Tensor
    layers: Tensor
    token_step: Tensor
    source_rank: Tensor
    expert_ids: Tensor
    local: Tensor


def local_index(token_step: Tensor, source_rank: Tensor) -> Tensor:
    """[T] int64, [T] int64 -> [T] int64: each token's index among the tokens of its step and source rank, in order."""
    width = int(source_rank.max()) + 1 if source_rank.numel() else 1
    return ordinal(token_step * width + source_rank)


def ordinal(group: Tensor) -> Tensor:
    """[N] int64 -> [N] int64: each element's index among those of the same group, in order."""
    ordered, order = group.sort(stable=True)
    place = torch.arange(len(group), device=group.device)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    start = torch.where(starts, place, 0).cummax(0).values if len(group) else place
    return torch.empty_like(place).scatter_(0, order, place - start)


def alone(counts: Tensor) -> Tensor:
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

    scores: Tensor
    weight_basis: Tensor
    expert_ids: Tensor
    weights: Tensor
    decode: Tensor
    holds: Tensor | None = None
    total: Callable[[Tensor], Tensor] = alone


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """expert_ids [..., B, k'] int64: by falling preference, -1 behind them for fewer than k'; weights [..., B, k']
    float32, 0 there."""

    expert_ids: Tensor
    weights: Tensor


Needs: TypeAlias = Literal["none", "reduced", "gathered"]


class BatchPolicy(Policy):
    """A policy that acts on every batch.

    Properties, which a subclass may also set as class variables:
    level: the coarsest trace that the policy works on. needs: what a rank must know of the other ranks' counts, which
    gives the policy's collective: `none`, nothing; `reduced`, their sum (an all-reduce); `gathered`, every rank's (an
    all-gather). work: terms of `PolicyCosts` that the policy's own work takes. table_key: its row in measured tables
    (`epsim.cost.calibrated.PolicyTable`). notes: what a reader of results under the policy should know.
    """

    __slots__ = ()

    @property
    def level(self) -> Level:
        return "counts"

    @property
    def needs(self) -> Needs:
        return "none"

    @property
    def table_key(self) -> str:
        return self.name

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def work(self) -> tuple[str, ...]:
        return ()

    def work_us(self, costs: PolicyCosts, tokens: Tensor, ranks: int) -> float | Tensor:
        """Microseconds of a layer that the policy's own work takes where no table has a row for it, collectives left
        out: the sum of its terms, or what a subclass makes of tokens [...] of a rank and the number of ranks."""
        terms: list[float] = [getattr(costs, term) for term in self.work]
        return sum(terms)

    def check(self, stack: Stack) -> None:
        """Raises ValueError where the policy does not go with the others of its stack."""

    def notes_beside(self, stack: Stack, redundant: bool) -> tuple[str, ...]:
        """Notes that depend on the other policies. redundant: whether any expert has several copies."""
        return ()


class Router(BatchPolicy):
    """Which experts a token takes, given the other tokens of its batch. One object serves the simulator, the runtime
    and a live model.

    acts: whether it changes anything, and so needs scores. whole_batch: whether it looks at the tokens of all source
    ranks of a step (by `RouterWork.total`), or each source rank's tokens are a batch of their own. capturable: whether
    its tensor operations can be captured in a CUDA graph.
    """

    __slots__ = ()
    kind: ClassVar[str] = "router"
    complexity: ClassVar[int] = 5
    acts: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    @property
    def level(self) -> Level:
        return "tokens"

    @property
    def whole_batch(self) -> bool:
        return True

    @property
    def work(self) -> tuple[str, ...]:
        return ("of_router",)

    def route(self, work: RouterWork) -> Routed:
        """Raises ValueError where the arguments do not fit the model."""
        raise NotImplementedError


class Reader(BatchPolicy):
    """What of an expert's weights is read. acts: whether less than all of them."""

    __slots__ = ()
    kind: ClassVar[str] = "reader"
    complexity: ClassVar[int] = 5
    acts: ClassVar[bool] = True

    def bytes_read(
        self, tokens: Tensor, active: Tensor, hidden: int, intermediate: int, weight_bytes: float, top_k: int
    ) -> Tensor:
        """tokens [...]: assignments of a rank, active [...]: its experts with any -> bytes [...] float64 of their
        weights, or of what is read in their place."""
        raise NotImplementedError

    def resident_bytes(self, num_experts: int, hidden: int, intermediate: int) -> int:
        """Kept in memory of a layer of so many experts beside their weights."""
        return 0


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
    steps: Tensor
    layers: Tensor
    routed: Tensor
    routed_by_source: Tensor
    tokens: Tensor
    node_of_rank: Tensor
    batch: Batch | None
    expert_ranks: Tensor | None

    def present(self) -> Tensor:
        """[T, L] bool: whether a layer has the token, that is any routed expert for it."""
        assert self.batch is not None
        return (self.batch.expert_ids >= 0).any(-1)


class SharedDispatch(BatchPolicy):
    """Where a token's shared expert is computed. A subclass defines `token_ranks`.

    level: where that is `tokens`, it looks at the ranks of a token's routed experts. needs: `reduced` is the routed
    load and the tokens of every rank; `gathered` also says which source ranks a load is from
    (`SharedWork.routed_by_source`).
    dispatches: whether a token's shared expert may be computed on another rank than its own.
    kernel: how the dispatch kernels place it; None where they cannot.
    """

    __slots__ = ()
    kind: ClassVar[str] = "shared"
    dispatches: ClassVar[bool] = True

    @property
    def level(self) -> Level:
        return "tokens"

    @property
    def needs(self) -> Needs:
        return "reduced"

    @property
    def kernel(self) -> SharedRule | None:
        return None

    def served(self, work: SharedWork) -> Tensor:
        """-> [S, L, R, R] int64: shared-expert tokens by source rank and the rank that serves them."""
        assert work.batch is not None
        chosen, num_ranks = self.token_ranks(work), work.tokens.shape[-1]
        token, layer = (chosen >= 0).nonzero(as_tuple=True)
        row = (work.batch.token_step[token] * chosen.shape[1] + layer) * num_ranks + work.batch.source_rank[token]
        shape = (*work.tokens.shape, num_ranks)
        return torch.bincount(row * num_ranks + chosen[token, layer], minlength=math.prod(shape)).reshape(shape)

    def token_ranks(self, work: SharedWork) -> Tensor:
        """-> [T, L] int64: the rank that serves the shared expert of each of the batch's tokens, -1 where the layer has
        no such token. `work` needs the batch, of all source ranks or of one: a token goes to the same rank either way,
        and `served` counts them."""
        raise NotImplementedError


class Split(BatchPolicy):
    """How an expert's tokens divide over its copies. `epsim.policies.splits` has two subclasses to start from:
    `Systematic` and `Sampled`, which turn `fractions` into tokens.

    by_rank: whether the number of a source rank's tokens for a copy follows from counts, without looking at tokens.
    by_fractions: whether tokens follow the fractions; if not, the split has no real-valued form, and tokens follow from
    counts alone.
    single_copies: all tokens of an expert go to one of its copies. exact: no split has a lower peak load.
    works_without_copies: its collective and its work are made where no expert has several copies, too.
    kernel: how the dispatch kernels split; None where they cannot.
    """

    __slots__ = ()
    kind: ClassVar[str] = "split"
    by_rank: ClassVar[bool] = True
    single_copies: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    works_without_copies: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        return "reduced"

    @property
    def by_fractions(self) -> bool:
        return True

    @property
    def kernel(self) -> SplitRule | None:
        return None

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        """counts [..., L, E] int64 of all source ranks -> [..., L, P] float64: each slot's share of its expert."""
        raise NotImplementedError

    def quotas(self, rank_counts: Tensor, fixed: Tensor, copies: Copies) -> Tensor:
        """rank_counts [..., L, R, E] int64, fixed-point fractions [..., L, P] -> assignments per slot [..., L, R, P].

        Only for splits `by_rank`.
        """
        raise NotImplementedError

    def physical_ids(self, batch: Batch, rank_counts: Tensor, fixed: Tensor, copies: Copies, seed: int) -> Tensor:
        """batch, rank_counts [S, L, R, E], fixed-point fractions [S, L, P] -> [T, L, k] int64: physical experts, -1 for
        an empty slot. Of rank_counts a split with `counts=gathered` needs those of all ranks, any other none."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TopK(Router):
    """Every token keeps the experts that were recorded."""

    name: ClassVar[str] = "topk"
    level: ClassVar[Level] = "counts"
    complexity: ClassVar[int] = 0
    acts: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    engines: ClassVar[Mapping[str, str]] = {"sglang": "", "vllm": ""}

    def route(self, work: RouterWork) -> Routed:
        return Routed(work.expert_ids, work.weights)


@dataclass(frozen=True, slots=True)
class Dense(Reader):
    """An active expert's weights are read whole."""

    name: ClassVar[str] = "dense"
    complexity: ClassVar[int] = 0
    acts: ClassVar[bool] = False
    engines: ClassVar[Mapping[str, str]] = {"sglang": "", "vllm": ""}

    def bytes_read(
        self, tokens: Tensor, active: Tensor, hidden: int, intermediate: int, weight_bytes: float, top_k: int
    ) -> Tensor:
        return active.double() * (3 * hidden * intermediate * weight_bytes)
