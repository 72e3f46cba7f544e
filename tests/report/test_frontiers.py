"""Frontiers come from what the benchmarks write, and their points are theirs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pytest

from epsim.cli.main import main
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.report.frontiers import frontier_figures, read_frontiers
from epsim.results import check_results, write_results
from epsim.traces.store import StoredTrace
from tests.benchmarks.scripts import script

frontier: Any = script("quality.frontier")

OEA = frontier.Trial("oea", "oea(k0=3)")
ROUTER: Any = frontier.Point(OEA, 16, {1: 35.5, 4: 12.0}, 0.95, 0.0125, 0.02, np.array([0.01, 0.015]))


def written(folder: Path, **content: Any) -> Path:
    path = folder / "quality.json"
    path.write_text(json.dumps({"machine": "a GPU", "command": "python x.py", **content}))
    return path


def test_routers(tmp_path: Path) -> None:
    (found,) = read_frontiers(written(tmp_path, points=[ROUTER.to_json()]))
    (point,) = found["points"]
    assert (point["family"], point["label"], point["x"], point["y"]) == ("oea, batch 16", "oea(k0=3)", 35.5, 0.0125)
    assert point["error"] == pytest.approx(0.0025)
    (figure,) = frontier_figures({"frontiers": [found]})
    assert "a GPU by python x.py" in figure.axes
    canvas = matplotlib.figure.Figure()
    figure.draw(canvas, False)
    (line,) = canvas.axes[0].lines[:1]
    assert np.asarray(line.get_xydata()).tolist() == [[35.5, 0.0125]]


def test_readers(tmp_path: Path) -> None:
    values = np.array([0.1, 0.3])
    figures = script("quality.figures").Figures(loss=values, kl=values, right=values, kept=755.0).to_json()
    (found,) = read_frontiers(
        written(tmp_path, trials={"sketch 0.178": figures, "cats 0.2": figures, "with oea": figures})
    )
    assert [(p["family"], p["x"], p["y"]) for p in found["points"]] == [("sketch", 0.178, 0.2), ("cats", 0.2, 0.2)]


@pytest.mark.parametrize("content", ["{", "[]", '{"machine": "x"}', '{"machine": "x", "points": []}'])
def test_other_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"x\.json: "):
        read_frontiers(path)


def test_they_become_part_of_results_and_page(
    make_trace: Callable[..., StoredTrace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = replay(make_trace("counts"), ReplayOptions(Cluster(4), (("", parse_stack("contiguous")),)))
    write_results(results, tmp_path / "results.json")
    path = written(tmp_path, points=[ROUTER.to_json()])
    out = tmp_path / "out"
    arguments = ["epsim", "report", str(tmp_path), "--quality", str(path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    found = json.loads((out / "results.json").read_text())
    check_results(found)
    assert found["frontiers"][0]["points"][0]["label"] == "oea(k0=3)"
    assert "Routers: loss against active experts" in (out / "report.html").read_text()
