"""Rank loads under an even split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.balance import even_balance, even_rank_loads
from epsim.placement.base import Placement


def test_by_hand() -> None:
    placement = Placement(torch.tensor([[0, 1, 0, 2], [0, 0, 1, 2]]), num_experts=3, num_ranks=2)
    counts = torch.tensor([[[10, 4, 3], [10, 4, 3]], [[0, 0, 0], [1, 0, 0]]])
    assert even_rank_loads(counts, placement).tolist() == [[[9, 8], [10, 7]], [[0, 0], [1, 0]]]
    assert even_balance(counts, placement).tolist() == [[9 / 8.5, 10 / 8.5], [1, 2]]


@settings(deadline=None)
@given(st.data())
def test_equals_a_loop_over_slots(data: st.DataObject) -> None:
    num_ranks, slots_per_rank = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    num_slots = num_ranks * slots_per_rank
    num_experts = data.draw(st.integers(1, num_slots))
    slots = data.draw(st.permutations([p % num_experts for p in range(num_slots)]))
    counts = data.draw(st.lists(st.integers(0, 10**9), min_size=num_experts, max_size=num_experts))
    loads = [0.0] * num_ranks
    for slot, expert in enumerate(slots):
        loads[slot // slots_per_rank] += counts[expert] / slots.count(expert)
    placement = Placement(torch.tensor([slots]), num_experts, num_ranks)
    assert even_rank_loads(torch.tensor([counts]), placement)[0].tolist() == pytest.approx(loads)


def test_counts_of_another_shape_are_refused() -> None:
    placement = Placement(torch.tensor([[0, 1]]), num_experts=2, num_ranks=2)
    with pytest.raises(ValueError, match=r"\[5, 1, 3\] do not fit"):
        even_rank_loads(torch.zeros(5, 1, 3), placement)
