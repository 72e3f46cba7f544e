"""When the verdict flips, and what sweeps and tune are shown as, on results whose answers are known."""

from __future__ import annotations

from typing import Any

import pytest

from epsim.report.content import cells, memory_words
from epsim.report.draw import drawn
from epsim.report.sweeps import gains
from epsim.report.views import tables, view_of
from epsim.results import ResultsData


def entry(stack: str, mean: float, **more: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        key: {"mean": None, "p95": None, "max": None, "unit": "ratio", "reason": "none"}
        for key in (
            "optimality_gap", "gap_placement", "gap_split", "gap_rounding", "gap_shared", "layer_time_us", "kept_mass",
            "active_experts", "remote_rank_share", "remote_node_share", "throughput_gain",
        )
    }  # fmt: skip
    metrics["max_over_mean"] = {"mean": mean, "p95": mean + 0.5, "max": mean + 1.0, "unit": "ratio"}
    return {"stack": stack, "metrics": metrics, "versus_first": {}, **more}


def flips(results: ResultsData) -> list[str]:
    return view_of(results).flips(results)


def results_of(*stacks: dict[str, Any], kind: str = "replay", **more: Any) -> ResultsData:
    trace = {
        "name": "t", "level": "tokens", "origin": "recorded", "model": "m", "phase": "decode", "num_layers": 3,
        "layers": [3, 4, 5], "num_experts": 8, "top_k": 2, "steps_planned": 0, "steps_scored": 4,
    }  # fmt: skip
    setting = {"ranks": 4, "nodes": 1, "redundant": 8, "groups": 1, "seed": 7, "shared_cost": 0.0, "history": "none"}
    setting |= {"version": "1", "command": "epsim replay t"}
    found: ResultsData = {"schema": 1, "kind": kind, "trace": trace, "setting": setting, "stacks": list(stacks)}
    return found | {"verdict": "words", **more}


def test_nothing_flips_it() -> None:
    assert flips(results_of(entry("a", 1.5), entry("b", 1.2))) == [
        "No other stack is better in any layer, step or batch size, or by any other metric compared here."
    ]
    assert flips(results_of(entry("a", 1.5))) == []


def test_each_condition_is_told() -> None:
    first = entry(
        "a", 1.5, max_over_mean_by_layer=[1.0, 2.0, None], by_step={"max_over_mean": [1.0, 2.0, 1.1, 2.0]},
        max_over_mean_by_tokens=[{"low": 1.0, "high": 2.0, "steps": 3, "mean": 1.1}],
    )  # fmt: skip
    best = entry(
        "b", 1.2, max_over_mean_by_layer=[1.3, 1.1, None], by_step={"max_over_mean": [1.2, 1.2, 1.2, 1.2]},
        max_over_mean_by_tokens=[{"low": 1.0, "high": 2.0, "steps": 3, "mean": 1.25}],
    )  # fmt: skip
    first["metrics"]["max_over_mean"]["p95"] = 1.6
    first["metrics"]["throughput_gain"]["mean"], best["metrics"]["throughput_gain"]["mean"] = 0.0, -0.1
    assert flips(results_of(first, best)) == [
        "By the 95th percentile of peak/mean, a is better: 1.6 against 1.7.",
        "By throughput, a is better: 0.0% against -10.0%.",
        "In 1 of 3 layers (3), a has a lower peak/mean.",
        "In 2 of 4 steps, another stack has a lower peak/mean: a in 2.",
        "With 1 to 2 tokens per rank (3 steps), peak/mean is lower with a: 1.100 instead of 1.250.",
    ]


def test_doubtful_data_is_told() -> None:
    results = results_of(entry("a", 1.5), entry("b", 1.2))
    results["trace"]["origin"] = "drawn"
    results["setting"]["history"] = "hindsight: planned on them"
    assert [line.split()[0] for line in flips(results)] == ["No", "Tokens", "Placements"]


def sweep() -> ResultsData:
    cells_of = [
        {
            "key": f"k{n}",
            "trace": "t",
            "ranks": 4,
            "redundant": n,
            "origin": "recorded",
            "steps_scored": 4,
            "verdict": "",
        }
        for n in (0, 8, 16)
    ]
    stacks = []
    for cell, base, other in zip(cells_of, (1.5, 1.6, 1.5), (1.5, 1.2, 1.2), strict=True):
        for name, mean in (("eplb", base), ("lplb", other)):
            one = entry(name, mean, of=name, cell=cell["key"], name=f"{name} [redundant {cell['redundant']}]")
            interval = {"difference": mean - base, "low": mean - base - 0.1, "high": mean - base + 0.1}
            stacks.append(one | {"versus_first": {"max_over_mean": interval}})
    told = {"axes": {"redundant": [0, 8, 16]}, "cells": cells_of, "failed": [], "excluded": 0}
    told["skipped"] = [{"redundant": 3, "reason": "do not divide"}]
    return results_of(*stacks, kind="sweep", sweep=told)


def test_sweeps() -> None:
    results = sweep()
    assert flips(results) == [
        "lplb is best in 2 of 3 cells, all with redundant 8 or 16.",
        "eplb is best in 1 of 3 cells, all with redundant 0.",
        "From the first stack to the best, peak/mean changes by -25.0% to -20.0%.",
    ]
    unsure = sweep()
    unsure["stacks"][3]["versus_first"]["max_over_mean"]["high"] = 0.1
    assert flips(unsure)[-1] == "This change's 95% interval includes zero in 1 of 3 cells, all with redundant 8."
    found = gains(results, "redundant", "max_over_mean")
    assert found["eplb"] == {0.0: [0.0], 8.0: [0.0], 16.0: [0.0]}
    assert found["lplb"] == {0.0: [0.0], 8.0: [pytest.approx(-0.25)], 16.0: [pytest.approx(-0.2)]}
    shown = {row[0].text: row for row in cells(results, memory=True)}
    # against the first of the same cell, with the cell's own redundancy
    assert shown["lplb [redundant 8]"][-2].text == "-25.0% (-31.3% to -18.8%)"
    assert shown["lplb [redundant 8]"][-1].text == "6 experts"
    assert shown["eplb [redundant 16]"][-2].text == "-"
    view = view_of(results)
    assert view.title(results) == "epsim sweep: 3 cells"
    assert view.source(results) == "replayed from t (recorded), seed 7, epsim 1"
    ((name, _, rows),) = tables(view.trailing, results)
    assert (name, rows) == ("Cells without results", [["redundant 3", "skipped", "do not divide"]])
    (figure,) = view.figures(results)
    picture = drawn(figure)
    assert "redundant experts per layer" in picture.wide
    assert picture.png.startswith(b"\x89PNG")


def test_tune() -> None:
    candidate = {"name": "eplb r8", "memory_bytes": 2e9, "gain_choosing": 0.04, "rounds": 2}
    told = {
        "words": [{"about": "run", "text": "eplb"}, {"about": "does not pay", "text": "below 8 tokens"}],
        "answers": [{"commands": ["sglang --x", "vllm --y"]}, {"commands": ["sglang --x"]}],
        "candidates": [
            candidate | {"gain": None, "memory_bytes": 36.7e6},
            candidate | {"gain": {"mean": 0.03, "low": 0.01, "high": 0.05}},
        ],
    }
    results = results_of(entry("a", 1.5), entry("b", 1.2), kind="tune", tune=told)
    assert flips(results) == ["below 8 tokens"]
    assert view_of(results).answers(results)[-2:] == [("command", "sglang --x"), ("command", "vllm --y")]
    ((name, _, rows),) = tables(view_of(results).leading, results)
    assert name == "Candidates"
    assert rows == [["eplb r8", "2.0 GB", "+4.00%", "+3.00% (+1.00% to +5.00%)"], ["eplb r8", "36.7 MB", "+4.00%", "-"]]


def test_memory_in_words() -> None:
    results = results_of(entry("a", 1.5))
    assert memory_words(results) == "redundant experts: 2 per rank and layer, 6 experts per rank for all 3 layers"
    results["setting"]["expert_bytes"] = 2.0**20
    assert memory_words(results) == "redundant experts: 2 per rank and layer, 6 MiB per rank for all 3 layers"
