"""The tables of small placements that have every case."""

from __future__ import annotations

import pytest
import torch

from epsim.kernels.split import prepare


def test_tables_of_a_small_placement() -> None:
    """Rank 0: expert 0 twice, 1. Rank 1: 1, 2, 3. Rank 2: 1, 3, 3. The second layer has nothing replicated."""
    tables = prepare(torch.tensor([[0, 0, 1, 1, 2, 3, 1, 3, 3], [0, 0, 0, 1, 1, 1, 2, 3, 3]]), 3).tables
    assert tables.fixed_start.tolist() == [[0, 1, 2, 2], [2, 3, 4, 6]]
    assert tables.fixed_expert.tolist() == [0, 2, 0, 1, 2, 3]
    assert tables.expert_start.tolist() == [0, 2, 2]
    assert tables.expert.tolist() == [3, 1]  # fewest copies first
    assert tables.copy_start.tolist() == [0, 2, 5, 0]
    assert tables.num_paired.tolist() == [2, 0]
    assert tables.layer_copies.tolist() == [0, 5, 5]
    assert tables.copy_rank.tolist() == [1, 2, 0, 1, 2]
    assert tables.copy_expert.tolist() == [0, 0, 1, 1, 1]
    assert tables.copy_share.tolist() == [1 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3]
    assert tables.rank_start.tolist() == [[0, 1, 3, 5], [0, 0, 0, 0]]
    assert tables.rank_copy.tolist() == [2, 0, 3, 1, 4]
    assert tables.source.tolist() == [[0, 0, 6, 7, 2, 4, 8, 5, 5], [0, 0, 0, 1, 1, 1, 2, 3, 3]]
    assert tables.twin_start.tolist() == [0, 4, 12]
    assert tables.twin[:4].tolist() == [[0, 0, 2], [1, 1, 2], [7, 0, 2], [8, 1, 2]]


def test_an_empty_slot_is_in_no_table_but_source() -> None:
    """Rank 0: expert 0, 1 and an empty slot. Rank 1: an empty slot, 1 twice. Rank 2: empty, then full in layer 1."""
    structure = prepare(torch.tensor([[0, 1, -1, -1, 1, 1, -1, -1, -1], [-1, 0, -1, -1, -1, -1, 1, 1, 0]]), 3)
    tables = structure.tables
    assert tables.fixed_start.tolist() == [[0, 1, 1, 1], [1, 1, 1, 2]]
    assert tables.fixed_expert.tolist() == [0, 1]
    assert tables.expert.tolist() == [1, 0]
    assert tables.copy_start.tolist() == [0, 2, 0, 2]
    assert tables.copy_rank.tolist() == [0, 1, 0, 2]
    assert tables.copy_share.tolist() == [1 / 3, 2 / 3, 1 / 2, 1 / 2]
    assert tables.source.tolist() == [[0, 2, -1, -1, 3, 3, -1, -1, -1], [-1, 2, -1, -1, -1, -1, 1, 1, 3]]
    assert tables.twin.tolist() == [[4, 0, 2], [5, 1, 2], [6, 0, 2], [7, 1, 2]]


@pytest.mark.parametrize(
    ("slots", "num_ranks", "num_experts", "message"),
    [
        ([[0, 1, 2]], 2, None, "3 slots do not divide among 2 ranks"),
        ([[0, 1]], 0, None, "2 slots do not divide among 0 ranks"),
        ([[0, -2]], 2, None, r"outside 0\.\.0 \(or -1 for an empty slot\)"),
        ([[-1, -1]], 2, None, "layer 0 has no slot for expert 0"),
        ([[0, 4]], 2, 4, r"outside 0\.\.3"),
        ([[0, 2**40]], 2, None, "with ids up to 1099511627776, do not fit 2 slots"),
        ([[0, 1, 2, 3], [0, 1, 3, 3]], 2, None, "layer 1 has no slot for expert 2"),
        ([0, 1], 2, None, r"is \[2\] int64, not \[layers, slots\]"),
    ],
)
def test_bad_placements_are_refused(
    slots: list[list[int]], num_ranks: int, num_experts: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(torch.tensor(slots), num_ranks, num_experts)


def test_later_changes_of_the_placement_do_not_reach_the_structure() -> None:
    slots = torch.tensor([[0, 1, 1, 2]])
    structure = prepare(slots, 2)
    slots[0, 0] = 2
    assert structure.physical_to_logical.tolist() == [[0, 1, 1, 2]]
