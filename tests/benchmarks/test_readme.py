"""The README's figures are those of the committed results."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = str(ROOT / "benchmarks")
if SCRIPTS not in sys.path:
    sys.path.append(SCRIPTS)
readme: Any = importlib.import_module("readme")


def test_the_readme_says_what_the_results_say() -> None:
    text = (ROOT / "README.md").read_text()
    assert readme.with_figures(text) == text, "python benchmarks/readme.py"
    # and each command that it names is one that is there
    for part in readme.figures().split("`python ")[1:]:
        assert (ROOT / part.split("`")[0].split()[0]).exists(), part


def test_another_result_is_another_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text()
    load = readme.load

    def changed(name: str) -> Any:
        found = load(name)
        if name == "split.json":
            for part in found["summary"]:
                part["infeasible"] += 1
        return found

    monkeypatch.setattr(readme, "load", changed)
    assert readme.with_figures(text) != text
    monkeypatch.setattr(readme, "load", lambda name: None)
    assert "| `" not in readme.figures()
    with pytest.raises(SystemExit, match=r"README\.md lacks"):
        readme.with_figures("no marks")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (None, "-"),
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
def test_percents_have_two_digits(part: float | None, words: str) -> None:
    assert readme.percent(part) == words


def test_a_gpu_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads((ROOT / "benchmarks/results/split_gpu.json").read_text())
    monkeypatch.setattr(readme, "load", lambda name: found)
    assert "bit for bit the CPU's" in next(readme.split_gpu_lines())
    found["rows"][-1]["equal"] = False
    assert "NOT THE CPU'S BITS" in next(readme.split_gpu_lines())
