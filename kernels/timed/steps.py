"""The steps of the timed split on one layer's graph: moves along paths, costs, relaxation, trials (see search.py)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from epsim.kernels.split.structure import Ints, Longs

NO_LIMIT = 1 << 62
Flags = npt.NDArray[np.bool_]


class Problem(NamedTuple):
    """One layer and batch: the graph of copies (`epsim.kernels.split.structure.Tables`), and what ranks pay.

    fixed_tokens, fixed_active [R]: of experts that one rank alone holds. demand: tokens of the replicated experts.
    """

    price: int
    opening: int
    fixed_tokens: Longs
    fixed_active: Longs
    demand: Longs
    copy_start: Ints
    copy_rank: Ints
    copy_expert: Ints
    rank_start: Ints
    rank_copy: Ints


class Scratch(NamedTuple):
    """By rank and by expert: what `settle` saw last (`mark` [1] counts its rounds), trees and queue; loads and
    capacities of the relaxation and of tokens [R]; tokens and open copies of a trial [copies]."""

    mark: Longs
    seen_rank: Longs
    seen_expert: Longs
    root: Longs
    from_copy: Longs
    to_copy: Longs
    queue: Longs
    load: Longs
    cap: Longs
    token_load: Longs
    token_cap: Longs
    trial: Longs
    open: Flags


@njit(nogil=True, error_model="numpy")
def settle(p: Problem, x: Longs, load: Longs, cap: Longs, usable: Flags, s: Scratch) -> int:
    """Moves x along shortest paths over usable copies until no rank's load is above its capacity: returns 0.

    Or returns the size of a set of ranks that holds too much and that nothing can leave: those last seen.
    """
    while True:
        s.mark[0] += 1
        mark = s.mark[0]
        head, tail = 0, 0
        for r in range(load.size):
            if load[r] > cap[r]:
                s.seen_rank[r] = mark
                s.root[r] = r
                s.queue[tail] = r
                tail += 1
        if tail == 0:
            return 0
        pushed = False
        while head < tail:
            u = s.queue[head]
            head += 1
            source = s.root[u]
            if load[source] <= cap[source]:
                continue
            for i in range(p.rank_start[u], p.rank_start[u + 1]):
                c = p.rank_copy[i]
                k = p.copy_expert[c]
                if x[c] <= 0 or s.seen_expert[k] == mark:
                    continue
                s.seen_expert[k] = mark
                for d in range(p.copy_start[k], p.copy_start[k + 1]):
                    v = p.copy_rank[d]
                    if not usable[d] or s.seen_rank[v] == mark:
                        continue
                    s.seen_rank[v] = mark
                    s.root[v] = source
                    s.from_copy[v] = c
                    s.to_copy[v] = d
                    s.queue[tail] = v
                    tail += 1
                    amount = min(cap[v] - load[v], load[source] - cap[source])
                    w = v
                    while w != source and amount > 0:
                        amount = min(amount, x[s.from_copy[w]])
                        w = p.copy_rank[s.from_copy[w]]
                    if amount <= 0:
                        continue
                    pushed = True
                    w = v
                    while w != source:
                        x[s.from_copy[w]] -= amount
                        x[s.to_copy[w]] += amount
                        w = p.copy_rank[s.from_copy[w]]
                    load[source] -= amount
                    load[v] += amount
        if not pushed:
            return tail


@njit(nogil=True, error_model="numpy")
def cost_of(p: Problem, x: Longs, s: Scratch) -> int:
    """The dearest rank's cost with tokens x [copies]."""
    for r in range(s.token_load.size):
        s.token_load[r] = p.price * p.fixed_tokens[r] + p.opening * p.fixed_active[r]
    for c in range(x.size):
        if x[c] > 0:
            s.token_load[p.copy_rank[c]] += p.price * x[c] + p.opening
    return int(s.token_load.max())


@njit(nogil=True, error_model="numpy")
def whole_experts(p: Problem, weights: Longs, load: Longs) -> None:
    """Heaviest first, each expert whole onto the cheapest of its ranks: weights [copies], load [R] come out."""
    weights[:] = 0
    for r in range(load.size):
        load[r] = p.price * p.fixed_tokens[r] + p.opening * p.fixed_active[r]
    # In order of place where equal.
    order = np.argsort(-p.demand, kind="mergesort")
    for k in order:
        if p.demand[k] == 0:
            break
        best = p.copy_start[k]
        for c in range(best + 1, p.copy_start[k + 1]):
            if load[p.copy_rank[c]] < load[p.copy_rank[best]]:
                best = c
        weights[best] = p.price * p.demand[k] + p.opening
        load[p.copy_rank[best]] += weights[best]


@njit(nogil=True, error_model="numpy")
def rounded_up(p: Problem, bound: int, slots: int) -> int:
    """The least A * i + B * j >= bound with whole i >= 0 and 0 <= j <= slots: no rank's cost lies between."""
    best = NO_LIMIT
    for j in range(slots + 1):
        cost = p.opening * j
        if cost < bound:
            if p.price == 0:
                continue
            cost += p.price * ((bound - cost + p.price - 1) // p.price)
        best = min(best, cost)
    return best


@njit(nogil=True, error_model="numpy")
def relaxed(p: Problem, weights: Longs, bound: int, usable: Flags, s: Scratch) -> int:
    """The relaxation's least peak, from `bound` on; weights [copies] and s.load [R] come to reach it."""
    while True:
        s.cap[:] = bound
        closed = settle(p, weights, s.load, s.cap, usable, s)
        if closed == 0:
            return bound
        held = 0
        for r in range(s.load.size):
            if s.seen_rank[r] == s.mark[0]:
                held += s.load[r]
        bound = (held + closed - 1) // closed


@njit(nogil=True, error_model="numpy")
def try_open(p: Problem, target: int, weights: Longs, s: Scratch) -> bool:
    """Whether the copies s.open can carry all tokens at the target; then s.trial holds them."""
    for r in range(s.token_load.size):
        s.token_load[r] = p.fixed_tokens[r]
        s.token_cap[r] = target - p.opening * p.fixed_active[r]
    for c in range(weights.size):
        if s.open[c]:
            s.token_cap[p.copy_rank[c]] -= p.opening
    for r in range(s.token_load.size):
        if s.token_cap[r] < 0:
            return False
        s.token_cap[r] = NO_LIMIT if p.price == 0 else s.token_cap[r] // p.price
        if s.token_cap[r] < s.token_load[r]:
            return False
    for k in range(p.demand.size):
        first, last = p.copy_start[k], p.copy_start[k + 1]
        total, largest = 0, -1
        for c in range(first, last):
            s.trial[c] = 0
            if s.open[c]:
                total += weights[c]
                if largest < 0 or weights[c] > weights[largest]:
                    largest = c
        if largest < 0:
            continue
        rest = p.demand[k]
        for c in range(first, last):
            if s.open[c] and c != largest and total > 0:
                s.trial[c] = min(np.int64(p.demand[k] * (weights[c] / total)), rest)
                rest -= s.trial[c]
        s.trial[largest] = rest
    for c in range(weights.size):
        s.token_load[p.copy_rank[c]] += s.trial[c]
    return settle(p, s.trial, s.token_load, s.token_cap, s.open, s) == 0
