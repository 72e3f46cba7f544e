"""Assigns shared-expert tokens to ranks with low routed load: first the number of tokens per pair of ranks, then which.

1. Numbers. A rank with load limit H has a capacity of floor((H - routed) / cost) tokens. H starts at the lowest value
   for which the capacities sum to all tokens. Each source rank keeps its own tokens up to its capacity and sends the
   others to ranks of its node, then to all ranks, in equal shares where capacity allows. With limits on the tokens that
   one rank may send to another (`bounded`), the remaining tokens move along augmenting paths. If no path exists, the
   ranks that the search has reached cannot send more tokens out of their set. They must serve the rest, so H rises to
   the lowest value that allows it, and step 1 starts again. No H is above the optimum, so the last H is optimal.
2. Which tokens. Within these numbers, tokens go to ranks that already serve one of their routed experts. Augmenting
   paths find the largest number of such tokens.

All arithmetic is on integers. Loads are in units of 2^-20 assignments.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

Longs = npt.NDArray[np.int64]
NO_LIMIT = 1 << 62


@njit(nogil=True, error_model="numpy")
def lowest_level(load: Longs, cost: int, number: int, inside: Longs, mark: int, low: int) -> int:
    """The lowest H >= low (low >= all loads) at which the ranks with inside == mark have capacity for number tokens."""
    total, size = number * cost, 0
    for r in range(load.size):
        if inside[r] == mark:
            total += load[r]
            size += 1
    # Bisection. Without rounding down, the level `low` has capacity for all tokens; with it, `low + cost` always has.
    low = max(low, (total + size - 1) // size)
    high = low + cost
    while low < high:
        middle = (low + high) // 2
        room = 0
        for r in range(load.size):
            if inside[r] == mark:
                room += (middle - load[r]) // cost
        if room >= number:
            high = middle
        else:
            low = middle + 1
    return low


@njit(nogil=True, error_model="numpy")
def send_directly(served: Longs, cap: Longs, node: Longs, limit: Longs, flow: Longs, local: bool, evenly: bool) -> None:
    """Moves tokens from ranks above their capacity to ranks below it, at most limit [R, R] per pair of ranks.

    local: only between ranks of one node. evenly: each rank below its capacity gets an equal share.
    """
    num_ranks = served.size
    for u in range(num_ranks):
        if served[u] <= cap[u]:
            continue
        share = served[u] - cap[u]
        if evenly:
            takers = 0
            for v in range(num_ranks):
                takers += served[v] < cap[v] and flow[u, v] < limit[u, v] and (not local or node[u] == node[v])
            share = (share + takers - 1) // takers if takers else 0
        for v in range(num_ranks):
            if v == u or (local and node[u] != node[v]):
                continue
            amount = min(min(served[u] - cap[u], cap[v] - served[v]), min(limit[u, v] - flow[u, v], share))
            if amount > 0:
                flow[u, v] += amount
                served[u] -= amount
                served[v] += amount


@njit(nogil=True, error_model="numpy")
def send_on(served: Longs, cap: Longs, limit: Longs, flow: Longs, seen: Longs, parent: Longs, queue: Longs) -> int:
    """Moves tokens along shortest augmenting paths until no rank is above its capacity. Then returns 0.

    If no path exists, returns the mark in `seen` of the ranks reached, which cannot send more tokens out of their set.
    """
    num_ranks = served.size
    mark = 0
    seen[:] = 0
    while True:
        start = 0
        while start < num_ranks and served[start] <= cap[start]:
            start += 1
        if start == num_ranks:
            return 0
        mark += 1
        seen[start] = mark
        queue[0] = start
        head, tail, end = 0, 1, -1
        while head < tail and end < 0:
            u = queue[head]
            head += 1
            for v in range(num_ranks):
                if seen[v] == mark or (flow[u, v] >= limit[u, v] and flow[v, u] == 0):
                    continue
                seen[v] = mark
                parent[v] = u
                queue[tail] = v
                tail += 1
                if served[v] < cap[v]:
                    end = v
                    break
        if end < 0:
            return mark
        amount = min(served[start] - cap[start], cap[end] - served[end])
        v = end
        while v != start:
            u = parent[v]
            amount = min(amount, limit[u, v] - flow[u, v] + flow[v, u])
            v = u
        v = end
        while v != start:
            u = parent[v]
            back = min(amount, flow[v, u])
            flow[v, u] -= back
            flow[u, v] += amount - back
            v = u
        served[start] -= amount
        served[end] += amount


@njit(cache=True, nogil=True, error_model="numpy")
def pour_range(
    routed: Longs, tokens: Longs, limits: Longs, cost: int, node: Longs, bounded: bool, quotas: Longs, level: Longs
) -> None:
    """Solves problems one after the other: routed [N, R] in 2^-20 assignments, tokens [N, R].

    limits [N, R, R], used if bounded: how many tokens a rank may send to each other rank. Their sum over serving ranks
    is at most the tokens of the source rank. cost > 0: the cost of a token, in 2^-20 assignments. node [R].
    Results: quotas [N, R, R], tokens by source and serving rank; level [N], the lowest H.
    """
    num_ranks = routed.shape[1]
    served, cap = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    seen, parent, queue = np.empty((3, num_ranks), np.int64)
    free = np.full((num_ranks, num_ranks), NO_LIMIT)
    for b in range(routed.shape[0]):
        load, flow = routed[b], quotas[b]
        limit = limits[b] if bounded else free
        seen[:] = 0
        height = lowest_level(load, cost, tokens[b].sum(), seen, 0, load.max())
        while True:
            flow[:] = 0
            for r in range(num_ranks):
                served[r] = tokens[b, r]
                cap[r] = (height - load[r]) // cost
            for local in (True, False):
                for evenly in (True, False):
                    send_directly(served, cap, node, limit, flow, local, evenly)
            mark = send_on(served, cap, limit, flow, seen, parent, queue)
            if mark == 0:
                break
            captive = 0
            for u in range(num_ranks):
                if seen[u] == mark:
                    captive += tokens[b, u]
                    for v in range(num_ranks):
                        if seen[v] != mark:
                            captive -= limit[u, v]
            height = lowest_level(load, cost, captive, seen, mark, height)
        for r in range(num_ranks):
            flow[r, r] = tokens[b, r] - (flow[r].sum() - flow[r, r])
        level[b] = height


@njit(nogil=True, error_model="numpy")
def move_token(
    start: int, rank_of: Longs, visited: Longs, members: Longs, quota: Longs, seen: Longs, token: Longs, queue: Longs
) -> bool:
    """Moves a token off rank `start` along an augmenting path (each token moves to a rank it visits); else False."""
    seen[:] = 0
    seen[start] = 1
    queue[0] = start
    head, tail = 0, 1
    while head < tail:
        u = queue[head]
        head += 1
        for i in range(members.size):
            if rank_of[i] != u:
                continue
            for v in visited[members[i]]:
                if v < 0 or seen[v]:
                    continue
                seen[v] = 1
                token[v] = i
                queue[tail] = v
                tail += 1
                if quota[v] > 0:
                    quota[v] -= 1
                    while v != start:
                        i = token[v]
                        v, rank_of[i] = rank_of[i], v
                    return True
    return False


@njit(cache=True, nogil=True, error_model="numpy")
def assign_range(first: Longs, members: Longs, source: Longs, visited: Longs, quotas: Longs, ranks: Longs) -> None:
    """Assigns tokens to ranks by group. Group g has the tokens members[first[g] : first[g + 1]] of rank source[g].

    visited [N, k]: the ranks that serve a token's routed experts, -1 for none. quotas [G, R]: tokens of a group by
    serving rank; they sum to the group's tokens. Result: ranks [N]. As many tokens as the quotas allow stay on the
    source rank or go to a rank that they visit. The other tokens fill the remaining quotas in order.
    """
    num_ranks = quotas.shape[1]
    seen, token, queue = np.empty((3, num_ranks), np.int64)
    for g in range(source.size):
        source_rank = source[g]
        group = members[first[g] : first[g + 1]]
        rank_of = np.full(group.size, source_rank)
        quota = quotas[g].copy()
        quota[source_rank] = 0
        leaving = group.size - quotas[g, source_rank]
        for i in range(group.size):
            if leaving == 0:
                break
            best = source_rank
            for v in visited[group[i]]:
                if v >= 0 and quota[v] > 0 and (best == source_rank or quota[v] > quota[best]):
                    best = v
            if best != source_rank:
                rank_of[i] = best
                quota[best] -= 1
                leaving -= 1
        while leaving > 0 and move_token(source_rank, rank_of, visited, group, quota, seen, token, queue):
            leaving -= 1
        v = 0
        for i in range(group.size):
            if leaving == 0:
                break
            if rank_of[i] == source_rank:
                while quota[v] == 0:
                    v += 1
                rank_of[i] = v
                quota[v] -= 1
                leaving -= 1
        for i in range(group.size):
            ranks[group[i]] = rank_of[i]
