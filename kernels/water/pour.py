"""Shared-expert tokens fill the ranks with low routed load: first how many tokens go where, then which tokens.

How many: at a level H, a rank serves up to floor((H - routed) / cost) tokens. H is the lowest level at which all
tokens are served. Tokens stay on their own rank while there is room below H. The others go to ranks of the same node,
then to other ranks, as evenly as the room allows. If the number that one rank may send to another is limited
(`bounded`), the tokens that are left move along augmenting paths: a token from one rank to a second, and one from the
second to a third. If there is no path, the ranks reached can send nothing more out and must serve their tokens
themselves. The lowest level at which they can is the next H. Each H is necessary, so the last one is the lowest
possible.

Which: within these numbers, a source rank's tokens go to ranks that serve their routed experts, again by augmenting
paths. All arithmetic is on integers; loads are in units of 2^-20 assignments.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

Longs = npt.NDArray[np.int64]
NO_LIMIT = 1 << 62


@njit(nogil=True, error_model="numpy")
def least_level(load: Longs, cost: int, number: int, inside: Longs, mark: int, low: int) -> int:
    """The lowest H >= low at which the ranks with inside == mark can serve `number` tokens. low >= all their loads."""
    total, size = number * cost, 0
    for r in range(load.size):
        if inside[r] == mark:
            total += load[r]
            size += 1
    # Without rounding, this level has room for all tokens; with rounding, a level higher by one token's cost has.
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
def send_directly(have: Longs, cap: Longs, node: Longs, most: Longs, quotas: Longs, near: bool, evenly: bool) -> None:
    """Moves tokens from ranks above their capacity to ranks below it, at most `most` [R, R] per pair.

    near: only within nodes. evenly: each rank below its capacity gets an equal share.
    """
    num_ranks = have.size
    for u in range(num_ranks):
        if have[u] <= cap[u]:
            continue
        share = have[u] - cap[u]
        if evenly:
            takers = 0
            for v in range(num_ranks):
                takers += have[v] < cap[v] and quotas[u, v] < most[u, v] and (not near or node[u] == node[v])
            share = (share + takers - 1) // takers if takers else 0
        for v in range(num_ranks):
            if v == u or (near and node[u] != node[v]):
                continue
            amount = min(min(have[u] - cap[u], cap[v] - have[v]), min(most[u, v] - quotas[u, v], share))
            if amount > 0:
                quotas[u, v] += amount
                have[u] -= amount
                have[v] += amount


@njit(nogil=True, error_model="numpy")
def send_on(have: Longs, cap: Longs, most: Longs, quotas: Longs, seen: Longs, by: Longs, queue: Longs) -> int:
    """Moves tokens along shortest paths until no rank is above its capacity. Then returns 0.

    If that is impossible, returns the mark, in `seen`, of a set of ranks that can send nothing out.
    """
    num_ranks = have.size
    mark = 0
    seen[:] = 0
    while True:
        start = 0
        while start < num_ranks and have[start] <= cap[start]:
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
                if seen[v] == mark or (quotas[u, v] >= most[u, v] and quotas[v, u] == 0):
                    continue
                seen[v] = mark
                by[v] = u
                queue[tail] = v
                tail += 1
                if have[v] < cap[v]:
                    end = v
                    break
        if end < 0:
            return mark
        amount = min(have[start] - cap[start], cap[end] - have[end])
        v = end
        while v != start:
            u = by[v]
            amount = min(amount, most[u, v] - quotas[u, v] + quotas[v, u])
            v = u
        v = end
        while v != start:
            u = by[v]
            back = min(amount, quotas[v, u])
            quotas[v, u] -= back
            quotas[u, v] += amount - back
            v = u
        have[start] -= amount
        have[end] += amount


@njit(cache=True, nogil=True, error_model="numpy")
def pour_range(
    routed: Longs, tokens: Longs, most: Longs, cost: int, node: Longs, bounded: bool, quotas: Longs, level: Longs
) -> None:
    """Solves problems one after the other: routed [N, R] in 2^-20 assignments, tokens [N, R].

    most [N, R, R], if bounded: how many tokens a rank may send to another; the sum is at most the tokens that it has.
    cost > 0: of a token, in 2^-20 assignments. node [R].
    Results: quotas [N, R, R] by source and serving rank, level [N].
    """
    num_ranks = routed.shape[1]
    have, cap = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    seen, by, queue = np.empty((3, num_ranks), np.int64)
    free = np.full((num_ranks, num_ranks), NO_LIMIT)
    for b in range(routed.shape[0]):
        load, sent = routed[b], quotas[b]
        limit = most[b] if bounded else free
        seen[:] = 0
        height = least_level(load, cost, tokens[b].sum(), seen, 0, load.max())
        while True:
            sent[:] = 0
            for r in range(num_ranks):
                have[r] = tokens[b, r]
                cap[r] = (height - load[r]) // cost
            for near in (True, False):
                for evenly in (True, False):
                    send_directly(have, cap, node, limit, sent, near, evenly)
            mark = send_on(have, cap, limit, sent, seen, by, queue)
            if mark == 0:
                break
            held = 0
            for u in range(num_ranks):
                if seen[u] == mark:
                    held += tokens[b, u]
                    for v in range(num_ranks):
                        if seen[v] != mark:
                            held -= limit[u, v]
            height = least_level(load, cost, held, seen, mark, height)
        for r in range(num_ranks):
            sent[r, r] = tokens[b, r] - (sent[r].sum() - sent[r, r])
        level[b] = height


@njit(nogil=True, error_model="numpy")
def move_one(
    start: int, rank_of: Longs, visited: Longs, members: Longs, want: Longs, seen: Longs, token: Longs, queue: Longs
) -> bool:
    """Moves one token off `start` along a path of ranks, each visited by the token moved, to a rank that wants more."""
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
                if want[v] > 0:
                    want[v] -= 1
                    while v != start:
                        i = token[v]
                        v, rank_of[i] = rank_of[i], v
                    return True
    return False


@njit(cache=True, nogil=True, error_model="numpy")
def assign_range(first: Longs, members: Longs, source: Longs, visited: Longs, quotas: Longs, ranks: Longs) -> None:
    """Assigns tokens to ranks by group. Group g has the tokens members[first[g] : first[g + 1]] of rank source[g].

    visited [N, k]: the ranks of a token's routed experts, -1 for none. quotas [G, R]: they sum to the group's tokens.
    Result: ranks [N]. As far as the quotas allow, a token stays or goes to a rank that it visits. The others fill the
    remaining quotas in order.
    """
    num_ranks = quotas.shape[1]
    seen, token, queue = np.empty((3, num_ranks), np.int64)
    for g in range(source.size):
        home = source[g]
        group = members[first[g] : first[g + 1]]
        rank_of = np.full(group.size, home)
        want = quotas[g].copy()
        want[home] = 0
        leaving = group.size - quotas[g, home]
        for i in range(group.size):
            if leaving == 0:
                break
            best = home
            for v in visited[group[i]]:
                if v >= 0 and want[v] > 0 and (best == home or want[v] > want[best]):
                    best = v
            if best != home:
                rank_of[i] = best
                want[best] -= 1
                leaving -= 1
        while leaving > 0 and move_one(home, rank_of, visited, group, want, seen, token, queue):
            leaving -= 1
        v = 0
        for i in range(group.size):
            if leaving == 0:
                break
            if rank_of[i] == home:
                while want[v] == 0:
                    v += 1
                rank_of[i] = v
                want[v] -= 1
                leaving -= 1
        for i in range(group.size):
            ranks[group[i]] = rank_of[i]
