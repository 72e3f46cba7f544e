"""Which policies the kernels follow, by the names and arguments of the stack grammar (docs/contract.md section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Collective: TypeAlias = Literal["none", "all_reduce", "all_gather"]
SPLITS = ("even", "random", "static", "lplb", "lplb-sampled")
SHARED = ("none", "local", "waterfill")
SAMPLED = ("random", "lplb-sampled")


@dataclass(frozen=True, slots=True)
class Rule:
    """split, and `counts` and `objective` of lplb.

    shared: `none` where the layer has no shared expert, else its policy; candidates, load and shared_counts: the
    arguments of `waterfill`; cost of the shared expert in routed assignments. seed of the draws.
    """

    split: str = "lplb"
    counts: Literal["reduced", "gathered"] = "reduced"
    objective: Literal["tokens", "time"] = "tokens"
    shared: str = "none"
    candidates: Literal["visited", "all"] = "visited"
    load: Literal["routed", "routed+local"] = "routed"
    shared_counts: Literal["global", "local"] = "global"
    cost: float = 1.0
    seed: int = 0

    @classmethod
    def of(cls, split: Any, shared: Any, cost: float, seed: int) -> Rule:
        """Of a stack's split and shared policies (objects of epsim.policies); a cost of 0: no shared expert."""
        return cls(
            split.name,
            getattr(split, "counts", "reduced"),
            getattr(split, "objective", "tokens"),
            shared.name if cost > 0 else "none",
            getattr(shared, "candidates", "visited"),
            getattr(shared, "load", "routed"),
            getattr(shared, "counts", "global"),
            cost,
            seed,
        )

    def uncovered(self) -> str | None:
        """Why there are no kernels for it, in one line, or None where there are."""
        if self.split not in SPLITS:
            return f"split {self.split} has no kernel (there are {', '.join(SPLITS)})"
        if self.objective != "tokens":
            return f"lplb(objective={self.objective}) has no kernel"
        if self.shared not in SHARED:
            return f"shared policy {self.shared} has no kernel (there are {', '.join(SHARED[1:])})"
        if self.shared == "waterfill" and self.split in SAMPLED:
            return f"waterfill after {self.split} has no kernel: the ranks' loads follow from no counts, but from draws"
        return None

    @property
    def solves(self) -> bool:
        return self.split in ("lplb", "lplb-sampled")

    @property
    def gathered(self) -> bool:
        return self.split == "lplb" and self.counts == "gathered"

    @property
    def sees_all_ranks(self) -> bool:
        """Whether Waterfill looks at the loads of all ranks' tokens."""
        return self.shared == "waterfill" and self.shared_counts == "global"

    @property
    def collective(self) -> Collective:
        """What the caller does with the counts between `count` and `assign`."""
        if self.gathered or self.sees_all_ranks:
            return "all_gather"
        return "all_reduce" if self.solves else "none"
