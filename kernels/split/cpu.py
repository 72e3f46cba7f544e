"""The split on the CPU: water-filling to come near, then augmenting paths to finish and to prove it.

1. Two sweeps of water-filling: each replicated expert in turn is poured over the ranks of its copies (pairs in closed
   form). Every step is exact for its expert, so the split is feasible from the first sweep, and mostly near the optimum.
2. A lower bound: for any rank set A, M* >= (load that cannot leave A) / |A|. First the whole group's mean and each
   rank's fixed load alone.
3. While a rank is above the bound by more than the tolerance: breadth first from it, over experts that have load on a
   reached rank to the other ranks of their copies, to ranks below the bound; load is pushed along the tree. If none is
   reachable, the reached set is closed: no expert with load in it has a copy outside. The load that cannot leave the set
   is then all of its load, above the bound times its size, and gives a larger bound (Dinkelbach's iteration on the
   cut of a maximum flow). This ends after finitely many pushes, whatever the shape: a chain takes one breadth-first
   pass where water-filling takes thousands of sweeps.
4. One more sweep evens out the other ranks: it never raises the peak. The split is then near the least-squares one, so
   that consecutive batches differ little, though only the peak is proven.

With `whole` the loads are integers below 2^53 in float64, every operation on them is exact, the capacity in step 3 is the
bound rounded up, and the split is integral with a peak of exactly ceil(M*): a flow with integral capacities has an
integral solution wherever it has one.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from epsim.kernels.split.structure import Floats, Ints

OK, BAD_LOAD, TOO_LARGE = 0, 1, 2
EXACT = 2.0**53


@njit(cache=True, nogil=True)
def _water_fill(demand: Floats, copy_start: Ints, copy_rank: Ints, x: Floats, load: Floats, whole: bool) -> None:
    """One sweep over the replicated experts of a layer; x [copies] and load [R] are updated."""
    origin = copy_start[0]
    for k in range(demand.size):
        first, last = copy_start[k] - origin, copy_start[k + 1] - origin
        need = demand[k]
        if last - first == 2:
            u, v = copy_rank[first], copy_rank[first + 1]
            a, b = load[u] - x[first], load[v] - x[first + 1]
            part = (b - a + need) * 0.5
            if whole:
                part = math.floor(part)
            part = min(max(part, 0.0), need)
            x[first] = part
            x[first + 1] = need - part
            load[u] = a + part
            load[v] = b + (need - part)
            continue
        total = need
        lowest = first
        for c in range(first, last):
            r = copy_rank[c]
            load[r] -= x[c]
            x[c] = 0.0
            total += load[r]
            if load[r] < load[copy_rank[lowest]]:
                lowest = c
        # The level at which the water stands: drop ranks above it until none is (Michelot's projection).
        level = total / (last - first)
        wet = last - first
        while True:
            total, under = need, 0
            for c in range(first, last):
                if load[copy_rank[c]] < level:
                    total += load[copy_rank[c]]
                    under += 1
            if under >= wet or under == 0:
                break
            wet = under
            level = total / under
        if whole:
            level = math.floor(level)
        rest = need
        for c in range(first, last):
            r = copy_rank[c]
            if c != lowest and load[r] < level:
                part = min(level - load[r], rest)
                x[c] = part
                load[r] += part
                rest -= part
        x[lowest] = rest
        load[copy_rank[lowest]] += rest


@njit(cache=True, nogil=True)
def _rescale(demand: Floats, copy_start: Ints, x: Floats) -> None:
    """Makes each expert's copies lie in [0, demand] and sum to it: proportionally, evenly where all are zero."""
    origin = copy_start[0]
    for k in range(demand.size):
        first, last = copy_start[k] - origin, copy_start[k + 1] - origin
        total = 0.0
        largest = first
        for c in range(first, last):
            x[c] = max(x[c], 0.0)
            total += x[c]
            if x[c] > x[largest]:
                largest = c
        if not 0.0 < total < np.inf:
            for c in range(first, last):
                x[c] = demand[k] / (last - first)
            total, largest = demand[k], first
        scale = demand[k] / total if total > 0 else 0.0
        rest = demand[k]
        for c in range(first, last):
            if c != largest:
                if scale != 1.0:
                    x[c] *= scale
                x[c] = min(x[c], rest)
                rest -= x[c]
        x[largest] = rest


@njit(cache=True, nogil=True)
def _finish(
    demand: Floats,
    fixed: Floats,
    copy_start: Ints,
    copy_rank: Ints,
    copy_expert: Ints,
    rank_start: Ints,
    rank_copy: Ints,
    x: Floats,
    load: Floats,
    numerator: float,
    size: int,
    slots_per_rank: int,
    tol: float,
    limit: int,
    whole: bool,
    seen_rank: Ints,
    seen_expert: Ints,
    out_copy: Ints,
    in_copy: Ints,
    queue: Ints,
) -> tuple[float, int, int]:
    """Pushes until no rank is above the bound numerator / size by more than tol; returns the final bound, and rounds."""
    origin, rank_origin = copy_start[0], rank_start[0]
    num_ranks = load.size
    seen_rank[:] = 0
    seen_expert[: demand.size] = 0
    rounds = 0
    while rounds < limit:
        if whole:
            # A correctly rounded quotient may be one off: the products below are exact.
            cap = math.floor(numerator / size)
            while cap * size < numerator:
                cap += 1.0
            slack, tiny = 0.0, 0.0
        else:
            # Half of the tolerance is capacity to spare; an eighth keeps rounding errors from being pushed about.
            cap = numerator / size * (1 + 0.5 * tol)
            slack = cap * tol / 8
            tiny = slack / (2 * slots_per_rank)
        source = 0
        for r in range(1, num_ranks):
            if load[r] > load[source]:
                source = r
        if load[source] <= cap + slack:
            break
        rounds += 1
        seen_rank[source] = rounds
        queue[0] = source
        head, tail = 0, 1
        pushed = False
        while head < tail and load[source] > cap:
            u = queue[head]
            head += 1
            for i in range(rank_start[u] - rank_origin, rank_start[u + 1] - rank_origin):
                c = rank_copy[i]
                k = copy_expert[c]
                if x[c] <= tiny or seen_expert[k] == rounds:
                    continue
                seen_expert[k] = rounds
                for d in range(copy_start[k] - origin, copy_start[k + 1] - origin):
                    v = copy_rank[d]
                    if seen_rank[v] == rounds:
                        continue
                    seen_rank[v] = rounds
                    out_copy[v] = c
                    in_copy[v] = d
                    queue[tail] = v
                    tail += 1
                    amount = min(cap - load[v], load[source] - cap)
                    if amount <= 0.0 or cap - load[v] <= slack:
                        continue
                    w = v
                    while w != source:
                        amount = min(amount, x[out_copy[w]])
                        w = copy_rank[out_copy[w]]
                    if amount <= 0.0:
                        continue
                    pushed = True
                    w = v
                    while w != source:
                        x[out_copy[w]] -= amount
                        x[in_copy[w]] += amount
                        w = copy_rank[out_copy[w]]
                    load[source] -= amount
                    load[v] += amount
        if pushed:
            continue
        captive = 0.0
        for i in range(tail):
            captive += fixed[queue[i]]
        for k in range(demand.size):
            inside = True
            for c in range(copy_start[k] - origin, copy_start[k + 1] - origin):
                inside = inside and seen_rank[copy_rank[c]] == rounds
            if inside:
                captive += demand[k]
        if not whole and captive * size <= numerator * tail:
            break  # only rounding errors are left: the caller sees whether the gap is closed
        numerator, size = captive, tail
    return numerator, size, rounds


@njit(cache=True, nogil=True)
def solve_range(
    loads: Floats,
    layer: Ints,
    slots: Ints,
    fixed_start: Ints,
    fixed_expert: Ints,
    layer_start: Ints,
    expert: Ints,
    copy_start: Ints,
    copy_rank: Ints,
    copy_expert: Ints,
    rank_start: Ints,
    rank_copy: Ints,
    slot_copy: Ints,
    slot_place: Ints,
    slot_mates: Ints,
    most_copies: int,
    start: Floats,
    tol: float,
    limit: int,
    whole: bool,
    split: Floats,
    peak: Floats,
    numerator: Floats,
    size: Ints,
    sweeps: Ints,
    status: Ints,
) -> None:
    """Solves problems one after the other: loads [N, E] of layers `layer` [N]; the tables are SplitStructure's.

    start [N, P], or [0, P] for none. Results go to split [N, P] ([0, P]: not wanted), peak, numerator, size, sweeps and
    status [N]; a problem whose status is not OK has no other result. `whole`: integral split (module docstring).
    """
    num_ranks = fixed_start.shape[1] - 1
    num_physical = slots.shape[1]
    fixed = np.empty(num_ranks)
    load = np.empty(num_ranks)
    x_room = np.empty(most_copies)
    demand_room = np.empty(most_copies)
    seen_rank = np.empty(num_ranks, np.int64)
    seen_expert = np.empty(most_copies, np.int64)
    out_copy = np.empty(num_ranks, np.int64)
    in_copy = np.empty(num_ranks, np.int64)
    queue = np.empty(num_ranks, np.int64)
    for b in range(loads.shape[0]):
        row = loads[b]
        at = layer[b]
        total = 0.0
        low = 0.0
        for e in range(row.size):
            total += row[e]
            low = min(low, row[e])
        if low < 0 or not total < np.inf:
            status[b] = BAD_LOAD
            continue
        if whole and total >= EXACT:
            status[b] = TOO_LARGE
            continue
        status[b] = OK

        best, best_size = total, num_ranks
        for r in range(num_ranks):
            here = 0.0
            for i in range(fixed_start[at, r], fixed_start[at, r + 1]):
                here += row[fixed_expert[i]]
            fixed[r] = here
            load[r] = here
            if here * best_size > best:
                best, best_size = here, 1
        k0, k1 = layer_start[at], layer_start[at + 1]
        starts = copy_start[k0 : k1 + 1]
        c0, c1 = starts[0], starts[k1 - k0]
        ranks = copy_rank[c0:c1]
        x = x_room[: c1 - c0]
        demand = demand_room[: k1 - k0]
        x[:] = 0.0
        for k in range(k1 - k0):
            demand[k] = row[expert[k0 + k]]
        if start.shape[0]:
            for p in range(num_physical):
                if slot_copy[at, p] >= 0:
                    x[slot_copy[at, p]] += start[b, p]
            _rescale(demand, starts, x)
            for c in range(x.size):
                load[ranks[c]] += x[c]
        swept = 0
        for _ in range(2):
            _water_fill(demand, starts, ranks, x, load, whole)
            swept += 1
        owners = copy_expert[c0:c1]
        found = _finish(
            demand,
            fixed,
            starts,
            ranks,
            owners,
            rank_start[at],
            rank_copy[c0:c1],
            x,
            load,
            best,
            best_size,
            num_physical // num_ranks,
            tol,
            limit,
            whole,
            seen_rank,
            seen_expert,
            out_copy,
            in_copy,
            queue,
        )
        numerator[b], size[b] = found[0], found[1]
        sweeps[b] = swept + found[2]
        if not whole:
            _water_fill(demand, starts, ranks, x, load, whole)
            _rescale(demand, starts, x)
        for r in range(num_ranks):
            load[r] = fixed[r]
        for c in range(x.size):
            load[ranks[c]] += x[c]
        peak[b] = load.max()
        if split.shape[0]:
            for p in range(num_physical):
                c = slot_copy[at, p]
                here = row[slots[at, p]] if c < 0 else x[c]
                mates = slot_mates[at, p]
                if mates == 1:
                    split[b, p] = here
                elif whole:
                    split[b, p] = math.floor((here + (mates - 1 - slot_place[at, p])) / mates)
                else:
                    split[b, p] = here / mates
