"""A map that a serving system runs today, as the baseline of `tune` and as a candidate."""

from __future__ import annotations

from pathlib import Path

import torch

from epsim.placement.base import Placement
from epsim.placement.formats import write_placement
from epsim.policies.stack import parse_stack
from tests.tune.cases import MakeCounts, RunTune, answered, hot


def test_tune_compares_with_the_map_that_runs_today(make_counts: MakeCounts, run_tune: RunTune, tmp_path: Path) -> None:
    """The hot experts are 0 to 3. Today's map holds all four on rank 0."""
    path = tmp_path / "today.json"
    write_placement(Placement((torch.arange(20) % 16).repeat(2, 1), 16, 4), path, "sglang", (0, 1))
    trace = make_counts([hot(0)] * 60)
    today = parse_stack(f"file({path})")
    results = run_tune(trace, baseline=today, policies=(parse_stack("eplb+lplb"), today), redundant=(0, 4))
    assert results["tune"]["baseline"] == f"file(path={path}) r4"
    names = {row["name"] for row in results["tune"]["candidates"]}
    assert {name for name in names if name.startswith("file")} == {f"file(path={path}) r4"}
    best = answered(results)
    assert best["advised"]
    assert best["stack"] == "eplb+lplb"
    vllm = next(line["text"] for line in results["tune"]["words"] if line["about"] == "vLLM")
    assert vllm.startswith("It runs the answer as it is: ")


def test_a_serving_system_is_given_the_file(make_counts: MakeCounts, run_tune: RunTune, tmp_path: Path) -> None:
    path = tmp_path / "good map.json"
    order = torch.tensor([0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15])
    write_placement(Placement(order.repeat(2, 1), 16, 4), path, "trtllm", (0, 1))
    stack = parse_stack(f'file("{path}")')
    results = run_tune(make_counts([hot(0)] * 60), policies=(stack,), redundant=(0,))
    one = answered(results, "sglang")
    assert one["advised"]
    assert one["stack"] == f'file(path="{path}")'
    assert f"""--placement 'file(path="{path}")' --format sglang -o placement-sglang.json""" in one["commands"][0]
    assert "--init-expert-location placement-sglang.json" in one["commands"][1]
