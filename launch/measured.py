"""results.json out of telemetry: the replay's own keys with measured loads and times, beside what a replay predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from epsim.cost.layer_time import LayerTiming
from epsim.kernels.split import prepare, solve_peak
from epsim.policies.apply import BoundStack, bind
from epsim.policies.load import Load
from epsim.results import Results
from epsim.runtime.job import Job
from epsim.runtime.phases import PHASES
from epsim.score.metrics import Values, layer_metrics
from epsim.score.statistics import BlockBootstrap
from epsim.score.steps import ScoredSteps, add_copies
from epsim.score.summary import StackSummary, tied_with_best
from epsim.score.time_metrics import timed_metrics
from epsim.score.verdict import verdict
from epsim.traces.trace import TokenBlock

MEASURED_KEYS = ("bytes_read", "layer_time_us", "throughput_gain")


@dataclass(frozen=True, slots=True)
class Measured:
    """entries: a stack's part of results.json each, measured; predicted: the same from a replay of the same tokens
    under the same placements. scored: the entry of that name. differing: (stack, step, layer) whose loads are not the
    same whole numbers."""

    entries: list[Results]
    predicted: list[Results]
    scored: Results
    verdict: str
    predicted_verdict: str
    differing: list[tuple[str, int, int]]


@dataclass(slots=True)
class _Stack:
    bound: BoundStack
    measured: StackSummary
    predicted: StackSummary
    phases: list[np.ndarray[Any, Any]]
    times: list[np.ndarray[Any, Any]]


def measure(
    table: pa.Table,
    job: Job,
    blocks: Iterable[Sequence[TokenBlock]],
    weight_bytes: int,
    seed: int,
    timing: LayerTiming | None = None,
) -> Measured:
    """table: telemetry of all ranks (`telemetry.joined`). blocks: the tokens of the same steps, as the ranks had them,
    of each stack: all the same where a trace told the experts, each its own where a router chose them.

    weight_bytes: of one element of an expert's weights. timing: by which times are predicted. Raises ValueError where
    the telemetry lacks rows.
    """
    shape = job.shape
    stacks = []
    tile = 0 if timing is None else timing.experts.tile
    setting = dataclasses.replace(job.setting, rows=timing is not None, tile=tile)
    for of_job in job.stacks:
        bound = bind(of_job.stack, of_job.placement, setting)
        made = [StackSummary(of_job.name, of_job.stack, bound.notes, job.num_steps) for _ in range(2)]
        stacks.append(_Stack(bound, made[0], made[1], [], []))
    differing: list[tuple[str, int, int]] = []
    num_steps = 0
    steps = ScoredSteps()
    first_times: list[np.ndarray[Any, Any]] = []
    first_us: torch.Tensor | None = None
    for of_stacks, rows in _aligned(table, blocks):
        num_steps += len(of_stacks[0].steps)
        steps.add(of_stacks[0].to_counts(shape.num_experts).counts)
        for number, (stack, of_job, block) in enumerate(zip(stacks, job.stacks, of_stacks, strict=True)):
            part = rows.filter(pc.equal(rows["stack"], number))
            columns = _Columns(part, len(block.steps), len(job.layers), of_job.placement.num_ranks)
            predicted = stack.bound.load(block)
            optimum = _optimum(stack.bound, predicted, block)
            load = columns.load(predicted, shape.shared_cost)
            shared = shape.has_shared
            times = columns.layer_times()
            if number == 0:
                first_times.append(times)
            metrics = layer_metrics(load, optimum, shared) | _timed(columns, times, first_times[-1], job, weight_bytes)
            stack.measured.add(metrics, load.total.double(), load.tokens)
            replayed, phases = layer_metrics(predicted, optimum, shared), None
            if timing is not None:
                timed = (timing, predicted, of_job.stack, stack.bound.copies.redundant)
                values, step_us, phases = timed_metrics(*timed, shared, None if number == 0 else first_us)
                first_us = step_us if number == 0 else first_us
                replayed = replayed | values
            stack.predicted.add(replayed, predicted.total.double(), predicted.tokens, phases)
            stack.phases.append(columns.phases())
            same = (load.routed == predicted.routed) & (load.shared_tokens == predicted.shared_tokens)
            for step, layer in (~same.all(-1)).nonzero().tolist():
                differing.append((of_job.name or str(of_job.stack), int(block.steps[step]), job.layers[layer]))
    bootstrap = BlockBootstrap(num_steps, seed)
    measured, predicted_entries = ([getattr(s, kind) for s in stacks] for kind in ("measured", "predicted"))
    entries = [summary.entry(bootstrap, measured[0]) for summary in measured]
    for entry, stack in zip(entries, stacks, strict=True):
        entry["phases_us"] = _phase_statistics(np.concatenate(stack.phases))
    replayed_entries = [summary.entry(bootstrap, predicted_entries[0]) for summary in predicted_entries]
    scored = steps.entry(measured[0].detail.stretches)
    for side in (entries, replayed_entries):
        add_copies(side, [of_job.placement for of_job in job.stacks], scored)
    for entry, replayed in zip(entries, replayed_entries, strict=True):
        entry["predicted"] = {key: value["mean"] for key, value in replayed["metrics"].items()}
    return Measured(
        entries,
        replayed_entries,
        scored,
        verdict(entries, tied_with_best(entries, measured, bootstrap)),
        verdict(replayed_entries, tied_with_best(replayed_entries, predicted_entries, bootstrap)),
        differing,
    )


def _aligned(
    table: pa.Table, blocks: Iterable[Sequence[TokenBlock]]
) -> Iterator[tuple[Sequence[TokenBlock], pa.Table]]:
    """The stacks' blocks of some steps with the rows of these."""
    steps = table["step"].to_numpy()
    for of_stacks in blocks:
        block = of_stacks[0]
        low, high = (
            np.searchsorted(steps, [block.steps[0], block.steps[-1] + 1]).tolist() if len(block.steps) else (0, 0)
        )
        yield of_stacks, table.slice(low, high - low)


class _Columns:
    """One stack's rows of a block as arrays [S, L, R]."""

    def __init__(self, rows: pa.Table, num_steps: int, num_layers: int, num_ranks: int) -> None:
        self._rows, self._shape = rows, (num_steps, num_layers, num_ranks)
        if rows.num_rows != num_steps * num_layers * num_ranks:
            raise ValueError(f"telemetry holds {rows.num_rows} rows where {self._shape} (steps, layers, ranks) are due")

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return np.array(self._rows[name].to_numpy()).reshape(self._shape)

    def load(self, predicted: Load, shared_cost: float) -> Load:
        """What the ranks served. Only the real-valued split before rounding is the replay's: no token shows it."""

        def sums(name: str) -> torch.Tensor:
            return torch.from_numpy(self[name].sum(-1))

        shared_tokens = torch.from_numpy(self["shared_tokens"])
        return dataclasses.replace(
            predicted,
            routed=torch.from_numpy(self["routed"]),
            shared_tokens=shared_tokens,
            shared=shared_tokens.double() * shared_cost,
            tokens=sums("tokens").double(),
            assignments=sums("assignments"),
            active=torch.from_numpy(self["active"]),
            remote_rank=sums("left_rank"),
            remote_node=sums("left_node"),
            shared_remote_rank=sums("shared_left_rank"),
            shared_remote_node=sums("shared_left_node"),
        )

    def phases(self) -> np.ndarray[Any, Any]:
        """[S, L, R, phases] microseconds."""
        return np.stack([self[f"{phase}_us"] for phase in PHASES], -1)

    def layer_times(self) -> np.ndarray[Any, Any]:
        """[S, L] microseconds of the slowest rank."""
        slowest: np.ndarray[Any, Any] = self.phases().sum(-1).max(-1)
        return slowest


def _timed(
    columns: _Columns, times: np.ndarray[Any, Any], first: np.ndarray[Any, Any], job: Job, weight_bytes: int
) -> dict[str, Values]:
    shape = job.shape
    routed, shared = (
        3 * shape.hidden * width * weight_bytes for width in (shape.intermediate, shape.shared_intermediate)
    )
    read = columns["active"] * routed + (columns["shared_tokens"] > 0) * shared
    busy = columns["assignments"].sum(-1) > 0
    nan = np.nan

    def where_busy(values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.where(busy, values, nan))

    gain = np.where(busy.any(-1), first.sum(-1) / times.sum(-1) - 1, nan)
    found: dict[str, Values] = {
        "bytes_read": where_busy(read.max(-1).astype(np.float64)),
        "layer_time_us": where_busy(times),
        "throughput_gain": torch.from_numpy(gain),
    }
    if shape.has_shared:
        found |= {f"routed_{key}": "measured for routed and shared experts together" for key in MEASURED_KEYS}
    return found


def _optimum(bound: BoundStack, load: Load, block: TokenBlock) -> torch.Tensor:
    placement = bound.copies.placement
    counts = load.counts  # after a router policy
    if counts is None:
        counts = torch.from_numpy(block.to_counts(placement.num_experts).counts)
    num_steps, num_layers, num_experts = counts.shape
    structure = prepare(placement.physical_to_logical, placement.num_ranks, num_experts)
    layer = torch.arange(num_layers).repeat(num_steps)
    return solve_peak(structure, counts.reshape(-1, num_experts), layer).bound.reshape(num_steps, num_layers)


def _phase_statistics(phases: np.ndarray[Any, Any]) -> dict[str, dict[str, float]]:
    """phases [S, L, R, phases] -> over steps and layers, each the slowest rank's."""
    slowest = phases.max(2)
    found = {}
    for number, phase in enumerate(PHASES):
        values = slowest[..., number]
        p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        found[phase] = {"mean": float(values.mean()), "p50": p50, "p95": p95, "p99": p99, "max": float(values.max())}
    return found
