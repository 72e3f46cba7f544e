"""The rules of the dispatch kernels. The split and the shared policy of a stack declare them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Collective: TypeAlias = Literal["none", "all_reduce", "all_gather"]
Follow: TypeAlias = Literal["systematic", "sampled", "nearest", "gathered"]


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How an expert's tokens are divided over its copies.

    solves: whether the fractions are those of the lowest peak load; otherwise they are equal. follow: how tokens are
    assigned by these fractions. `systematic`: each source rank rounds its own tokens. `sampled`: one random draw per
    token. `gathered`: the split is in whole tokens, computed from the gathered counts. `nearest`: a table gives the
    copy for each source rank.
    """

    solves: bool = False
    follow: Follow = "systematic"


@dataclass(frozen=True, slots=True)
class SharedRule:
    """Where a token's shared expert is computed.

    candidates: `none` (no shared expert), `own` (the source rank), `visited` (the ranks that the token visits and the
    source rank), or `all` ranks. plus_local: whether a rank's load includes the shared work of its own tokens.
    sees_all_ranks: whether loads count the tokens of all ranks, not only those of the source rank.
    """

    candidates: Literal["none", "own", "visited", "all"]
    plus_local: bool = False
    sees_all_ranks: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The rules of a stack. split, shared: None if the policy has no kernel. names: those of the two policies. cost: a
    token of the shared expert, in routed assignments. seed: of the random draws."""

    split: SplitRule | None
    shared: SharedRule | None
    names: tuple[str, str]
    cost: float
    seed: int

    @classmethod
    def of(cls, split: Any, shared: Any, cost: float, seed: int) -> Rule:
        """The rule of a split and a shared policy (objects of epsim.policies). A cost of 0 means no shared expert."""
        names = (split.table_key, shared.table_key)
        return cls(split.kernel, shared.kernel if cost > 0 else SharedRule("none"), names, cost, seed)

    def uncovered(self) -> str | None:
        """The reason why the kernels cannot run this rule, in one line, or None if they can."""
        if self.split is None:
            return f"split {self.names[0]} has no kernel"
        if self.shared is None:
            return f"shared policy {self.names[1]} has no kernel"
        if self.shared.candidates in ("visited", "all") and self.follow == "sampled":
            why = "loads depend on random draws, not on counts"
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
        """Whether Waterfill uses the loads from the tokens of all ranks."""
        return self.shared is not None and self.shared.sees_all_ranks

    @property
    def collective(self) -> Collective:
        """The collective that the caller runs on the counts between `count` and `assign`."""
        if self.gathered or self.sees_all_ranks:
            return "all_gather"
        return "all_reduce" if self.solves else "none"
