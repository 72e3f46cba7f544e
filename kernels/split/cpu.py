"""The split on the CPU: water-filling to come near, then augmenting paths to finish and to prove it.

1. From the even split, three sweeps of water-filling: each replicated expert in turn is poured over the ranks of its
   copies (pairs in closed form). A step is exact for its expert and never raises the peak: the split is feasible at any
   time, mostly near the optimum after these, and never worse than even.
2. A lower bound: for any rank set A, M* >= (load that cannot leave A) / |A|. First the whole group's mean, and each
   rank's fixed load alone.
3. While ranks are above the bound by more than the tolerance: breadth first from all of them, over experts with load on
   a reached rank to the other ranks of their copies, to ranks below the bound; load is pushed along the tree. After
   the first such rounds, each set of ranks connected by partly used copies is levelled along a spanning tree, which is
   a step to the least-squares split in one pass, where water-filling takes thousands of sweeps on a long chain.
   If no rank below can be reached, the reached set is closed: no expert with load in it has a copy outside. What cannot
   leave the set is then all of its load, more than the bound times its size, and gives a larger bound (Dinkelbach's
   iteration over minimum cuts). This ends after finitely many pushes, whatever the shape.
4. One more sweep evens out the other ranks: it never raises the peak. The split is then near the least-squares one, so
   that consecutive batches differ little, though only the peak is proven. (Measured on DeepSeek-V3, 16 ranks, 32
   redundant: the spread of rank loads is within 3% of the least-squares split's; more sweeps buy little.)

With `whole` the loads are integers below 2^53 in float64, every operation on them is exact, the capacity in step 3 is
the bound rounded up, and the split is integral with a peak of exactly ceil(M*): a flow with integral capacities has an
integral solution wherever it has one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from epsim.kernels.split import flow
from epsim.kernels.split.flow import Graph, Search, close_gap, largest, rescale, water_fill
from epsim.kernels.split.structure import Floats, Ints, Longs, Tables

OK, BAD_LOAD, TOO_LARGE = 0, 1, 2
NUM_SWEEPS = 3


@njit(nogil=True, error_model="numpy")
def add_fixed(fixed_start: Ints, fixed_expert: Ints, values: Floats, fixed: Floats) -> tuple[float, float]:
    """Sums each rank's fixed experts into fixed [R]; returns their total, and the least load seen if below zero."""
    total, low = 0.0, 0.0
    for r in range(fixed.size):
        here = 0.0
        for i in range(fixed_start[r], fixed_start[r + 1]):
            value = values[fixed_expert[i]]
            here += value
            low = min(low, value)
        fixed[r] = here
        total += here
    return total, low


@njit(nogil=True, error_model="numpy")
def write_split(source: Ints, twin: Ints, values: Floats, split: Floats, whole: bool) -> None:
    """split [P] from the experts' and the copies' loads; slots of one copy share it evenly."""
    for p in range(split.size):
        split[p] = values[source[p]]
    for i in range(twin.shape[0]):
        p, place, mates = twin[i, 0], twin[i, 1], twin[i, 2]
        if whole:
            split[p] = math.floor((split[p] + (mates - 1 - place)) / mates) * 1.0
        else:
            split[p] /= mates


@njit(nogil=True, error_model="numpy")
def _solve_range(
    loads: Floats,
    layer: Longs,
    tables: Tables,
    start: Floats,
    tol: float,
    limit: int,
    too_large: float,
    whole: bool,
    split: Floats,
    peak: Floats,
    numerator: Floats,
    size: Longs,
    sweeps: Longs,
    status: Longs,
) -> None:
    """Solves problems one after the other: loads [N, E] of the layers `layer` [N].

    start [N, P], or [0, P] for none. Results go to split [N, P] ([0, P]: not wanted), peak, numerator, size, sweeps and
    status [N]; a problem whose status is not OK has no other result. Totals from too_large on are refused. `whole`:
    integral split (module docstring).
    """
    num_ranks = tables.fixed_start.shape[1] - 1
    num_experts = loads.shape[1]
    num_physical = tables.source.shape[1]
    fixed = np.empty(num_ranks)
    load = np.empty(num_ranks)
    values = np.empty(num_experts + num_physical)  # the experts' loads, then the copies'
    demands = np.empty(num_experts)
    by_rank = np.empty((4, num_ranks), np.int32)
    seen_rank, seen_expert = np.empty(num_ranks, np.int32), np.empty(num_experts, np.int32)
    seen = Search(seen_rank, seen_expert, by_rank[0], by_rank[1], by_rank[2], by_rank[3])
    tiny_part = num_ranks / (2 * num_physical)  # empty copies of a rank hold less than half of the slack together
    for b in range(loads.shape[0]):
        at = layer[b]
        for e in range(num_experts):
            values[e] = loads[b, e]
        total, low = add_fixed(tables.fixed_start[at], tables.fixed_expert, values, fixed)
        first_expert, first_copy = tables.expert_start[at], tables.layer_copies[at]
        num_replicated = tables.expert_start[at + 1] - first_expert
        end_copy = tables.layer_copies[at + 1]
        x = values[num_experts : num_experts + end_copy - first_copy]
        demand = demands[:num_replicated]
        for k in range(num_replicated):
            demand[k] = values[tables.expert[first_expert + k]]
            total += demand[k]
            low = min(low, demand[k])
        status[b] = BAD_LOAD if low < 0.0 or total != total else TOO_LARGE if total >= too_large else OK
        if status[b] != OK:
            continue
        graph = Graph(
            demand,
            tables.copy_start[first_expert + at : first_expert + at + num_replicated + 1],
            tables.copy_rank[first_copy:end_copy],
            tables.copy_expert[first_copy:end_copy],
            tables.rank_start[at],
            tables.rank_copy[first_copy:end_copy],
            tables.num_paired[at],
        )

        # The even split over physical experts: the sweeps never raise a peak, and the end looks back at this one.
        share = tables.copy_share[first_copy:end_copy]
        for r in range(num_ranks):
            load[r] = fixed[r]
        for c in range(x.size):
            x[c] = 0.0 if whole else demand[graph.copy_expert[c]] * share[c]
            load[graph.copy_rank[c]] += x[c]
        even_peak = np.inf if whole else largest(load)
        if start.shape[0]:
            for r in range(num_ranks):
                load[r] = fixed[r]
            for c in range(x.size):
                x[c] = 0.0
            for p in range(num_physical):
                if tables.source[at, p] >= num_experts:
                    values[tables.source[at, p]] += start[b, p]
            rescale(graph, x)
            for c in range(x.size):
                load[graph.copy_rank[c]] += x[c]
        for _ in range(NUM_SWEEPS):
            water_fill(graph, x, load, whole)
        best, best_size = total, num_ranks
        for r in range(num_ranks):
            if fixed[r] * best_size > best:
                best, best_size = fixed[r], 1
        found = close_gap(graph, fixed, x, load, best, best_size, tol, tiny_part, limit - NUM_SWEEPS, whole, seen)
        numerator[b], size[b], rounds = found
        sweeps[b] = NUM_SWEEPS + rounds

        if rounds and not whole:
            water_fill(graph, x, load, whole)
        for r in range(num_ranks):
            load[r] = fixed[r]
        for c in range(x.size):
            load[graph.copy_rank[c]] += x[c]
        peak[b] = largest(load)
        if peak[b] > even_peak:  # by less than the tolerance
            for c in range(x.size):
                x[c] = demand[graph.copy_expert[c]] * share[c]
            peak[b] = even_peak
        if not split.shape[0]:
            continue
        twin = tables.twin[tables.twin_start[at] : tables.twin_start[at + 1]]
        write_split(tables.source[at], twin, values, split[b], whole)


def _cached(stamp: str) -> Callable[..., None]:
    """_solve_range, compiled once for this stamp and kept on disk.

    numba's cache looks at a function's own file alone, and would go on using what it compiled from an older flow.py. A
    variable of the enclosing function is part of its key.
    """

    @njit(cache=True, nogil=True, error_model="numpy")
    def solve_range(*arguments: Any) -> None:
        if stamp != "":
            _solve_range(*arguments)

    return solve_range


solve_range = _cached(hashlib.sha256(Path(flow.__file__).read_bytes()).hexdigest())
