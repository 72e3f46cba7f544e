"""The gathered split: conserved, at exactly ceil(optimum), near first, and token for token what its quotas say."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.split import prepare, solve_gathered
from epsim.kernels.split.reference import solve_reference
from epsim.placement.base import Cluster
from epsim.policies.base import Batch, local_index
from epsim.policies.copies import Copies
from epsim.policies.gathered import gathered_quotas, ids_by_quotas
from epsim.policies.stack import placement_policy

NUM_STEPS, NUM_LAYERS = 2, 2


def problem(seed: int, ranks: int, nodes: int, redundant: int) -> tuple[torch.Tensor, torch.Tensor, Copies]:
    """Counts [S, L, R, E], whole loads [S, L, P] and copies; two experts a rank, some ranks without tokens."""
    generator = torch.Generator().manual_seed(seed)
    experts = 2 * ranks
    counts = torch.randint(0, 9, (NUM_STEPS, NUM_LAYERS, ranks, experts), generator=generator)
    counts *= torch.randint(0, 2, (NUM_STEPS, NUM_LAYERS, ranks, 1), generator=generator)
    counts[..., 0] *= 20
    cluster = Cluster(ranks, min(nodes, ranks), ranks * min(redundant, 2 * (ranks - 1)))
    placement = placement_policy("eplb").plan(counts.sum(2), cluster)
    structure = prepare(placement.physical_to_logical, ranks, experts)
    return counts, solve_gathered(structure, counts.sum(2)).split, Copies(placement)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 3), st.integers(0, 2))
def test_every_token_is_served_once_and_the_peak_is_the_rounded_optimum(
    seed: int, ranks: int, nodes: int, redundant: int
) -> None:
    counts, loads, copies = problem(seed, ranks, nodes, redundant)
    quotas = gathered_quotas(counts, loads, copies)
    slots = copies.placement.physical_to_logical
    assert bool((quotas >= 0).all())
    assert torch.equal(quotas.sum(2), loads)
    back = torch.zeros_like(counts).scatter_add_(-1, slots[:, None, :].expand(quotas.shape), quotas)
    assert torch.equal(back, counts)
    for step, layer in np.ndindex(NUM_STEPS, NUM_LAYERS):
        optimum, _ = solve_reference(slots[layer], ranks, counts[step, layer].sum(0))
        assert int(copies.per_rank(loads[step, layer]).max()) == int(np.ceil(optimum - 1e-6))


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(1, 3), st.integers(0, 2))
def test_tokens_stay_as_near_as_the_loads_allow(seed: int, ranks: int, nodes: int, redundant: int) -> None:
    counts, loads, copies = problem(seed, ranks, nodes, redundant)
    quotas = gathered_quotas(counts, loads, copies)
    rank, node = copies.rank_of_slot, copies.node_of_rank
    experts = copies.placement.physical_to_logical
    for step, layer, expert in np.ndindex(NUM_STEPS, NUM_LAYERS, counts.shape[-1]):
        slots = (experts[layer] == expert).nonzero()[:, 0]
        given_ = quotas[step, layer][:, slots]
        supply, room = counts[step, layer, :, expert], loads[step, layer, slots]
        on_rank = rank[slots] == torch.arange(ranks)[:, None]
        own_room = torch.zeros(ranks, dtype=torch.int64).scatter_add_(0, rank[slots], room)
        own = torch.minimum(supply, own_room)
        assert int(given_[on_rank].sum()) == int(own.sum())
        for place in range(copies.placement.num_nodes):
            on_node = (node == place)[:, None] & (node[rank[slots]] == place)
            inside = node == place
            most = min(int(supply[inside].sum()), int(own_room[inside].sum()))
            assert int(given_[on_node].sum()) == most


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 2))
def test_tokens_fill_the_quotas(seed: int, ranks: int, redundant: int) -> None:
    counts, loads, copies = problem(seed, ranks, 1, redundant)
    tokens = [
        (step, rank, layer, expert)
        for step, layer, rank, expert in np.ndindex(*counts.shape)
        for _ in range(int(counts[step, layer, rank, expert]))
    ]
    tokens.sort()
    ids = torch.full((len(tokens), NUM_LAYERS, 1), -1)
    for token, (_, _, layer, expert) in enumerate(tokens):
        ids[token, layer, 0] = expert
    token_step = torch.tensor([step for step, *_ in tokens], dtype=torch.int64)
    source = torch.tensor([rank for _, rank, *_ in tokens], dtype=torch.int64)
    layers, steps = torch.arange(NUM_LAYERS), torch.arange(NUM_STEPS)
    quotas = gathered_quotas(counts, loads, copies)
    batch = Batch(steps, layers, token_step, source, ids, local_index(token_step, source))
    physical = ids_by_quotas(batch, quotas, copies)
    served = torch.zeros_like(quotas)
    for token, layer in np.ndindex(len(tokens), NUM_LAYERS):
        slot = int(physical[token, layer, 0])
        if ids[token, layer, 0] < 0:
            assert slot == -1
        else:
            assert copies.placement.physical_to_logical[layer, slot] == ids[token, layer, 0]
            served[token_step[token], layer, source[token], slot] += 1
    assert torch.equal(served, quotas)
