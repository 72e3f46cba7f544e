"""The gates of the time model on whole layers, predicted and as benchmarks/gates/layers.py measured them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from epsim.cost.layer_time import LayerTiming, Phases
from epsim.launch.prepare import layer_timing
from epsim.models.shapes import LayerShape
from epsim.placement.base import Cluster
from epsim.policies.load import Load
from epsim.policies.stack import parse_stack
from epsim.traces.trace import TraceMeta
from gates.gate import CALIBRATED, Gate, call_gate, layer_gate, ranking_gate


@dataclass(frozen=True, slots=True)
class Case:
    """A stack's layer on some batches. us [batches]: medians over passes; apart [batches]: largest / smallest pass - 1;
    predicted: times [batches, 1]."""

    row: dict[str, Any]
    stack: str
    us: np.ndarray[Any, Any]
    apart: np.ndarray[Any, Any]
    predicted: Phases

    @property
    def total(self) -> np.ndarray[Any, Any]:
        return self.predicted.total[:, 0].numpy()


def timing_of(row: dict[str, Any], folder: str) -> LayerTiming:
    """The time model with which `epsim run` predicts such layers."""
    shape = LayerShape(**row["shape"])
    ranks = len(row["stacks"][0]["routed"][0])
    meta = TraceMeta("tokens", 1, shape.num_experts, shape.top_k, ranks, shape.shared_cost, shape.name)
    return layer_timing(folder, shape, meta, Cluster(ranks, 1, 0, 1))


def load_of(row: dict[str, Any], stack: dict[str, Any], tile: int) -> Load:
    """The loads as a replay of the batches gives them, [batches, 1, ranks]."""

    def given(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None]

    routed, shared, rows = given(stack["routed"]), given(stack["shared_tokens"]), given(stack["rank_rows"])
    shape, num_ranks = LayerShape(**row["shape"]), routed.shape[-1]
    tokens = torch.full(routed.shape[:2], float(row["tokens"] * num_ranks), dtype=torch.float64)
    return Load(
        routed=routed, routed_real=routed, shared=shared * shape.shared_cost, shared_tokens=shared, tokens=tokens,
        assignments=routed.sum(-1).to(torch.int64), active=given(stack["active"]), remote_rank=None, remote_node=None,
        shared_remote_rank=None, shared_remote_node=None, rounded=True, rank_rows=rows,
        node_rows=rows.sum(-1, keepdim=True), tiles=given(stack["tiles"][str(tile)]) if tile else None,
    )  # fmt: skip


def cases_of(rows: Sequence[dict[str, Any]], folder: str = str(CALIBRATED)) -> Iterator[Case]:
    for row in rows:
        timing = timing_of(row, folder)
        for stack in row["stacks"]:
            passes = np.array(stack["us"])
            load = load_of(row, stack, timing.experts.tile)
            predicted = timing.phases(load, parse_stack(stack["stack"]), stack["copies"])
            apart = passes.max(1) / passes.min(1) - 1
            yield Case(row, stack["stack"], np.median(passes, axis=1), apart, predicted)


def layer_gates(rows: Sequence[dict[str, Any]], folder: str = str(CALIBRATED)) -> Iterator[Gate]:
    cases = list(cases_of(rows, folder))
    exchange, experts = [], []
    for case in cases:
        if case.stack == case.row["parts_of"]:
            parts, phases = case.row["parts"], case.predicted
            exchange.append(float((phases.dispatch + phases.combine)[0, 0]) / parts["exchange"])
            experts.append(float(phases.experts[0, 0]) / parts["experts"])
    ranks = len(rows[0]["stacks"][0]["routed"][0])
    yield call_gate(f"exchange of layers on {ranks} H200s, measured separately", exchange)
    yield call_gate(f"slowest rank's experts of layers on {ranks} H200s, measured separately", experts)
    for what, chosen in _by_source(cases).items():
        yield layer_gate(f"whole layers in a CUDA graph on {ranks} H200s, deep_ep: {what}", _ratios(chosen))
    yield layer_gate(f"whole layers in a CUDA graph on {ranks} H200s, deep_ep: all of these", _ratios(cases))
    yield _ranking(cases, ranks)


def _by_source(cases: Sequence[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        shape = case.row["shape"]
        where = f"{case.row['what']}, experts of {shape['hidden']} x {shape['intermediate']}"
        found.setdefault(where, []).append(case)
    return found


def _ratios(cases: Sequence[Case]) -> list[float]:
    return np.concatenate([case.total / case.us for case in cases]).tolist()


def _ranking(cases: Sequence[Case], ranks: int) -> Gate:
    batches: list[list[tuple[float, float]]] = []
    for _, group in itertools.groupby(cases, key=lambda case: id(case.row)):
        stacks = [zip(case.total.tolist(), case.us.tolist(), strict=True) for case in group]
        batches += [list(times) for times in zip(*stacks, strict=True)]
    apart = np.concatenate([case.apart for case in cases])
    note = f"repeated passes of a measurement differ by {np.median(apart):.1%} (median of largest / smallest - 1)"
    return ranking_gate(f"stacks by whole layers in a CUDA graph on {ranks} H200s", batches, note)
