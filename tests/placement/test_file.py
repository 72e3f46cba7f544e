"""A serving system's map as a placement: formats by their structure, layers, and what is wrong in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from epsim.launch.inline import run_inline
from epsim.launch.options import RunOptions
from epsim.placement.base import Cluster, Placement, Target
from epsim.placement.file import File
from epsim.placement.formats import FORMATS, read_placement, write_placement
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.results import read_results
from epsim.traces.store import StoredTrace

TraceMaker = Callable[..., StoredTrace]
Epsim = Callable[..., tuple[int, str, str]]
ROWS = [[0, 1, 2, 3, 0, 2], [3, 2, 1, 0, 1, 3]]
"""Two layers with experts, of four, on two ranks."""
IN_ORDER = [0, 1, 2, 3, 0, 1]
LAYERS = (3, 5)


def planned(path: Path, layers: tuple[int, ...] = LAYERS, experts: int = 4, ranks: int = 2) -> Placement:
    target = Target(Cluster(ranks, 1, 2), layers, parse_stack("contiguous"))
    return File(str(path)).plan_for(torch.zeros(0, len(layers), experts), target)


def notes(path: Path, layers: tuple[int, ...] = LAYERS, redundant: int = 2) -> tuple[str, ...]:
    return File(str(path)).notes(4, Target(Cluster(2, 1, redundant), layers, parse_stack("contiguous")))


def all_layers() -> list[list[int]]:
    """The rows of a model with layers 0 to 6, dense ones in order."""
    rows = [IN_ORDER] * 7
    return [ROWS[LAYERS.index(layer)] if layer in LAYERS else row for layer, row in enumerate(rows)]


ASCEND = {
    "moe_layer_count": 2,
    "layer_list": [
        {
            "layer_id": number,
            "device_count": 2,
            "device_list": [{"device_id": rank, "device_expert": row[rank * 3 : rank * 3 + 3]} for rank in range(2)],
        }
        for number, row in enumerate(ROWS)
    ],
}
TRTLLM = {"num_slots": 6, "initial_global_assignments": dict(zip(LAYERS, ROWS)), "layer_updates_per_iter": 0}


@pytest.mark.parametrize(
    "content",
    [
        {"physical_to_logical_map": all_layers()},
        {"rank": 0, "state": [{"more": 1}, {"last_physical_to_logical_map": all_layers(), "time": 3}]},
        all_layers(),
        [[] if layer not in LAYERS else row for layer, row in enumerate(all_layers())],  # nothing for dense layers
        ROWS,  # the layers with experts alone, in order
        ASCEND,
        {"eplb": {"map": ASCEND}},
        TRTLLM,
        {"moe_config": {"load_balancer": TRTLLM}},
    ],
)
def test_formats_are_told_by_their_structure(content: Any, tmp_path: Path) -> None:
    for name, text in (("map.json", json.dumps(content)), ("map.yaml", yaml.safe_dump(content)), ("map", None)):
        path = tmp_path / name
        path.write_text(json.dumps(content) if text is None else text)
        placement = planned(path)
        assert placement.physical_to_logical.tolist() == ROWS
        assert (placement.num_experts, placement.num_ranks, placement.num_nodes) == (4, 2, 1)


@pytest.mark.parametrize("format_name", FORMATS)
def test_what_epsim_writes_it_reads_as_a_stack(format_name: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    whole = Placement(torch.tensor([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 1, 3]]), 4, 2)
    write_placement(whole, path, format_name, LAYERS)
    assert torch.equal(planned(path).physical_to_logical, whole.physical_to_logical)
    assert notes(path) == ()


def test_readings_that_are_not_the_only_ones_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(ROWS))
    (note,) = notes(path)
    assert "its 2 rows are taken as the layers 3 to 5 of the trace, in order" in note
    assert notes(path, (0, 1)) == ()
    path.write_text(json.dumps(all_layers()))
    assert notes(path) == ()
    (note,) = notes(path, (0, 1))
    assert "rows 0 to 1 of 7 are taken, since the trace numbers its layers from 0" in note
    (note,) = notes(path, redundant=0)
    assert note == f"{path} has 2 redundant experts per layer, and --redundant is 0"


def epsim_map(**changed: Any) -> dict[str, Any]:
    given = {"version": "x", "num_experts": 4, "num_ranks": 2, "layers": LAYERS, "physical_to_logical": ROWS}
    return json.loads(json.dumps(given | changed))  # type: ignore[no-any-return]


def changed(layer: int, slot: int, expert: int) -> list[list[int]]:
    rows = [list(row) for row in all_layers()]
    rows[layer][slot] = expert
    return rows


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        (changed(3, 1, 0), {}, "layer 3 has no slot for expert 1: give every expert a slot"),
        (changed(3, 1, -1), {}, "layer 3, slot 1 holds expert -1, the trace has experts 0 to 3: correct the slot"),
        (changed(5, 0, 4), {}, "layer 5, slot 0 holds expert 4, the trace has experts 0 to 3"),
        (all_layers()[:5], {}, r"layer 5 of the trace is missing \(the file has 5 layers, up to 4\): give the map"),
        (all_layers(), {"ranks": 4}, "6 slots a layer do not divide among 4 ranks: give the number of ranks"),
        (all_layers(), {"experts": 8}, "6 slots a layer cannot hold the 8 experts of the trace: give the map"),
        ([*all_layers()[:5], [0, 1, 2, 3]], {}, "layer 5 has 4 slots, other layers 6: give every layer as many"),
        (ASCEND, {"ranks": 3}, "a map for 2 ranks, not 3: give --ranks 2"),
        (ASCEND, {"layers": (3, 4, 5)}, "its 2 layers have no numbers of the model, and the trace has 3: give a trace"),
        (TRTLLM, {"layers": (3, 4)}, "layer 4 of the trace is missing"),
        ({"layers": [1]}, {}, "no placement that epsim, SGLang, vLLM, vLLM-Ascend or TensorRT-LLM reads"),
        ([[0, "1"]], {}, "no placement that epsim"),
        ({"initial_global_assignments": {3: ROWS[0], "3": ROWS[1]}}, {}, "layer 3 has two rows: give each layer one"),
        (epsim_map(layers=[3, 3]), {}, "layer 3 has two rows"),
        (epsim_map(layers=[3, "5"]), {}, "no placement that epsim"),
        (epsim_map(num_ranks="2"), {}, "no placement that epsim"),
        (epsim_map(num_nodes=[]), {}, "no placement that epsim"),
        (epsim_map(num_experts=10**9), {}, "6 slots a layer cannot hold 1000000000 experts"),
        (epsim_map(num_experts=0), {}, "no placement that epsim"),
        (epsim_map(physical_to_logical=[[10**30] * 6] * 2), {}, "no placement that epsim"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(content: Any, more: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=says) as error:
        planned(path, **more)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        planned(tmp_path / "map.json")
    with pytest.raises(ValueError, match="is a folder: give a file"):
        planned(tmp_path)
    with pytest.raises(ValueError, match=r"^/proc/self/mem: the file is empty$"):
        planned(Path("/proc/self/mem"))


def test_a_file_beside_eplb_with_other_redundancy(make_trace: TraceMaker, tmp_path: Path) -> None:
    """The loads are those of `contiguous` with as many slots, whatever --redundant says."""
    trace, path = make_trace("tokens", shared_cost=1.0), tmp_path / "map.json"
    write_placement(Placement((torch.arange(12) % 8).repeat(2, 1), 8, 4), path, "sglang", (0, 1))

    def peaks(redundant: int, *texts: str) -> tuple[list[float], Any]:
        stacks = tuple(("", parse_stack(text)) for text in ("eplb+lplb", *texts))
        entries = replay(trace, ReplayOptions(Cluster(4, 2, redundant), stacks))["stacks"]
        return [entry["metrics"]["peak"]["mean"] for entry in entries[1:]], entries[1]

    found, entry = peaks(0, f"file({path})+static", f"file({path})+lplb+waterfill")
    assert found == peaks(4, "contiguous+static", "contiguous+lplb+waterfill")[0]
    assert f"{path} has 4 redundant experts per layer, and --redundant is 0" in entry["notes"]
    assert entry["stack"] == f"file(path={path})+static"


def test_stacks_of_other_numbers_of_slots_run_together(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=2, ranks=1, shared_cost=1.0)
    path = tmp_path / "map.json"
    write_placement(Placement((torch.arange(11) % 8).repeat(2, 1), 8, 1), path, "epsim", (0, 1))
    stacks = ("contiguous+lplb", f"file({path})+lplb", f"file({path})+static")
    out = tmp_path / "out"
    run_inline(RunOptions(str(trace.path), model="tiny", policies=stacks, out=out, device="cpu", redundant=1))
    results = read_results(tmp_path / "out/results.json")
    assert results["run"]["equals_replay"] is True
    assert any(
        "has 3 redundant experts per layer, and --redundant is 1" in note for note in results["stacks"][1]["notes"]
    )


@pytest.mark.parametrize("format_name", FORMATS)
def test_plan_converts_a_file(epsim: Epsim, make_trace: TraceMaker, tmp_path: Path, format_name: str) -> None:
    trace = make_trace("counts", layers=2, experts=8)
    source, target = tmp_path / 'my map (1), a+b="c".json', tmp_path / "converted.json"
    rows = [[7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    source.write_text(json.dumps(rows))
    placement = f"file(path={json.dumps(str(source))})"
    asked = ("plan", trace.path, "--ranks", "4", "--placement", placement, "-o", target, "--format", format_name)
    code, printed, err = epsim(*asked)
    assert (code, err) == (0, "")
    assert "12 slots a layer" in printed
    assert read_placement(target, num_ranks=4)[0].physical_to_logical.tolist() == rows


def test_plan_takes_arguments_and_refuses_what_is_no_placement(
    epsim: Epsim, make_trace: TraceMaker, tmp_path: Path
) -> None:
    trace = make_trace("counts").path
    for text in ("searched(seconds=1,seed=3)", "eplb(form=global)", "eplb-global"):
        code, _, err = epsim("plan", trace, "--ranks", "4", "--placement", text, "-o", tmp_path / "p.json")
        assert (code, err) == (0, "")
    code, _, err = epsim("plan", trace, "--ranks", "4", "--placement", "lplb", "-o", tmp_path / "p.json")
    assert code == 2
    assert "unknown placement 'lplb': did you mean eplb? Known are contiguous, eplb" in err
