"""The results of a run: metrics of the measured loads and times, beside what a replay predicts."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from epsim.cost.layer_time import LayerTiming
from epsim.policies.apply import bind
from epsim.policies.copies import Copies
from epsim.policies.load import Load
from epsim.results import ResultsData
from epsim.runtime.beats import FAULT
from epsim.runtime.job import Job
from epsim.runtime.phases import LAYER_PHASES
from epsim.score.block import StackScore, score_block
from epsim.score.collect import ScoredStacks
from epsim.score.metrics import Values, layer_metrics
from epsim.score.statistics import Floats
from epsim.score.summary import StackSummary
from epsim.traces.trace import TokenBlock

MEASURED_KEYS = ("bytes_read", "layer_time_us", "throughput_gain")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured, and what a replay predicts for the same steps.

    measured, predicted: the entries `scored`, `stacks` and `verdict` of results.json. differing: for each stack,
    step and layer whose measured loads are not exactly those of the replay, a text that says where and what they are.
    """

    measured: ResultsData
    predicted: ResultsData
    differing: list[str]

    @property
    def note(self) -> str:
        """Whether the measured loads are those of the replay, in words."""
        if not self.differing:
            return "Measured loads are those of a replay, integer for integer, in every step, layer and rank."
        return (
            f"measured loads are not those of a replay, which is a fault of a policy or of epsim "
            f"({len(self.differing)} differences by stack, step and layer): {self.differing[0]}"
        )


def print_note(run: Mapping[str, Any]) -> None:
    """Prints the note of the entry `run` of results.json. If loads differ from the replay's, prints it on stderr and
    exits with code 1."""
    if run["equals_replay"]:
        print(run["note"])
        return
    print(f"epsim: {run['note']}", file=sys.stderr)
    sys.exit(FAULT)


def measure(
    table: pa.Table,
    job: Job,
    blocks: Iterable[Sequence[TokenBlock]],
    weight_bytes: int,
    seed: int,
    timing: LayerTiming | None = None,
) -> Measured:
    """Scores what a run measured, and what a replay predicts for the same tokens and placements.

    table: telemetry of all ranks (`telemetry.joined`). blocks: the tokens of the run's steps, one block for each stack.
    The blocks are one object if a trace gave the experts, and differ if a router chose them. weight_bytes: bytes of one
    element of an expert's weights. timing: the model that predicts times; None for none. Raises ValueError if rows of
    the telemetry are missing.
    """
    tile = 0 if timing is None else timing.experts.tile
    setting = dataclasses.replace(job.setting, rows=timing is not None, tile=tile)
    copies: dict[str, Copies] = {}
    bound_stacks = [bind(entry.stack, entry.placement, setting, copies) for entry in job.stacks]
    measured, predicted = (
        ScoredStacks(
            [
                StackSummary(entry.name, entry.stack, (*entry.notes, *bound.notes), job.num_steps)
                for entry, bound in zip(job.stacks, bound_stacks, strict=True)
            ],
            seed,
        )
        for _ in range(2)
    )
    phases: list[list[Floats]] = [[] for _ in bound_stacks]
    differing: list[str] = []
    all_steps = table["step"].to_numpy()
    for stack_blocks in blocks:
        steps, rows = stack_blocks[0].steps, table.slice(0, 0)
        if len(steps):
            low, high = np.searchsorted(all_steps, [steps[0], steps[-1] + 1]).tolist()
            rows = table.slice(low, high - low)
        replayed = score_block(stack_blocks, bound_stacks, timing)
        predicted.add(replayed.stacks, replayed.seen)
        scores: list[StackScore] = []
        first_times: Floats | None = None
        for number, (prediction, stack) in enumerate(zip(replayed.stacks, job.stacks, strict=True)):
            stack_rows = rows.filter(pc.equal(rows["stack"], number))
            columns = _Columns(stack_rows, len(steps), len(job.layers), stack.placement.num_ranks)
            load, times = columns.load(prediction.load, job.shape.shared_cost), columns.layer_times()
            first_times = times if first_times is None else first_times
            metrics = layer_metrics(load, prediction.optimum, job.shape.has_shared)
            metrics |= _timed(columns, times, first_times, job, weight_bytes)
            scores.append(StackScore(load, prediction.optimum, metrics))
            phases[number].append(columns.phases())
            served, replayed_served = (
                torch.stack((each.routed, each.shared_tokens.to(torch.int64)), -1) for each in (load, prediction.load)
            )
            wrong = (served != replayed_served).any(-1)
            for step, layer in wrong.any(-1).nonzero().tolist():
                rank = int(wrong[step, layer].to(torch.int8).argmax())
                (routed, shared), replay_loads = (x[step, layer, rank].tolist() for x in (served, replayed_served))
                where = f"stack {stack.name or stack.stack}, step {steps[step]}, layer {job.layers[layer]}, rank {rank}"
                differing.append(
                    f"{where} served {routed} routed assignments and {shared} shared-expert tokens, "
                    f"but {replay_loads[0]} and {replay_loads[1]} in the replay"
                )
        measured.add(scores, replayed.seen)
    placements = [stack.placement for stack in job.stacks]
    ours, theirs = measured.results(placements, measured=True), predicted.results(placements)
    for entry, predicted_entry, stack_phases in zip(ours["stacks"], theirs["stacks"], phases, strict=True):
        entry["phases_us"] = _phase_statistics(np.concatenate(stack_phases))
        entry["predicted"] = {key: value["mean"] for key, value in predicted_entry["metrics"].items()}
    return Measured(ours, theirs, differing)


class _Columns:
    """One stack's rows of a block as arrays [S, L, R]."""

    def __init__(self, rows: pa.Table, num_steps: int, num_layers: int, num_ranks: int) -> None:
        self._rows, self._shape = rows, (num_steps, num_layers, num_ranks)
        if rows.num_rows != num_steps * num_layers * num_ranks:
            raise ValueError(f"telemetry has {rows.num_rows} rows instead of {self._shape} (steps, layers, ranks)")

    def __getitem__(self, name: str) -> Floats:
        return np.array(self._rows[name].to_numpy()).reshape(self._shape)

    def load(self, predicted: Load, shared_cost: float) -> Load:
        """What the ranks served. The real-valued split is the replay's, because it cannot be measured."""

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

    def phases(self) -> Floats:
        """[S, L, R, phases] microseconds."""
        return np.stack([self[f"{phase}_us"] for phase in LAYER_PHASES], -1)

    def layer_times(self) -> Floats:
        """[S, L] microseconds of the slowest rank."""
        slowest: Floats = self.phases().sum(-1).max(-1)
        return slowest


def _timed(columns: _Columns, times: Floats, first: Floats, job: Job, weight_bytes: int) -> dict[str, Values]:
    shape = job.shape
    routed, shared = (
        3 * shape.hidden * width * weight_bytes for width in (shape.intermediate, shape.shared_intermediate)
    )
    read = columns["active"] * routed + (columns["shared_tokens"] > 0) * shared
    busy = columns["assignments"].sum(-1) > 0
    nan = np.nan

    def where_busy(values: Floats) -> torch.Tensor:
        return torch.from_numpy(np.where(busy, values, nan))

    gain = np.where(busy.any(-1), first.sum(-1) / times.sum(-1) - 1, nan)
    values: dict[str, Values] = {
        "bytes_read": where_busy(read.max(-1).astype(np.float64)),
        "layer_time_us": where_busy(times),
        "throughput_gain": torch.from_numpy(gain),
    }
    if shape.has_shared:
        values |= {f"routed_{key}": "measured for routed and shared experts together" for key in MEASURED_KEYS}
    return values


def _phase_statistics(phases: Floats) -> dict[str, dict[str, float]]:
    """Statistics over steps and layers of the slowest rank's phases. phases [S, L, R, phases]."""
    slowest = phases.max(2)
    statistics = {}
    for number, phase in enumerate(LAYER_PHASES):
        values = slowest[..., number]
        p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        ends = {"mean": float(values.mean()), "max": float(values.max())}
        statistics[phase] = {"mean": ends["mean"], "p50": p50, "p95": p95, "p99": p99, "max": ends["max"]}
    return statistics
