"""What is tried: stacks, redundancy and rebalance intervals, and how simple and cheap each is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from epsim.placement.base import Cluster
from epsim.placement.eplb import prefers_global
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.traces.trace import LEVELS, Level

EXTRA_SLOTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Slots a GPU and layer beyond those that hold every expert once."""
INTERVALS = tuple(mantissa * 10**power for power in range(1, 6) for mantissa in (1, 2, 5))
MOST_INTERVALS = 5
SGLANG_WATERFILL = "waterfill(load=routed+local,counts=local)"
"""Waterfill as SGLang runs it unless told otherwise: from the counts of a rank's own tokens."""
SPLIT_STEPS = {"even": 0, "random": 0, "static": 0, "one-copy": 1}
"""How much a split adds to what runs; those not named solve something for each batch."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """stack on `redundant` physical experts more than logical ones. interval: steps between rebalances, None where the
    placement is planned once. charged: the stack whose policies' time is charged, where it is not the stack's own: a
    split that needs tokens, scored on counts as the exact one."""

    stack: PolicyStack
    redundant: int
    interval: int | None = None
    charged: PolicyStack | None = None

    @property
    def timed_as(self) -> PolicyStack:
        return self.charged or self.stack

    @property
    def shown_stack(self) -> PolicyStack:
        """What would be run."""
        return self.timed_as

    @property
    def name(self) -> str:
        every = "" if self.interval is None else f" every {self.interval}"
        return f"{self.shown_stack} r{self.redundant}{every}"

    @property
    def complexity(self) -> int:
        """Steps away from what a serving system does when told nothing: a choice between candidates alike otherwise."""
        stack = self.shown_stack
        placed = {"contiguous": 0, "searched": 2}.get(stack.placement.name, 1)
        split = SPLIT_STEPS.get(stack.split.name, 2) if self.redundant else 0
        shared = {"local": 0, "waterfill": 1}.get(stack.shared.name, 2)
        return placed + split + shared + 3 * (self.interval is not None) + 5 * (stack.router.acts + stack.reader.acts)

    @property
    def planned_once(self) -> Candidate:
        return dataclasses.replace(self, interval=None)


def redundancies(num_experts: int, num_gpus: int, most_slots: int) -> tuple[int, ...]:
    """Redundant experts a layer that divide among the GPUs and fit most_slots a GPU; no expert twice on a GPU."""
    least = -(-num_experts // num_gpus)
    spare = least * num_gpus - num_experts
    most = min(most_slots, num_experts)
    return tuple(spare + extra * num_gpus for extra in EXTRA_SLOTS if least + extra <= most)


def default_stacks(level: Level, has_shared: bool) -> list[str]:
    """Splits and shared-expert policies that are tried on every placement with redundancy, as text after it; a part
    after `|` is the split that is charged."""
    if level == "counts":
        return ["even", "lplb", "lplb|lplb-ipm"]
    if level == "rank_counts":
        stacks = ["even", "lplb", "lplb|lplb-ipm", "lplb(counts=gathered)"]
        return stacks + (["lplb(counts=gathered)+waterfill-joint"] if has_shared else [])
    stacks = ["even", "random", "lplb-ipm", "lplb"]
    if has_shared:
        stacks += [f"random+{SGLANG_WATERFILL}", f"lplb-ipm+{SGLANG_WATERFILL}"]
        stacks += ["lplb(counts=gathered)+waterfill-joint"]
    return stacks


def baseline(redundant: int) -> Candidate:
    """What runs where nobody asks for balance."""
    return Candidate(parse_stack("contiguous"), redundant)


def all_candidates(
    level: Level,
    has_shared: bool,
    num_experts: int,
    clusters: Sequence[Cluster],
    intervals: Sequence[int],
    routers: Sequence[str] = (),
) -> list[Candidate]:
    """The grid, the baseline first. clusters: one for each redundancy, ascending."""
    found = [baseline(clusters[0].num_redundant)]
    for cluster in clusters:
        placements = ["eplb"]
        sizes = (num_experts, cluster.num_physical(num_experts), cluster.num_groups, cluster.num_nodes)
        if cluster.num_nodes > 1 and not prefers_global(*sizes, cluster.num_ranks):
            placements.append("eplb-global")
        placements.append("searched")
        if cluster is clusters[0]:
            placements.insert(0, "contiguous")
        rests = default_stacks(level, has_shared)
        if not cluster.num_redundant:
            rests = _without_splits(level, has_shared)
        for placement in placements:
            for rest in rests:
                for router in ("", *routers):
                    found += _at(placement, router, rest, cluster.num_redundant, intervals)
    return list(dict.fromkeys(found))


def given_candidates(
    stacks: Sequence[PolicyStack], clusters: Sequence[Cluster], intervals: Sequence[int]
) -> list[Candidate]:
    """The stacks that the user names, and the baseline, in place of the grid's."""
    found = [baseline(clusters[0].num_redundant)]
    for stack in stacks:
        for cluster in clusters:
            every = intervals if stack.placement.name.startswith("eplb") else ()
            found += [Candidate(stack, cluster.num_redundant, interval) for interval in (None, *every)]
    return list(dict.fromkeys(found))


def check_levels(candidates: Sequence[Candidate], level: Level, has_shared: bool) -> None:
    """Raises ValueError where a candidate needs a finer trace."""
    for candidate in candidates:
        candidate.stack.check_level(level, candidate.redundant > 0, has_shared)


def possible_intervals(most: int) -> tuple[int, ...]:
    """The largest of 10, 20, 50, 100, ... that are at most `most`, at most MOST_INTERVALS of them."""
    return tuple(interval for interval in INTERVALS if interval <= most)[-MOST_INTERVALS:]


def _without_splits(level: Level, has_shared: bool) -> list[str]:
    """Without redundancy there is nothing to split."""
    if not has_shared or LEVELS.index(level) == 0:
        return ["even"]
    own = ["lplb(counts=gathered)+waterfill-joint"]
    return ["even", *own] + ([f"even+{SGLANG_WATERFILL}"] if level == "tokens" else [])


def _at(placement: str, router: str, rest: str, redundant: int, intervals: Sequence[int]) -> list[Candidate]:
    rest, _, charged = rest.partition("|")
    head = f"{placement}+{router}+" if router else f"{placement}+"
    stack = parse_stack(head + rest)
    other = parse_stack(head + charged) if charged else None
    # Systems that rebalance plan by EPLB; none searches while it serves.
    every = intervals if placement.startswith("eplb") else ()
    return [Candidate(stack, redundant, interval, other) for interval in (None, *every)]
