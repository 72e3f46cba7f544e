"""Opportunistic expert activation, and its first phase by itself (arXiv 2511.02237, Algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from epsim.kernels.router import Plan, Rule
from epsim.policies.base import Routed, Router, RouterWork
from epsim.policies.routing.choose import preference, take
from epsim.policies.routing.fused import by_kernel
from epsim.policies.routing.schedule import parse_schedule
from epsim.policies.routing.union import union

DECODE_ONLY = "changes decode tokens only: prefill tokens keep the model's choice, and their experts count as read"


@dataclass(frozen=True, slots=True)
class Pruned(Router):
    """Every token keeps only its k0 best experts. This is phase 1 of opportunistic expert activation.

    k0: a number, or numbers by batch size (`parse_schedule`). Only the latter need an all-reduce, of the batch size.
    """

    k0: str
    name: ClassVar[str] = "pruned"
    examples: ClassVar[tuple[str, ...]] = ("pruned(k0=2)", "pruned(k0=2@4/1@9)")
    notes: ClassVar[tuple[str, ...]] = (f"pruned {DECODE_ONLY}",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "k0", str(parse_schedule(self.k0, self.name, 1)))

    @property
    def whole_batch(self) -> bool:
        return not self._plan.settled

    @property
    def _plan(self) -> Plan:
        return Plan("base", Rule(parse_schedule(self.k0, self.name, 1).steps))

    def route(self, work: RouterWork) -> Routed:
        schedule, plan = parse_schedule(self.k0, self.name, 1), self._plan
        top_k = work.expert_ids.shape[-1]
        schedule.check(top_k, f"{self.name}(k0={self.k0})")
        if (routed := by_kernel(work, plan)) is not None:
            return routed
        wish = preference(work)
        size = wish.active.sum(-1, keepdim=True)
        place = schedule.place(size if plan.settled else work.total(size))[..., None]
        base = wish.own
        for number, k0 in enumerate(schedule.values, 1):
            base = torch.where(place == number, wish.position < k0, base)
        return take(work, wish, base, top_k)


@dataclass(frozen=True, slots=True)
class Oea(Router):
    """Every token keeps its k0 best experts (its base), then adds experts that are read for other tokens, best first.

    k0: a number, or numbers by batch size (`parse_schedule`). A batch of one token keeps the model's k.
    p: the base has no more experts than are needed to reach this share of the token's scores.
    kmax: the most experts per token, by default the model's k. In batches below k0's first step it is at least k.
    maxp: a token considers only its maxp best experts, by default all with known scores.
    union: whose bases a token may add experts from. `batch`: those of all tokens of the step, which needs one small
    all-reduce before the exchange. `rank`: those of the tokens of its source rank, which needs none; k0 then follows
    from the number of these tokens. With equal k0 both read the same experts in total, but with `rank` a token finds
    fewer experts to add.
    Raises ValueError if arguments contradict each other.
    """

    k0: str
    p: float = 1.0
    kmax: int | None = None
    maxp: int | None = None
    union: Literal["batch", "rank"] = "batch"
    name: ClassVar[str] = "oea"
    examples: ClassVar[tuple[str, ...]] = ("oea(k0=2)", "oea(k0=2,kmax=6)")
    notes: ClassVar[tuple[str, ...]] = (f"oea {DECODE_ONLY}",)

    def __post_init__(self) -> None:
        schedule = parse_schedule(self.k0, self.name, 2)
        object.__setattr__(self, "k0", str(schedule))
        if not 0 < self.p <= 1:
            raise ValueError(f"oea: p={self.p}: give a share above 0 and up to 1")
        for name, value in (("kmax", self.kmax), ("maxp", self.maxp)):
            if value is not None and value < max(schedule.values):
                raise ValueError(f"oea: {name}={value} is less than k0={self.k0}, which every token is guaranteed")

    @property
    def whole_batch(self) -> bool:
        return self.union == "batch"

    def most_experts(self, top_k: int) -> int:
        return max(top_k, self.kmax or 0)

    def route(self, work: RouterWork) -> Routed:
        schedule = parse_schedule(self.k0, self.name, 2)
        top_k, num_experts = work.expert_ids.shape[-1], work.scores.shape[-1]
        schedule.check(top_k, f"{self.name}(k0={self.k0})")
        if self.kmax is not None and self.kmax > num_experts:
            raise ValueError(f"oea: kmax={self.kmax}, but the model has {num_experts} experts")
        rule = Rule(schedule.steps, self.p, self.kmax, self.maxp)
        if (routed := by_kernel(work, Plan("union", rule))) is not None:
            return routed
        wish = preference(work)
        found = union(work, wish, schedule, self.p)
        within = wish.position < (num_experts if self.maxp is None else self.maxp)
        allowed = found.base | (found.loaded[..., None, :] & within)
        return take(work, wish, allowed, top_k if self.kmax is None else self.kmax, found.small)
