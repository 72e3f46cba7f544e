"""Applies a policy stack to blocks of a trace, which gives the load of each rank."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from epsim.kernels.split import Backend
from epsim.placement.base import Placement
from epsim.policies.base import Batch, SharedWork, Split, local_index
from epsim.policies.copies import Copies
from epsim.policies.load import Load, joined
from epsim.policies.one_copy import held_by_rank
from epsim.policies.rounding import ONE, fixed_point
from epsim.policies.routing.block import Rerouted, reroute_block
from epsim.policies.rows import expected_rows, quota_rows, token_rows
from epsim.policies.splits import Even
from epsim.policies.stack import PolicyStack
from epsim.traces.trace import Block, CountsBlock, Level, Phase, RankCountsBlock, TokenBlock

EXACT = 2**53
CELLS = 1 << 18
"""The most elements of an intermediate tensor, unless a single step has more. Larger blocks are processed in parts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a stack needs to know in addition to the placement.

    seed: seed of all random draws. shared_cost: work of the shared expert in routed assignments, 0 for none.
    top_k: routed experts per token. layers: the model's number of each layer; draws depend on it.
    backend: the form of `epsim.kernels.split` that solves splits. All forms give the same bits.
    phase, num_scores: of the trace, for router policies.
    rows: whether loads contain the rows that are sent (Load.rank_rows). tile: rows of a grouped GEMM's tile, for
    Load.tiles; 0 for none.
    """

    seed: int
    shared_cost: float
    top_k: int
    layers: tuple[int, ...]
    backend: Backend = "auto"
    rows: bool = False
    tile: int = 0
    phase: Phase = "unknown"
    num_scores: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CountedSteps:
    """Successive steps of a block, counted once for all stacks on the same cluster.

    steps [S], assignments [S, L], counts [S, L, E] int64. rank_counts [S, L, R, E] int64: counts by source rank; None
    at counts level. batch: the tokens; None if the trace holds counts.
    """

    steps: Tensor
    assignments: Tensor
    counts: Tensor
    rank_counts: Tensor | None = None
    batch: Batch | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BoundStack:
    """A stack on one placement. notes: what a reader of its results should know."""

    stack: PolicyStack
    copies: Copies
    setting: Setting
    notes: tuple[str, ...]

    def load(self, block: Block) -> Load:
        """The load of a block of S >= 0 steps, whose tokens are on source ranks 0..R-1 of the placement.

        Works on the placement's device. Raises ValueError if the block is too coarse for the stack, does not fit the
        placement, or has counts that are negative or sum to more than 2^53 in a layer of a step. At rank-count level it
        also raises ValueError if there is a shared expert and a rank's assignments are not a multiple of top-k.
        """
        self.check_level(block)
        kept_mass = None
        if self.stack.router.acts:
            assert isinstance(block, TokenBlock)
            routed = self.rerouted(block)
            block, kept_mass = routed.block, routed.kept_mass
        load = joined([self.load_of(part, self.copies) for part in self.counted(block)])
        return load if kept_mass is None else dataclasses.replace(load, kept_mass=kept_mass)

    def check_level(self, block: Block) -> None:
        """Raises ValueError if the block is too coarse for the stack."""
        level: Level = "counts"
        if not isinstance(block, CountsBlock):
            level = "tokens" if isinstance(block, TokenBlock) else "rank_counts"
        self.stack.check_level(level, self.copies.redundant, self.has_shared)

    def counted(self, block: Block) -> Iterator[CountedSteps]:
        """The block's steps in order, in parts that fit a cache. Raises ValueError as `load`."""
        return self._token_parts(block) if isinstance(block, TokenBlock) else self._count_parts(block)

    def load_of(self, part: CountedSteps, copies: Copies) -> Load:
        """The load of counted steps, under the router's choice of experts. copies: those of the stack, or a view."""
        if part.rank_counts is None:
            return self._from_counts(part, copies)
        return self._from_ranks(part, part.rank_counts, copies)

    def rerouted(self, block: TokenBlock) -> Rerouted:
        """The block as the stack's router would have routed it. Raises ValueError as `reroute_block`."""
        placement, setting = self.copies.placement, self.setting
        if block.expert_ids.shape[1] != placement.num_layers:
            raise ValueError(
                f"tokens of {block.expert_ids.shape[1]} layers do not fit a placement of {placement.num_layers} layers"
            )
        holds = self.copies.once(held_by_rank)
        router, num_ranks = self.stack.router, placement.num_ranks
        return reroute_block(router, block, setting.phase, placement.num_experts, num_ranks, holds)

    @property
    def has_shared(self) -> bool:
        return self.setting.shared_cost > 0

    @property
    def most_experts(self) -> int:
        """The most routed experts of a token."""
        return self.stack.router.most_experts(self.setting.top_k)

    @property
    def split(self) -> Split:
        """The stack's split; `even` if no expert has several copies, since nothing is split or drawn then."""
        return self.stack.split if self.copies.redundant else Even()

    def _count_parts(self, block: CountsBlock | RankCountsBlock) -> Iterator[CountedSteps]:
        placement, device = self.copies.placement, self.copies.slot.device
        counts = torch.as_tensor(block.counts, dtype=torch.int64, device=device)
        by_rank = isinstance(block, RankCountsBlock)
        sources = [placement.num_ranks] if by_rank else []
        expected = [len(block.steps), placement.num_layers, *sources, placement.num_experts]
        if list(counts.shape) != expected:
            raise ValueError(f"counts of shape {list(counts.shape)} do not fit the placement: expected {expected}")
        steps = torch.as_tensor(block.steps, dtype=torch.int64, device=device)
        per_step = placement.num_layers * placement.num_physical * (placement.num_ranks if by_rank else 1)
        for first, last in _ranges(len(steps), per_step):
            part = counts[first:last]
            summed, rank_counts = (part.sum(2), part) if by_rank else (part, None)
            yield CountedSteps(steps[first:last], _sums(part), summed, rank_counts)

    def _token_parts(self, block: TokenBlock) -> Iterator[CountedSteps]:
        placement, device = self.copies.placement, self.copies.slot.device
        ids = torch.as_tensor(block.expert_ids, device=device)
        source = torch.as_tensor(block.source_rank, dtype=torch.int64, device=device)
        token_step = torch.as_tensor(block.token_step, dtype=torch.int64, device=device)
        steps = torch.as_tensor(block.steps, dtype=torch.int64, device=device)
        layers = torch.tensor(self.setting.layers, device=device)
        num_tokens, num_layers, top_k = ids.shape
        if num_layers != placement.num_layers:
            raise ValueError(f"tokens of {num_layers} layers do not fit a placement of {placement.num_layers} layers")
        if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < placement.num_experts:
            raise ValueError(f"a token names an expert outside 0..{placement.num_experts - 1} (or -1 for none)")
        if num_tokens and not 0 <= int(source.min()) <= int(source.max()) < placement.num_ranks:
            raise ValueError(f"a token's source rank is outside 0..{placement.num_ranks - 1}")
        tokens_per_step = -(-num_tokens // max(len(steps), 1))
        per_step = num_layers * max(placement.num_ranks * placement.num_physical, tokens_per_step * top_k)
        for first, last in _ranges(len(steps), per_step):
            begin, end = torch.searchsorted(token_step, torch.tensor([first, last], device=device)).tolist()
            step = token_step[begin:end] - first
            local = local_index(step, source[begin:end])
            part = ids[begin:end].to(torch.int64)
            batch = Batch(steps[first:last], layers, step, source[begin:end], part, local)
            rank_counts = self._by_source(batch, part, placement.num_experts)
            yield CountedSteps(batch.steps, _sums(rank_counts), rank_counts.sum(2), rank_counts, batch)

    def _from_counts(self, part: CountedSteps, copies: Copies) -> Load:
        """Expected loads, with tokens spread evenly over source ranks."""
        counts, assignments, num_ranks = part.counts, part.assignments, copies.placement.num_ranks
        fractions = self.split.fractions(counts, copies)
        per_slot = fractions * copies.per_slot(counts)
        routed = copies.per_rank(per_slot)
        tokens = assignments.to(torch.float64) / self.setting.top_k
        shared_tokens = (tokens * (self.has_shared / num_ranks))[..., None].expand_as(routed)
        # A fraction that would round to 0 in fixed point is a solver's error, not load.
        has_load = (per_slot > 0) & (fractions >= 0.5 / ONE)
        return Load(
            routed=routed,
            routed_real=routed,
            shared=shared_tokens * self.setting.shared_cost,
            shared_tokens=shared_tokens,
            tokens=tokens,
            assignments=assignments,
            active=copies.per_rank(has_load.to(torch.int64)),
            rounded=False,
            tiles=self._tiles(per_slot, has_load),
        )

    def _from_ranks(self, part: CountedSteps, rank_counts: Tensor, copies: Copies) -> Load:
        """Loads in whole assignments."""
        counts, batch, split = part.counts, part.batch, self.split
        fractions = split.fractions(counts, copies) if split.by_fractions else None
        fixed = counts.new_empty(0) if fractions is None else fixed_point(fractions, copies)
        ids = None
        of_tokens = not split.by_rank or (self.has_shared and self.stack.shared.level == "tokens")
        dispatched = self.has_shared and self.stack.shared.dispatches
        if of_tokens or (self.setting.rows and dispatched and batch is not None):
            assert batch is not None
            ids = split.physical_ids(batch, rank_counts, fixed, copies, self.setting.seed)
        if ids is None or batch is None:
            served = split.quotas(rank_counts, fixed, copies)
        else:
            served = self._by_source(batch, ids, copies.placement.num_physical)
        by_source = copies.per_rank(served)
        routed = by_source.sum(2)
        real = routed.to(torch.float64)
        if fractions is not None:
            real = copies.per_rank(fractions * copies.per_slot(counts))
        tokens = self._tokens(rank_counts, batch)
        shared, shared_ranks = torch.zeros_like(by_source), None
        if self.has_shared:
            work = SharedWork(
                cost=self.setting.shared_cost,
                seed=self.setting.seed,
                top_k=self.setting.top_k,
                most_experts=self.most_experts,
                steps=part.steps,
                layers=torch.tensor(self.setting.layers, device=counts.device),
                routed=routed,
                routed_by_source=by_source,
                tokens=tokens,
                node_of_rank=copies.node_of_rank,
                batch=batch,
                expert_ranks=None if ids is None else self._ranks(ids),
            )
            if self.setting.rows and dispatched and batch is not None:
                shared_ranks = self.stack.shared.token_ranks(work)
                shared = self._by_source(batch, shared_ranks[:, :, None], copies.placement.num_ranks)
            else:
                shared = self.stack.shared.served(work)
        rank_rows, node_rows = None, None
        if self.setting.rows and batch is None:
            moved = shared if dispatched else None
            rank_rows, node_rows = expected_rows(by_source, tokens, self.setting.top_k, moved, copies.node_of_rank)
        elif self.setting.rows and batch is not None:
            if ids is None:
                rank_rows, node_rows = quota_rows(batch, served, copies)
            else:
                rank_rows, node_rows = token_rows(batch, self._ranks(ids), shared_ranks, copies.node_of_rank)
        per_slot = served.sum(2)
        return Load(
            routed=routed,
            routed_real=real,
            shared=shared.sum(2).to(torch.float64) * self.setting.shared_cost,
            shared_tokens=shared.sum(2),
            tokens=tokens.sum(-1).to(torch.float64),
            assignments=part.assignments,
            active=copies.per_rank((per_slot > 0).to(torch.int64)),
            remote_rank=self._leaving(by_source, node=False),
            remote_node=self._leaving(by_source, node=True),
            shared_remote_rank=self._leaving(shared, node=False),
            shared_remote_node=self._leaving(shared, node=True),
            rounded=True,
            rank_rows=rank_rows,
            node_rows=node_rows,
            tiles=self._tiles(per_slot),
        )

    def _tiles(self, per_slot: Tensor, has_load: Tensor | None = None) -> Tensor | None:
        """[S, L, P] assignments of each physical expert -> [S, L, R]: tiles that a rank's experts fill.
        has_load [S, L, P]: the experts that count, None for all."""
        if not self.setting.tile:
            return None
        tiles = per_slot / self.setting.tile  # a large tensor, so it is changed in place
        if has_load is not None:
            tiles.mul_(has_load)
        return self.copies.per_rank(tiles.ceil_())

    def _ranks(self, ids: Tensor) -> Tensor:
        """Physical experts [...], -1 for none -> the ranks that hold them."""
        # Rounding down keeps -1.
        return torch.div(ids, self.copies.placement.slots_per_rank, rounding_mode="floor")

    def _tokens(self, rank_counts: Tensor, batch: Batch | None) -> Tensor:
        """[S, L, R]: tokens of each source rank; int64, or float64 if they need not be whole."""
        if batch is not None:
            return self._by_source(batch, (batch.expert_ids >= 0).any(-1, keepdim=True).to(torch.int64) - 1, 1)[..., 0]
        assignments = rank_counts.sum(-1)
        if not self.has_shared:
            return assignments.to(torch.float64) / self.setting.top_k
        if bool((assignments % self.setting.top_k != 0).any()):
            step, layer, rank = (int(i) for i in (assignments % self.setting.top_k).nonzero()[0])
            raise ValueError(
                f"source rank {rank} has {int(assignments[step, layer, rank])} assignments (step {step} of the block, "
                f"layer {self.setting.layers[layer]}), not a multiple of top-k {self.setting.top_k}: "
                "the shared expert needs whole tokens; give the right --top-k, or a shared cost of 0"
            )
        return assignments // self.setting.top_k

    def _by_source(self, batch: Batch, ids: Tensor, width: int) -> Tensor:
        """ids [T, L, k] in -1..width-1 -> [S, L, R, width] int64: how often each is named, by source rank."""
        num_layers, num_ranks = ids.shape[1], self.copies.placement.num_ranks
        layer = torch.arange(num_layers, device=ids.device)
        row = (batch.token_step[:, None] * num_layers + layer) * num_ranks + batch.source_rank[:, None]
        shape = (len(batch.steps), num_layers, num_ranks, width + 1)
        index = row[:, :, None] * (width + 1) + (ids + 1)
        return torch.bincount(index.flatten(), minlength=math.prod(shape)).reshape(shape)[..., 1:]

    def _leaving(self, by_source: Tensor, node: bool) -> Tensor:
        """[S, L, R, R] by source and serving rank -> [S, L]: how much leaves its rank or node."""
        group = self.copies.node_of_rank
        group = group if node else torch.arange(len(group), device=group.device)
        return (by_source * (group[:, None] != group)).sum((2, 3))


def bind(
    stack: PolicyStack, placement: Placement, setting: Setting, shared: dict[str, Copies] | None = None
) -> BoundStack:
    """Prepares a stack for a placement.

    shared: the copies of earlier placements by version, so that stacks on the same placement share them.
    Raises ValueError if the setting does not fit the placement.
    """
    if len(setting.layers) != placement.num_layers:
        raise ValueError(f"{len(setting.layers)} layer numbers given for a placement of {placement.num_layers} layers")
    if setting.rows and placement.num_ranks % placement.num_nodes:
        raise ValueError(
            f"{placement.num_ranks} ranks on {placement.num_nodes} nodes: rows need nodes of equally many ranks: "
            "give a number of nodes that divides the ranks, or rows=False"
        )
    copies = Copies(placement, setting.backend)
    if shared is not None:
        copies = shared.setdefault(placement.version, copies)
    return BoundStack(stack, copies, setting, _notes(stack, copies, setting))


def _notes(stack: PolicyStack, copies: Copies, setting: Setting) -> tuple[str, ...]:
    known, redundant = setting.num_scores, copies.redundant
    router, split, *others = stack.batch_policies
    notes = [*(split.notes if redundant else ()), *router.notes]
    if stack.router.acts and 0 < known < copies.placement.num_experts:
        scores = f"the trace holds the {known} best scores of a token"
        notes.append(f"{scores}, so it takes no other expert (maxp is {known})")
    notes += [*router.notes_beside(stack, redundant), *split.notes_beside(stack, redundant)]
    for policy in others:
        unused = f"the shared cost is 0, so {policy.name} changes nothing"
        notes += policy.notes if policy.decides(redundant, setting.shared_cost > 0) else (unused,)
        notes += policy.notes_beside(stack, redundant)
    return tuple(notes)


def _sums(counts: Tensor) -> Tensor:
    """[S, L, ...] -> [S, L] int64. Raises ValueError for negative counts and for sums above 2^53."""
    flat = counts.flatten(2)
    if flat.numel():
        least, most = (int(value) for value in flat.aminmax())
        if least < 0:
            raise ValueError(f"a count is {least}: counts are 0 or more")
        if most * flat.shape[-1] > EXACT and bool((flat.sum(-1, dtype=torch.float64) > EXACT).any()):
            raise ValueError("a layer of a step has more than 2^53 assignments: scale the counts down")
    return flat.sum(-1)


def _ranges(num_steps: int, per_step: int) -> list[tuple[int, int]]:
    """Ranges of consecutive steps with at most CELLS elements, or of one step; one empty range for no steps."""
    size = max(CELLS // max(per_step, 1), 1)
    return [(first, min(first + size, num_steps)) for first in range(0, max(num_steps, 1), size)]
