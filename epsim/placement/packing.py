"""Greedy replication and balanced packing, compiled: the two steps of EPLB, with a limit on copies per rank.

The rules are those of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), with stable sorting and one addition: a limit on
the copies of an expert on a rank. The limit changes nothing if EPLB's own result respects it. All arithmetic is float32
and in the order of EPLB's code, so that rounding, and with it every tie, is the same.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

Floats32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@njit(cache=True)
def replicate(weight: Floats32, num_slots: int, most_copies: int) -> tuple[Ints, Ints]:
    """Gives each expert one slot, then each further slot to the expert with the largest weight per copy.

    weight [E]; most_copies * E >= num_slots >= E. Returns the expert of each slot and the number of the copy that the
    slot holds, both [num_slots]. Ties go to the first expert. Experts without weight get further slots only when
    all others have most_copies copies; the expert with the fewest copies is then the next.
    """
    num_experts = len(weight)
    expert = np.empty(num_slots, np.int64)
    copy = np.zeros(num_slots, np.int64)
    copies = np.ones(num_experts, np.int64)
    share = weight.copy()
    for slot in range(num_slots):
        if slot < num_experts:
            expert[slot] = slot
            continue
        best = -1
        for e in range(num_experts):
            if copies[e] < most_copies and (
                best < 0 or share[e] > share[best] or (share[e] == 0 and share[best] == 0 and copies[e] < copies[best])
            ):
                best = e
        expert[slot] = best
        copy[slot] = copies[best]
        copies[best] += 1
        share[best] = weight[best] / np.float32(copies[best])
    return expert, copy


def pack(weight: Floats32, kind: Ints, num_packs: int, most_alike: int) -> Ints:
    """Packs items into packs of equal size: the heaviest item first, into the lightest pack with room.

    weight, kind [n], n % num_packs == 0. No pack gets more than most_alike items of one kind; no kind may have more
    than most_alike * num_packs items. If the limit excluded the lightest pack, swaps between packs follow.
    Returns [num_packs, n / num_packs]: the items of each pack in the order in which they were added.
    """
    if len(weight) == num_packs:
        return np.arange(num_packs)[:, None]
    packed = np.empty((num_packs, len(weight) // num_packs), np.int64)
    load = np.zeros(num_packs, np.float32)
    alike = np.zeros((num_packs, int(kind.max()) + 1), np.int64)
    order = np.argsort(-weight, kind="stable")
    _pack(order, weight, kind, packed, np.zeros(num_packs, np.int64), load, alike, most_alike)
    return packed


@njit(cache=True)
def _pack(
    order: Ints, weight: Floats32, kind: Ints, packed: Ints, size: Ints, load: Floats32, alike: Ints, most_alike: int
) -> None:
    """Fills `packed`. order [n]: the items, heaviest first. size, load and alike (by pack) are zero at the start."""
    num_packs, room = packed.shape
    hindered = False
    for item in order:
        target, lightest = -1, -1
        for p in range(num_packs):
            if size[p] < room:
                if lightest < 0 or load[p] < load[lightest]:
                    lightest = p
                if alike[p, kind[item]] < most_alike and (target < 0 or load[p] < load[target]):
                    target = p
        hindered |= target != lightest
        if target < 0:
            _swap_in(item, weight, kind, packed, size, load, alike, most_alike)
        else:
            packed[target, size[target]] = item
            size[target] += 1
            load[target] += weight[item]
            alike[target, kind[item]] += 1
    if hindered:
        _swap_down(weight, kind, packed, load, alike, most_alike)


@njit(cache=True)
def _swap_in(
    item: int, weight: Floats32, kind: Ints, packed: Ints, size: Ints, load: Floats32, alike: Ints, most_alike: int
) -> None:
    """Packs an item when each pack with room is at the limit for its kind.

    A full pack takes the item and gives one of its own items to a pack with room. Such an exchange always exists: a
    full pack below the limit has more items of other kinds than a pack with room. Of all exchanges, the one that leaves
    the heavier of the two packs lightest is taken.
    """
    num_packs, room = packed.shape
    best = np.inf
    giver, place, taker = -1, -1, -1
    for q in range(num_packs):
        if size[q] < room or alike[q, kind[item]] >= most_alike:
            continue
        for i in range(room):
            moved = packed[q, i]
            for p in range(num_packs):
                if size[p] < room and alike[p, kind[moved]] < most_alike:
                    heavier = max(load[q] - weight[moved] + weight[item], load[p] + weight[moved])
                    if giver < 0 or heavier < best:
                        best = heavier
                        giver, place, taker = q, i, p
    assert giver >= 0
    moved = packed[giver, place]
    packed[giver, place] = item
    load[giver] += weight[item] - weight[moved]
    alike[giver, kind[moved]] -= 1
    alike[giver, kind[item]] += 1
    packed[taker, size[taker]] = moved
    size[taker] += 1
    load[taker] += weight[moved]
    alike[taker, kind[moved]] += 1


@njit(cache=True)
def _swap_down(weight: Floats32, kind: Ints, packed: Ints, load: Floats32, alike: Ints, most_alike: int) -> None:
    """Swaps items of the heaviest pack for lighter items of other packs, as long as its load falls; the best swap
    first."""
    num_packs, room = packed.shape
    while True:
        heavy = 0
        for p in range(len(load)):
            if load[p] > load[heavy]:
                heavy = p
        lowest = load[heavy]
        other, give, take = -1, -1, -1
        for q in range(num_packs):
            for i in range(room):
                for j in range(room):
                    a, b = packed[heavy, i], packed[q, j]
                    surplus = weight[a] - weight[b]
                    heavier = max(load[heavy] - surplus, load[q] + surplus)
                    if (
                        q != heavy
                        and surplus > 0
                        and heavier < lowest
                        and (kind[a] == kind[b] or (alike[q, kind[a]] < most_alike > alike[heavy, kind[b]]))
                    ):
                        lowest = heavier
                        other, give, take = q, i, j
        if other < 0:
            return
        a, b = packed[heavy, give], packed[other, take]
        packed[heavy, give], packed[other, take] = b, a
        load[heavy] += weight[b] - weight[a]
        load[other] += weight[a] - weight[b]
        alike[heavy, kind[a]] -= 1
        alike[heavy, kind[b]] += 1
        alike[other, kind[b]] -= 1
        alike[other, kind[a]] += 1


def replicate_and_pack(weight: Floats32, num_slots: int, num_ranks: int) -> tuple[Ints, Ints]:
    """Replicates and places the experts of one node (or one group of ranks), for each row.

    weight [rows, E], num_slots % num_ranks == 0, num_slots >= E. Returns the expert in each slot and the number of its
    copy, in rank order, both [rows, num_slots]. No rank holds an expert more than ceil(slots per rank / E) times. A row
    whose weights are all 0 is treated as a row of equal weights.
    """
    num_rows, num_experts = weight.shape
    most_alike = -(-(num_slots // num_ranks) // num_experts)
    expert = np.empty((num_rows, num_slots), np.int64)
    copy = np.empty((num_rows, num_slots), np.int64)
    for row in range(num_rows):
        row_weight = weight[row] if weight[row].max() > 0 else np.ones(num_experts, np.float32)
        slot_expert, slot_copy = replicate(row_weight, num_slots, most_alike * num_ranks)
        copies = np.bincount(slot_expert, minlength=num_experts).astype(np.float32)
        order = pack((row_weight / copies)[slot_expert], slot_expert, num_ranks, most_alike).ravel()
        expert[row] = slot_expert[order]
        copy[row] = slot_copy[order]
    return expert, copy


def pack_groups(weight: Floats32, num_nodes: int) -> Ints:
    """weight [rows, groups] -> the groups of each node in turn [rows, groups]; groups % num_nodes == 0."""
    groups = np.arange(weight.shape[1])
    return np.array([pack(row, groups, num_nodes, 1).ravel() for row in weight], dtype=np.int64)
