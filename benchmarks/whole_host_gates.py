"""The time model's gates on the layers that benchmarks/whole_host.py ran: predicted beside measured, nothing fitted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gates import ORDERED, TELLING, Gate, call_gate, layer_gate

MOVED = ("dispatch", "experts", "combine")


def gates_of(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Empty where nothing was predicted."""
    found: list[Gate] = []
    for part in ("layers-deep_ep", "layers-torch", "oea"):
        cases = [row for row in parts.get(part, {}).get("rows", []) if "predicted_us" in row.get("stacks", [{}])[0]]
        for exchange in sorted({case["exchange"] for case in cases}):
            chosen = [case for case in cases if case["exchange"] == exchange]
            found += _of(f"{part.removesuffix('-' + exchange)}, {exchange}", chosen)
    found.sort(key=lambda gate: gate.number)
    return [_flat(gate) for gate in found]


def _of(what: str, cases: list[dict[str, Any]]) -> Iterator[Gate]:
    stacks = [stack for case in cases for stack in case["stacks"]]
    for name, phases in (("exchange", ("dispatch", "combine")), ("slowest rank's experts", ("experts",))):
        ratios = [
            sum(s["predicted_us"][p] for p in phases) / max(sum(s["phases_us"][p] for p in phases), 1e-9)
            for s in stacks
        ]
        yield call_gate(f"{what}: {name}", ratios)
    ratios = [sum(s["predicted_us"][p] for p in MOVED) / sum(s["phases_us"][p] for p in MOVED) for s in stacks]
    yield layer_gate(f"{what}: layers called eagerly, without router and balance", ratios)
    graphs = [s for s in stacks if "graph_us" in s]
    if graphs:
        note = "the router is in the graph, and not predicted"
        ratios = [sum(s["predicted_us"].values()) / s["graph_us"] for s in graphs]
        yield layer_gate(f"{what}: whole layers in a CUDA graph", ratios, note)
    yield from _ranking(what, cases)


def _ranking(what: str, cases: list[dict[str, Any]]) -> Iterator[Gate]:
    right = pairs = 0
    for case in cases:
        times = [
            (sum(s["predicted_us"][p] for p in MOVED), sum(s["phases_us"][p] for p in MOVED)) for s in case["stacks"]
        ]
        for (mine, took), (others, theirs) in itertools.combinations(times, 2):
            if max(took, theirs) > (1 + TELLING) * min(took, theirs):
                pairs += 1
                right += (mine < others) == (took < theirs)
    if pairs:
        figures = {"ordered": right / pairs}
        yield Gate(3, f"{what}: stacks", pairs, figures, f"{ORDERED:.0%} of pairs", right / pairs >= ORDERED)


def _flat(gate: Gate) -> dict[str, Any]:
    row = asdict(gate)
    return {"gate": row.pop("number"), **{key: row[key] for key in ("what", "cases")}, **row.pop("figures"),
            **{key: row[key] for key in ("aim", "holds", "note")}}  # fmt: skip
