"""results.json: checked against its schema, written whole or not at all, documented key for key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epsim.files import whole_file
from epsim.results import check_results, read_results, write_results
from epsim.results.checks import results_schema
from epsim.score.formulas import METRICS

ROOT = Path(__file__).resolve().parents[2]


def some_results() -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("mean", "p50", "p95", "p99", "max")) | {"unit": "ratio", "reason": "none"}
    value: dict[str, Any] = {"mean": 1.5, "p50": 1.4, "p95": 2.0, "p99": 2.0, "max": 2.0, "unit": "ratio"}
    metrics = {key: dict(nothing) for key in METRICS} | {"max_over_mean": value, "optimality_gap": dict(value)}
    versus = {"max_over_mean": {"difference": 0.0, "low": None, "high": None}}
    trace = {"name": "t", "level": "counts", "origin": "recorded", "model": "m", "phase": "decode", "num_layers": 1}
    trace |= {"num_experts": 4, "top_k": 2, "steps_planned": 0, "steps_scored": 1}
    setting: dict[str, Any] = {"ranks": 2, "nodes": 1, "redundant": 0, "groups": 1, "seed": 0, "shared_cost": 0.0}
    setting |= {"history": "none", "version": "0", "command": "epsim"}
    stack = {"stack": "eplb", "metrics": metrics, "versus_first": versus}
    return {"schema": 1, "kind": "replay", "trace": trace, "setting": setting, "stacks": [stack], "verdict": "words"}


def test_round_trip(tmp_path: Path) -> None:
    results = some_results()
    write_results(results, tmp_path / "deep" / "results.json")
    assert read_results(tmp_path / "deep" / "results.json") == results


def test_schema_requires_every_metric_and_documents_it() -> None:
    assert set(results_schema("definitions")["$defs"]["metrics"]["required"]) == set(METRICS)
    words = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for key, metric in METRICS.items():
        assert f"| `{key}` | {metric.unit} | {metric.formula} |" in words


@pytest.mark.parametrize(
    ("break_it", "where"),
    [
        (lambda r: r.pop("verdict"), "verdict"),
        (lambda r: r.update(schema=2), "$.schema"),
        (lambda r: r["stacks"][0]["metrics"].pop("peak"), "peak"),
        (lambda r: r["stacks"][0]["metrics"]["max_over_mean"].pop("p99"), "max_over_mean"),
        (lambda r: r["stacks"][0]["metrics"]["peak"].pop("reason"), "peak"),
        (lambda r: r["setting"].update(ranks=0), "ranks"),
        (lambda r: r["setting"].update(seed=2.0), "$.setting.seed: 2.0 is not of type 'integer'"),
        (lambda r: r.update(kind="sweeps"), "$.kind: 'sweeps' is not one of replay, run, tune, comparison, sweep"),
        (lambda r: r.update(kind="run"), "'run' is a required property"),
        (lambda r: r["stacks"].append(r["stacks"][0]), "$.stacks: the name 'eplb' is given twice"),
        (
            lambda r: r["stacks"][0].update(load_over_mean_by_rank=[1.0, 1.0, 1.0]),
            "$.stacks[0].load_over_mean_by_rank: has 3 entries, but there are 2 ranks",
        ),
        (
            lambda r: r["stacks"][0].update(load_over_mean_by_layer=[[[1.0, 1.0], [None]]]),
            "$.stacks[0].load_over_mean_by_layer[0][1]: has 1 entries, but there are 2 ranks",
        ),
        (lambda r: r["stacks"][0].update(by_step={"peak": [1.0, 2.0]}), "$.trace.steps_scored: is 1, but there are 2"),
        (lambda r: r["trace"].update(layers=[3, 4]), "$.trace.layers: has 2 entries, but num_layers is 1"),
    ],
)
def test_broken_results_are_refused(break_it: Any, where: str) -> None:
    results = some_results()
    break_it(results)
    with pytest.raises(ValueError, match=r"^results: ") as caught:
        check_results(results)
    assert where in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(some_results(), path)
    before = path.read_text()
    broken = some_results()
    del broken["stacks"]
    with pytest.raises(ValueError, match="stacks"):
        write_results(broken, path)
    with pytest.raises(RuntimeError, match="stop"), whole_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("stop")
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_unreadable_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        read_results(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text(json.dumps(some_results())[:-20])
    with pytest.raises(ValueError, match=r"bad\.json: not a results\.json"):
        read_results(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json"):
        read_results(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ("NaN", "NaN is not a finite"),
        ("1e999", "1e999 is not"),
        ("1" + 30 * "0", "18 digits"),
        ('"\\ud800"', "surrogates"),
    ],
)
def test_what_json_allows_and_nothing_can_show(tmp_path: Path, wrong: str, word: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(some_results(), indent=1).replace('"verdict": ', f'"more": {wrong}, "verdict": '))
    with pytest.raises(ValueError, match=rf"results.json: not a results.json \(.*{word}.*make it again"):
        read_results(path)
