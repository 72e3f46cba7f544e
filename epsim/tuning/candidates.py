"""The candidates of the search: stacks, numbers of redundant experts, and rebalance intervals."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from epsim.engines.base import Deployment
from epsim.placement.base import Cluster
from epsim.placement.eplb import prefers_global
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.traces.trace import LEVELS, Level

EXTRA_SLOTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""The numbers of slots per GPU and layer that are tried, in addition to those that hold every expert once."""
INTERVALS = tuple(mantissa * 10**power for power in range(1, 6) for mantissa in (1, 2, 5))
MOST_INTERVALS = 5
SGLANG_WATERFILL = "waterfill(load=routed+local,counts=local)"
"""Waterfill as SGLang runs it by default: each rank uses the counts of its own tokens only."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stack with `redundant` redundant experts per layer.

    interval: steps between rebalances; None if the placement is planned once. charged: another stack that would be run,
    and whose policies' time is charged. A split that needs tokens is scored on counts as the exact split, and charged
    as itself.
    """

    stack: PolicyStack
    redundant: int
    interval: int | None = None
    charged: PolicyStack | None = None

    @property
    def shown_stack(self) -> PolicyStack:
        """The stack that would be run, and whose time is charged."""
        return self.charged or self.stack

    @property
    def deployment(self) -> Deployment:
        return Deployment(self.shown_stack, self.redundant, self.interval)

    @property
    def name(self) -> str:
        every = "" if self.interval is None else f" every {self.interval}"
        return f"{self.shown_stack} r{self.redundant}{every}"

    @property
    def complexity(self) -> int:
        """How many moving parts the candidate adds to a serving system's defaults. Of otherwise equal candidates, the
        least complex one is chosen."""
        stack = self.shown_stack
        deciding = stack.deciding(self.redundant > 0, shared_expert=True)
        complexity = stack.placement.complexity + sum(policy.complexity for policy in deciding)
        return complexity + 3 * (self.interval is not None)

    @property
    def planned_once(self) -> Candidate:
        """The same candidate without rebalances."""
        return dataclasses.replace(self, interval=None)


def redundancies(num_experts: int, num_gpus: int, most_slots: int) -> tuple[int, ...]:
    """The numbers of redundant experts per layer that divide among the GPUs and need at most most_slots per GPU. No GPU
    holds more slots than there are experts."""
    least = -(-num_experts // num_gpus)
    spare = least * num_gpus - num_experts
    most = min(most_slots, num_experts)
    return tuple(spare + extra * num_gpus for extra in EXTRA_SLOTS if least + extra <= most)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A split and a shared-expert policy, as the text of a stack without its placement. charged: the split whose time
    is charged, where it is not the stack's own."""

    text: str
    charged: str = ""


JOINT = Dispatch("lplb(counts=gathered)+waterfill-joint")
COARSE = [Dispatch("even"), Dispatch("lplb"), Dispatch("lplb", charged="lplb-ipm")]


def default_dispatches(level: Level, has_shared: bool) -> list[Dispatch]:
    """What is tried on every placement with redundant experts."""
    if level == "counts":
        return COARSE
    if level == "rank_counts":
        return [*COARSE, Dispatch("lplb(counts=gathered)"), *([JOINT] if has_shared else [])]
    dispatches = [Dispatch(text) for text in ("even", "random", "lplb-ipm", "lplb")]
    if has_shared:
        dispatches += [Dispatch(f"{split}+{SGLANG_WATERFILL}") for split in ("random", "lplb-ipm")] + [JOINT]
    return dispatches


def baseline(stack: PolicyStack | None, num_experts: int, least: Cluster) -> Candidate:
    """The candidate that the others are compared with: the given stack, which runs today, or experts in order. least:
    the cluster with the fewest redundant experts."""
    stack = stack or parse_stack("contiguous")
    return Candidate(stack, stack.placement.redundant(num_experts, least))


def all_candidates(
    level: Level,
    has_shared: bool,
    num_experts: int,
    clusters: Sequence[Cluster],
    intervals: Sequence[int],
    routers: Sequence[str] = (),
    today: PolicyStack | None = None,
) -> list[Candidate]:
    """The default candidates, the baseline first. clusters: one for each number of redundant experts, ascending. today:
    the stack that runs today; None for experts in order."""
    candidates = [baseline(today, num_experts, clusters[0])]
    for cluster in clusters:
        placements = ["eplb"]
        sizes = (num_experts, cluster.num_physical(num_experts), cluster.num_groups, cluster.num_nodes)
        if cluster.num_nodes > 1 and not prefers_global(*sizes, cluster.num_ranks):
            placements.append("eplb-global")
        placements.append("searched")
        if cluster is clusters[0]:
            placements.insert(0, "contiguous")
        dispatches = default_dispatches(level, has_shared)
        if not cluster.num_redundant:
            dispatches = _without_splits(level, has_shared)
        for placement, dispatch, router in itertools.product(placements, dispatches, ("", *routers)):
            candidates += _at(placement, router, dispatch, cluster.num_redundant, intervals)
    return list(dict.fromkeys(candidates))


def given_candidates(
    stacks: Sequence[PolicyStack],
    num_experts: int,
    clusters: Sequence[Cluster],
    intervals: Sequence[int],
    today: PolicyStack | None = None,
) -> list[Candidate]:
    """The baseline, and the given stacks on each cluster. today: as for `all_candidates`."""
    candidates = [baseline(today, num_experts, clusters[0])]
    for stack in stacks:
        for cluster in clusters:
            redundant = stack.placement.redundant(num_experts, cluster)
            candidates += [Candidate(stack, redundant, interval) for interval in (None, *_intervals(stack, intervals))]
    return list(dict.fromkeys(candidates))


def check_levels(candidates: Sequence[Candidate], level: Level, has_shared: bool) -> None:
    """Raises ValueError if a candidate needs a finer trace."""
    for candidate in candidates:
        candidate.stack.check_level(level, candidate.redundant > 0, has_shared)


def possible_intervals(most: int) -> tuple[int, ...]:
    """Of 10, 20, 50, 100, ... the MOST_INTERVALS largest that are at most `most`."""
    return tuple(interval for interval in INTERVALS if interval <= most)[-MOST_INTERVALS:]


def _without_splits(level: Level, has_shared: bool) -> list[Dispatch]:
    """Without redundant experts there is nothing to split."""
    if not has_shared or LEVELS.index(level) == 0:
        return [Dispatch("even")]
    waterfill = [Dispatch(f"even+{SGLANG_WATERFILL}")] if level == "tokens" else []
    return [Dispatch("even"), JOINT, *waterfill]


def _at(placement: str, router: str, dispatch: Dispatch, redundant: int, intervals: Sequence[int]) -> list[Candidate]:
    head = f"{placement}+{router}+" if router else f"{placement}+"
    stack = parse_stack(head + dispatch.text)
    charged = parse_stack(head + dispatch.charged) if dispatch.charged else None
    return [Candidate(stack, redundant, interval, charged) for interval in (None, *_intervals(stack, intervals))]


def _intervals(stack: PolicyStack, intervals: Sequence[int]) -> Sequence[int]:
    """The intervals tried for the stack's placement; none if no system rebalances with it."""
    return intervals if stack.placement.rebalances else ()
