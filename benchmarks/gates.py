"""The gates of the time model, from what was measured on H200s; none of the figures that a gate looks at was fitted.

    python benchmarks/gates.py [--out benchmarks/results/gates.json]

Experts: benchmarks/results/calibrated_h200 (epsim calibrate), against benchmarks/results/gates_h200.json
(benchmarks/gates_measure.py). Exchange and whole layers on two H200s: benchmarks/results/runtime.json. Public tables:
where the extra is installed. A gate that fails is shown as failed.

1  per call: median error at most 5%, p95 at most 15%, on sizes not used in the fit
2  per layer: median error at most 7%
3  ranking: of pairs of stacks whose slowest ranks differ by more than 3%, at least 95% in the right order
4  published: DeepEP's normal kernels on 8 to 64 ranks within 15%
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epsim.cost.calibrated import load_calibration
from epsim.cost.curve import curve
from epsim.cost.experts_time import ExpertsTime
from epsim.cost.hardware import load_hardware
from epsim.cost.model import ModelSpec, load_model
from epsim.reproduce.deepep import TOLERANCE, published_exchange
from epsim.reproduce.held_out import MEDIAN, P95, held_out

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("deepseek-v3-bf16", "qwen3-30b-a3b", "gpt-oss-20b")
LAYER, TELLING, ORDERED = 0.07, 0.03, 0.95

DENSE_ROWS = (
    "likely since the grid was measured with rows of 1.25 slots, as 16 ranks get them; on two ranks a row has 4.5, and "
    "their experts take less than predicted: rows are no term of the fit"
)
EAGER = "calls of more than 2 ms were timed one by one, the wait for their first launch (about 0.1 ms) included"


@dataclass(frozen=True, slots=True)
class Gate:
    """number: which of the gates; cases: of measurements compared; figures: name to value; aim: in words; note: what a
    reader should know of it, why it fails where it does."""

    number: int
    what: str
    cases: int
    figures: dict[str, float]
    aim: str
    holds: bool
    note: str = ""


def call_gate(what: str, ratios: Sequence[float]) -> Gate:
    errors = np.abs(np.asarray(ratios) - 1)
    figures = {"median": float(np.median(errors)), "p95": float(np.percentile(errors, 95))}
    holds = figures["median"] <= MEDIAN and figures["p95"] <= P95
    return Gate(1, what, len(errors), figures, f"median {MEDIAN:.0%}, p95 {P95:.0%}", holds)


def layer_gate(what: str, ratios: Sequence[float], note: str = "") -> Gate:
    errors = np.abs(np.asarray(ratios) - 1)
    figures = {"median": float(np.median(errors)), "p95": float(np.percentile(errors, 95))}
    return Gate(2, what, len(errors), figures, f"median {LAYER:.0%}", figures["median"] <= LAYER, note)


class Model:
    """The calibrated expert times of a model."""

    def __init__(self, name: str) -> None:
        calibration = load_calibration(str(RESULTS / "calibrated_h200"))
        self.spec: ModelSpec = load_model(name)
        table = calibration.table_for(self.spec)
        assert table is not None
        assert table.fit is not None
        self.experts = ExpertsTime(calibration.hardware, self.spec, table)

    def us(self, loads: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
        """loads: of each rank's slots -> microseconds a rank."""
        counts = torch.tensor(loads, dtype=torch.float64)
        tiles = (counts / self.experts.tile).ceil().sum(1)
        time: np.ndarray[Any, Any] = self.experts.us(counts.sum(1), (counts > 0).sum(1).double(), tiles).numpy()
        return time


def expert_gates(measured: dict[str, Any], models: dict[str, Model]) -> Iterator[Gate]:
    for name, model in models.items():
        cells = [cell for cell in measured["cells"] if cell["model"] == name]
        ratios = [float(model.us([cell["loads"]])[0]) / cell["us"] for cell in cells]
        yield call_gate(f"experts of {name}, sizes and numbers of experts between the grid's", ratios)
    for name, model in models.items():
        cases = [case for case in measured["slices"] if case["model"] == name]
        if not cases:
            continue
        ratios = np.concatenate([model.us(case["loads"]) / np.array(case["us"]) for case in cases]).tolist()
        stacks, ranks = len({case["stack"] for case in cases}), cases[0]["ranks"]
        yield call_gate(
            f"experts of {name}, what {stacks} stacks give each of {ranks} ranks ({cases[0]['what']})", ratios
        )
        slowest = [float(model.us(case["loads"]).max()) / max(case["us"]) for case in cases]
        yield layer_gate(
            f"slowest rank's experts of {name}, {ranks} ranks played one by one on one H200", slowest, EAGER
        )


def ranking_gate(measured: dict[str, Any], models: dict[str, Model]) -> Iterator[Gate]:
    right = pairs = 0
    batches: dict[Any, list[tuple[float, float]]] = {}
    for case in measured["slices"]:
        key = (case["model"], case["ranks"], case["layer"], case["tokens"])
        predicted = float(models[case["model"]].us(case["loads"]).max())
        batches.setdefault(key, []).append((predicted, max(case["us"])))
    for times in batches.values():
        for (mine, took), (others, theirs) in itertools.combinations(times, 2):
            if max(took, theirs) > (1 + TELLING) * min(took, theirs):
                pairs += 1
                right += (mine < others) == (took < theirs)
    share = right / pairs
    what = f"stacks by their slowest rank's experts, {len(batches)} batches on one H200"
    yield Gate(3, what, pairs, {"ordered": share}, f"{ORDERED:.0%} of pairs", share >= ORDERED, _noise(measured))


def _noise(measured: dict[str, Any]) -> str:
    """How far apart times of the very same loads are, measured under several stacks."""
    times: dict[Any, list[float]] = {}
    for case in measured["slices"]:
        for load, us in zip(case["loads"], case["us"], strict=True):
            times.setdefault((case["model"], tuple(load)), []).append(us)
    apart = [max(us) / min(us) - 1 for us in times.values() if len(us) > 1]
    return (
        f"each was measured once; {len(apart)} loads that came twice were {np.median(apart):.1%} (median) to "
        f"{max(apart):.1%} apart, and the slowest of 16 ranks has the largest of 16 such errors"
    )


def exchange_gates(runtime: dict[str, Any]) -> Iterator[Gate]:
    """Of three sizes the middle one is predicted from the others."""
    ratios = []
    by_sms: dict[int, dict[int, dict[str, float]]] = {}
    for row in runtime["parts"]["exchange"]:
        by_sms.setdefault(row["sms"], {})[row["tokens"]] = row
    for rows in by_sms.values():
        size = [rows[tokens]["received_mb"] for tokens in (128, 1024, 4096)]
        for way in ("dispatch", "combine"):
            times = []
            for tokens in (128, 1024, 4096):
                there = rows[tokens]["deep_ep_dispatch"]
                times.append(there if way == "dispatch" else rows[tokens]["deep_ep"] - there)
            predicted = curve([size[0], size[2]], [times[0], times[2]], torch.tensor([size[1]]).double())
            ratios.append(float(predicted) / times[1])
    yield call_gate("deep_ep on two H200s, 1,024 tokens from 128 and 4,096, by multiprocessors", ratios)


def layer_gates(runtime: dict[str, Any], model: Model) -> Iterator[Gate]:
    """DeepSeek-V3's layer with 224 experts on two H200s. Routing is drawn anew as benchmarks/runtime_common.py does, on
    another generator: the loads are alike, not the same."""
    parts = runtime["parts"]
    sms64 = {row["tokens"]: row for row in parts["exchange"] if row["sms"] == 64}
    phases = {row["tokens"]: row for row in parts["phases"]
              if (row["shape"], row["exchange"]) == ("deepseek-v3-layer", "deep_ep")}  # fmt: skip
    ratios = []
    for row in parts["graph"]:
        tokens = row["tokens"]
        experts = float(model.us(_two_ranks(tokens)).max())
        sizes = [float(number) for number in sms64]
        exchange = curve(sizes, [one["deep_ep_graph"] for one in sms64.values()], torch.tensor([tokens]).double())
        wanted = (row["stack"], 128, "peer")
        balance = next(
            one["graph"] for one in parts["balance"] if (one["stack"], one.get("tokens"), one["collective"]) == wanted
        )
        ratios.append((phases[128]["route"] + balance + float(exchange) + experts) / row["graph"])
    yield layer_gate(
        "whole layers in a CUDA graph on two H200s, DeepSeek-V3's with 224 experts, deep_ep", ratios, DENSE_ROWS
    )
    eager = []
    for tokens, row in phases.items():
        experts = float(model.us(_two_ranks(tokens)).max())
        total = sum(row[phase] for phase in ("balance", "dispatch", "experts", "combine"))
        known = row["balance"] + sms64[tokens]["deep_ep"]
        eager.append((known + experts) / total)
    yield layer_gate("the same called eagerly, without the router", eager, DENSE_ROWS)
    again = []
    for row in parts["slices"]:
        load = torch.tensor(row["loads"], dtype=torch.float64)
        predicted = model.experts.us(load, torch.full_like(load, 19.0)).numpy()
        again += (predicted / np.array(row["times"])).tolist()
    yield layer_gate("each of 16 ranks' experts in an earlier run, experts' own tokens not known", again)


def _two_ranks(tokens: int) -> list[list[int]]:
    """Loads of the 127 slots of two ranks, the shared expert's last, as benchmarks/runtime_parts.py places them."""
    from runtime_common import REDUNDANT, V3, placement_of, skewed_ids

    placement = placement_of("eplb", V3, 2, REDUNDANT[V3.name])
    ids = torch.cat([skewed_ids(V3, tokens, 400 + rank, torch.device("cpu")) for rank in range(2)])
    copies = torch.bincount(placement.physical_to_logical[0], minlength=V3.num_experts)
    counts = torch.bincount(ids.flatten(), minlength=V3.num_experts).double()
    share = (counts / copies)[placement.physical_to_logical[0]].round().to(torch.int64)
    return [[*half, tokens] for half in share.view(2, -1).tolist()]


def published_gate() -> Iterator[Gate]:
    figures = [
        one for one in published_exchange(load_hardware("h800"), load_model("deepseek-v3")) if one.kernels == "normal"
    ]
    worst = max(abs(one.error) for one in figures)
    yield Gate(4, "DeepEP's published normal kernels, 8 to 64 ranks", len(figures), {"worst": worst},
               f"within {TOLERANCE:.0%}", worst <= TOLERANCE)  # fmt: skip


def public_gates() -> Iterator[Gate]:
    try:
        checks = held_out("h200", load_hardware("h200"), load_model("deepseek-v3"))
    except ValueError as error:
        print(f"not checked: {error}")
        return
    for one in checks:
        figures = {"median": one.median, "p95": one.p95}
        yield Gate(
            1, f"public tables: {one.what}", one.sizes, figures, f"median {MEDIAN:.0%}, p95 {P95:.0%}", one.holds
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = json.loads((RESULTS / "gates_h200.json").read_text())
    runtime = json.loads((RESULTS / "runtime.json").read_text())
    models = {load_model(name).name: Model(name) for name in MODELS}
    gates = [*expert_gates(measured, models), *exchange_gates(runtime), *public_gates()]
    gates += [*layer_gates(runtime, models["DeepSeek-V3 in bf16"]), *ranking_gate(measured, models), *published_gate()]
    gates.sort(key=lambda gate: gate.number)
    for gate in gates:
        shown = ", ".join(f"{name} {value:.1%}" for name, value in gate.figures.items())
        print(
            f"{'holds ' if gate.holds else 'FAILS '} {gate.number}  {gate.what}: {shown} of {gate.cases} ({gate.aim})"
        )
    if options.out:
        report = {"command": "python benchmarks/gates.py", "device": measured["device"], "date": measured["date"]}
        options.out.write_text(json.dumps(report | {"gates": [asdict(gate) for gate in gates]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
