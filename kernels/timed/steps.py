"""The steps of the timed split on one layer's graph: augmenting paths, costs, relaxation, trials (see search.py)."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from epsim.kernels.split.flow import push_along
from epsim.kernels.split.structure import Ints, Longs

NO_LIMIT = 1 << 62
Flags = npt.NDArray[np.bool_]


class Problem(NamedTuple):
    """One problem: the graph of copies of its layer (`epsim.kernels.split.structure.Tables`), and the costs.

    price, opening: the costs of a token and of an active expert. fixed_tokens, fixed_active [R]: tokens and active
    experts of the experts that only this rank holds. demand: the tokens of the replicated experts.
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
    """Buffers.

    mark [1]: the number of rounds of `settle`. seen_rank .. queue: the search trees of `settle`, as in flow.Search.
    load, cap [R]: costs and capacities of the relaxation. token_load, token_cap [R]: tokens and capacities of a trial.
    trial, open [copies]: the tokens of each copy in a trial, and whether it is open.
    """

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
    """Moves x along shortest augmenting paths of usable copies until no load is above its rank's capacity; returns 0.

    If no path exists, returns the size of a closed set of ranks, whose load cannot leave and exceeds their capacity:
    the ranks with seen_rank == mark.
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
                    push_along(p, x, load, amount, source, v, s)
        if not pushed:
            return tail


@njit(nogil=True, error_model="numpy")
def cost_of(p: Problem, x: Longs, s: Scratch) -> int:
    """The largest cost of a rank with tokens x [copies]."""
    s.token_load[:] = p.price * p.fixed_tokens + p.opening * p.fixed_active
    for c in range(x.size):
        if x[c] > 0:
            s.token_load[p.copy_rank[c]] += p.price * x[c] + p.opening
    return int(s.token_load.max())


@njit(nogil=True, error_model="numpy")
def whole_experts(p: Problem, weights: Longs, load: Longs) -> None:
    """Assigns each expert, heaviest first, to the copy on its cheapest rank. Sets weights [copies] and load [R]."""
    weights[:] = 0
    load[:] = p.price * p.fixed_tokens + p.opening * p.fixed_active
    # A stable sort, so that the result is the same on every machine.
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
    """The lowest A * i + B * j >= bound with integers i >= 0, 0 <= j <= slots: the lowest cost that a rank can have."""
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
    """The lowest peak of the relaxation, at least `bound`. Sets weights [copies] and s.load [R] to such a split."""
    while True:
        s.cap[:] = bound
        closed = settle(p, weights, s.load, s.cap, usable, s)
        if closed == 0:
            return bound
        captive = 0
        for r in range(s.load.size):
            if s.seen_rank[r] == s.mark[0]:
                captive += s.load[r]
        bound = (captive + closed - 1) // closed


@njit(nogil=True, error_model="numpy")
def try_open(p: Problem, target: int, weights: Longs, s: Scratch) -> bool:
    """Whether the open copies (s.open) can serve all tokens at a cost of at most `target`. s.trial: their tokens."""
    s.token_load[:] = p.fixed_tokens
    s.token_cap[:] = target - p.opening * p.fixed_active
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
        remaining = p.demand[k]
        for c in range(first, last):
            if s.open[c] and c != largest and total > 0:
                s.trial[c] = min(np.int64(p.demand[k] * (weights[c] / total)), remaining)
                remaining -= s.trial[c]
        s.trial[largest] = remaining
    for c in range(weights.size):
        s.token_load[p.copy_rank[c]] += s.trial[c]
    return settle(p, s.trial, s.token_load, s.token_cap, s.open, s) == 0
