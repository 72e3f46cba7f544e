"""Reads measured tables from the installed wheel aiconfigurator-core (extra `public-tables`); they are not bundled.

They are for DeepSeek-V3's shape in FP8 (hidden 7168, 256 experts of 2048, top-8): SGLang's masked grouped GEMMs on one
rank of 2 to 256 under even routing, and DeepEP's normal kernels on 1 to 8 nodes with 8 GPUs.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from epsim.cost.experts_time import ExpertsTime, ExpertTable
from epsim.machines.hardware import Hardware
from epsim.models.spec import ModelSpec

PACKAGE = "aiconfigurator_core"
SHAPE = (7168, 2048, 256, 8)


@dataclass(frozen=True, slots=True)
class ExpertPoint:
    """One measurement: assignments of a rank, its active experts, microseconds."""

    tokens: float
    active: float
    us: float


@dataclass(frozen=True, slots=True)
class ExchangePoint:
    """One measurement: tokens per rank, microseconds of dispatch and combine, without the exchange of counts."""

    tokens: float
    dispatch_us: float
    combine_us: float


def data_folder(device: str) -> Path:
    """The folder of a device's tables (`h100`, `h200`, `b200`) in the wheel. Raises ValueError if the wheel is not
    installed or has no tables of the device."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the public tables are not installed: pip install 'epsim[public-tables]'")
    folder = Path(next(iter(spec.submodule_search_locations))) / "systems" / "data" / f"{device.lower()}_sxm"
    if not folder.is_dir():
        raise ValueError(f"the public tables have no {device}: choose h100, h200 or b200")
    return folder


def expert_points(device: str) -> list[ExpertPoint]:
    """The measurements of the newest version of the table. Assignments fewer than experts go to one expert each."""
    experts, top_k = SHAPE[2:]
    points = []
    for row in _rows(data_folder(device), "moe/sglang", "wideep_generation_moe_perf.parquet"):
        shape = tuple(row[key] for key in ("hidden_size", "inter_size", "num_experts", "topk"))
        if row["distribution"] != "uniform" or shape != SHAPE:
            continue
        tokens, held = row["num_tokens"] * top_k / row["moe_ep_size"], experts / row["moe_ep_size"]
        points.append(ExpertPoint(tokens, min(held, tokens), row["latency"] * 1e3))
    return points


def exchange_points(device: str, nodes: int) -> list[ExchangePoint]:
    """The measurements with the most SMs, from the version that covers the most numbers of nodes. Raises ValueError if
    there are none."""
    rows = [
        row
        for row in _rows(data_folder(device), "comm/sglang", "wideep_deepep_normal_perf.parquet", most="node_num")
        if row["node_num"] == nodes and (row["hidden_size"], row["num_experts"], row["num_topk"]) == (7168, 256, 8)
    ]
    if not rows:
        raise ValueError(f"the public tables have no exchange on {nodes} nodes of {device}")
    sms = max(row["dispatch_sms"] for row in rows)
    return [
        ExchangePoint(row["num_token"], row["dispatch_transmit_us"], row["combine_transmit_us"])
        for row in sorted(rows, key=lambda row: row["num_token"])
        if row["dispatch_sms"] == row["combine_sms"] == sms
    ]


def expert_table(points: Sequence[ExpertPoint], hardware: Hardware, model: ModelSpec) -> ExpertTable:
    """A grid of the points whose number of active experts is a power of two. A cell without a point takes the ratio
    measured / roofline of the nearest size with the same number of experts."""
    roofline = ExpertsTime(hardware, model)
    columns: dict[float, dict[float, float]] = defaultdict(dict)
    for point in points:
        if math.log2(point.active).is_integer():
            columns[point.active][point.tokens / point.active] = point.us
    sizes = tuple(sorted({size for column in columns.values() for size in column}))
    active = tuple(sorted(columns))
    grid = []
    for size in sizes:
        row = []
        for experts in active:
            column = columns[experts]
            near = min(column, key=lambda known: abs(math.log(known / size)))
            row.append(column[near] * _roofline(roofline, size, experts) / _roofline(roofline, near, experts))
        grid.append(tuple(row))
    command = f"aiconfigurator-core {metadata.version('aiconfigurator-core')}, wideep_generation_moe_perf, even routing"
    return ExpertTable(hardware.name, command, model.compute, *SHAPE[:2], sizes, active, tuple(grid))


def _roofline(experts: ExpertsTime, per_expert: float, active: float) -> float:
    return float(experts.roofline(torch.tensor(per_expert * active).double(), torch.tensor(active).double()))


def _rows(folder: Path, under: str, name: str, most: str = "") -> list[dict[str, Any]]:
    """The rows of a file, from the newest version, or from the one with the most different values of the column `most`.
    Raises ValueError if there is no such file."""
    files = sorted((folder / under).glob(f"*/{name}"), key=lambda path: path.parent.name)
    if not files:
        raise ValueError(f"the public tables of {folder.name} lack {under}/*/{name}")
    tables: list[list[dict[str, Any]]] = [pq.read_table(file).to_pylist() for file in files]
    if most:
        tables.sort(key=lambda rows: len({row[most] for row in rows}))
    return tables[-1]
