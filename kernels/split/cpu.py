"""The split on the CPU: sweeps of water-filling, a lower bound, and augmenting paths until the bound is reached.

M* is the lowest peak load of any split.

1. Water-filling: starting from the even split (or from another batch's split), the load of each replicated expert in
   turn is distributed over the ranks of its copies so that these ranks are as level as possible. This is optimal for
   the expert alone and never raises the peak. Experts with two copies have a closed form.
2. Lower bound: for any set A of ranks, M* >= (load that cannot leave A) / |A|. The first bounds are the mean load and
   each rank's fixed load. After a sweep, the sets {ranks with load >= t} are tried; at the least-squares split they
   give M*.
3. Levelling: between sweeps, each set of ranks connected by partly used copies is levelled along a spanning tree. This
   moves towards the least-squares split in one pass; on a long chain, water-filling alone takes thousands of sweeps. Up
   to 32 ranks, steps 1 to 3 are computed in integers (coarse.py) until the peak is within the tolerance of the bound.
   Beyond 32 ranks, three sweeps are made in float64.
4. Augmenting paths, in float64: while ranks are above the bound by more than the tolerance, a breadth-first search
   starts from all of them. It goes from a rank, over each expert with load there, to the other ranks of that expert,
   until it reaches ranks below the bound. Load is pushed along the search tree. If no rank below the bound can be
   reached, the reached set is closed: no expert with load in it has a copy outside. Then none of its load can leave,
   and its mean is a higher bound (Dinkelbach's iteration over minimum cuts). This ends after finitely many pushes for
   any placement. (In practice, problems with up to 32 ranks do not need this step: none of thousands did.)

If `whole` is set, loads are integers below 2^53 in float64, so all operations are exact. The capacity in step 4 is the
bound rounded up, and the split is integral with a peak of exactly ceil(M*), because a feasible flow with integral
capacities has an integral solution.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from epsim.kernels.split import coarse, flow
from epsim.kernels.split.coarse import Scratch, add_loads
from epsim.kernels.split.flow import Graph, Search, largest, water_fill
from epsim.kernels.split.structure import Floats, Ints, Longs, Tables

OK, BAD_LOAD, TOO_LARGE = 0, 1, 2
NUM_SWEEPS = 3


@njit(nogil=True, error_model="numpy")
def add_fixed(fixed_start: Ints, fixed_expert: Ints, values: Floats, fixed: Floats) -> tuple[float, float]:
    """Sums the fixed experts of each rank into fixed [R]. Returns their total, and the lowest load or 0."""
    total, low = 0.0, 0.0
    for r in range(fixed.size):
        fixed[r] = 0.0
        for i in range(fixed_start[r], fixed_start[r + 1]):
            value = values[fixed_expert[i]]
            fixed[r] += value
            low = min(low, value)
        total += fixed[r]
    return total, low


@njit(nogil=True, error_model="numpy")
def add_even(graph: Graph, share: Floats, fixed: Floats, load: Floats) -> float:
    """The peak load of the even split over slots."""
    load[:] = fixed
    for c in range(share.size):
        load[graph.copy_rank[c]] += graph.demand[graph.copy_expert[c]] * share[c]
    return float(largest(load))


@njit(nogil=True, error_model="numpy")
def near_split(
    graph: Graph,
    fixed: Floats,
    x: Floats,
    load: Floats,
    total: float,
    until: Floats,
    warm: bool,
    tol: float,
    limit: int,
    whole: bool,
    num_physical: int,
    scratch: Scratch,
    seen: Search,
) -> tuple[float, int, int, bool]:
    """Computes x and load by the search in coarse.py. warm: start from x if it is better than the even split.

    Returns the bound's numerator and size, the number of sweeps, and whether the even split may have a lower peak.
    """
    unit = coarse.unit_of(total, whole)
    need, part, fixed_units, load_units = scratch.need, scratch.part, scratch.words[4], scratch.words[5]
    for r in range(load.size):
        fixed_units[r] = int(fixed[r] * unit)
    for k in range(need.size):
        need[k] = int(graph.demand[k] * unit)
    coarse.even_start(graph, until, need, part)
    add_loads(graph, part, fixed_units, load_units)
    even_top, unlevelled = largest(load_units), coarse.COLD
    if warm:
        coarse.warm_start(graph, x, need, part)
        add_loads(graph, part, fixed_units, load_units)
        mean = load_units.sum() // load.size
        above, even_above = largest(load_units) - mean, even_top - mean
        if above < even_above:
            unlevelled = 0 if above < even_above >> 1 else coarse.WARM
        else:
            coarse.even_start(graph, until, need, part)
            add_loads(graph, part, fixed_units, load_units)
    most_sweeps = min(limit, coarse.MOST_WHOLE if whole else coarse.MOST_SWEEPS)
    inside, sweeps, top = coarse.search(graph, fixed_units, load_units, tol, most_sweeps, unlevelled, whole, scratch)
    inverse = 1.0 / unit
    for c in range(x.size):
        x[c] = part[c] * inverse
    for k in range(need.size):
        x[graph.copy_start[k]] += graph.demand[k] - need[k] * inverse  # the load lost by rounding to units
    add_loads(graph, x, fixed, load)
    size = 0
    for r in range(load.size):
        seen.seen_rank[r] = inside >> r & 1
        size += inside >> r & 1
    return flow.captive_load(graph, fixed, seen, 1), size, sweeps, even_top <= top + num_physical


@njit(nogil=True, error_model="numpy")
def far_split(
    graph: Graph,
    fixed: Floats,
    x: Floats,
    load: Floats,
    total: float,
    share: Floats,
    warm: bool,
    limit: int,
    whole: bool,
) -> tuple[float, int, int, bool]:
    """`near_split` for more than 32 ranks: three sweeps of water-filling in float64."""
    if warm:
        flow.rescale(graph, x)
    else:
        for c in range(x.size):
            x[c] = 0.0 if whole else graph.demand[graph.copy_expert[c]] * share[c]
    add_loads(graph, x, fixed, load)
    for _ in range(NUM_SWEEPS):
        water_fill(graph, x, load, whole)
    add_loads(graph, x, fixed, load)
    numerator, size = total, load.size
    for r in range(load.size):
        if fixed[r] * size > numerator:
            numerator, size = fixed[r], 1
    return numerator, size, NUM_SWEEPS, True


@njit(nogil=True, error_model="numpy")
def write_split(source: Ints, twin: Ints, values: Floats, split: Floats, whole: bool) -> None:
    """Writes split [P] from the loads of experts and copies. The slots of one copy share its load evenly."""
    for p in range(split.size):
        split[p] = values[source[p]]
    for i in range(twin.shape[0]):
        p, index, mates = twin[i, 0], twin[i, 1], twin[i, 2]
        if whole:
            split[p] = math.floor((split[p] + (mates - 1 - index)) / mates) * 1.0
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

    start [N, P], or [0, P] for none. Results: split [N, P] ([0, P] if not wanted), peak, numerator, size, sweeps and
    status [N]. If status is not OK, the other results are undefined. TOO_LARGE: the loads sum to too_large or more.
    whole: integral split (see the module docstring).
    """
    num_ranks = tables.fixed_start.shape[1] - 1
    num_experts = loads.shape[1]
    num_physical = tables.source.shape[1]
    fixed = np.empty(num_ranks)
    load = np.empty(num_ranks)
    values = np.zeros(num_experts + num_physical + 1)  # the experts' loads, then the copies', and 0 for empty slots
    demands = np.empty(num_experts)
    by_rank = np.empty((4, num_ranks), np.int32)
    seen_rank, seen_expert = np.empty(num_ranks, np.int32), np.empty(num_experts, np.int32)
    seen = Search(seen_rank, seen_expert, by_rank[0], by_rank[1], by_rank[2], by_rank[3])
    words, tree = np.empty((6, num_ranks), np.int64), np.empty((4, num_ranks), np.int32)
    needs, used = np.empty((2, num_experts), np.int64)
    parts = np.empty(num_physical, np.int64)
    tiny_part = num_ranks / (2 * num_physical)  # ignored copies of a rank sum to less than half of the slack
    for b in range(loads.shape[0]):
        at = layer[b]
        values[:num_experts] = loads[b]
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

        warm = start.shape[0] > 0
        if warm:
            x[:] = 0.0
            for p in range(num_physical):
                if tables.source[at, p] >= num_experts:
                    values[tables.source[at, p]] += start[b, p]

        share = tables.copy_share[first_copy:end_copy]
        if num_ranks <= coarse.MOST_RANKS:
            until = tables.copy_until[first_copy:end_copy]
            scratch = Scratch(needs[:num_replicated], parts[: x.size], words, used, tree)
            bound = near_split(
                graph, fixed, x, load, total, until, warm, tol, limit, whole, num_physical, scratch, seen
            )
        else:
            bound = far_split(graph, fixed, x, load, total, share, warm, limit, whole)
        numerator[b], size[b], sweeps[b], look_at_even = bound
        peak[b] = largest(load)
        proven = (peak[b] - 1.0) * size[b] < numerator[b] if whole else peak[b] <= numerator[b] / size[b] * (1 + tol)
        rounds = 0
        if not proven:
            rounds_left = limit - sweeps[b]
            numerator[b], size[b], rounds = flow.close_gap(
                graph, fixed, x, load, numerator[b], size[b], tol, tiny_part, rounds_left, whole, seen
            )
            if rounds:
                sweeps[b] += rounds
                if num_ranks > coarse.MOST_RANKS and not whole:
                    water_fill(graph, x, load, whole)
                add_loads(graph, x, fixed, load)
                peak[b] = largest(load)
        if not whole and (look_at_even or rounds):
            # Within the tolerance, the peak may be higher than that of the even split. Then use the even split.
            even_peak = add_even(graph, share, fixed, load)
            if peak[b] > even_peak:
                for c in range(x.size):
                    x[c] = demand[graph.copy_expert[c]] * share[c]
                peak[b] = even_peak
        if not split.shape[0]:
            continue
        twin = tables.twin[tables.twin_start[at] : tables.twin_start[at + 1]]
        write_split(tables.source[at], twin, values, split[b], whole)


def _cached(stamp: str) -> Callable[..., None]:
    """_solve_range, compiled once per stamp (a hash of the sources) and cached on disk.

    numba's cache checks only the file of the function itself and would keep code compiled from an older flow.py. The
    stamp becomes part of the cache key, because it is a variable of the enclosing function.
    """

    @njit(cache=True, nogil=True, error_model="numpy")
    def solve_range(*arguments: Any) -> None:
        if stamp != "":
            _solve_range(*arguments)

    return solve_range


_SOURCES = b"".join(Path(str(module.__file__)).read_bytes() for module in (flow, coarse))
solve_range = _cached(hashlib.sha256(_SOURCES).hexdigest())
