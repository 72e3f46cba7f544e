"""The verdict's sentences, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from epsim.score.verdict import best_of, verdict

GAP = " That is 2.0% above the lowest peak that this placement allows."
FORMULA = " The ratio is peak load / mean load of a layer, averaged over steps and layers."
MEASURED = FORMULA.replace("is peak", "is measured peak")


def entry(name: str, ratio: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    difference = {"difference": 0.0, "low": low, "high": high}
    metrics = {"max_over_mean": {"mean": ratio}, "optimality_gap": {"mean": 0.02}}
    return {"stack": name, "metrics": metrics, "versus_first": {"max_over_mean": difference}}


A, B = entry("a", 1.95, 0.0, 0.0), entry("b", 1.34, -0.702, -0.5655)
SLIGHT = entry("b", 1.048, -0.01, -0.002)
WON = "Use b: the busiest rank carries 1.34x the mean load instead of 1.95x (-31%, 95% interval -36% to -29%)."


@pytest.mark.parametrize(
    ("entries", "tied", "expected"),
    [
        ([A, B], [], WON + GAP + FORMULA),
        (
            [A, B, entry("c", 1.35, -0.7, -0.5)],
            ["c"],
            f"{WON}{GAP} These steps show no clear difference from c.{FORMULA}",
        ),
        ([A, B], ["c", "d"], f"{WON}{GAP} These steps show no clear difference from c or d.{FORMULA}"),
        ([A], [], "a: the busiest rank carries 1.95x the mean load." + GAP + FORMULA),
        (
            [B, A],
            [],
            "Keep b: no other stack has a lower peak load; the busiest rank carries 1.34x the mean load."
            + GAP
            + FORMULA,
        ),
        (
            [B, A],
            ["a"],
            "Keep b: no other stack has a lower peak load; the busiest rank carries 1.34x the mean load."
            + f"{GAP} These steps show no clear difference from a.{FORMULA}",
        ),
        (
            [A, entry("b", 1.34)],
            [],
            "Use b: the busiest rank carries 1.34x the mean load instead of 1.95x (-31%; no interval from one step)."
            + GAP
            + FORMULA,
        ),
        (
            [entry("a", 1.05), SLIGHT],
            [],
            "Use b: the busiest rank carries 1.048x the mean load instead of 1.050x "
            "(-0.2%, 95% interval -1.0% to -0.2%)." + GAP + FORMULA,
        ),
        (
            [A, entry("b", 1.34, -1.17, 0.0195)],
            ["a"],
            "Keep a: these steps show no clear gain; with b the busiest rank carries 1.34x the mean load instead of "
            "1.95x (-31%, 95% interval -60% to +1%)." + GAP + FORMULA,
        ),
        ([entry("a", None), entry("b", None)], [], "No step has tokens: there is nothing to compare."),
    ],
)
def test_what_to_do_and_what_it_brings(entries: list[dict[str, Any]], tied: list[str], expected: str) -> None:
    assert verdict(entries, tied) == expected


def test_a_run_has_measured() -> None:
    assert verdict([A, B], measured=True) == WON.replace("carries", "carried") + GAP + MEASURED


def test_a_named_stack_goes_by_its_name() -> None:
    assert verdict([A, B | {"name": "today"}]).startswith("Use today: ")


def test_the_best_has_the_lowest_ratio_and_the_first_of_equals() -> None:
    assert best_of([entry("a", None), entry("b", 1.2), entry("c", 1.1), entry("d", 1.1)]) == 2
