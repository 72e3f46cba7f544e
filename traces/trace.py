"""A trace in memory: its description (TraceMeta) and its blocks of consecutive steps, at three levels of detail."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from epsim.traces import limits
from epsim.traces.limits import LEVELS, MAX_EXPERTS, MAX_RANKS, MAX_SHARED_COST, PHASES, Level, Origin, Phase

__all__ = ["LEVELS", "MAX_EXPERTS", "MAX_RANKS", "MAX_SHARED_COST", "PHASES", "Level", "Origin", "Phase"]

Array: TypeAlias = npt.NDArray[np.generic]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceMeta:
    """Describes a whole trace.

    level: `counts` [S, L, E], `rank_counts` [S, L, R, E], or `tokens` (expert ids [T, L, k]). Tokens give both counts.
    num_layers: L, mixture-of-experts layers only (dense layers are dropped on import).
    num_experts: E, logical routed experts per layer.
    top_k: routed experts per token; a step's number of tokens in a layer is its assignments / top_k.
    num_source_ranks: ranks on which tokens lived before dispatch; 0 if the recording does not say.
    shared_cost: work of the shared expert in units of one routed assignment, 0 for none, None where unknown.
    layers: the number that the model gives each of the L layers.
    num_scores: m, router scores kept per token and layer (tokens level); 0 for none. If m == E they are in order of
        expert id. Otherwise `score_ids` holds the expert of each; without `score_ids` they belong to `expert_ids`.
    source: where the recording came from; notes: what an import did to it (warm-up rows dropped, and so on).
    """

    level: Level
    num_layers: int
    num_experts: int
    top_k: int
    num_source_ranks: int = 0
    shared_cost: float | None = None
    model: str = "unknown"
    phase: Phase = "unknown"
    origin: Origin = "recorded"
    layers: tuple[int, ...] = ()
    num_scores: int = 0
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        if not self.layers:
            object.__setattr__(self, "layers", tuple(range(self.num_layers)))
        for name, known in (("level", LEVELS), ("phase", PHASES), ("origin", limits.ORIGINS)):
            if getattr(self, name) not in known:
                raise ValueError(f"trace {name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.num_layers < 1 or self.num_experts < 1:
            raise ValueError(f"a trace needs layers and experts, not {self.num_layers} x {self.num_experts}")
        largest = {"num_layers": limits.MAX_LAYERS, "num_experts": MAX_EXPERTS, "num_source_ranks": MAX_RANKS}
        for name, most in largest.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} is {getattr(self, name)}, more than {most}")
        if self.num_source_ranks < 0 or self.num_scores < 0:
            raise ValueError(f"num_source_ranks {self.num_source_ranks} and num_scores {self.num_scores} must be >= 0")
        ranks = self.num_source_ranks if self.level == "rank_counts" else 1
        if self.num_layers * max(ranks, 1) * self.num_experts > limits.MAX_STEP_NUMBERS:
            raise ValueError(
                f"{self.num_layers} layers x {ranks} source ranks x {self.num_experts} experts: a single step has more "
                f"than {limits.MAX_STEP_NUMBERS} counts"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top-k {self.top_k} is outside 1..{self.num_experts}, the number of experts")
        if len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} layer numbers given for {self.num_layers} layers")
        if len(set(self.layers)) != len(self.layers) or min(self.layers) < 0 or max(self.layers) >= 2**31:
            raise ValueError("layer numbers must be different whole numbers >= 0")
        if self.level == "rank_counts" and self.num_source_ranks < 1:
            raise ValueError("a trace of counts by source rank needs the number of source ranks")
        if self.shared_cost is not None and not 0 <= self.shared_cost <= MAX_SHARED_COST:
            raise ValueError(f"shared_cost {self.shared_cost} is outside 0..{MAX_SHARED_COST:g}")

    def _check_types(self) -> None:
        """Checks the types of the fields, which may come from a file's JSON."""
        whole = ("num_layers", "num_experts", "top_k", "num_source_ranks", "num_scores")
        for name in (*whole, "model", "source", "level", "phase", "origin"):
            kind, wanted = (int, "a whole number") if name in whole else (str, "a string")
            if type(getattr(self, name)) is not kind:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not {wanted}")
        if not all(type(layer) is int for layer in self.layers) or not all(isinstance(n, str) for n in self.notes):
            raise ValueError("layers must be whole numbers, and notes strings")
        if self.shared_cost is not None and type(self.shared_cost) not in (int, float):
            raise ValueError(f"shared_cost is {self.shared_cost!r}, not a number")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TraceMeta:
        fields = json.loads(text)
        fields["layers"] = tuple(fields["layers"])
        fields["notes"] = tuple(fields["notes"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class CountsBlock:
    """steps [S]: the steps' numbers, ascending. counts [S, L, E] int64: assignments per logical expert."""

    steps: Ints
    counts: Ints


@dataclass(frozen=True, slots=True)
class RankCountsBlock:
    """steps [S]. counts [S, L, R, E] int64: assignments per source rank and logical expert."""

    steps: Ints
    counts: Ints

    def to_counts(self) -> CountsBlock:
        return CountsBlock(self.steps, self.counts.sum(axis=2))


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Tokens of whole steps, ordered by step, then source rank, then position in the batch.

    steps [S]: the steps' numbers, ascending; token_step [T]: the index into `steps` of each token's step, ascending.
    source_rank [T] int64; expert_ids [T, L, k] integer, -1 for an empty slot.
    scores [T, L, m] float or None, score_ids [T, L, m] integer or None: see TraceMeta.num_scores.
    domain [T] of str or None: the label of the request that the token belongs to.
    phase [S] of str or None: each step's phase, if the trace mixes phases.
    A trace may keep scores for some steps only; a block of steps without scores has None.
    """

    steps: Ints
    token_step: Ints
    source_rank: Ints
    expert_ids: Array
    scores: Array | None = None
    score_ids: Array | None = None
    domain: npt.NDArray[np.object_] | None = None
    phase: npt.NDArray[np.object_] | None = None

    def take(self, steps: Any, tokens: Any, token_step: Ints) -> TokenBlock:
        """The block with only some steps and tokens. steps, tokens: indices, masks or slices; token_step: the new index
        of each token's step."""

        def of_tokens(array: Any) -> Any:
            return None if array is None else array[tokens]

        return TokenBlock(
            self.steps[steps],
            token_step,
            self.source_rank[tokens],
            self.expert_ids[tokens],
            of_tokens(self.scores),
            of_tokens(self.score_ids),
            of_tokens(self.domain),
            None if self.phase is None else self.phase[steps],
        )

    def to_rank_counts(self, num_ranks: int, num_experts: int) -> RankCountsBlock:
        """Counts [S, L, num_ranks, num_experts]."""
        num_layers = self.expert_ids.shape[1]
        ids = self.expert_ids.astype(np.int64)
        row = (self.token_step[:, None] * num_layers + np.arange(num_layers)) * num_ranks + self.source_rank[:, None]
        flat = (row[:, :, None] * num_experts + ids)[ids >= 0]
        shape = (len(self.steps), num_layers, num_ranks, num_experts)
        return RankCountsBlock(self.steps, np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape))

    def to_counts(self, num_experts: int) -> CountsBlock:
        # Counts as if all tokens were on one rank: an array per source rank would be many times as large.
        together = dataclasses.replace(self, source_rank=np.zeros_like(self.source_rank))
        return together.to_rank_counts(1, num_experts).to_counts()


Block: TypeAlias = CountsBlock | RankCountsBlock | TokenBlock
