"""Experts in order, and the placements by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Cluster
from epsim.policies.stack import placement_policy


def test_no_redundancy_is_the_identity() -> None:
    placement = placement_policy("contiguous").plan(torch.zeros(1, 2, 6), Cluster(3))
    assert placement.physical_to_logical.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_redundant_slots_start_again_at_expert_0() -> None:
    placement = placement_policy("contiguous").plan(torch.zeros(0, 1, 5), Cluster(2, num_redundant=3))
    assert placement.physical_to_logical.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 8), st.data())
def test_no_expert_twice_on_a_rank_where_avoidable(num_experts: int, num_ranks: int, data: st.DataObject) -> None:
    slots_per_rank = data.draw(st.integers(-(-num_experts // num_ranks), num_experts))
    redundant = slots_per_rank * num_ranks - num_experts
    placement = placement_policy("contiguous").plan(torch.zeros(1, 1, num_experts), Cluster(num_ranks, 1, redundant))
    for rank in placement.physical_to_logical.view(num_ranks, slots_per_rank).tolist():
        assert len(set(rank)) == slots_per_rank


def test_an_unknown_placement_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"unknown placement 'best'.*contiguous, eplb, eplb-global"):
        placement_policy("best")
    with pytest.raises(ValueError, match="unknown placement 'lplb'"):
        placement_policy("lplb")
