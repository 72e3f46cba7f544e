"""Greedy replication and balanced packing, compiled: the two halves of EPLB, with a limit on copies per rank.

The rules are those of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), ties sorted stably. Added to them is the limit,
which changes nothing where EPLB's own answer keeps within it. All arithmetic is float32 in EPLB's order of operations:
sums of shares such as 1/3 tie or not by their rounding, so another precision would break other ties.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Floats32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@njit(cache=True)
def replicate(weight: Floats32, num_slots: int, most_copies: int) -> tuple[Ints, Ints]:
    """Gives every further slot to the expert with the largest weight per copy, the first one on ties.

    weight [E]; most_copies * E >= num_slots >= E. Returns each slot's expert and which copy of it the slot is, both
    [num_slots]. Experts without weight come only when all others are at the limit, those with fewest copies first.
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
    """Packs items into equal packs: the heaviest first, onto the lightest pack with room, the first on ties.

    weight, kind [n], n % num_packs == 0. No pack gets more than most_alike items of one kind, which must be possible:
    no kind has more than most_alike * num_packs items. Where that limit came in the way, swaps then make up for it.
    Returns [num_packs, n / num_packs]: items in order of arrival.
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
    order: Ints,
    weight: Floats32,
    kind: Ints,
    packed: Ints,
    size: Ints,
    load: Floats32,
    alike: Ints,
    most_alike: int,
) -> None:
    """Fills packed; order [n]: items, the heaviest first; size, load and alike, by pack, are zero at the start."""
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
    item: int,
    weight: Floats32,
    kind: Ints,
    packed: Ints,
    size: Ints,
    load: Floats32,
    alike: Ints,
    most_alike: int,
) -> None:
    """Places an item that every pack with room has enough of: a full pack takes it and gives one of its own to them.

    Such a pair exists: some full pack holds fewer of the kind, hence more of the others than any pack with room, so one
    of its items has fewer of its kind there. Of all, the one whose heavier pack ends lightest is taken.
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
    """Swaps items of the heaviest pack for lighter ones of others, the best swap first, while that lowers its load."""
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
    """One node (or one group of ranks) of every row. weight [rows, E], num_slots % num_ranks == 0, num_slots >= E.

    Returns the expert and its copy's number for every slot in rank order, both [rows, num_slots]. No rank holds an
    expert more than ceil(slots per rank / E) times, that is twice only where it cannot be avoided. A row without any
    weight is treated as one of equal weights.
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
    """weight [rows, groups] -> groups in node order [rows, groups]; groups % num_nodes == 0."""
    groups = np.arange(weight.shape[1])
    return np.array([pack(row, groups, num_nodes, 1).ravel() for row in weight], dtype=np.int64)
