"""Placement files: round trips, and each system's loader read by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Cluster, Placement
from epsim.placement.eplb import Eplb
from epsim.placement.formats import FORMATS, check_format, read_placement, write_placement

LAYERS = (3, 4, 6)


@pytest.fixture
def placement() -> Placement:
    counts = torch.randint(0, 1000, (1, 3, 12), generator=torch.Generator().manual_seed(0))
    return Eplb().plan(counts, Cluster(num_ranks=4, num_nodes=2, num_redundant=4))


def test_sglang_finds_a_row_for_every_layer_and_no_other_key(placement: Placement, tmp_path: Path) -> None:
    write_placement(placement, tmp_path / "p.json", "sglang", LAYERS, num_model_layers=8)
    content = json.loads((tmp_path / "p.json").read_text())
    # SGLang passes the keys on as arguments, and indexes the map by the model's layer number.
    assert list(content) == ["physical_to_logical_map"]
    rows = torch.tensor(content["physical_to_logical_map"])
    assert rows.shape == (8, 16)
    assert torch.equal(rows[list(LAYERS)], placement.physical_to_logical)
    assert all(torch.equal(rows[dense], torch.arange(16) % 12) for dense in (0, 1, 2, 5, 7))
    write_placement(placement, tmp_path / "p.json", "sglang", LAYERS)
    assert len(json.loads((tmp_path / "p.json").read_text())["physical_to_logical_map"]) == 7


def test_vllm_ascend_finds_every_expert_where_it_is(placement: Placement, tmp_path: Path) -> None:
    write_placement(placement, tmp_path / "map.json", "vllm", LAYERS)
    data = json.loads((tmp_path / "map.json").read_text())
    assert data["moe_layer_count"] == 3
    slots_per_rank = placement.slots_per_rank
    for layer in range(3):
        devices = data["layer_list"][layer]["device_list"]
        assert data["layer_list"][layer]["device_count"] == len(devices) == 4
        held = torch.tensor([device["device_expert"] for device in devices], dtype=torch.int32)
        assert held.numel() - 12 == 4  # its number of redundant experts
        # A rank's map there: local slot by logical expert, -1 where absent; global slot = rank * local slots + it.
        found = []
        for rank in range(4):
            expert_map = torch.full((12,), -1)
            expert_map[held[rank].long()] = torch.arange(slots_per_rank)
            found += [
                (int(expert), rank * slots_per_rank + int(expert_map[expert]))
                for expert in (expert_map >= 0).nonzero().flatten()
            ]
        assert sorted(found) == sorted((e, p) for p, e in enumerate(placement.physical_to_logical[layer].tolist()))


def test_trtllm_finds_its_layers_by_the_models_number(placement: Placement, tmp_path: Path) -> None:
    write_placement(placement, tmp_path / "p.yaml", "trtllm", LAYERS)
    config = yaml.safe_load((tmp_path / "p.yaml").read_text())
    assert config.keys() == {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}
    assert config["layer_updates_per_iter"] == 0
    for place, layer in enumerate(LAYERS):
        assignments = config["initial_global_assignments"][layer]
        assert len(assignments) == config["num_slots"]
        assert set(assignments) == set(range(12))
        local = config["num_slots"] // 4
        for rank in range(4):
            held = placement.physical_to_logical[place][placement.rank_of_slot == rank]
            assert assignments[rank * local : (rank + 1) * local] == held.tolist()


@pytest.mark.parametrize("format_name", FORMATS)
def test_round_trip(format_name: str, placement: Placement, tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    write_placement(placement, path, format_name, LAYERS)
    read, layers = read_placement(path, num_ranks=4, num_nodes=2)
    rows = read.physical_to_logical
    if format_name == "sglang":
        rows = rows[list(LAYERS)]
    assert torch.equal(rows, placement.physical_to_logical)
    assert (read.num_experts, read.num_ranks, read.num_nodes) == (12, 4, 2)
    assert layers == {"sglang": tuple(range(7)), "vllm": (0, 1, 2)}.get(format_name, LAYERS)
    assert [p.name for p in tmp_path.iterdir()] == ["placement.json"]


@settings(deadline=None)
@given(st.data())
def test_epsim_form_carries_everything(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    ranks, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    experts = data.draw(st.integers(1, ranks * slots))
    row = st.permutations([p % experts for p in range(ranks * slots)])
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    placement = Placement(torch.tensor(rows), experts, ranks, data.draw(st.integers(1, ranks)))
    path = tmp_path_factory.mktemp("placement") / "p.json"
    write_placement(placement, path, "epsim", range(len(rows)))
    read, _ = read_placement(path)
    assert read.version == placement.version
    assert (read.num_experts, read.num_ranks, read.num_nodes) == (experts, ranks, placement.num_nodes)


def test_what_a_format_cannot_hold_is_refused(placement: Placement, tmp_path: Path) -> None:
    twice = Placement(torch.tensor([[0, 0, 1, 2]]), num_experts=3, num_ranks=2)
    with pytest.raises(ValueError, match="layer 0 has an expert twice on rank 0"):
        write_placement(twice, tmp_path / "p.json", "vllm", [0])
    with pytest.raises(ValueError, match=r"ending in \.json"):
        write_placement(placement, tmp_path / "p.txt", "sglang", LAYERS)
    with pytest.raises(ValueError, match="layer 6 is not among the 5 layers"):
        write_placement(placement, tmp_path / "p.json", "sglang", LAYERS, num_model_layers=5)
    with pytest.raises(ValueError, match="2 layer numbers given for a placement of 3"):
        write_placement(placement, tmp_path / "p.json", "epsim", [0, 1])
    with pytest.raises(ValueError, match="unknown placement format 'sgl': choose one of epsim, sglang"):
        check_format("sgl")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    write_placement(placement, path, "epsim", LAYERS)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_placement(placement, path, "sglang", LAYERS)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "neither JSON nor YAML|no placement"),
        ("[1, 2]", "no placement"),
        ('{"logical_count": [[1, 2]]}', "no placement"),
        ('{"physical_to_logical_map": [[0, 1], [0]]}', "layer 1 has 1 slots, and layer 0 has 2"),
        ('{"physical_to_logical_map": [[0, 1.5]]}', "no placement"),
        ('{"physical_to_logical_map": [[0, true]]}', "no placement"),
        ("[[]]", "no placement"),
        ('{"physical_to_logical_map": [[0, 1, 2, 2]]}', "give --ranks"),
        ('{"physical_to_logical_map": [[0, 2, 2, 2]]}', "give --ranks"),
        ("initial_global_assignments: {3: [0, x]}", "no placement"),
        ("a: [", "neither JSON nor YAML"),
    ],
)
def test_other_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_placement(tmp_path / "p")


def test_wrong_placements_are_named(placement: Placement, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"physical_to_logical_map": [[0, 2, 2, 2]]}')
    with pytest.raises(ValueError, match=r"p\.json: layer 0 has no slot for expert 1"):
        read_placement(path, num_ranks=2)
    with pytest.raises(ValueError, match="4 slots do not divide among 3 ranks"):
        read_placement(path, num_ranks=3)
    write_placement(placement, path, "epsim", LAYERS)
    with pytest.raises(ValueError, match="a placement for 4 ranks, not 8"):
        read_placement(path, num_ranks=8)
    content = json.loads(path.read_text())
    content["physical_to_logical"][0].reverse()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the file was changed"):
        read_placement(path)
