"""docs/figures.md says what the committed results say."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = str(ROOT / "benchmarks")
if SCRIPTS not in sys.path:
    sys.path.append(SCRIPTS)
figures: Any = importlib.import_module("figures")


def test_the_page_is_what_the_results_give() -> None:
    text = (ROOT / "docs/figures.md").read_text()
    assert figures.page() == text, "python benchmarks/figures.py"
    # Every script that the page names is in the repository.
    scripts = re.findall(r"benchmarks/\w+\.py", text)
    assert len(scripts) > 20
    assert all((ROOT / script).exists() for script in scripts)


def test_other_results_give_another_page() -> None:
    def changed(name: str) -> Any:
        found = figures.load(name)
        if name == "split":
            for part in found["summary"]:
                part["infeasible"] += 1
        if name == "split_gpu":
            found["rows"][-1]["equal"] = False
        return found

    text = figures.page(changed)
    assert "| 953 | 3,800 |" in text
    assert "| 952 | 3,800 |" not in text
    assert "the results do NOT equal those of the CPU;" in " ".join(text.split())


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (0.0, "0"),
        (4e-15, "0"),
        (-1e-9, "0"),
        (3.8e-6, "0.00038%"),
        (0.0032, "0.32%"),
        (0.0151, "1.5%"),
        (0.1, "10%"),
        (0.352, "35%"),
        (0.998, "100%"),
        (1.724, "172%"),
    ],
)
def test_percents_have_two_digits(part: float, words: str) -> None:
    assert format(figures.Field(part), "pc") == words


def test_missing_values_and_flags() -> None:
    fields = figures.Fields(figures.load, row={"a": {"0.178": 1.25}, "none": None, "same": False, "many": [7, 8]})
    line = "{row[a][0.178]:.1f} {row[a][x][y]:.1f} {row[none]:us} {row[same]} {row[many][1]:us}"
    assert line.format_map(fields) == "1.2 - - NO 8"
