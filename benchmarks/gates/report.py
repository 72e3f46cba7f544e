"""Compares the predictions of the time model with measured and with published times. Each comparison is a gate.

    python benchmarks/gates.py [--out benchmarks/results/gates.json]

The model predicts from the tables in benchmarks/results/calibrated_h200, which `epsim calibrate` measured. The measured
times are those of experts on one GPU (gates_h200.json and gates_slices.json, by benchmarks/gates/measure.py) and of
whole layers on two GPUs (gates_layers.json, by benchmarks/gates/layers.py). The public tables are used too, if their
extra is installed. None of these times was used to fit the model. There are four kinds of gates, each with its limit:

1  single calls, of sizes that were not used to fit: median error at most 5%, 95th percentile at most 15%
2  whole layers: median error at most 7%
3  order of stacks: if the times of two stacks differ by more than 3%, the model must say which one is faster. It must
   be right for at least 95% of these pairs.
4  DeepEP's published times of its normal kernels on 8 to 64 ranks: error at most 15%

A gate whose error exceeds the limit is printed as `FAILS`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, script_parser, write

from epsim.cost.calibrated import ExchangeTable, load_calibration, read_table
from epsim.cost.curve import curve
from epsim.cost.experts_time import ExpertsTime
from epsim.machines.hardware import load_hardware
from epsim.models.spec import ModelSpec, load_model
from epsim.reproduce.deepep import TOLERANCE, published_exchange
from epsim.reproduce.held_out import MEDIAN, P95, held_out
from gates.gate import CALIBRATED, Gate, call_gate, layer_gate, ordered, ranking_gate
from gates.predicted import layer_gates

MODELS = ("deepseek-v3-bf16", "qwen3-30b-a3b", "gpt-oss-20b")


class Model:
    """The calibrated expert times of a model."""

    def __init__(self, name: str) -> None:
        calibration = load_calibration(str(CALIBRATED))
        self.spec: ModelSpec = load_model(name)
        table = calibration.table_for(self.spec)
        assert table is not None
        assert table.fit is not None
        # The slices were measured with grouped products for any number of rows, so the decode table is not used.
        self.experts = ExpertsTime(calibration.hardware, self.spec, table)

    def us(self, loads: Sequence[Sequence[float]], rows: Sequence[float] | None = None) -> np.ndarray[Any, Any]:
        """Microseconds of each rank. loads: of each rank's slots; rows: that each rank received."""
        counts = torch.tensor(loads, dtype=torch.float64)
        tiles = (counts / self.experts.tile).ceil().sum(1)
        received = None if rows is None else torch.tensor(rows, dtype=torch.float64)
        time = self.experts.us(counts.sum(1), (counts > 0).sum(1).double(), tiles, received)
        return time.numpy()


def expert_gates(measured: dict[str, Any], models: dict[str, Model]) -> Iterator[Gate]:
    for name, model in models.items():
        cells = [cell for cell in measured["cells"] if cell["model"] == name]
        ratios = [float(model.us([cell["loads"]])[0]) / cell["us"] for cell in cells]
        yield call_gate(f"experts of {name}, sizes and numbers of experts between the grid's", ratios)
    for name, model in models.items():
        cases = [case for case in measured["slices"] if case["model"] == name]
        if not cases:
            continue
        predicted = [model.us(case["loads"], case["rows"]) for case in cases]
        ratios = np.concatenate([us / np.array(case["us"]) for us, case in zip(predicted, cases, strict=True)])
        stacks, ranks = len({case["stack"] for case in cases}), cases[0]["ranks"]
        what = f"experts of {name}, the loads of each of {ranks} ranks under {stacks} stacks ({cases[0]['what']})"
        yield call_gate(what, ratios.tolist())
        slowest = [float(us.max()) / max(case["us"]) for us, case in zip(predicted, cases, strict=True)]
        yield layer_gate(f"slowest rank's experts of {name}, {ranks} ranks one after the other on one H200", slowest)


def slices_ranking(measured: dict[str, Any], models: dict[str, Model]) -> Gate:
    """Gate 3, for the experts of the slowest rank."""
    batches: dict[Any, list[tuple[float, float]]] = {}
    for case in measured["slices"]:
        key = (bool(case["apart"]), case["model"], case["ranks"], case["layer"], case["tokens"])
        predicted = float(models[case["model"]].us(case["loads"], case["rows"]).max())
        batches.setdefault(key, []).append((predicted, max(case["us"])))
    repeated, share = ordered([times for key, times in batches.items() if key[0]])
    note = f"of the {repeated} pairs measured repeatedly, {share:.1%} are in the right order; {_noise(measured)}"
    what = f"stacks by their slowest rank's experts, {len(batches)} batches on one H200"
    return ranking_gate(what, list(batches.values()), note)


def _noise(measured: dict[str, Any]) -> str:
    """The differences between passes of a measurement, and between the times of equal loads under several stacks."""
    passes = [one for case in measured["slices"] for one in case["apart"]]
    times: dict[Any, list[float]] = {}
    for case in measured["slices"]:
        for load, rows, us in zip(case["loads"], case["rows"], case["us"], strict=True):
            times.setdefault((case["model"], tuple(load), rows), []).append(us)
    apart = [max(us) / min(us) - 1 for us in times.values() if len(us) > 1]
    return (
        f"repeated passes of a measurement differ by {np.median(passes):.1%} (median of largest / smallest - 1); the "
        f"times of {len(apart)} loads measured twice differ by {np.median(apart):.1%} (median) to {max(apart):.1%}; "
        "the pairs in the wrong order are of the smallest batches"
    )


def exchange_gates(folder: Path) -> Iterator[Gate]:
    """Every other size of the calibration's tables, predicted from the others. Dispatch and combine are added, because
    combine was measured as the time of both minus that of dispatch."""
    for path in sorted(folder.glob("exchange-*-deep_ep-*.json")):
        table = read_table(path)
        assert isinstance(table, ExchangeTable)
        number = len(table.dispatch_bytes)
        held = list(range(1, number - 1, 2))
        kept = [place for place in range(number) if place not in held]
        predicted, measured = 0.0, 0.0
        for sizes, times in ((table.dispatch_bytes, table.dispatch_us), (table.combine_bytes, table.combine_us)):
            at = torch.tensor([sizes[place] for place in held], dtype=torch.float64)
            predicted += curve([sizes[place] for place in kept], [times[place] for place in kept], at).numpy()
            measured += np.array([times[place] for place in held])
        what = f"deep_ep in a CUDA graph on {table.ranks} H200s, rows of {table.model}, every other size"
        yield call_gate(what, (predicted / measured).tolist())


def published_gate() -> Gate:
    published = published_exchange(load_hardware("h800"), load_model("deepseek-v3"))
    figures = [one for one in published if one.kernels == "normal"]
    worst = max(abs(one.error) for one in figures)
    what, aim = "DeepEP's published normal kernels, 8 to 64 ranks", f"within {TOLERANCE:.0%}"
    return Gate(4, what, len(figures), {"worst": worst}, aim, worst <= TOLERANCE)


def public_gates() -> Iterator[Gate]:
    try:
        checks = held_out("h200", load_hardware("h200"), load_model("deepseek-v3"))
    except ValueError as error:
        print(f"not checked: {error}")
        return
    for one in checks:
        figures = {"median": one.median, "p95": one.p95}
        aim = f"median {MEDIAN:.0%}, p95 {P95:.0%}"
        yield Gate(1, f"public tables: {one.what}", one.sizes, figures, aim, one.holds)


def main(words: list[str]) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    measured = json.loads((RESULTS / "gates_h200.json").read_text())
    measured |= {"slices": json.loads((RESULTS / "gates_slices.json").read_text())["slices"]}
    layers = json.loads((RESULTS / "gates_layers.json").read_text())
    models = {load_model(name).name: Model(name) for name in MODELS}
    gates = [*expert_gates(measured, models), *exchange_gates(CALIBRATED), *public_gates()]
    gates += [*layer_gates(layers["rows"]), slices_ranking(measured, models), published_gate()]
    gates.sort(key=lambda gate: gate.number)
    for gate in gates:
        shown = ", ".join(f"{name} {value:.1%}" for name, value in gate.figures.items())
        result = "holds " if gate.holds else "FAILS "
        print(f"{result} {gate.number}  {gate.what}: {shown} of {gate.cases} ({gate.aim})")
    if options.out:
        report = {"command": "python benchmarks/gates.py", "device": measured["device"], "date": measured["date"]}
        write(options.out, report | {"gates": [asdict(gate) for gate in gates]})
