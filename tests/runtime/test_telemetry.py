"""Telemetry: finished steps are on disk, even if the process dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epsim.runtime.phases import LAYER_PHASES
from epsim.runtime.telemetry import COUNTS, TelemetryWriter, described, rank_file, read_rank, read_telemetry

JOB = {"stacks": ["eplb"], "seed": 3}


def rows(step: int, rank: int, stacks: int = 2, layers: int = 3, ranks: int = 4) -> dict[str, Any]:
    """Rows in which every value encodes its position."""
    number = stacks * layers
    made: dict[str, Any] = {
        "step": np.full(number, step),
        "stack": np.repeat(np.arange(stacks), layers).astype(np.int16),
        "layer": np.tile(np.arange(layers), stacks).astype(np.int32),
        "rank": np.full(number, rank, dtype=np.int32),
        "rows_to": (np.arange(number * ranks).reshape(number, ranks) + step).astype(np.int32),
    }
    made |= {name: np.arange(number) + 1000 * place + step for place, name in enumerate(COUNTS)}
    return made | {f"{phase}_us": np.full(number, 1.5 * place + step) for place, phase in enumerate(LAYER_PHASES)}


def stream(folder: Path, rank: int) -> Path:
    return rank_file(folder, rank).with_suffix(".arrows")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    for rank in range(2):
        writer = TelemetryWriter(tmp_path, rank, 4, JOB)
        for step in (7, 8):
            writer.append(rows(step, rank))
        writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.parquet", "rank-00001.parquet"]
    table = read_telemetry(tmp_path)
    assert described(table) == JOB
    assert table.num_rows == 2 * 2 * 6
    order = list(zip(*(table[name].to_pylist() for name in ("step", "stack", "layer", "rank"))))
    assert order == sorted(order)
    one = [row for row in table.to_pylist() if (row["step"], row["rank"], row["stack"], row["layer"]) == (8, 1, 1, 2)]
    assert one == [
        {"step": 8, "stack": 1, "layer": 2, "rank": 1, "rows_to": [28, 29, 30, 31]}
        | {name: 5 + 1000 * place + 8 for place, name in enumerate(COUNTS)}
        | {f"{phase}_us": 1.5 * place + 8 for place, phase in enumerate(LAYER_PHASES)}
    ]


@pytest.mark.parametrize("cut", [1, 100, 700])
def test_a_step_cut_short_is_left_out(tmp_path: Path, cut: int) -> None:
    writer = TelemetryWriter(tmp_path, 0, 4, JOB)
    for step in range(3):
        writer.append(rows(step, 0))
    os.truncate(stream(tmp_path, 0), stream(tmp_path, 0).stat().st_size - cut)
    assert sorted(set(read_rank(tmp_path, 0)["step"].to_pylist())) == [0, 1]


def test_only_steps_that_all_ranks_finished_are_joined(tmp_path: Path) -> None:
    for rank, steps in ((0, 3), (1, 2), (2, 4)):
        writer = TelemetryWriter(tmp_path, rank, 4, JOB)
        for step in range(steps):
            writer.append(rows(step, rank))
    table = read_telemetry(tmp_path)
    assert sorted(set(table["step"].to_pylist())) == [0, 1]
    assert table.num_rows == 2 * 3 * 6


@pytest.mark.parametrize("closed", [False, True])
def test_a_restart_keeps_what_came_before_its_first_step(tmp_path: Path, closed: bool) -> None:
    """A rank that had finished is restarted with the others."""
    writer = TelemetryWriter(tmp_path, 0, 4, JOB)
    for step in range(4):
        writer.append(rows(step, 0))
    if closed:
        writer.close()
    again = TelemetryWriter(tmp_path, 0, 4, JOB, first_step=2)
    again.append(rows(2, 9))
    again.close()
    table = read_rank(tmp_path, 0)
    assert list(dict.fromkeys(zip(table["step"].to_pylist(), table["rank"].to_pylist()))) == [(0, 0), (1, 0), (2, 9)]


@pytest.mark.parametrize("closed", [False, True])
def test_a_restart_that_fails_loses_no_finished_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    writer = TelemetryWriter(tmp_path, 0, 4, JOB)
    for step in range(4):
        writer.append(rows(step, 0))
    if closed:
        writer.close()
    full = os.open("/dev/full", os.O_WRONLY)
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777: full if flags & os.O_WRONLY else real(path, flags))
    with pytest.raises(OSError, match="no space left on device"):
        TelemetryWriter(tmp_path, 0, 4, JOB, first_step=2)
    monkeypatch.undo()
    assert set(read_telemetry(tmp_path)["step"].to_pylist()) == {0, 1, 2, 3}


def test_full_disk_is_told_and_finished_steps_stay(tmp_path: Path) -> None:
    writer = TelemetryWriter(tmp_path, 0, 4, JOB)
    writer.append(rows(0, 0))
    full = os.open("/dev/full", os.O_WRONLY)
    kept, writer._file = writer._file, full
    with pytest.raises(
        OSError, match=r"rank-00000.arrows: cannot be written: no space left on device; earlier finished steps"
    ):
        writer.append(rows(1, 0))
    os.close(kept)
    os.close(full)
    assert set(read_rank(tmp_path, 0)["step"].to_pylist()) == {0}


def test_what_is_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no telemetry"):
        read_telemetry(tmp_path)
    rank_file(tmp_path, 0).write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match="not telemetry, or damaged"):
        read_telemetry(tmp_path)
