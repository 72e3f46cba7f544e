"""Assigns whole tokens to copies so that the largest cost of a rank is lowest, by branch and bound.

A rank costs A * tokens + B * active experts; all are integers. The weight of an expert with n tokens is A * n + B: its
cost if one copy serves all its tokens.

1. Lower bound. The linear relaxation divides the weight of an expert over its copies in any proportion, so that a copy
   pays a share of B. This is the plain split with weights as loads. Its lowest peak is a lower bound. Augmenting paths
   and closed sets of ranks find it, as in epsim.kernels.split.
2. Depth-first search for a solution that costs at most a target, which is between the bound and the best cost so far. A
   node of the search tree fixes some copies as closed and some as open; an open copy pays B whatever it serves. If the
   relaxation at a node is not feasible at the target, the search leaves its subtree. If it is feasible, the copies with
   load in it are opened, and an integral flow with capacities (target - B * active) / A tries to serve all tokens. If
   no flow does, the search takes an expert divided over several copies and branches on the copy with the lowest weight
   of all such experts: first closed, then open.
3. Each target halves the distance between the bound and the best cost. A search that ends finds a cheaper solution or
   proves a higher bound. A search that reaches its node limit proves nothing, and the next target is larger.
Nothing is random and all arithmetic is on integers, so the result is the same on every machine.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from epsim.kernels.split import flow
from epsim.kernels.split.structure import Longs, Tables
from epsim.kernels.timed import steps
from epsim.kernels.timed.steps import NO_LIMIT, Flags, Problem, Scratch, cost_of, settle

FOUND, NONE, UNKNOWN = 0, 1, 2
MOST_LEVELS = 256


class Tree(NamedTuple):
    """The path from the root of the search tree to the current node. A decision closes or opens one copy.

    weights [levels, copies]: the weights before each decision. copy, stage [levels]: the copy of each decision, and 0
    if it is closed, 1 if it is open. usable, paid [copies]: whether a copy is not closed, and whether it is open.
    num_usable, num_paid: the number of such copies of each expert.
    """

    weights: Longs
    copy: Longs
    stage: Longs
    usable: Flags
    paid: Flags
    num_usable: Longs
    num_paid: Longs


@njit(nogil=True, error_model="numpy")
def start_loads(p: Problem, weights: Longs, t: Tree, s: Scratch) -> None:
    """Sets s.load [R] to the cost of each rank with these weights and open copies."""
    s.load[:] = p.price * p.fixed_tokens + p.opening * p.fixed_active
    for c in range(weights.size):
        s.load[p.copy_rank[c]] += weights[c] + (p.opening if t.paid[c] else 0)


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
    """Opens a copy, which then pays B. The first open copy of an expert removes B from the weight that is divided."""
    k = p.copy_expert[c]
    t.paid[c] = True
    s.load[p.copy_rank[c]] += p.opening
    t.num_paid[k] += 1
    if t.num_paid[k] > 1:
        return
    remaining = p.opening
    part = min(remaining, weights[c])
    weights[c] -= part
    s.load[p.copy_rank[c]] -= part
    remaining -= part
    for d in range(p.copy_start[k], p.copy_start[k + 1]):
        part = min(remaining, weights[d])
        weights[d] -= part
        s.load[p.copy_rank[d]] -= part
        remaining -= part


@njit(nogil=True, error_model="numpy")
def undecided(p: Problem, weights: Longs, t: Tree) -> int:
    """The copy of the next decision, or -1 if all are decided."""
    best, best_weight, other = -1, NO_LIMIT, -1
    for k in range(p.demand.size):
        if p.demand[k] == 0 or (t.num_usable[k] == 1 and t.num_paid[k] == 0):
            continue
        several = 0
        lightest = -1
        for c in range(p.copy_start[k], p.copy_start[k + 1]):
            if t.usable[c] and not t.paid[c]:
                other = c
                if weights[c] > 0:
                    several += 1
                    if lightest < 0 or weights[c] < weights[lightest]:
                        lightest = c
        if several + t.num_paid[k] >= 2 and lightest >= 0 and weights[lightest] < best_weight:
            best, best_weight = lightest, weights[lightest]
    return best if best >= 0 else other


@njit(nogil=True, error_model="numpy")
def search(p: Problem, target: int, limit: int, root: Longs, weights: Longs, t: Tree, s: Scratch) -> tuple[int, int]:
    """Searches for a solution that costs at most `target`. Returns the outcome and the number of nodes.

    FOUND: the solution is in s.trial. NONE: there is none. UNKNOWN: the limit was reached.
    root [copies]: the weights of the relaxation, from which the search starts. weights: a buffer.
    """
    weights[:] = root
    t.usable[:] = True
    t.paid[:] = False
    t.num_paid[:] = 0
    for k in range(p.demand.size):
        t.num_usable[k] = p.copy_start[k + 1] - p.copy_start[k]
    start_loads(p, weights, t, s)
    depth, nodes = 0, 0
    while True:
        s.cap[:] = target
        nodes += 1
        choice = -1
        if settle(p, weights, s.load, s.cap, t.usable, s) == 0:
            for c in range(weights.size):
                s.open[c] = weights[c] > 0
            # If the weight of an expert is 0 after B is removed, its open copies must still serve its tokens.
            for k in range(p.demand.size):
                if t.num_paid[k] > 0:
                    for c in range(p.copy_start[k], p.copy_start[k + 1]):
                        s.open[c] = s.open[c] or t.paid[c]
            if steps.try_open(p, target, weights, s):
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
        start_loads(p, weights, t, s)
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
    """Solves problems one after the other: counts [N, E] of the layers `layer` [N]; start [N, P]: the initial split.

    Results: split [N, P], cost, bound, nodes [N]; costs have the unit of the integers `price` and `opening`. Problems
    in which at most few_copies copies of replicated experts have tokens are solved to optimality. Others get `limit`
    nodes, with at most target_limit nodes per target.
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
            index = tables.source[at, q]
            if index >= num_experts:
                best[index - num_experts] += start[b, q]
        high = cost_of(p, best, s)
        steps.whole_experts(p, root, s.load)
        low = max(
            (p.price * fixed_tokens + p.opening * fixed_active).max(), (s.load.sum() + num_ranks - 1) // num_ranks
        )
        undecided_copies = 0
        trial = by_copy[4, :width]
        for c in range(width):
            n = demand[p.copy_expert[c]]
            trial[c] = n if root[c] > 0 else 0
            undecided_copies += n > 0
        whole_cost = cost_of(p, trial, s)
        if whole_cost < high:
            high = whole_cost
            best[:] = trial
        t.usable[:] = True
        most_filled = 0
        for r in range(num_ranks):
            num_filled = 0
            for q in range(r * slots_per_rank, (r + 1) * slots_per_rank):
                num_filled += tables.source[at, q] >= 0
            most_filled = max(most_filled, num_filled)
        low = steps.rounded_up(p, steps.relaxed(p, root, low, t.usable, s), most_filled)
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
                low = steps.rounded_up(p, target + 1, most_filled)
                if status == NONE:
                    bound[b] = min(low, high)
            target = low + (high - 1 - low) // 2
        cost[b] = high
        nodes[b] = used

        values[:num_experts] = counts[b]
        values[num_experts : num_experts + width] = best
        for q in range(num_physical):
            split[b, q] = values[tables.source[at, q]]
        for i in range(tables.twin_start[at], tables.twin_start[at + 1]):
            if tables.twin[i, 1] > 0:  # the first slot of a copy serves all
                split[b, tables.twin[i, 0]] = 0


def _cached(stamp: str) -> Callable[..., None]:
    """_solve_range, compiled once per stamp and cached on disk (split/cpu.py explains the stamp)."""

    @njit(cache=True, nogil=True, error_model="numpy")
    def solve_range(*arguments: Any) -> None:
        if stamp != "":
            _solve_range(*arguments)

    return solve_range


_SOURCES = b"".join(Path(str(module.__file__)).read_bytes() for module in (steps, flow))
solve_range = _cached(hashlib.sha256(_SOURCES).hexdigest())
