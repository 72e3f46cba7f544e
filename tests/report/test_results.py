"""`Results`: its parts by attribute and by name, its table, and its forms on a terminal, in a notebook and on disk."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import epsim.report.results
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.report.content import rows
from epsim.report.results import Results
from epsim.traces.store import StoredTrace

HOSTILE = "<i>best"


@pytest.fixture
def results(make_trace: Callable[..., StoredTrace]) -> Results:
    stacks = (("", parse_stack("eplb")), ("best", parse_stack("eplb+lplb")))
    return Results(replay(make_trace("tokens"), ReplayOptions(Cluster(4, 2, 4), stacks), trace_name="t"))


def test_examples(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.save(tmp_path / "out" / "results.json")
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(epsim.report.results).failed == 0
    assert doctest.testmod(epsim.report.results).attempted >= 8


def test_parts_by_attribute_and_by_name(results: Results) -> None:
    entry = results.data["stacks"][1]
    best = results.stacks["best"]
    assert list(best) == list(results.stacks[1]) == list(entry)
    assert best.metrics.max_over_mean.mean == entry["metrics"]["max_over_mean"]["mean"]
    assert best.versus_first.max_over_mean.low == entry["versus_first"]["max_over_mean"]["low"]
    assert best.max_over_mean_by_tokens[0].low == entry["max_over_mean_by_tokens"][0]["low"]
    assert {"metrics", "versus_first", "stack"} <= set(dir(best))
    assert [one.stack for one in results.stacks[1:]] == ["eplb+lplb"]
    with pytest.raises(KeyError, match="no 'worst'; there are eplb, best"):
        results.stacks["worst"]
    with pytest.raises(AttributeError, match="no 'mode'; there are mean, p50"):
        _ = best.metrics.peak.mode
    with pytest.raises(AttributeError, match="these are the results of a replay; only those of a tune have answers"):
        _ = results.answers


def test_table_has_the_numbers_that_are_shown(results: Results) -> None:
    headers, table = results.table()
    first, best = table
    assert first[0] == "eplb"
    assert headers[-1] == "vs first"
    means = [entry["metrics"]["max_over_mean"]["mean"] for entry in results.data["stacks"]]
    assert best[headers.index("peak/mean")] == means[1]
    assert best[-1] == pytest.approx(means[1] / means[0] - 1)


def test_shows_itself(results: Results) -> None:
    results.data["stacks"][1]["name"] = HOSTILE
    text, page = str(results), results._repr_html_()
    assert text.splitlines()[-1] == results.verdict
    assert "&lt;i&gt;best" in page
    assert HOSTILE not in page
    for cell in rows(results.data)[1][1:]:
        assert cell in text
        assert f"<td>{cell}</td>" in page


def test_saves_and_reads(results: Results, tmp_path: Path) -> None:
    results.report(tmp_path / "out")
    names = [path.name for path in sorted((tmp_path / "out").iterdir())]
    assert names == ["pictures", "report.html", "report.md", "results.json"]
    assert Results.load(tmp_path / "out").data == results.data
    with pytest.raises(ValueError, match="verdict"):
        Results({key: value for key, value in results.data.items() if key != "verdict"})


def test_import_is_cheap() -> None:
    code = "import sys, epsim.report.results; assert not {'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
