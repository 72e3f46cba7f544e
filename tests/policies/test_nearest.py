"""The nearest copy, read off the placement by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Placement, node_of_rank
from epsim.policies.copies import Copies
from epsim.policies.nearest import Static, nearest_slots
from epsim.traces.trace import TokenBlock


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4), st.integers(1, 10), st.integers(0, 25))
def test_own_rank_first_then_the_node_then_any_and_equally_near_ones_in_turn(
    draw_problem: Callable[..., tuple[Placement, TokenBlock]],
    seed: int,
    ranks: int,
    nodes: int,
    experts: int,
    redundant: int,
) -> None:
    nodes = min(nodes, ranks)
    placement, _ = draw_problem(seed, experts=experts, ranks=ranks, nodes=nodes, redundant=redundant, top_k=1)
    table = nearest_slots(Copies(placement))
    node = node_of_rank(ranks, nodes).tolist()
    for layer in range(placement.num_layers):
        for expert in range(experts):
            slots = (placement.physical_to_logical[layer] == expert).nonzero()[:, 0].tolist()
            rank_of = {slot: slot // placement.slots_per_rank for slot in slots}
            used: dict[tuple[int, ...], Counter[int]] = {}
            for rank in range(ranks):
                chosen = int(table[layer, rank, expert])
                own = [slot for slot in slots if rank_of[slot] == rank]
                near = [slot for slot in slots if node[rank_of[slot]] == node[rank]]
                assert chosen in (own or near or slots)
                if not own:
                    group = (1, node[rank]) if near else (2,)
                    used.setdefault(group, Counter(dict.fromkeys(near or slots, 0)))[chosen] += 1
            for turns in used.values():
                assert max(turns.values()) - min(turns.values()) <= 1


def test_fractions_are_the_shares_of_the_senders_and_quotas_follow_the_table() -> None:
    # Two nodes of two ranks; expert 0 has copies on ranks 0 and 1, expert 1 on ranks 2 and 3.
    placement = Placement(torch.tensor([[0, 0, 1, 1]]), 2, 4, 2)
    copies = Copies(placement)
    counts = torch.tensor([[[5, 0], [7, 1], [11, 2], [13, 4]]])
    quotas = Static().quotas(counts, torch.empty(0), copies)[0]
    assert quotas[0].tolist() == [5, 0, 0, 0]
    assert quotas[1].tolist() in ([0, 7, 1, 0], [0, 7, 0, 1])
    assert sorted(quotas[2:, :2].sum(0).tolist()) == [11, 13]
    assert quotas[2:, 2:].tolist() == [[2, 0], [0, 4]]
    assert Static().fractions(counts.sum(1), copies).tolist() == [[0.5, 0.5, 0.5, 0.5]]


def test_different_experts_begin_with_different_copies() -> None:
    # Eight experts with copies on both ranks of node 0, seen from a rank of node 1.
    placement = Placement(torch.cat([torch.arange(8), torch.arange(8), torch.arange(8, 24)])[None], 24, 4, 2)
    first_rank = nearest_slots(Copies(placement))[0, 2, :8] // 8
    assert sorted(first_rank.tolist()) == [0, 0, 0, 0, 1, 1, 1, 1]
