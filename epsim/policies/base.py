"""The base class of each kind of policy. A policy states only what differs from the defaults."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from epsim.kernels.dispatch.rule import SharedRule, SplitRule
from epsim.machines.hardware import PolicyCosts
from epsim.placement.base import Policy, Stack
from epsim.policies.copies import Copies
from epsim.policies.hashing import ordinal
from epsim.traces.trace import Level


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of S steps and L layers, of all source ranks or of one. Policies treat a token the same in both cases.

    steps [S] int64: the steps' numbers. layers [L] int64: the model's layer numbers.
    token_step [T] int64: each token's index in `steps`. source_rank [T] int64.
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
    """[T] int64: each token's index among the tokens of its step and source rank, in order."""
    num_ranks = int(source_rank.max()) + 1 if source_rank.numel() else 1
    return ordinal(token_step * num_ranks + source_rank)


def alone(counts: Tensor) -> Tensor:
    """The sum over a group of one source rank."""
    return counts


@dataclass(frozen=True, slots=True, eq=False)
class RouterWork:
    """The input of a router: batches of B tokens of one layer each, over any leading axes.

    scores [..., B, E] float32: the scores by which the model chose, -inf if unknown.
    weight_basis [..., B, E] float32 >= 0: the model's weights are proportional to it. In most models it is the scores.
    expert_ids [..., B, k] int64: the model's choice, -1 for an empty slot. A row of -1 is padding and activates no
    expert. weights [..., B, k] float32: the weights of the choice.
    decode [..., B] bool: tokens to reroute. The others (prefill) keep the model's choice.
    holds [..., E, R] bool, broadcast over leading axes: whether a rank has a copy of an expert; None if unknown.
    total: sums an int64 tensor of this source rank over all source ranks of the batch, with one collective per call.
    The identity if all tokens are on this rank.
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
    """A router's answer. expert_ids [..., B, k'] int64: from most to least preferred, -1 after a token's last expert.
    weights [..., B, k'] float32: 0 where the expert is -1."""

    expert_ids: Tensor
    weights: Tensor


Needs: TypeAlias = Literal["none", "reduced", "gathered"]


class BatchPolicy(Policy):
    """A policy that acts on every batch.

    A subclass may set these properties as class variables:
    level: the coarsest trace that the policy works on.
    needs: what a rank must know about the counts of other ranks. `none`: nothing. `reduced`: their sum (an all-reduce).
    `gathered`: the counts of each rank (an all-gather).
    work: the fields of `PolicyCosts` that add up to the time of the policy's own work. table_key: its row in measured
    tables (`epsim.cost.calibrated.PolicyTable`). notes: what a reader of the policy's results should know.
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
        """Microseconds of a layer that the policy's own work takes, without collectives, if no table has a row for it.
        tokens [...]: of a rank. The default is the sum of the costs named in `work`."""
        return sum(costs.us(name) for name in self.work)

    def decides(self, redundant: bool, shared_expert: bool) -> bool:
        """Whether the policy matters. redundant: whether any expert has several copies. shared_expert: whether the
        shared expert costs anything."""
        return True

    def check(self, stack: Stack) -> None:
        """Raises ValueError if the policy does not work with the other policies of its stack."""

    def notes_beside(self, stack: Stack, redundant: bool) -> tuple[str, ...]:
        """Notes that depend on the other policies. redundant: whether any expert has several copies."""
        return ()


class Router(BatchPolicy):
    """Chooses a token's experts, given the other tokens of its batch. The simulator, the runtime and a live model use
    the same object.

    acts: whether it changes anything, and so needs scores. whole_batch: whether a batch is the tokens of all source
    ranks in a step (with sums by `RouterWork.total`), or the tokens of one source rank. capturable: whether its tensor
    operations can be captured in a CUDA graph.
    """

    __slots__ = ()
    kind: ClassVar[str] = "router"
    must_define: ClassVar[tuple[str, ...]] = ("route",)
    level: ClassVar[Level] = "tokens"
    work: ClassVar[tuple[str, ...]] = ("router_us",)
    complexity: ClassVar[int] = 5
    acts: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    @property
    def whole_batch(self) -> bool:
        return True

    def most_experts(self, top_k: int) -> int:
        """The largest k' of `Routed` if the model chooses top_k experts. Define it if a token may get more than top_k:
        loads may depend on this number, and it must be the same for all steps and ranks."""
        return top_k

    def route(self, work: RouterWork) -> Routed:
        """Raises ValueError if the arguments do not fit the model. Call it through `checked_route`."""
        raise NotImplementedError


def checked_route(router: Router, work: RouterWork) -> Routed:
    """The router's answer. Raises ValueError if it has more experts per token than `Router.most_experts` says."""
    routed = router.route(work)
    width, most = routed.expert_ids.shape[-1], router.most_experts(work.expert_ids.shape[-1])
    if width > most:
        raise ValueError(
            f"router {router.name} gives a token up to {width} experts, but its most_experts() returns {most}: "
            "let most_experts() return the larger number"
        )
    return routed


class Reader(BatchPolicy):
    """Chooses which part of an expert's weights is read. acts: whether it can be less than all of them."""

    __slots__ = ()
    kind: ClassVar[str] = "reader"
    must_define: ClassVar[tuple[str, ...]] = ("bytes_read",)
    complexity: ClassVar[int] = 5
    acts: ClassVar[bool] = True

    def bytes_read(
        self, tokens: Tensor, active: Tensor, hidden: int, intermediate: int, weight_bytes: float, top_k: int
    ) -> Tensor:
        """Bytes [...] float64 that a rank reads: of its active experts' weights, or of what is read instead.

        tokens [...]: assignments of the rank. active [...]: its active experts."""
        raise NotImplementedError

    def resident_bytes(self, num_experts: int, hidden: int, intermediate: int) -> int:
        """Bytes per layer that the reader keeps in memory in addition to the weights of `num_experts` experts."""
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """The input of a shared-expert policy, for S steps and L layers.

    cost: the shared expert's work in routed assignments, > 0. seed: seed of random draws. top_k: the model's k.
    most_experts: the most routed experts of a token after the router policy. Use it instead of the width of a tensor
    of experts, which depends on the other steps of a block.
    steps [S], layers [L] int64: their numbers.
    routed [S, L, R] int64: assignments that each rank serves, from all source ranks.
    routed_by_source [S, L, R, R] int64: the same by source rank. Only the batch's source ranks must be right.
    tokens [S, L, R] int64: tokens of each source rank.
    node_of_rank [R] int64.
    batch: the tokens, of all source ranks or of one. expert_ranks [T, L, k] int64: the rank that serves each of their
    routed experts, -1 for an empty slot. Both are None at rank-count level.
    """

    cost: float
    seed: int
    top_k: int
    most_experts: int
    steps: Tensor
    layers: Tensor
    routed: Tensor
    routed_by_source: Tensor
    tokens: Tensor
    node_of_rank: Tensor
    batch: Batch | None
    expert_ranks: Tensor | None

    def present(self) -> Tensor:
        """[T, L] bool: whether the token has any routed expert in the layer."""
        assert self.batch is not None
        return (self.batch.expert_ids >= 0).any(-1)


class SharedDispatch(BatchPolicy):
    """Chooses the rank that computes a token's shared expert. A subclass defines `token_ranks`.

    level: a policy of level `tokens` uses the ranks of a token's routed experts. needs: `reduced` gives the routed load
    and the tokens of every rank; `gathered` also gives the load by source rank (`SharedWork.routed_by_source`).
    dispatches: whether a token's shared expert may be computed on another rank than the token's.
    kernel: how the dispatch kernels place it; None if they cannot.
    """

    __slots__ = ()
    kind: ClassVar[str] = "shared"
    must_define: ClassVar[tuple[str, ...]] = ("token_ranks",)
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

    def decides(self, redundant: bool, shared_expert: bool) -> bool:
        return shared_expert

    def served(self, work: SharedWork) -> Tensor:
        """-> [S, L, R, R] int64: shared-expert tokens by source rank and the rank that serves them."""
        assert work.batch is not None
        chosen, num_ranks = self.token_ranks(work), work.tokens.shape[-1]
        token, layer = (chosen >= 0).nonzero(as_tuple=True)
        row = (work.batch.token_step[token] * chosen.shape[1] + layer) * num_ranks + work.batch.source_rank[token]
        shape = (*work.tokens.shape, num_ranks)
        return torch.bincount(row * num_ranks + chosen[token, layer], minlength=math.prod(shape)).reshape(shape)

    def token_ranks(self, work: SharedWork) -> Tensor:
        """-> [T, L] int64: the rank that serves the shared expert of each token of the batch, -1 if the token is not in
        the layer. A token's rank must not depend on whether the batch has all source ranks or one."""
        raise NotImplementedError


class Split(BatchPolicy):
    """Divides an expert's tokens over its copies. Its subclasses `Systematic` and `Sampled` (`epsim.policies.splits`)
    turn `fractions` into tokens.

    by_rank: whether counts determine how many tokens of a source rank each copy gets.
    by_fractions: whether tokens follow the fractions. If not, the split has no real-valued form, and counts determine
    the tokens.
    single_copies: all tokens of an expert go to one of its copies. exact: no split has a lower peak load.
    works_without_copies: the split takes time even if no expert has several copies.
    kernel: how the dispatch kernels split; None if they cannot.
    """

    __slots__ = ()
    kind: ClassVar[str] = "split"
    must_define: ClassVar[tuple[str, ...]] = ("fractions", "physical_ids")
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

    def decides(self, redundant: bool, shared_expert: bool) -> bool:
        return redundant

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        """counts [..., L, E] int64 of all source ranks -> [..., L, P] float64: each slot's share of its expert."""
        raise NotImplementedError

    def quotas(self, rank_counts: Tensor, fixed: Tensor, copies: Copies) -> Tensor:
        """rank_counts [..., L, R, E] int64, fixed-point fractions [..., L, P] -> assignments per slot [..., L, R, P].

        A split defines it if `by_rank` is true.
        """
        raise NotImplementedError

    def physical_ids(self, batch: Batch, rank_counts: Tensor, fixed: Tensor, copies: Copies, seed: int) -> Tensor:
        """batch, rank_counts [S, L, R, E], fixed-point fractions [S, L, P] -> [T, L, k] int64: physical experts, -1 for
        an empty slot. Only splits that need `gathered` counts read rank_counts."""
        raise NotImplementedError
