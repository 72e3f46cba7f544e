"""Whom the watch blames, and whom it leaves alone."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from epsim.runtime.faults import Beat, JobClock, Watch


def beat_of(watch: Watch, state: str, turn: int, phase: str, step: int) -> Beat:
    watch.turn = turn
    watch.clock.enter(phase, step, 0)
    return dataclasses.replace(watch.beat(), state=state)  # type: ignore[arg-type]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(HashStore(), 1, 2, JobClock(1, torch.device("cpu")), tmp_path)


def look(watch: Watch, other: Beat, own: Beat) -> str | None:
    watch._known = {0: other, 1: own}
    watch._heard = watch._moved = dict.fromkeys((0, 1), time.monotonic())
    fault = watch._look()
    return fault.line if fault else None


@pytest.mark.parametrize("phase", ["telemetry", "idle", "results"])
def test_who_still_writes_the_last_step_is_not_ahead_of_who_is_done(watch: Watch, phase: str) -> None:
    done = beat_of(watch, "closing", 8, "results", 3)
    assert look(watch, done, beat_of(watch, "running", 8, phase, 3)) is None


@pytest.mark.parametrize(("turn", "phase"), [(8, "route"), (8, "dispatch"), (9, "telemetry")])
def test_who_works_on_a_step_that_another_does_not_take_part_in_is_told(watch: Watch, turn: int, phase: str) -> None:
    done = beat_of(watch, "closing", 8, "results", 3)
    line = look(watch, done, beat_of(watch, "running", turn, phase, 4))
    assert line is not None
    assert line.startswith(f"rank 0 finished after step 3, but rank 1 is in phase {phase}, step 4")


def test_a_rank_that_ends_before_the_first_step_is_told(watch: Watch) -> None:
    done = beat_of(watch, "closing", -1, "results", 0)
    line = look(watch, done, beat_of(watch, "running", -1, "dispatch", 0))
    assert line is not None
    assert "finished after step 0" in line
