"""Whole tokens on copies so that the dearest rank is cheapest, where a rank pays for tokens and for active experts.

A rank costs A * tokens + B * active, all integers; an expert of n tokens, on one copy alone, weighs A * n + B.

1. Lower bound: were an expert's weight to divide over its copies without opening any twice, the problem would be the
   plain split with weights for loads (each copy paying B in proportion to its tokens: the linear relaxation of the
   integer model). Its least peak, by augmenting paths and closed sets of ranks as in epsim.kernels.split, is a bound.
2. A target between the bound and the best cost so far is searched depth first. A node fixes copies as closed or as open
   (an open one pays B whatever it serves); its relaxation is feasible at the target, or nothing below the node is. A
   feasible one tells which copies to try open: their tokens are then a flow with capacities (target - B * active) / A,
   whole and exact. Else the copy with the least of a divided expert is closed, and opened in the other branch.
3. Targets halve the distance between bound and best. A search that ends brings a cheaper solution, or the proof that
   the bound is higher. One that reaches its limit of nodes proves nothing, and the next target is larger.

Nothing is drawn, all arithmetic is on integers: the answer is the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from epsim.kernels.split.structure import Longs, Tables
from epsim.kernels.timed import steps
from epsim.kernels.timed.steps import (
    NO_LIMIT,
    Flags,
    Problem,
    Scratch,
    cost_of,
    relaxed,
    rounded_up,
    settle,
    try_open,
    whole_experts,
)

FOUND, NONE, UNKNOWN = 0, 1, 2
MOST_LEVELS = 256


class Tree(NamedTuple):
    """The path from the first decision to the node at hand: weights before each decision [levels, copies], its copy and
    whether it has been closed (0) or opened (1) [levels]; copies that may be used and those that pay [copies], and how
    many of each an expert has."""

    weights: Longs
    copy: Longs
    stage: Longs
    usable: Flags
    paid: Flags
    num_usable: Longs
    num_paid: Longs


@njit(nogil=True, error_model="numpy")
def close_copy(p: Problem, c: int, weights: Longs, t: Tree, s: Scratch) -> None:
    k = p.copy_expert[c]
    t.usable[c] = False
    t.num_usable[k] -= 1
    best = -1
    for d in range(p.copy_start[k], p.copy_start[k + 1]):
        if t.usable[d] and (best < 0 or s.load[p.copy_rank[d]] < s.load[p.copy_rank[best]]):
            best = d
    weights[best] += weights[c]
    s.load[p.copy_rank[best]] += weights[c]
    s.load[p.copy_rank[c]] -= weights[c]
    weights[c] = 0


@njit(nogil=True, error_model="numpy")
def open_copy(p: Problem, c: int, weights: Longs, t: Tree, s: Scratch) -> None:
    """The copy pays B of its own; an expert's first open copy takes B out of the weight that is to be divided."""
    k = p.copy_expert[c]
    t.paid[c] = True
    s.load[p.copy_rank[c]] += p.opening
    t.num_paid[k] += 1
    if t.num_paid[k] > 1:
        return
    rest = p.opening
    part = min(rest, weights[c])
    weights[c] -= part
    s.load[p.copy_rank[c]] -= part
    rest -= part
    for d in range(p.copy_start[k], p.copy_start[k + 1]):
        part = min(rest, weights[d])
        weights[d] -= part
        s.load[p.copy_rank[d]] -= part
        rest -= part


@njit(nogil=True, error_model="numpy")
def undecided(p: Problem, weights: Longs, t: Tree) -> int:
    """The copy to decide next, or -1 where none is left."""
    best, best_weight, other = -1, NO_LIMIT, -1
    for k in range(p.demand.size):
        if p.demand[k] == 0 or (t.num_usable[k] == 1 and t.num_paid[k] == 0):
            continue
        several = 0
        least = -1
        for c in range(p.copy_start[k], p.copy_start[k + 1]):
            if t.usable[c] and not t.paid[c]:
                other = c
                if weights[c] > 0:
                    several += 1
                    if least < 0 or weights[c] < weights[least]:
                        least = c
        if several + t.num_paid[k] >= 2 and least >= 0 and weights[least] < best_weight:
            best, best_weight = least, weights[least]
    return best if best >= 0 else other


@njit(nogil=True, error_model="numpy")
def search(p: Problem, target: int, limit: int, root: Longs, weights: Longs, t: Tree, s: Scratch) -> tuple[int, int]:
    """A solution that costs at most `target` (FOUND, in s.trial), the proof that there is NONE, or UNKNOWN.

    root [copies]: the relaxation's weights, from which the search starts; weights: scratch. Also returns nodes used.
    """
    num_ranks = s.load.size
    weights[:] = root
    t.usable[:] = True
    t.paid[:] = False
    t.num_paid[:] = 0
    for k in range(p.demand.size):
        t.num_usable[k] = p.copy_start[k + 1] - p.copy_start[k]
    for r in range(num_ranks):
        s.load[r] = p.price * p.fixed_tokens[r] + p.opening * p.fixed_active[r]
    for c in range(weights.size):
        s.load[p.copy_rank[c]] += weights[c]
    depth, nodes = 0, 0
    while True:
        s.cap[:] = target
        nodes += 1
        choice = -1
        if settle(p, weights, s.load, s.cap, t.usable, s) == 0:
            for c in range(weights.size):
                s.open[c] = weights[c] > 0
            # Where all of a paid expert's weight was its opening, one copy must still serve.
            for k in range(p.demand.size):
                if t.num_paid[k] > 0:
                    for c in range(p.copy_start[k], p.copy_start[k + 1]):
                        s.open[c] = s.open[c] or t.paid[c]
            if try_open(p, target, weights, s):
                return FOUND, nodes
            choice = undecided(p, weights, t)
            if depth == t.copy.size and choice >= 0:
                return UNKNOWN, nodes
        if choice < 0:
            while depth > 0:
                c = t.copy[depth - 1]
                k = p.copy_expert[c]
                if t.stage[depth - 1] == 0:
                    t.usable[c] = True
                    t.num_usable[k] += 1
                    break
                t.paid[c] = False
                t.num_paid[k] -= 1
                depth -= 1
            if depth == 0:
                return NONE, nodes
        if nodes >= limit:
            return UNKNOWN, nodes
        if choice >= 0:
            t.weights[depth, : weights.size] = weights
            t.copy[depth] = choice
            t.stage[depth] = 0
            depth += 1
            close_copy(p, choice, weights, t, s)
            continue
        weights[:] = t.weights[depth - 1, : weights.size]
        for r in range(num_ranks):
            s.load[r] = p.price * p.fixed_tokens[r] + p.opening * p.fixed_active[r]
        for c in range(weights.size):
            s.load[p.copy_rank[c]] += weights[c] + (p.opening if t.paid[c] else 0)
        t.stage[depth - 1] = 1
        open_copy(p, t.copy[depth - 1], weights, t, s)


@njit(nogil=True, error_model="numpy")
def _solve_range(
    counts: Longs,
    layer: Longs,
    tables: Tables,
    start: Longs,
    price: int,
    opening: int,
    few_copies: int,
    limit: int,
    target_limit: int,
    split: Longs,
    cost: Longs,
    bound: Longs,
    nodes: Longs,
) -> None:
    """Problems one after the other: counts [N, E] of the layers `layer` [N]; start [N, P]: a split to begin with.

    Results: split [N, P], cost, bound, nodes [N], costs in units of the integers `price` and `opening`. Problems with
    at most few_copies copies of replicated experts with tokens are solved to the end, others within `limit` nodes, of
    which a target gets target_limit.
    """
    num_ranks = tables.fixed_start.shape[1] - 1
    num_experts = counts.shape[1]
    num_physical = tables.source.shape[1]
    slots_per_rank = num_physical // num_ranks
    most = 0
    for at in range(tables.layer_copies.size - 1):
        most = max(most, tables.layer_copies[at + 1] - tables.layer_copies[at])
    levels = min(most, MOST_LEVELS) + 1
    by_rank = np.zeros((9, num_ranks), np.int64)
    by_expert = np.zeros((4, num_experts), np.int64)
    by_copy = np.zeros((5, most), np.int64)
    flags = np.zeros((3, most), np.bool_)
    saved = np.empty((levels, most), np.int64)
    decided = np.empty((2, levels), np.int64)
    mark = np.zeros(1, np.int64)
    fixed_tokens, fixed_active = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    values = np.zeros(num_experts + most + 1, np.int64)  # the last is 0, for empty slots
    for b in range(counts.shape[0]):
        at = layer[b]
        first_expert, first_copy = tables.expert_start[at], tables.layer_copies[at]
        num = tables.expert_start[at + 1] - first_expert
        end_copy = tables.layer_copies[at + 1]
        width = end_copy - first_copy
        for r in range(num_ranks):
            tokens, active = 0, 0
            for i in range(tables.fixed_start[at, r], tables.fixed_start[at, r + 1]):
                n = counts[b, tables.fixed_expert[i]]
                tokens += n
                active += n > 0
            fixed_tokens[r] = tokens
            fixed_active[r] = active
        demand = by_expert[0, :num]
        for k in range(num):
            demand[k] = counts[b, tables.expert[first_expert + k]]
        p = Problem(
            price,
            opening,
            fixed_tokens,
            fixed_active,
            demand,
            tables.copy_start[first_expert + at : first_expert + at + num + 1],
            tables.copy_rank[first_copy:end_copy],
            tables.copy_expert[first_copy:end_copy],
            tables.rank_start[at],
            tables.rank_copy[first_copy:end_copy],
        )
        s = Scratch(
            mark,
            by_rank[0],
            by_expert[1],
            by_rank[1],
            by_rank[2],
            by_rank[3],
            by_rank[4],
            by_rank[5],
            by_rank[6],
            by_rank[7],
            by_rank[8],
            by_copy[0, :width],
            flags[0, :width],
        )
        t = Tree(
            saved, decided[0], decided[1], flags[1, :width], flags[2, :width], by_expert[2, :num], by_expert[3, :num]
        )
        best, root, weights = by_copy[1, :width], by_copy[2, :width], by_copy[3, :width]

        best[:] = 0
        for q in range(num_physical):
            place = tables.source[at, q]
            if place >= num_experts:
                best[place - num_experts] += start[b, q]
        high = cost_of(p, best, s)
        whole_experts(p, root, s.load)
        total, low, undecided_copies = 0, 0, 0
        for r in range(num_ranks):
            total += s.load[r]
            low = max(low, p.price * fixed_tokens[r] + p.opening * fixed_active[r])
        low = max(low, (total + num_ranks - 1) // num_ranks)
        trial = by_copy[4, :width]
        for c in range(width):
            n = demand[p.copy_expert[c]]
            trial[c] = n if root[c] > 0 else 0
            undecided_copies += n > 0
        own = cost_of(p, trial, s)
        if own < high:
            high = own
            best[:] = trial
        t.usable[:] = True
        most_filled = 0
        for r in range(num_ranks):
            num_filled = 0
            for q in range(r * slots_per_rank, (r + 1) * slots_per_rank):
                num_filled += tables.source[at, q] >= 0
            most_filled = max(most_filled, num_filled)
        low = rounded_up(p, relaxed(p, root, low, t.usable, s), most_filled)
        bound[b] = min(low, high)
        used = 0
        few = undecided_copies <= few_copies
        target = low
        while low < high and (few or used < limit):
            now = NO_LIMIT if few else min(limit - used, target_limit)
            status, more = search(p, target, now, root, weights, t, s)
            used += more
            if status == FOUND:
                high = cost_of(p, s.trial, s)
                best[:] = s.trial
            else:
                low = rounded_up(p, target + 1, most_filled)
                if status == NONE:
                    bound[b] = min(low, high)
            target = low + (high - 1 - low) // 2
        cost[b] = high
        nodes[b] = used

        for e in range(num_experts):
            values[e] = counts[b, e]
        for c in range(width):
            values[num_experts + c] = best[c]
        for q in range(num_physical):
            split[b, q] = values[tables.source[at, q]]
        for i in range(tables.twin_start[at], tables.twin_start[at + 1]):
            if tables.twin[i, 1] > 0:  # of slots of one expert on one rank the first serves all
                split[b, tables.twin[i, 0]] = 0


def _cached(stamp: str) -> Callable[..., None]:
    """_solve_range, compiled once for this stamp and kept on disk: numba's cache looks at a function's own file alone,
    and a variable of the enclosing function is part of its key."""

    @njit(cache=True, nogil=True, error_model="numpy")
    def solve_range(*arguments: Any) -> None:
        if stamp != "":
            _solve_range(*arguments)

    return solve_range


solve_range = _cached(hashlib.sha256(Path(steps.__file__).read_bytes()).hexdigest())
