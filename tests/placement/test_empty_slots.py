"""Placements with empty slots: what is counted, what is refused, and which file formats hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from epsim.cost.layer_time import load_timing
from epsim.placement.balance import even_rank_loads, even_shares
from epsim.placement.base import Placement
from epsim.placement.formats import read_placement, write_placement
from epsim.tuning.migration import held, migration

ROWS = [[0, 1, -1, 2, 1, -1], [-1, -1, -1, 2, 1, 0]]


@pytest.fixture
def placement() -> Placement:
    """Two ranks of three slots: two experts on each, then none on the first and three on the second."""
    return Placement(torch.tensor(ROWS), num_experts=3, num_ranks=2)


def test_empty_slots_hold_no_copy(placement: Placement) -> None:
    assert placement.copies.tolist() == [[1, 2, 1], [1, 1, 1]]
    assert placement.filled_slots.tolist() == [[2, 2], [0, 3]]
    assert placement.logical_to_physical().tolist() == [[[0, -1], [1, 4], [3, -1]], [[5, -1], [4, -1], [3, -1]]]
    assert even_shares(placement)[0].tolist() == [[1, 0], [0.5, 0.5], [0, 1]]
    counts = torch.tensor([[4, 6, 1], [5, 2, 3]])
    assert even_rank_loads(counts, placement).tolist() == [[7, 4], [0, 10]]


def test_the_version_of_a_full_placement_is_as_before() -> None:
    full = Placement(torch.tensor([[0, 1, 0, 2, 1, 3], [3, 2, 1, 0, 0, 0]]), 4, 3)
    assert full.version == "7f14751b2b75"
    assert full.logical_to_physical().tolist() == [
        [[0, 2, -1], [1, 4, -1], [3, -1, -1], [5, -1, -1]],
        [[3, 4, 5], [2, -1, -1], [1, -1, -1], [0, -1, -1]],
    ]


def test_the_version_tells_where_empty_slots_are(placement: Placement) -> None:
    moved = Placement(torch.tensor([[0, -1, 1, 2, 1, -1], ROWS[1]]), 3, 2)
    assert moved.version != placement.version


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 1, -2, 2], r"a slot names an expert outside 0\.\.2 \(or -1 for an empty slot\)"),
        ([0, 1, -1, -1], "layer 0 has no slot for expert 2: 4 slots, 3 experts"),
    ],
)
def test_what_is_no_placement(row: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(torch.tensor([row]), 3, 2)


def test_the_epsim_format_holds_empty_slots(placement: Placement, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_placement(placement, path, "epsim", (3, 4))
    assert json.loads(path.read_text())["physical_to_logical"] == ROWS
    read, layers = read_placement(path)
    assert (read.version, layers) == (placement.version, (3, 4))


@pytest.mark.parametrize("name", ["sglang", "vllm", "trtllm"])
def test_other_formats_refuse_to_write_them(placement: Placement, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        write_placement(placement, tmp_path / "p.json", name, (3, 4))
    assert str(error.value) == (
        f"the {name} format: layer 3, rank 0 has 2 experts in 3 slots, and only the epsim format can hold empty slots"
    )
    assert not list(tmp_path.iterdir())


def devices(*lists: list[int]) -> dict[str, Any]:
    return {"device_list": [{"device_id": i, "device_expert": held} for i, held in enumerate(lists)]}


@pytest.mark.parametrize(
    ("content", "layer", "rank"),
    [
        ({"physical_to_logical_map": [[0, 1, 2, 0, 1, 2], ROWS[0]]}, 1, 0),
        ({"layer_list": [devices([0, 1, 2], [2, 1])]}, 0, 1),  # 5 experts: unequal lists, none of them -1
        ({"layer_list": [devices([0, 1], [0, 1, 2])]}, 0, 0),
        ({"initial_global_assignments": {5: [0, 1, 2, 0, 1, -1]}}, 5, 1),
    ],
)
def test_other_formats_refuse_to_read_them(content: Any, layer: int, rank: int, tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError) as error:
        read_placement(path, num_ranks=2)
    assert str(error.value) == (
        f"{path}: layer {layer}, rank {rank} has 2 experts in 3 slots, and only the epsim format can hold empty slots"
    )


def test_filling_an_empty_slot_moves_an_expert_and_emptying_one_moves_none(placement: Placement) -> None:
    assert held(placement).tolist() == [
        [[True, True, False], [False, True, True]],
        [[False, False, False], [True, True, True]],
    ]
    timing = load_timing("h200", "deepseek-v3", 1, "prefill")
    fuller = Placement(torch.tensor([[0, 1, 2, 2, 1, -1], ROWS[1]]), 3, 2)
    there = migration(placement, fuller, timing.hardware, timing.model, 0.0)
    assert there.bytes_moved == 0.5 * timing.model.moe_layers * timing.model.expert_bytes
    assert migration(fuller, placement, timing.hardware, timing.model, 0.0).bytes_moved == 0
