"""The layer's latencies: the paper's own are the line that it says, and what is claimed of ours the results hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.scripts import script

ROOT = Path(__file__).resolve().parents[2]
common: Any = script("common")
# arXiv 2511.02237, tables 3 and 4: at k0 = 3 to 8, the means over four benchmarks, and these.
PAPER_T = [25.1, 29.9, 35.1, 40.3, 44.4, 48.8]
PAPER_US = [106.8, 120.9, 136.0, 151.3, 163.0, 175.7]
EACH_T = [
    *(22.2, 26.5, 30.5, 36.0, 39.2, 43.0),
    *(26.5, 31.4, 37.5, 42.9, 47.6, 51.6),
    *(23.8, 28.7, 33.9, 38.7, 42.5, 47.2),
    *(27.9, 33.0, 38.6, 43.7, 48.3, 53.5),
]
EACH_US = [
    *(97.9, 110.5, 122.0, 138.4, 147.4, 158.0),
    *(111.0, 125.4, 143.2, 159.0, 172.5, 184.1),
    *(102.7, 117.1, 132.2, 146.5, 157.3, 170.8),
    *(115.6, 130.4, 146.7, 161.5, 174.7, 189.9),
]


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads((ROOT / "benchmarks/results/oea_latency.json").read_text())


def form(found: Any, name: str) -> Any:
    return next(row for row in found["latency"] if row["form"] == name)


def test_the_papers_latencies_are_the_papers_line() -> None:
    line = common.fit(EACH_T, EACH_US)
    assert line["fixed"] == pytest.approx(33.3, abs=0.2)
    assert line["slope"] == pytest.approx(2.923, abs=0.005)
    assert line["r2"] == pytest.approx(0.9998, abs=1e-4)
    assert PAPER_US[0] / PAPER_US[-1] == pytest.approx(0.61, abs=0.005)
    assert PAPER_US[2] / PAPER_US[-1] == pytest.approx(0.77, abs=0.005)


def test_a_line_is_found_again() -> None:
    active = [8, 20, 33, 64]
    line = common.fit(active, [7 + 2.5 * t for t in active])
    assert line == {"fixed": pytest.approx(7), "slope": pytest.approx(2.5), "r2": pytest.approx(1)}
    bent = common.fit([1, 2, 3], [1.0, 3.0, 2.0])
    assert bent["r2"] == pytest.approx(0.25)


def test_results_keep_what_is_claimed(found: Any) -> None:
    ours = form(found, "ours")
    assert ours["r2"] > 0.99
    assert ours["slope"] <= 2.3
    assert ours["error"] < 3e-3
    assert found["paper"]["3"]["normalised"] <= 0.58
    assert found["paper"]["5"]["normalised"] <= 0.75
    for name in ("two grouped products", "grouped layer", "grouped_mm", "batched_mm", "eager"):
        theirs = dict(zip(form(found, name)["T"], form(found, name)["us"], strict=True))
        mine = dict(zip(ours["T"], ours["us"], strict=True))
        assert all(mine[active] < us for active, us in theirs.items()), name
    assert all(row["same bits"] for row in found["batches"])


def test_lines_and_shares_follow_from_the_latencies(found: Any) -> None:
    for row in found["latency"]:
        again = common.fit(row["T"], row["us"])
        assert {key: row[key] for key in again} == pytest.approx(again)
    for k0, mean in zip(range(3, 9), PAPER_T, strict=True):
        assert found["paper"][str(k0)]["T"] == pytest.approx(mean, abs=0.1)


def test_padding_costs_nothing_where_it_is_masked(found: Any) -> None:
    us = found["padding"]
    assert us["7 padded to 8, masked"] == pytest.approx(us["7"], rel=0.005)
    assert us["7 padded to 8, not masked"] > 1.05 * us["7"]


def test_the_router_is_within_its_time(found: Any) -> None:
    row = next(row for row in found["router"] if row["experts"] == 128 and row["batch"] == 16)
    assert row["logits"]["row"] <= 6
    assert row["choice"]["row"] <= 6


def test_uniform_routing_reads_what_the_formula_says(found: Any) -> None:
    for row in found["uniform"]:
        wanted = 128 * (1 - (1 - row["k0"] / 128) ** 16)
        assert row["formula"] == pytest.approx(wanted)
        assert abs(row["T"] - wanted) < 3 * row["error"]


def test_formula_gives_the_papers_numbers() -> None:
    rounded = [round(float(x), 1) for x in 128 * (1 - (1 - np.arange(3, 9) / 128) ** 16)]
    assert rounded == [40.4, 51.0, 60.3, 68.6, 76.0, 82.4]
