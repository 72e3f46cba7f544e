"""The float64 steps of the split on one layer's graph: water-filling, levelling, augmenting paths, bound (see cpu.py).

split.cu does the same steps with the same rounding. Tests compare bits, so both must change together.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from epsim.kernels.split.structure import Floats, Ints, Longs

NUM_LEVELLED = 3
"""Ranks are levelled after each of the first NUM_LEVELLED rounds. Later rounds only push load, which always ends."""


class Graph(NamedTuple):
    """One layer's part of the tables, and the loads of its replicated experts in one problem (demand)."""

    demand: Floats
    copy_start: Ints
    copy_rank: Ints
    copy_expert: Ints
    rank_start: Ints
    rank_copy: Ints
    num_paired: int  # copies of experts with two copies; the other copy of c is c ^ 1


class Search(NamedTuple):
    """Buffers of the breadth-first search, one element per rank (seen_expert: per expert).

    seen_rank, seen_expert: the round in which the rank or expert was last reached. root: the root of the rank's tree.
    from_copy, to_copy: load that moves to this rank leaves from_copy and goes to to_copy. queue: the ranks reached.
    """

    seen_rank: Ints
    seen_expert: Ints
    root: Ints
    from_copy: Ints
    to_copy: Ints
    queue: Ints


@njit(nogil=True, error_model="numpy")
def water_fill(graph: Graph, x: Floats, load: Floats, whole: bool) -> None:
    """One sweep of water-filling over the replicated experts. Updates x [copies] and load [R]. whole: in integers."""
    ranks = graph.copy_rank
    for k in range(graph.demand.size):
        first, last = graph.copy_start[k], graph.copy_start[k + 1]
        need = graph.demand[k]
        if last - first == 2:
            u, v = ranks[first], ranks[first + 1]
            a, b = load[u] - x[first], load[v] - x[first + 1]
            part = (b - a + need) * 0.5
            if whole:
                part = math.floor(part) * 1.0
            part = min(max(part, 0.0), need)
            x[first] = part
            x[first + 1] = need - part
            load[u] = a + part
            load[v] = b + (need - part)
            continue
        total = need
        lowest = first
        for c in range(first, last):
            load[ranks[c]] -= x[c]
            x[c] = 0.0
            total += load[ranks[c]]
            if load[ranks[c]] < load[ranks[lowest]]:
                lowest = c
        # The water level: ranks above it are removed, and it is computed again, until none is above (Michelot).
        wet = last - first
        level = total / wet
        while True:
            total, under = need, 0
            for c in range(first, last):
                if load[ranks[c]] < level:
                    total += load[ranks[c]]
                    under += 1
            if under >= wet or under == 0:
                break
            wet = under
            level = total / wet
        if whole:
            level = math.floor(level) * 1.0
        # The lowest rank takes the remaining load, so that the parts sum to the need despite rounding.
        remaining = need
        for c in range(first, last):
            if c != lowest and load[ranks[c]] < level:
                part = min(level - load[ranks[c]], remaining)
                x[c] = part
                load[ranks[c]] += part
                remaining -= part
        x[lowest] = remaining
        load[ranks[lowest]] += remaining


@njit(nogil=True, error_model="numpy")
def rescale(graph: Graph, x: Floats) -> None:
    """Scales the loads of each expert's copies to sum to its demand. Equal loads if the scale is not finite."""
    for k in range(graph.demand.size):
        first, last = graph.copy_start[k], graph.copy_start[k + 1]
        need = graph.demand[k]
        total = 0.0
        largest = first
        for c in range(first, last):
            x[c] = max(x[c], 0.0)
            total += x[c]
            if x[c] > x[largest]:
                largest = c
        if not (0.0 < total < np.inf and need / total < np.inf):
            for c in range(first, last):
                x[c] = 1.0
            total = 1.0 * (last - first)
            largest = first
        scale = 1.0 if total == need else need / total
        remaining = need
        for c in range(first, last):
            if c != largest:
                x[c] = min(x[c] * scale, remaining)
                remaining -= x[c]
        x[largest] = remaining


@njit(nogil=True, error_model="numpy")
def neighbours(graph: Graph, c: int, seen: Search, mark: int) -> tuple[int, int]:
    """The range of copies to which the load of copy c can move; empty if this round has already visited its expert."""
    if c < graph.num_paired:
        return c ^ 1, (c ^ 1) + 1
    k = graph.copy_expert[c]
    if seen.seen_expert[k] == mark:
        return 0, 0
    seen.seen_expert[k] = mark
    return graph.copy_start[k], graph.copy_start[k + 1]


@njit(nogil=True, error_model="numpy")
def push_along(graph: Any, x: Any, load: Any, amount: Any, source: int, target: int, seen: Any) -> None:
    """Moves `amount` from rank source to rank target, along the edges of the search tree."""
    w = target
    while w != source:
        x[seen.from_copy[w]] -= amount
        x[seen.to_copy[w]] += amount
        w = graph.copy_rank[seen.from_copy[w]]
    load[source] -= amount
    load[target] += amount


@njit(nogil=True, error_model="numpy")
def level_out(graph: Graph, x: Floats, load: Floats, seen: Search, mark: int) -> None:
    """Moves the loads of ranks connected by partly used copies towards their mean, along a spanning tree.

    The same as coarse.level_out, in float64.
    """
    tail = 0
    for r in range(load.size):
        if seen.seen_rank[r] == mark:
            continue
        seen.seen_rank[r] = mark
        seen.queue[tail] = r
        head, begin = tail, tail
        tail += 1
        total = 0.0
        while head < tail:
            u = seen.queue[head]
            head += 1
            total += load[u]
            for i in range(graph.rank_start[u], graph.rank_start[u + 1]):
                c = graph.rank_copy[i]
                if x[c] <= 0.0:
                    continue
                first, last = neighbours(graph, c, seen, mark)
                for d in range(first, last):
                    v = graph.copy_rank[d]
                    if seen.seen_rank[v] != mark and x[d] > 0.0:
                        seen.seen_rank[v] = mark
                        seen.from_copy[v] = c
                        seen.to_copy[v] = d
                        seen.queue[tail] = v
                        tail += 1
        mean = total / (tail - begin)
        for i in range(tail - 1, begin, -1):
            v = seen.queue[i]
            c, d = seen.from_copy[v], seen.to_copy[v]
            amount = max(min(load[v] - mean, x[d]), -x[c])
            x[d] -= amount
            x[c] += amount
            load[v] -= amount
            load[graph.copy_rank[c]] += amount


@njit(nogil=True, error_model="numpy")
def push(graph: Graph, x: Floats, load: Floats, cap: float, slack: float, tiny: float, seen: Search, mark: int) -> int:
    """Breadth-first search from all ranks above cap + slack. Pushes load along the tree to ranks below cap - slack.

    Copies with a load of at most `tiny` are not followed. Returns 0 if no rank is above cap + slack, -1 if load was
    pushed, else the size of the closed set of ranks (those with seen_rank == mark).
    """
    head, tail = 0, 0
    for r in range(load.size):
        if load[r] > cap + slack:
            seen.seen_rank[r] = mark
            seen.root[r] = r
            seen.queue[tail] = r
            tail += 1
    pushed = False
    while head < tail:
        u = seen.queue[head]
        head += 1
        source = seen.root[u]
        if load[source] <= cap:
            continue
        for i in range(graph.rank_start[u], graph.rank_start[u + 1]):
            c = graph.rank_copy[i]
            if x[c] <= tiny:
                continue
            first, last = neighbours(graph, c, seen, mark)
            for d in range(first, last):
                v = graph.copy_rank[d]
                if seen.seen_rank[v] == mark:
                    continue
                seen.seen_rank[v] = mark
                seen.root[v] = source
                seen.from_copy[v] = c
                seen.to_copy[v] = d
                seen.queue[tail] = v
                tail += 1
                amount = min(cap - load[v], load[source] - cap)
                if amount <= 0.0 or cap - load[v] <= slack:
                    continue
                w = v
                while w != source:
                    amount = min(amount, x[seen.from_copy[w]])
                    w = graph.copy_rank[seen.from_copy[w]]
                if amount <= 0.0:
                    continue
                pushed = True
                push_along(graph, x, load, amount, source, v, seen)
    return -1 if pushed else tail


@njit(nogil=True, error_model="numpy")
def captive_load(graph: Graph, fixed: Floats, seen: Search, mark: int) -> float:
    """The load that cannot leave the set of ranks with seen_rank == mark, computed from the demands."""
    captive = 0.0
    for r in range(fixed.size):
        if seen.seen_rank[r] == mark:
            captive += fixed[r]
    for k in range(graph.demand.size):
        inside = True
        for c in range(graph.copy_start[k], graph.copy_start[k + 1]):
            inside = inside and seen.seen_rank[graph.copy_rank[c]] == mark
        if inside:
            captive += graph.demand[k]
    return captive


@njit(nogil=True, error_model="numpy")
def close_gap(
    graph: Graph,
    fixed: Floats,
    x: Floats,
    load: Floats,
    numerator: float,
    size: int,
    tol: float,
    tiny_part: float,
    limit: int,
    whole: bool,
    seen: Search,
) -> tuple[float, int, int]:
    """Pushes load until no rank is above the bound numerator / size by more than tol. Closed sets raise the bound.

    tiny_part: copies with a load of at most this share of the slack are not followed. Returns the last numerator and
    size, and the number of rounds (at most limit).
    """
    seen.seen_rank[:] = 0
    seen.seen_expert[:] = 0
    mark = rounds = 0
    while rounds < limit:
        if whole:
            # The rounded quotient may be too small by one. The products are exact.
            cap = math.floor(numerator / size) * 1.0
            while cap * size < numerator:
                cap += 1.0
            slack = 0.0
        else:
            # Half of the tolerance is spare capacity. The slack, an eighth of it, covers rounding errors.
            cap = numerator / size * (1 + 0.5 * tol)
            slack = cap * tol / 8
        mark += 2
        reached = push(graph, x, load, cap, slack, slack * tiny_part, seen, mark)
        if reached == 0:
            break
        rounds += 1
        if reached > 0:
            captive = captive_load(graph, fixed, seen, mark)
            if not whole and captive * size <= numerator * reached:
                break  # the bound no longer rises, up to rounding errors; the caller checks whether the gap is closed
            numerator, size = captive, reached
        elif not whole and rounds <= NUM_LEVELLED:
            level_out(graph, x, load, seen, mark + 1)
    return numerator, size, rounds


@njit(nogil=True, error_model="numpy")
def largest(load: Floats | Longs) -> Any:
    top = load[0]
    for r in range(1, load.size):
        top = max(top, load[r])
    return top
