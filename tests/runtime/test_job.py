"""The loop of one rank: the telemetry of a step, and the order of the stacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from epsim.launch.measured import measure
from epsim.launch.options import RunOptions
from epsim.launch.prepare import prepare
from epsim.runtime.beats import JobClock, place_file
from epsim.runtime.faults import Watch
from epsim.runtime.job import Place, RandomLayers, count_row, run_job
from epsim.runtime.layer import LayerRecord
from epsim.runtime.phases import LAYER_PHASES, PhaseError
from epsim.runtime.telemetry import COUNTS, TelemetryWriter, read_telemetry
from epsim.runtime.trial import Trial
from epsim.traces.store import StoredTrace

TraceMaker = Callable[..., StoredTrace]


def test_counts_of_a_row_by_hand() -> None:
    """Rank 1 of 4 (two nodes), two slots a rank: tokens on slots 0..7."""
    record = LayerRecord(
        step=5,
        layer=2,
        placement_version="x",
        chosen=torch.zeros(3, 2, dtype=torch.int64),
        ids=torch.tensor([[4, 1], [3, -1], [0, 5]]),
        weights=torch.ones(3, 2),
        shared_weight=torch.ones(3),
        scores=torch.ones(3, 8),
        physical=torch.tensor([[2, 3], [7, -1], [1, 0]]),
        shared_rank=torch.tensor([1, 0, -1]),
        received=torch.tensor([4, 0]),
        received_shared=torch.tensor(6),
    )
    row = count_row(record, 1, torch.tensor([0, 0, 1, 1]), slots_per_rank=2).tolist()
    counts = dict(zip(COUNTS, row))
    assert counts == {
        "tokens": 3,
        "assignments": 5,
        "routed": 4,
        "shared_tokens": 6,
        "active": 1,
        "left_rank": 3,  # slots 7, 1 and 0
        "left_node": 1,  # slot 7
        "shared_left_rank": 1,
        "shared_left_node": 0,
    }
    # Token 0 to rank 1 once for two experts and its shared one; token 1 to ranks 3 and 0; token 2 to rank 0 once.
    assert row[len(COUNTS) :] == [2, 1, 0, 1]


def start(trace: StoredTrace, out: Path, *policies: str, **more: Any) -> tuple[Any, Any, RandomLayers, JobClock, Watch]:
    prepared = prepare(RunOptions(str(trace.path), policies, model="tiny", out=out, **more), 1)
    job = prepared.job(prepared.plan())
    place = Place(0, 1, None, torch.device("cpu"), torch.float32)
    clock = JobClock(0, place.device, timed=True)
    return job, place, RandomLayers(job, place, clock), clock, Watch(None, 0, 1, clock, out)


def test_a_job_of_one_rank(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=8, tokens=20, shared_cost=0.5)
    job, place, model, clock, watch = start(trace, tmp_path, "contiguous", "eplb+lplb", "eplb+random", steps=4)
    told: list[tuple[int, int]] = []

    def teller(stack: int) -> Callable[[LayerRecord], None]:
        return lambda record: told.append((record.step, stack))

    for stack, layers in enumerate(model.layers):
        layers[0].observers.append(teller(stack))
    writer = TelemetryWriter(tmp_path, 0, 1, {})
    clock.leave_place(tmp_path)
    run_job(job, place, model, clock, watch, writer)
    writer.close()
    # One warm-up run, then each step begins with the next stack.
    assert told == [(4, 0), (4, 1), (4, 2), *((4 + i, (i + turn) % 3) for i in range(4) for turn in range(3))]
    assert watch.turn == 12
    assert place_file(tmp_path, 0).read_text().split() == ["idle", "7", "-1"]
    table = read_telemetry(tmp_path)
    assert table.num_rows == 4 * 3 * 2
    assert set(table["tokens"].to_pylist()) == {20}
    assert set(table["routed"].to_pylist()) == {40}
    assert all(min(table[f"{phase}_us"].to_pylist()) > 0 for phase in LAYER_PHASES)
    measured = measure(table, job, ([block] * len(job.stacks) for block in job.blocks(0)), 4, seed=0)
    assert measured.differing == []
    entry = measured.measured["stacks"][1]["metrics"]
    assert entry["peak"]["mean"] == 40 + 20 * 0.5
    total = sum(measured.measured["stacks"][1]["phases_us"][phase]["mean"] for phase in LAYER_PHASES)
    assert entry["layer_time_us"]["mean"] == pytest.approx(total)
    experts = 3 * 64 * 32 * 4
    active = entry["routed_active_experts"]["mean"]
    assert entry["bytes_read"]["mean"] == pytest.approx(active * experts + experts / 2)
    assert measured.measured["stacks"][0]["metrics"]["throughput_gain"]["mean"] == 0


def test_a_differing_load_is_found(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=4, tokens=20)
    job, place, model, clock, watch = start(trace, tmp_path, "contiguous", steps=4)
    writer = TelemetryWriter(tmp_path, 0, 1, {})
    run_job(job, place, model, clock, watch, writer)
    writer.close()
    table = read_telemetry(tmp_path)
    wrong = table["routed"].to_pylist()
    wrong[5] += 1  # step 2, layer 1
    table = table.set_column(table.schema.get_field_index("routed"), table.schema.field("routed"), pa.array(wrong))
    measured = measure(table, job, ([block] * len(job.stacks) for block in job.blocks(0)), 4, seed=0)
    [difference] = measured.differing
    assert difference == (
        "stack contiguous, step 2, layer 1, rank 0 served 41 routed assignments and 0 shared-expert tokens, "
        "but 40 and 0 in the replay"
    )


def test_scores_that_are_no_numbers_stop_the_job(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=4, tokens=20)
    job, place, model, clock, watch = start(trace, tmp_path, "contiguous", steps=4)
    writer = TelemetryWriter(tmp_path, 0, 1, {})
    with pytest.raises(PhaseError, match="rank 0, step 2, layer 0, phase route: router scores are not finite"):
        run_job(job, place, model, clock, watch, writer, trial=Trial("nan", 0, 2))
    assert set(read_telemetry(tmp_path)["step"].to_pylist()) == {0, 1}


def test_the_largest_seed_is_one(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=4, tokens=20)
    hidden = [start(trace, tmp_path, "eplb", seed=seed)[2]._hidden for seed in (2**63 - 1, 2**63 - 2, 0)]
    assert len({float(drawn.sum()) for drawn in hidden}) == 3


@pytest.mark.parametrize(
    "text", ["kill", "burn:rank=0,step=1", "kill:rank=0", "kill:rank=0,step=1,speed=3", "kill:rank=x,step=1"]
)
def test_trials_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="EPSIM_TRIAL_FAULT"):
        Trial.from_text(text)


def test_trial_from_text() -> None:
    assert Trial.from_text("sleep:rank=1,step=8,layer=2,phase=combine") == Trial("sleep", 1, 8, 2, "combine")
