"""docs/oea.md says what the results hold."""

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
speed: Any = importlib.import_module("stack_speed")
FORMS = ("oea(k0=4)", "topk-channels(0.178)", "oea(k0=4)+topk-channels(0.178)")


def rows_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results" / name).read_text())["rows"]
    return found


@pytest.fixture(scope="module")
def document() -> list[str]:
    return (ROOT / "docs/oea.md").read_text().splitlines()


def test_stacks_of_a_router_and_a_reader(tmp_path: Path) -> None:
    document = tmp_path / "oea.md"
    document.write_text((ROOT / "docs/oea.md").read_text())
    speed.write_table(document, rows_of("stack_speed.json"))
    assert document.read_text() == (ROOT / "docs/oea.md").read_text()
    assert "| alike | 64 |" in document.read_text()


def test_what_is_said_of_them() -> None:
    for row in rows_of("stack_speed.json"):
        oea, reader, both = (row["us"][form] for form in FORMS)
        assert min(oea, reader, both) < row["us"]["topk"]
        if row["batch"] > 1:
            assert 0 < 1 - both / reader < 0.045
        if row["batch"] <= 8 or row["routing"] == "uniform":
            assert both < min(oea, reader)
        else:
            assert oea < min(both, reader)


def test_routers_of_two_ranks(document: list[str]) -> None:
    rows = rows_of("router_ranks.json")
    assert all(row["same"] for row in rows)

    def shown(us: float | None) -> str:
        return "-" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"

    for row in rows:
        if (row["tokens"], row["collective"]) == (16, "peer"):
            asked = [row.get(f"{form}: {kind}") for kind in ("host", "graph") for form in ("operations", "kernels")]
            assert f"| {row['router']} | {' | '.join(map(shown, asked))} |" in document
