"""Simulated annealing over placements, compiled with Numba.

A move swaps the experts of two slots, or replaces the expert of one slot by another.

A problem is one layer with several rows of expert loads: steps, windows of steps, or variations of them
(`searched.load_rows`). The score of a placement has two parts, averaged over rows with weights: the peak load under an
even split, and LEVEL_WEIGHT times the mean squared rank load. Rows are scaled to a mean rank load of 1, so the first
part is peak / mean. The three busiest ranks of each row are kept, so evaluating a swap takes O(rows) time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

LEVEL_WEIGHT = 0.1
"""Weight of the mean squared rank load in the score. This part balances the ranks below the peak."""
SWAP_SHARE = 0.85
"""The share of moves that are swaps."""
BUSY_SHARE = 0.7
"""The share of moves that change the busiest rank of a random row. The others change a random rank."""


@njit(cache=True, nogil=True)
def _below(state: Words, bound: int) -> np.int64:
    """A pseudo-random integer in 0..bound-1 (xorshift64, Marsaglia 2003)."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return np.int64((x >> np.uint64(11)) % np.uint64(bound))


@njit(cache=True, nogil=True)
def _unit(state: Words) -> float:
    """A pseudo-random number in (0, 1]."""
    return (_below(state, 1 << 52) + 1) / (1 << 52)


@njit(cache=True, nogil=True)
def _find_heaviest(load: Floats, top: Ints, row: int) -> None:
    a, b, c = -1, -1, -1
    for rank in range(load.shape[0]):
        if a < 0 or load[rank, row] > load[a, row]:
            a, b, c = rank, a, b
        elif b < 0 or load[rank, row] > load[b, row]:
            b, c = rank, b
        elif c < 0 or load[rank, row] > load[c, row]:
            c = rank
    top[0, row], top[1, row], top[2, row] = a, b, c


@njit(cache=True)
def _set_up(rows: Floats, slots: Ints, copies: Ints, held: Ints, load: Floats, top: Ints) -> None:
    """Fills copies [E], held [R, E] and load [R, rows], all zero at the start, and top [3, rows]."""
    num_ranks, slots_per_rank = slots.shape
    for rank in range(num_ranks):
        for place in range(slots_per_rank):
            copies[slots[rank, place]] += 1
            held[rank, slots[rank, place]] += 1
    for rank in range(num_ranks):
        for place in range(slots_per_rank):
            expert = slots[rank, place]
            for row in range(rows.shape[1]):
                load[rank, row] += rows[expert, row] / copies[expert]
    for row in range(rows.shape[1]):
        _find_heaviest(load, top, row)


@njit(cache=True, nogil=True)
def _copy(source: Any, target: Any) -> None:
    """Copies a matrix by loops: array expressions take seconds to compile."""
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@njit(cache=True, nogil=True)
def anneal(
    rows: Floats,
    weight: Floats,
    span: int,
    slots: Ints,
    best_slots: Ints,
    best_score: float,
    random: Words,
    num_moves: int,
    hot: float,
    cold: float,
) -> float:
    """Proposes num_moves moves at temperatures that fall from `hot` to `cold`. Returns the best score so far.

    rows [E, rows]; weight [rows], which sums to 1; slots, best_slots [R, slots per rank]; random [1]: the state of the
    generator, not 0. slots, best_slots and random are changed in place. An expert stays within its block of `span`
    consecutive ranks (a node), and a rank never holds an expert twice. The function releases the GIL, so layers can run
    in threads.
    """
    num_experts, num_rows = rows.shape
    num_ranks, slots_per_rank = slots.shape
    copies = np.zeros(num_experts, np.int64)
    held = np.zeros((num_ranks, num_experts), np.int64)
    load = np.zeros((num_ranks, num_rows))
    top = np.empty((3, num_rows), np.int64)
    _set_up(rows, slots, copies, held, load, top)
    new_load = np.empty((num_ranks, num_rows))
    level = LEVEL_WEIGHT / num_ranks
    score = 0.0
    for row in range(num_rows):
        squares = 0.0
        for rank in range(num_ranks):
            squares += load[rank, row] ** 2
        score += weight[row] * (load[top[0, row], row] + level * squares)
    if score < best_score:
        best_score = score
        _copy(slots, best_slots)

    for move in range(num_moves):
        temperature = hot * (cold / hot) ** (move / num_moves)
        highest = score - temperature * np.log(_unit(random))
        busy = _unit(random) < BUSY_SHARE
        r = top[0, _below(random, num_rows)] if busy else _below(random, num_ranks)
        q = r // span * span + _below(random, span)
        if _unit(random) < SWAP_SHARE:
            if q == r:
                continue
            i, j = _below(random, slots_per_rank), _below(random, slots_per_rank)
            a, b = slots[r, i], slots[q, j]
            if a == b or held[q, a] > 0 or held[r, b] > 0:
                continue
            share_a, share_b = 1 / copies[a], 1 / copies[b]
            new_score = score
            for row in range(num_rows):
                change = rows[b, row] * share_b - rows[a, row] * share_a
                squares = 2 * change * (load[r, row] - load[q, row] + change)
                peak = max(load[r, row] + change, load[q, row] - change)
                for k in range(3):
                    other = top[k, row]
                    if other != r and other != q:
                        if other >= 0:
                            peak = max(peak, load[other, row])
                        break
                new_score += weight[row] * (peak - load[top[0, row], row] + level * squares)
            if new_score > highest:
                continue
            slots[r, i], slots[q, j] = b, a
            held[r, a] -= 1
            held[q, a] += 1
            held[q, b] -= 1
            held[r, b] += 1
            for row in range(num_rows):
                change = rows[b, row] * share_b - rows[a, row] * share_a
                load[r, row] += change
                load[q, row] -= change
        else:
            # A slot of rank q changes from expert a to expert b. Rank `giver` holds b: it is r, or a random rank of the
            # block if q is r.
            giver = r if q != r else r // span * span + _below(random, span)
            b = slots[giver, _below(random, slots_per_rank)]
            j = _below(random, slots_per_rank)
            a = slots[q, j]
            if a == b or copies[a] < 2 or held[q, b] > 0:
                continue
            less, more = 1 / copies[a] - 1 / (copies[a] - 1), 1 / copies[b] - 1 / (copies[b] + 1)
            for rank in range(num_ranks):
                gain_a, gain_b = -less * held[rank, a], -more * held[rank, b]
                if rank == q:
                    gain_a, gain_b = -1 / copies[a], 1 / (copies[b] + 1)
                for row in range(num_rows):
                    new_load[rank, row] = load[rank, row]
                    if gain_a != 0 or gain_b != 0:
                        new_load[rank, row] += gain_a * rows[a, row] + gain_b * rows[b, row]
            new_score = 0.0
            for row in range(num_rows):
                peak, squares = 0.0, 0.0
                for rank in range(num_ranks):
                    peak = max(peak, new_load[rank, row])
                    squares += new_load[rank, row] ** 2
                new_score += weight[row] * (peak + level * squares)
            if new_score > highest:
                continue
            slots[q, j] = b
            held[q, a] -= 1
            held[q, b] += 1
            copies[a] -= 1
            copies[b] += 1
            _copy(new_load, load)
        for row in range(num_rows):
            _find_heaviest(load, top, row)
        score = new_score
        if score < best_score - 1e-12:
            best_score = score
            _copy(slots, best_slots)
    return best_score
