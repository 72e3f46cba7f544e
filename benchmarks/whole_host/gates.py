"""The gates of the time model on the layers that benchmarks/whole_host.py ran, which no fit has seen.

The model predicts a device's time. Layers in CUDA graphs are compared whole. Of layers that are called eagerly, only
the experts are compared, and only if their host needs less than half as long to start them (`host_us`, measured). NCCL
waits for its host in every call, and a router policy on few tokens waits for launches: both are left out.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gates.gate import Gate, call_gate, layer_gate, ranking_gate

HOST_SHARE = 0.5


def gates_of(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The gates as rows; none if nothing was predicted."""
    found: list[Gate] = []
    for exchange in ("deep_ep", "torch"):
        rows = parts.get(f"layers-{exchange}", {}).get("rows", [])
        found += _of(exchange, [row for row in rows if "predicted_us" in row.get("stacks", [{}])[0]])
    found.sort(key=lambda gate: gate.number)
    return [_flat(gate) for gate in found]


def _of(exchange: str, cases: list[dict[str, Any]]) -> Iterator[Gate]:
    ratios = [
        stack["predicted_us"]["experts"] / stack["phases_us"]["experts"]
        for case in cases
        for stack in case["stacks"]
        if case["host_us"]["experts"] < HOST_SHARE * stack["phases_us"]["experts"]
    ]
    if ratios:
        yield call_gate(f"layers, {exchange}: slowest rank's experts, called, whose host is not the limit", ratios)
    graphs = [s for case in cases for s in case["stacks"] if "graph_us" in s]
    if graphs:
        ratios = [sum(s["predicted_us"].values()) / s["graph_us"] for s in graphs]
        note = "" if all("route" in s["predicted_us"] for s in graphs) else "some routers were not measured"
        yield layer_gate(f"layers, {exchange}: whole layers in a CUDA graph", ratios, note)
        each = [[s for s in case["stacks"] if "graph_us" in s] for case in cases]
        times = [[(sum(s["predicted_us"].values()), s["graph_us"]) for s in stacks] for stacks in each]
        gate = ranking_gate(f"layers, {exchange}: stacks by whole layers in a CUDA graph", times)
        if gate.cases:
            yield gate


def _flat(gate: Gate) -> dict[str, Any]:
    row = asdict(gate)
    return {"gate": row.pop("number"), **{key: row[key] for key in ("what", "cases")}, **row.pop("figures"),
            **{key: row[key] for key in ("aim", "holds", "note")}}  # fmt: skip
