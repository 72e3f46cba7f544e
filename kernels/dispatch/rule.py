"""What the dispatch kernels follow of a stack: the rules that its split and its shared policy declare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Collective: TypeAlias = Literal["none", "all_reduce", "all_gather"]
Follow: TypeAlias = Literal["systematic", "sampled", "nearest", "gathered"]


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How an expert's tokens divide over its copies.

    solves: by the fractions of the lowest peak load, else in equal parts. follow: how tokens follow from them:
    `systematic` rounding by each source rank, `sampled` per token, whole tokens from `gathered` counts; `nearest`: by a
    table of one copy for each source rank.
    """

    solves: bool = False
    follow: Follow = "systematic"


@dataclass(frozen=True, slots=True)
class SharedRule:
    """Where a token's shared expert is computed.

    candidates: `none`, there is no shared expert; on the token's `own` rank; on one of the ranks that it `visited`, or
    of `all`. plus_local: a rank's load includes its own tokens' shared work. sees_all_ranks: loads are those of all
    ranks' tokens, not of the source rank's alone.
    """

    candidates: Literal["none", "own", "visited", "all"]
    plus_local: bool = False
    sees_all_ranks: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """split, shared: None where the policy has no kernel. names: of both policies. cost: of the shared expert in routed
    assignments. seed: of the draws."""

    split: SplitRule | None
    shared: SharedRule | None
    names: tuple[str, str]
    cost: float
    seed: int

    @classmethod
    def of(cls, split: Any, shared: Any, cost: float, seed: int) -> Rule:
        """Of a stack's split and shared policies (objects of epsim.policies); a cost of 0: no shared expert."""
        names = (split.table_key, shared.table_key)
        return cls(split.kernel, shared.kernel if cost > 0 else SharedRule("none"), names, cost, seed)

    def uncovered(self) -> str | None:
        """Why there are no kernels for it, in one line, or None where there are."""
        if self.split is None:
            return f"split {self.names[0]} has no kernel"
        if self.shared is None:
            return f"shared policy {self.names[1]} has no kernel"
        if self.shared.candidates in ("visited", "all") and self.follow == "sampled":
            why = "the ranks' loads follow from no counts, but from draws"
            return f"{self.names[1]} after {self.names[0]} has no kernel: {why}"
        return None

    @property
    def follow(self) -> Follow:
        return "systematic" if self.split is None else self.split.follow

    @property
    def solves(self) -> bool:
        return self.split is not None and self.split.solves

    @property
    def gathered(self) -> bool:
        return self.follow == "gathered"

    @property
    def sees_all_ranks(self) -> bool:
        """Whether Waterfill looks at the loads of all ranks' tokens."""
        return self.shared is not None and self.shared.sees_all_ranks

    @property
    def collective(self) -> Collective:
        """What the caller does with the counts between `count` and `assign`."""
        if self.gathered or self.sees_all_ranks:
            return "all_gather"
        return "all_reduce" if self.solves else "none"
