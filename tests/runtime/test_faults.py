"""Which ranks the watch reports as lost, and which it does not."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from epsim import stops
from epsim.runtime.beats import HELD, INTERVAL, SILENCE, STARVED, Beat, JobClock, Lookout, place_file, process_state
from epsim.runtime.faults import Watch


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
    fault = watch._verdict()
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


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(["sleep", "600"])
    yield running
    running.kill()
    running.wait()


def silent(watch: Watch, pid: int, seconds: float, machine: str | None = None) -> str | None:
    """The message about rank 0, a process with this id, after so many seconds without a beat."""
    now = time.monotonic()
    own = beat_of(watch, "running", 3, "balance", 1)
    watch._known = {0: dataclasses.replace(own, pid=pid, machine=own.machine if machine is None else machine), 1: own}
    watch._heard, watch._moved = {0: now - seconds, 1: now}, {0: now, 1: now}
    fault = watch._verdict()
    return fault.line if fault else None


def test_a_process_that_runs_may_be_kept_from_beating(watch: Watch, process: subprocess.Popen[bytes]) -> None:
    """A busy machine is no fault; silence that long is, and so it is on a machine that cannot be looked at."""
    assert silent(watch, process.pid, SILENCE + 1) is None
    assert silent(watch, process.pid, SILENCE - 1, machine="elsewhere") is None
    for line in (silent(watch, process.pid, STARVED + 1), silent(watch, process.pid, SILENCE + 1, machine="elsewhere")):
        assert line is not None
        assert line.startswith("rank 0 stopped answering in phase balance, step 1, layer 0")


def test_a_stopped_process_is_told_by_its_silence(watch: Watch, process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while process_state(process.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert silent(watch, process.pid, SILENCE - 1) is None
    assert silent(watch, process.pid, SILENCE + 1) is not None


def test_who_waits_with_the_interpreter_held_is_left_alone(watch: Watch, process: subprocess.Popen[bytes]) -> None:
    """It cannot beat; its place tells, which is further on than its last beat. Elsewhere, silence is a fault."""
    watch.holds = True
    assert silent(watch, process.pid, STARVED + 1) is not None
    watch._store = HashStore()  # the first fault written is the one that is reported
    place_file(watch.folder, 0).write_text("dispatch 1 0")
    assert silent(watch, process.pid, STARVED + 1) is None
    assert silent(watch, process.pid, HELD - 1, machine="elsewhere") is None
    line = silent(watch, process.pid, HELD + 1)
    assert line is not None
    assert line.startswith("rank 0 stopped answering in phase dispatch, step 1, layer 0")
    watch._store = HashStore()
    process.kill()
    process.wait()
    silent(watch, process.pid, 1)
    assert silent(watch, process.pid, 1) is not None


def test_who_hangs_while_another_waits_with_the_interpreter_held(watch: Watch) -> None:
    """Rank 0's last beat is of a place behind rank 1's, and it is not the one that hangs."""
    now = time.monotonic()
    behind = dataclasses.replace(beat_of(watch, "running", 3, "balance", 1), pid=os.getpid(), holds=True)
    own = dataclasses.replace(beat_of(watch, "running", 3, "dispatch", 1), count=100)
    watch._known, watch._still = {0: behind, 1: own}, {0: 0, 1: 100 - MANY}
    watch._heard, watch._moved = {0: now - 21, 1: now}, dict.fromkeys((0, 1), now - 21)
    fault = watch._verdict()
    assert fault is not None
    assert fault.line.startswith("rank 0 stopped answering in phase balance")  # without its position
    place_file(watch.folder, 0).write_text("dispatch 1 0")
    watch._store = HashStore()
    fault = watch._verdict()
    assert fault is not None
    assert fault.line.startswith("rank 1 hangs in phase dispatch, step 1, layer 0 for 20 s (rank 1 reports)")


def test_a_launcher_speaks_where_no_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = HashStore(), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    dead = Watch(store, 1, 2, JobClock(1, torch.device("cpu")), tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(os, "getpid", lambda: gone.pid)
    dead.clock.enter("dispatch", 4, 2)
    dead._beat()
    monkeypatch.undo()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lookout = Lookout(store, 2, tmp_path)
    for _ in range(1 + round(SILENCE / INTERVAL)):
        assert lookout.look() is None
        now += INTERVAL
    fault = lookout.look()
    assert fault is not None
    assert fault.line == "rank 1 stopped answering in phase dispatch, step 4, layer 2 (the launcher reports)"
    assert Lookout(store, 2, tmp_path).look() == fault
    assert (lookout.place_of(1), lookout.place_of(0)) == ("phase dispatch, step 4, layer 2", "phase setup")


def test_a_dead_process_is_told_at_the_second_look(watch: Watch, process: subprocess.Popen[bytes]) -> None:
    """Its last beat, which says that it has finished, may still arrive."""
    process.kill()
    deadline = time.monotonic() + 5
    while process_state(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert silent(watch, process.pid, 0.1) is None
    assert silent(watch, process.pid, 0.6) is not None


def hanging(watch: Watch, places: dict[int, tuple[str, bool]], beats: dict[int, int], seconds: float) -> str | None:
    """places: of each rank its phase in one layer and whether it waits for others; beats since it came there."""
    now = time.monotonic()
    found = {rank: beat_of(watch, "running", 3, phase, 1) for rank, (phase, _) in places.items()}
    watch._known = {rank: dataclasses.replace(beat, waiting=places[rank][1], count=100) for rank, beat in found.items()}
    watch._heard = dict.fromkeys(places, now)
    watch._moved = dict.fromkeys(places, now - seconds)
    watch._still = {rank: 100 - beats[rank] for rank in places}
    fault = watch._verdict()
    return fault.line if fault else None


MANY = round(20 / INTERVAL)


@pytest.mark.parametrize(
    ("places", "beats", "who"),
    [
        # Rank 1 hangs, rank 0 waits for it where it is, or beyond, at its GPU.
        ({0: ("combine", True), 1: ("combine", False)}, {0: MANY, 1: MANY}, "rank 1 hangs in phase combine"),
        ({0: ("idle", False), 1: ("combine", False)}, {0: MANY, 1: MANY}, "rank 1 hangs in phase combine"),
        ({0: ("dispatch", False), 1: ("route", False)}, {0: MANY, 1: MANY}, "rank 1 hangs in phase route"),
        # Nothing new of rank 0, whose place of long ago is behind rank 1's: nobody can be named yet.
        ({0: ("dispatch", True), 1: ("combine", False)}, {0: 2, 1: MANY}, None),
        ({0: ("combine", False), 1: ("combine", False)}, {0: MANY, 1: MANY}, "ranks 0, 1 hang in phase combine"),
        ({0: ("route", True), 1: ("idle", False)}, {0: MANY, 1: MANY}, "rank 0 hangs in phase route"),
    ],
)
def test_who_hangs(watch: Watch, places: dict[int, tuple[str, bool]], beats: dict[int, int], who: str | None) -> None:
    assert hanging(watch, places, beats, 19) is None
    line = hanging(watch, places, beats, 21)
    assert line is None if who is None else line is not None and line.startswith(who)


def test_a_watch_that_was_kept_from_running_forgives_that_time(watch: Watch) -> None:
    now = time.monotonic()
    watch._heard, watch._moved = {0: now - 40}, {0: now - 35}
    watch._looked = now - 30
    watch._forgive()
    assert now - watch._heard[0] == pytest.approx(10 + INTERVAL, abs=0.2)
    assert now - watch._moved[0] == pytest.approx(5 + INTERVAL, abs=0.2)
    watch._forgive()
    assert now - watch._heard[0] == pytest.approx(10 + INTERVAL, abs=0.2)


def test_who_holds_the_store_stays_for_the_last_beats_of_others(tmp_path: Path) -> None:
    store = HashStore()
    watches = [Watch(store, rank, 2, JobClock(rank, torch.device("cpu")), tmp_path / str(rank)) for rank in range(2)]
    for watch in watches:
        watch._beat()
        watch.state = "finished"
    late = threading.Timer(0.4, watches[1].finish)
    late.start()
    begun = time.monotonic()
    watches[0].finish(holds_store=True)
    assert 0.3 < time.monotonic() - begun < SILENCE
    assert watches[0]._known[1].state == "finished"
    late.join()


@pytest.mark.parametrize("stopping", stops.SIGNALS)
def test_a_job_that_is_told_to_stop(watch: Watch, stopping: signal.Signals) -> None:
    """Ctrl-C reaches all ranks, as SIGTERM does. No rank is reported as lost."""
    watch.note_stop(stopping)
    own = beat_of(watch, "running", 3, "balance", 1)
    assert own.stopping
    assert look(watch, own, own) == f"stopped by {stopping.name}; rank 1 was in phase balance, step 1, layer 0"
    told = watch._verdict()
    assert told is not None
    assert told.code == 128 + stopping


def test_a_single_rank_that_is_told_to_stop(watch: Watch) -> None:
    """It ends as soon as every other rank has sent a beat after the signal, which shows that none of them is dead."""
    now = time.monotonic()
    watch.note_stop(signal.SIGTERM)
    own = beat_of(watch, "running", 3, "balance", 1)
    other = dataclasses.replace(own, stopping=False, machine="elsewhere")
    watch._known, watch._moved, watch._still = {0: other, 1: own}, dict.fromkeys((0, 1), now), {0: 0, 1: 0}
    for late, ends in ((0.5 * INTERVAL, False), (3 * INTERVAL, True)):
        watch._heard = {0: now + late, 1: now + 3 * INTERVAL}
        fault = watch._verdict()
        assert (fault is not None) == ends
    assert fault is not None
    assert (fault.code, fault.reporter) == (143, 1)
    assert fault.line == "rank 1 was stopped by SIGTERM in phase balance, step 1, layer 0"


def test_a_job_of_one_process_says_where_it_is(tmp_path: Path) -> None:
    alone = Watch(None, 0, 1, JobClock(0, torch.device("cpu")), tmp_path)
    alone.clock.enter("experts", 5, 1)
    with alone.answering_stops():
        assert stops._lines[-1](signal.SIGTERM) == "stopped by SIGTERM; rank 0 was in phase experts, step 5, layer 1"
