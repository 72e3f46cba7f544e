"""Every kind of results: its schema, files from before kinds, its object in Python, and pages of damaged files."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from epsim.report.draw import Drawn, Figure, _canvas, _svg
from epsim.report.results import Results
from epsim.report.views import VIEWS
from epsim.results import check_results, read_results, write_results
from epsim.results.checks import KINDS, results_schema
from tests.conftest import Epsim

EveryKind = dict[str, dict[str, Any]]
WRONG: tuple[Any, ...] = (
    None, True, 0, -1, 1, 3, 0.5, 1e308, -1e308, 1e29, 10**17, float("nan"), float("inf"), "", "1", "x" * 300,
    "<script>\x1b[31m\x00\u202e$x_{", [], {}, [[]], [None], [1, 2, 3], ["a", "a"], {"mean": 1}, {"a": None},
)  # fmt: skip


def test_every_kind_has_a_schema_and_a_view(every_kind: EveryKind) -> None:
    assert set(KINDS) == set(VIEWS) == set(every_kind)
    for kind, results in every_kind.items():
        assert results["kind"] == kind
        assert results_schema(kind)["properties"]["kind"] == {"const": kind}
        check_results(results)


def test_files_from_before_kinds_are_read(every_kind: EveryKind, tmp_path: Path) -> None:
    for kind, results in every_kind.items():
        path = tmp_path / f"{kind}.json"
        write_results(results, path)
        old = json.loads(path.read_text())
        assert old.pop("kind") == kind
        path.write_text(json.dumps(old))
        assert read_results(path) == old | {"kind": kind}


def test_results_in_python(every_kind: EveryKind) -> None:
    found = {kind: Results(data) for kind, data in every_kind.items()}
    answer = found["tune"].answers["vllm"]
    assert answer.throughput_gain.mean == every_kind["tune"]["tune"]["answers"][2]["throughput_gain"]["mean"]
    assert found["comparison"].rows[0].metric == every_kind["comparison"]["comparison"]["rows"][0]["metric"]
    cell = found["sweep"].cells[1]
    assert (found["sweep"].cells[cell.key].seed, cell.ranks) == (1, 2)
    for results in found.values():
        assert str(results).splitlines()[-1] == results.verdict
        assert len(results.table()[1]) == len(results.stacks)
    assert "gain on held-out steps" in str(found["tune"])
    assert "second - first" in found["comparison"]._repr_html_()


@pytest.mark.parametrize("part", ["sweep", "comparison", "tune", "run"])
def test_an_empty_part_is_refused_in_one_line(every_kind: EveryKind, tmp_path: Path, epsim: Epsim, part: str) -> None:
    """As a file from before kinds, whose kind is known by its parts."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps({part: {}}))
    for command in (["report", path], ["compare", path, path]):
        code, out, err = epsim(*command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "is a required property" in err


CONTRADICTIONS: dict[str, Any] = {
    "$.stacks[1].cell: 'x' is not the key of a cell": ("sweep", lambda r: r["stacks"][1].update(cell="x")),
    "no stack is of cell": ("sweep", lambda r: r["stacks"].__delitem__(slice(0, 2))),
    "$.sweep.cells: the key": ("sweep", lambda r: r["sweep"]["cells"].append(r["sweep"]["cells"][0])),
    "$.sweep.cells[0].ranks: is not one of the values": ("sweep", lambda r: r["sweep"]["axes"].update(ranks=[8])),
    "$.comparison.rows[0].first_file: 'x' is not one of": (
        "comparison", lambda r: r["comparison"]["rows"][0].update(first_file="x")
    ),
    "$.comparison.rows[0].high": ("comparison", lambda r: r["comparison"]["rows"][0].update(low=1.0, high=None)),
    "$.tune.answers[0].throughput_gain.high": (
        "tune", lambda r: r["tune"]["answers"][0]["throughput_gain"].update(low=0.0, high=None)
    ),
    "$.scored.hot_experts[0].layer: is 9": ("replay", lambda r: r["scored"]["hot_experts"][0].update(layer=9)),
    "hot_copies: has 1 entries": ("run", lambda r: r["stacks"][0].update(hot_copies=[[0]])),
}  # fmt: skip


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_contradictions_are_named(every_kind: EveryKind, words: str) -> None:
    kind, change = CONTRADICTIONS[words]
    change(every_kind[kind])
    with pytest.raises(ValueError) as caught:
        check_results(every_kind[kind])
    assert words in str(caught.value)


def edited(data: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A copy with one to three random edits: parts deleted, retyped, swapped, doubled, renamed, or scaled."""
    data = copy.deepcopy(data)
    for _ in range(draw.choice((1, 1, 2, 3))):
        parent, key = _place(data, draw)
        kind = draw.choice(("delete", "retype", "retype", "swap", "double", "rename", "scale"))
        if kind == "delete":
            del parent[key]
        elif kind == "retype":
            parent[key] = copy.deepcopy(draw.choice(WRONG))
        elif kind == "swap":
            other, other_key = _place(data, draw)
            value, other_value = copy.deepcopy(parent[key]), copy.deepcopy(other[other_key])
            parent[key] = other_value
            if other_key in other or (isinstance(other, list) and len(other) > other_key):
                other[other_key] = value
        elif kind == "double" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw.choice(("kind", "name", "cell", "run", "sweep", "routed_peak", "x"))] = parent.pop(key)
        elif isinstance(parent[key], int | float):
            parent[key] *= draw.choice((-1, 2, 1000, 10**12, 1e25))
    return data


def _place(data: Any, draw: random.Random) -> tuple[Any, Any]:
    """A random part, as what holds it and its key or index."""
    while True:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        key = draw.choice(keys)
        if not isinstance(data[key], dict | list) or not data[key] or draw.random() < 0.15:
            return data, key
        data = data[key]


def sketched(figure: Figure) -> Drawn:
    """The narrow form alone, which calls all that the others do."""
    with _canvas(figure, narrow=True) as canvas:
        return Drawn(figure, "", _svg(canvas, "x"), b"")


def check_damaged(every_kind: EveryKind, kind: str, number: int, seed: int, tmp_path: Path, epsim: Epsim) -> None:
    """`epsim report` and `epsim compare` on damaged files: a page, or one line."""
    whole, path, out = tmp_path / "whole.json", tmp_path / "damaged.json", tmp_path / "out"
    write_results(every_kind[kind], whole)
    draw = random.Random(f"{kind} {seed}")
    codes = {0: 0, 2: 0}
    for _ in range(number):
        path.write_text(json.dumps(edited(every_kind[kind], draw)))
        for command in (["report", path, "--out", out], ["compare", whole, path], ["compare", path]):
            code, _, err = epsim(*command)
            assert code in codes, (command, err)
            assert err.count("\n") == (code == 2), (command, err)
            codes[code] += 1
    assert min(codes.values()) > number / 10, codes


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_gives_a_page_or_one_line(
    every_kind: EveryKind, kind: str, tmp_path: Path, epsim: Epsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epsim.report.write.drawn", sketched)
    check_damaged(every_kind, kind, 10, 0, tmp_path, epsim)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_files(
    every_kind: EveryKind, kind: str, tmp_path: Path, epsim: Epsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epsim.report.write.drawn", sketched)
    check_damaged(every_kind, kind, 500, 1, tmp_path, epsim)
