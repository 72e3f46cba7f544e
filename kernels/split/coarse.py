"""The split's search in 30-bit integers: sweeps of water-filling, levelling along trees, bounds from level sets.

Loads are rounded to integer multiples of a unit. The unit is a power of two, chosen so that the total has 2^29 to 2^30
units. Integer sums do not depend on their order, so the GPU form (coarse.cuh), which processes all ranks at once, gives
the same bits. cpu.py checks the result in float64. If it is not within the tolerance, cpu.py continues from it.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from epsim.kernels.split.flow import Graph, largest
from epsim.kernels.split.structure import Floats, Ints, Longs

MOST_RANKS = 32
"""The most ranks for this search, in which a set of ranks is a 32-bit mask."""
MOST_SWEEPS, MOST_WHOLE = 40, 8
"""The most sweeps before augmenting paths take over, for real-valued and for integral splits."""
COLD, WARM, LEVELLED = 2, 1, 8
"""A search levels ranks from sweep COLD on if it starts from the even split, and from sweep WARM on if it starts from
another batch's split (at once if that split is good). After LEVELLED sweeps, ranks are levelled only at every other
sweep, because sweeps and levelling may undo each other."""


class Scratch(NamedTuple):
    """need [K], part [copies]: loads of experts and copies in units. Buffers: words [6, R], used [E], tree [4, R]."""

    need: Longs
    part: Longs
    words: Longs
    used: Longs
    tree: Ints


@njit(nogil=True, error_model="numpy")
def unit_of(total: float, whole: bool) -> float:
    """The number of units per load of 1.0. whole: at most 1, so that only whole tokens move."""
    if total <= 0.0:
        return 1.0
    exponent = min(max(30 - math.frexp(total)[1], -1000), 1000)
    return math.ldexp(1.0, min(exponent, 0) if whole else exponent)


@njit(nogil=True, error_model="numpy")
def even_start(graph: Graph, until: Floats, need: Longs, x: Longs) -> None:
    """Sets x to the even split over slots. until [copies]: the share of the expert's slots up to and including each
    copy."""
    for k in range(need.size):
        below = 0
        for c in range(graph.copy_start[k], graph.copy_start[k + 1]):
            upto = int(need[k] * until[c])
            x[c] = upto - below
            below = upto


@njit(nogil=True, error_model="numpy")
def warm_start(graph: Graph, before: Floats, need: Longs, x: Longs) -> None:
    """Sets x to before [copies], another batch's split, scaled to this batch. If before is near zero, x is even.

    Computed in float32, which is accurate enough for a start and faster on a GPU.
    """
    for k in range(need.size):
        first, last = graph.copy_start[k], graph.copy_start[k + 1]
        total, most_part, most_copy = np.float32(0.0), np.float32(0.0), first
        for c in range(first, last):
            part = np.float32(before[c]) if before[c] > 0.0 else np.float32(0.0)
            before[c] = part
            total += part
            if part > most_part:
                most_copy, most_part = c, part
        # Outside this range, float32 cannot represent the total, or 2^30 units divided by the total.
        if not np.float32(1e-28) <= total <= np.float32(1e38):
            for c in range(first, last):
                before[c] = 1.0
            total, most_copy = np.float32(last - first), first
        # Rounded down, the other copies sum to at most the need. The largest copy takes the remaining load.
        scale = np.float32(need[k]) / total
        remaining = need[k]
        for c in range(first, last):
            if c != most_copy:
                x[c] = int(np.float32(before[c]) * scale)
                remaining -= x[c]
        x[most_copy] = remaining


@njit(nogil=True, error_model="numpy")
def add_loads(graph: Graph, x: Longs | Floats, fixed: Longs | Floats, load: Longs | Floats) -> None:
    """Sets load [R] to the sum of each rank's fixed experts and copies, in units or in tokens."""
    load[:] = fixed
    for c in range(x.size):
        load[graph.copy_rank[c]] += x[c]


@njit(nogil=True, error_model="numpy")
def sweep(graph: Graph, need: Longs, x: Longs, load: Longs) -> None:
    """One sweep of water-filling over all replicated experts."""
    ranks, num_pairs = graph.copy_rank, graph.num_paired // 2
    for k in range(num_pairs):
        u, v = ranks[2 * k], ranks[2 * k + 1]
        a, b = load[u] - x[2 * k], load[v] - x[2 * k + 1]
        part = min(max((b - a + need[k]) >> 1, 0), need[k])
        x[2 * k], x[2 * k + 1] = part, need[k] - part
        load[u], load[v] = a + part, b + (need[k] - part)
    for k in range(num_pairs, need.size):
        first, last = graph.copy_start[k], graph.copy_start[k + 1]
        total = need[k]
        lowest = first
        for c in range(first, last):
            load[ranks[c]] -= x[c]
            x[c] = 0
            total += load[ranks[c]]
            if load[ranks[c]] < load[ranks[lowest]]:
                lowest = c
        # Ranks above the water level, total / wet, are removed until none is above it (Michelot's projection).
        wet = last - first
        while True:
            under, lower = 0, need[k]
            for c in range(first, last):
                if load[ranks[c]] * wet < total:
                    lower += load[ranks[c]]
                    under += 1
            if under == wet or under == 0:
                break
            wet, total = under, lower
        level = total // wet
        remaining = need[k]
        for c in range(first, last):
            if c != lowest and load[ranks[c]] < level:
                x[c] = min(level - load[ranks[c]], remaining)
                load[ranks[c]] += x[c]
                remaining -= x[c]
        x[lowest] = remaining
        load[ranks[lowest]] += remaining


@njit(nogil=True, error_model="numpy")
def level_sets(graph: Graph, need: Longs, fixed: Longs, load: Longs, whole: bool, words: Longs) -> tuple[int, int]:
    """The best bound in units from the sets {ranks with load >= t}, and the bits of that set."""
    num_ranks = load.size
    order, position, held = words[0], words[1], words[2]
    # Ranks are sorted by counting, which avoids unpredictable branches.
    for r in range(num_ranks):
        ahead = 0
        for j in range(r):
            more = load[j] >= load[r]
            ahead += more
            position[j] += not more
        position[r] = ahead
    for r in range(num_ranks):
        order[position[r]], held[position[r]] = r, fixed[r]
    ranks, num_pairs = graph.copy_rank, graph.num_paired // 2
    for k in range(num_pairs):
        held[max(position[ranks[2 * k]], position[ranks[2 * k + 1]])] += need[k]
    for k in range(num_pairs, need.size):
        last = 0
        for c in range(graph.copy_start[k], graph.copy_start[k + 1]):
            last = max(last, position[ranks[c]])
        held[last] += need[k]
    captive, best = 0, -1
    for i in range(num_ranks):
        captive += held[i]
        # A division in float64 is faster than in integers. After rounding down it is exact.
        held[i] = int((captive + (i if whole else 0)) / (i + 1))
        best = max(best, held[i])
    best_rank, best_set = num_ranks, 0
    for r in range(num_ranks - 1, -1, -1):
        best_rank = r if held[position[r]] == best else best_rank
    for i in range(position[best_rank] + 1):
        best_set |= 1 << order[i]
    return best, best_set


@njit(nogil=True, error_model="numpy")
def level_out(graph: Graph, x: Longs, load: Longs, scratch: Scratch) -> None:
    """Moves the loads of ranks connected by partly used copies towards their mean, along a spanning tree.

    At the least-squares split, such ranks have equal loads. On a tree, one flow gives all ranks the mean load; it is
    computed from the leaves to the root. A flow on an edge is limited to the load of the copy that it leaves.
    """
    num_ranks = load.size
    adjacent, levels, used, tree = scratch.words[0], scratch.words[1], scratch.used, scratch.tree
    parent, from_copy, to_copy, ranks = tree[0], tree[1], tree[2], graph.copy_rank
    seen = 0
    adjacent[:] = 0
    for k in range(graph.demand.size):
        first, last = graph.copy_start[k], graph.copy_start[k + 1]
        using = 0
        for c in range(first, last):
            using |= (x[c] > 0) << ranks[c]
        used[k] = using
        for c in range(first, last):
            if x[c] > 0:
                adjacent[ranks[c]] |= using
    for r in range(num_ranks):
        if not adjacent[r] & ~(1 << r):
            seen |= 1 << r  # not connected to another rank
    everyone = (1 << num_ranks) - 1
    while seen != everyone:
        # A tree is flat, and its paths are short, if its root is the rank with the most neighbours.
        root, most_adjacent = 0, 0
        for r in range(num_ranks):
            degree = num_bits(adjacent[r]) if not seen >> r & 1 else 0
            if degree > most_adjacent:
                root, most_adjacent = r, degree
        num_levels, frontier, tree_ranks, total = 0, 1 << root, 1 << root, load[root]
        while frontier:
            next_frontier = 0
            while frontier:
                u = num_bits((frontier & -frontier) - 1)
                frontier &= frontier - 1
                fresh = adjacent[u] & ~tree_ranks
                tree_ranks |= fresh
                next_frontier |= fresh
                while fresh:
                    v = num_bits((fresh & -fresh) - 1)
                    fresh &= fresh - 1
                    parent[v] = u
                    total += load[v]
                    i = graph.rank_start[v]
                    while x[graph.rank_copy[i]] == 0 or not used[graph.copy_expert[graph.rank_copy[i]]] >> u & 1:
                        i += 1
                    to_copy[v] = graph.rank_copy[i]
                    c = graph.copy_start[graph.copy_expert[to_copy[v]]]
                    while ranks[c] != u:
                        c += 1
                    from_copy[v] = c
            levels[num_levels] = frontier = next_frontier
            num_levels += 1
        seen |= tree_ranks
        mean = total // num_bits(tree_ranks)
        for level in range(num_levels - 2, -1, -1):
            # Ranks that receive load come first, so that they receive only load that their parents' copies already had.
            for receiving in (True, False):
                left = levels[level]
                while left:
                    v = num_bits((left & -left) - 1)
                    left &= left - 1
                    amount = load[v] - mean
                    if (amount < 0) != receiving:
                        continue
                    c, d = from_copy[v], to_copy[v]
                    amount = -min(-amount, x[c]) if receiving else min(amount, x[d])
                    if receiving:
                        levels[level] &= ~(1 << v)
                    x[d] -= amount
                    x[c] += amount
                    load[v] -= amount
                    load[parent[v]] += amount


@njit(nogil=True, error_model="numpy")
def search(
    graph: Graph, fixed: Longs, load: Longs, tol: float, limit: int, unlevelled: int, whole: bool, scratch: Scratch
) -> tuple[int, int, int]:
    """Improves scratch.part until the peak load is within tol of a lower bound. fixed, load [R]: in units.

    unlevelled: the number of sweeps before the first levelling.
    Returns the set of ranks that gives the bound (as bits), the number of sweeps (at most limit), and the peak load.
    """
    need, x, words = scratch.need, scratch.part, scratch.words
    num_ranks = load.size
    top, inside = largest(load), (1 << num_ranks) - 1
    bound = (load.sum() + (num_ranks - 1 if whole else 0)) // num_ranks
    for r in range(num_ranks):
        if fixed[r] > bound:
            bound, inside = fixed[r], 1 << r
    # Slightly less than the tolerance, because rounding to units may lose load.
    spare = 0 if whole else int(tol * 0.96875 * 4294967296.0)
    sweeps = 0
    while top > bound + (bound * spare >> 32):
        levels = sweeps >= unlevelled and (sweeps <= LEVELLED or sweeps % 2) and sweeps < limit
        new_bound, new_set = -1, 0
        if sweeps or levels:
            new_bound, new_set = level_sets(graph, need, fixed, load, whole, words)
        if levels or sweeps >= limit:
            if new_bound > bound:
                bound, inside = new_bound, new_set
            if top <= bound + (bound * spare >> 32) or not levels:
                break
            level_out(graph, x, load, scratch)
            top = largest(load)
            if top <= bound + (bound * spare >> 32):
                break
        sweep(graph, need, x, load)
        top = largest(load)
        sweeps += 1
        if new_bound > bound:  # used only after the sweep, because a GPU computes the bound during the sweep
            bound, inside = new_bound, new_set
    return inside, sweeps, top


@njit(nogil=True, error_model="numpy")
def num_bits(word: int) -> int:
    """The number of bits set in a 32-bit word."""
    word -= word >> 1 & 0x55555555
    word = (word & 0x33333333) + (word >> 2 & 0x33333333)
    return ((word + (word >> 4) & 0x0F0F0F0F) * 0x01010101 & 0xFFFFFFFF) >> 24
