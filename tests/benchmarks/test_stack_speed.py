"""What docs/figures.md says in words about stacks and routers is what the results hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("oea(k0=4)", "topk-channels(0.178)", "oea(k0=4)+topk-channels(0.178)")


def rows_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results" / name).read_text())["rows"]
    return found


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


def test_routers_of_two_ranks() -> None:
    rows = rows_of("router_ranks.json")
    assert len(rows) == 21
    assert all(row["same"] for row in rows)
