"""Empty slots change nothing: no token goes there, and every policy gives the loads that it gives without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Cluster, Placement
from epsim.placement.eplb import Eplb
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.copies import Copies, even_fractions
from epsim.policies.grammar import policy_text
from epsim.policies.load import Load
from epsim.policies.nearest import nearest_slots
from epsim.policies.one_copy import held_by_rank
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.traces.store import StoredTrace
from epsim.traces.trace import Block, TokenBlock
from tests.policies.conftest import random_placement
from tests.policies.registered import every
from tests.policies.test_oea_replay import drawn

STACKS = (
    *map(policy_text, every("split")),
    *(f"lplb+{policy_text(shared)}" for shared in every("shared")),
    "oea(k0=1)+lplb",
    "oea-ep(k0=1)+one-copy",
)


def spread(placement: Placement, empty: int, rng: np.random.Generator) -> Placement:
    """The same placement with `empty` more slots a rank, at places drawn for each rank and layer."""
    old = placement.physical_to_logical.view(placement.num_layers * placement.num_ranks, -1)
    width = old.shape[1] + empty
    new = torch.full((len(old), width), -1)
    for row, slots in zip(new, old):
        row[np.sort(rng.permutation(width)[: len(slots)])] = slots
    rows = new.view(placement.num_layers, -1)
    return Placement(rows, placement.num_experts, placement.num_ranks, placement.num_nodes)


def blocks_of(bound: BoundStack, block: TokenBlock) -> Iterator[Block]:
    """The block at every level that the stack takes."""
    ranks, experts = bound.copies.placement.num_ranks, bound.copies.placement.num_experts
    levels = ("counts", "rank_counts", "tokens")
    at = levels.index(bound.stack.required_level(bound.copies.redundant, bound.has_shared))
    yield from (block.to_counts(experts), block.to_rank_counts(ranks, experts), block)[at:]


@pytest.mark.parametrize("text", STACKS)
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 5), redundant=st.integers(0, 10), empty=st.integers(1, 3))
def test_loads_stay(text: str, seed: int, ranks: int, redundant: int, empty: int) -> None:
    rng = np.random.default_rng(seed)
    block = drawn(seed, ranks=ranks, tokens=100)
    before = random_placement(rng, 2, 12, redundant, ranks, 2 - ranks % 2)
    setting = Setting(7, 0.5, 4, (3, 5), rows=True, tile=8, phase="decode", num_scores=12)
    bound = bind(parse_stack(text), before, setting)
    more = bind(parse_stack(text), spread(before, empty, rng), setting)
    for part in blocks_of(bound, block):
        load, other = bound.load(part), more.load(part)
        for field in dataclasses.fields(Load):
            a, b = getattr(load, field.name), getattr(other, field.name)
            if isinstance(a, torch.Tensor):  # Real numbers are summed in another order.
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-9 if a.is_floating_point() else 0)
            else:
                assert a == b, field.name
        torch.testing.assert_close(other.routed.sum(-1).double(), other.assignments.double(), rtol=1e-12, atol=0)


def test_tables_of_a_placement_with_empty_slots() -> None:
    """Rank 0: an empty slot, expert 1 and 0. Rank 1: expert 1 and two empty slots."""
    copies = Copies(Placement(torch.tensor([[-1, 1, 0, 1, -1, -1]]), 2, 2))
    assert copies.slot.tolist() == [[2, 1, 3, 0, 4, 5]]
    assert copies.expert.tolist() == [[0, 1, 1, 2, 2, 2]]
    assert copies.start.tolist() == [[0, 1, 1, 3, 3, 3]]
    assert copies.last.tolist() == [[True, False, True, False, False, False]]
    assert copies.per_slot(torch.tensor([[7, 9]])).tolist() == [[0, 9, 7, 9, 0, 0]]
    assert copies.per_slot(torch.tensor([[True, True]])).tolist() == [[False, True, True, True, False, False]]
    assert even_fractions(copies).tolist() == [[0, 0.5, 1, 0.5, 0, 0]]
    assert held_by_rank(copies).tolist() == [[[True, False], [True, True]]]
    assert nearest_slots(copies).tolist() == [[[2, 1], [2, 3]]]


def test_a_rank_without_experts_in_a_layer() -> None:
    """All of a layer's experts on rank 1: the other rank serves shared tokens alone, as far as they fill it up."""
    placement = Placement(torch.tensor([[-1, -1, 0, 1]]), 2, 2)
    bound = bind(parse_stack("lplb+waterfill-joint"), placement, Setting(0, 1.0, 1, (0,)))
    ids = torch.zeros(6, 1, 1, dtype=torch.int64).numpy()
    load = bound.load(TokenBlock(np.arange(1), np.zeros(6, np.int64), np.array([0, 0, 0, 1, 1, 1]), ids))
    assert load.routed.tolist() == [[[0, 6]]]
    assert load.active.tolist() == [[[0, 1]]]
    assert load.shared_tokens.tolist() == [[[6, 0]]]


@dataclass(frozen=True)
class Spread(Eplb):
    """EPLB's placement with two empty slots more a rank."""

    def plan(self, history: torch.Tensor, cluster: Cluster) -> Placement:
        return spread(Eplb.plan(self, history, cluster), 2, np.random.default_rng(0))


@pytest.mark.parametrize("level", ["counts", "tokens"])
def test_a_replay_gives_the_same_metrics(make_trace: Callable[..., StoredTrace], level: str) -> None:
    trace = make_trace(level, steps=8, tokens=50, experts=32, shared_cost=0.1, top_k=4)
    text = "eplb+lplb" if level == "counts" else "eplb+lplb+waterfill"
    found = []
    for policy in (Eplb(), Spread()):
        stack = dataclasses.replace(parse_stack(text), placement=policy)
        found.append(replay(trace, ReplayOptions(Cluster(4, 1, 4), (("", stack),)))["stacks"][0]["metrics"])
    before, after = ({key: value["mean"] for key, value in metrics.items()} for metrics in found)
    assert before["max_over_mean"] > 1.005
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert after[key] is None if value is None else after[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key
