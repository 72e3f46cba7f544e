"""lplb(objective=time): the same loads at every level, alone and together, and never dearer than lplb."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Cluster, Placement
from epsim.planning import to_counts
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.base import Batch, local_index
from epsim.policies.load import Load
from epsim.policies.stack import parse_stack, placement_policy
from epsim.traces.importing import sample_path
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock

DrawProblem = Callable[..., tuple[Placement, TokenBlock]]
Bound = Callable[..., BoundStack]


def dearest(load: Load, a: float, b: float) -> torch.Tensor:
    """[S, L] float64"""
    return (a * load.routed + b * load.active).amax(-1).double()


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 0), (0, 1), (1, 3), (0.5, 40)]),
    st.integers(1, 6),
    st.sampled_from([1, 20, 200]),
    st.booleans(),
)
def test_never_dearer_than_lplb(
    draw_problem: DrawProblem,
    bound: Bound,
    seed: int,
    costs: tuple[float, float],
    ranks: int,
    tokens: int,
    blanks: bool,
) -> None:
    placement, block = draw_problem(seed, ranks=ranks, nodes=1, redundant=10, tokens=tokens, blanks=blanks)
    a, b = costs
    text = f"lplb(objective=time,a={a},b={b})"
    ours, gathered = (bound(t, placement, shared_cost=0.0).load(block) for t in (text, "lplb(counts=gathered)"))
    assert torch.equal(ours.routed.sum(-1), gathered.routed.sum(-1))
    assert bool((dearest(ours, a, b) <= dearest(gathered, a, b)).all())


def test_the_same_loads_at_every_level(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, block = draw_problem(3, steps=4, experts=24, ranks=4, redundant=16, tokens=60)
    on_placement = bound("lplb(objective=time,a=1,b=12)+local", placement)
    fine = on_placement.load(block)
    by_rank = on_placement.load(block.to_rank_counts(4, 24))
    coarse = on_placement.load(block.to_counts(24))
    assert torch.equal(fine.routed, by_rank.routed)
    assert torch.equal(fine.active, by_rank.active)
    torch.testing.assert_close(coarse.routed, fine.routed.double(), rtol=1e-14, atol=0)
    assert torch.equal(coarse.active, fine.active)
    assert torch.equal(fine.routed_real, fine.routed.double())
    lplb = bound("lplb+local", placement).load(block)
    assert float(dearest(fine, 1, 12).mean()) < 0.95 * float(dearest(lplb, 1, 12).mean())


def test_one_rank_alone_sends_its_tokens_to_the_same_experts(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, block = draw_problem(4, steps=2, redundant=12, tokens=150, blanks=True)
    on_placement = bound("lplb(objective=time,a=1,b=9)", placement)
    split, copies = on_placement.split, on_placement.copies
    counts = torch.from_numpy(block.to_rank_counts(4, 16).counts)
    step, source = torch.from_numpy(block.token_step), torch.from_numpy(block.source_rank)
    ids = torch.from_numpy(block.expert_ids)
    steps, layers, nothing = torch.from_numpy(block.steps), torch.tensor([3, 5]), torch.empty(0)
    whole = Batch(steps, layers, step, source, ids, local_index(step, source))
    together = split.physical_ids(whole, counts, nothing, copies, 0)
    for rank in range(4):
        own = source == rank
        alone = Batch(steps, layers, step[own], source[own], ids[own], local_index(step[own], source[own]))
        assert torch.equal(split.physical_ids(alone, counts, nothing, copies, 0), together[own])
    # The dearest rank's tokens and active experts are those of the load.
    load = on_placement.load(block)
    for s, layer, rank in itertools.product(range(2), range(2), range(4)):
        served = together[step == s, layer]
        there = served[(served >= 0) & (served // placement.slots_per_rank == rank)]
        assert int(load.routed[s, layer, rank]) == len(there)
        assert int(load.active[s, layer, rank]) == len(set(there.tolist()))


def test_notes_say_what_is_proven(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, _ = draw_problem(5)
    notes = bound("lplb(objective=time,a=1,b=2)", placement).notes
    assert ["optimal if at most 16 copies" in note for note in notes] == [True]
    assert bound("lplb", placement).notes == ()
    single, _ = draw_problem(5, redundant=0)
    assert bound("lplb(objective=time,a=1,b=2)", single).notes == ()


@pytest.mark.parametrize(("b", "gain"), [(4, 0.01), (100, 0.01)])
def test_on_the_sample(b: int, gain: float) -> None:
    trace = StoredTrace(sample_path())
    half = trace.num_steps // 2
    planned, *_ = trace.blocks(0, half)
    cluster = Cluster(16, 2, 16)
    counts = torch.from_numpy(to_counts(planned, 64).counts)
    placement = placement_policy("eplb").plan(counts, cluster)
    setting = Setting(0, 0.0, 8, trace.meta.layers)
    costs: dict[str, list[torch.Tensor]] = {}
    for block in trace.blocks(half, trace.num_steps):
        for text in (f"lplb(objective=time,a=1,b={b})", "lplb(counts=gathered)", "lplb"):
            load = bind(parse_stack(text), placement, setting).load(block)
            costs.setdefault(text, []).append(dearest(load, 1, b).flatten())
    ours, gathered, reduced = (torch.cat(parts) for parts in costs.values())
    assert bool((ours <= gathered).all())
    assert float(ours.mean()) < (1 - gain) * float(gathered.mean())
    assert float((ours <= reduced).double().mean()) > 0.99
