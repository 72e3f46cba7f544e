"""Heartbeats: every rank writes its position to a store and to a file, so that others notice when it is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import mmap
import os
import platform
import signal
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from epsim.runtime.phases import LAYER_PHASES, PhaseClock

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PLACE_BYTES = 64
State: TypeAlias = Literal["running", "closing", "finished"]
"""closing: all steps are done and results are being collected."""

INTERVAL = 0.5
SILENCE = 6.0
"""Seconds without a beat after which a process on another machine counts as dead or stopped."""
STARVED = 18.0
"""The same limit for a process that still runs on this machine. It is longer, because a busy machine delays beats."""
HELD = 120.0
"""The same limit in a dispatch that holds the GIL while it waits. deep_ep itself gives up after 100 s."""
FAULT, BAD_INPUT = 1, 2
KEY = "fault"


@dataclass(frozen=True, slots=True)
class Beat:
    """The position of a rank. order: (turn, layer index, phase index), which grows during the job. A turn is one step
    under one stack; turns count from 0. stopping: the rank got a stop signal. waiting: it is inside a collective.
    pid: its process on `machine` (`this_machine`). holds: its dispatch holds the GIL while it waits for other ranks, so
    it sends no beats meanwhile."""

    count: int
    order: tuple[int, int, int]
    phase: str
    step: int
    layer: int
    state: State
    stopping: bool
    waiting: bool
    pid: int
    machine: str
    holds: bool = False

    @property
    def begun(self) -> int:
        """The number of turns begun so far. The next turn counts from its first layer on, not during telemetry."""
        return self.order[0] + (self.phase in LAYER_PHASES)

    @property
    def words(self) -> str:
        words = f"phase {self.phase}"
        if self.step >= 0 and self.phase != "setup":
            words += f", step {self.step}"
        return words + (f", layer {self.layer}" if self.layer >= 0 and self.phase in LAYER_PHASES else "")


class JobClock(PhaseClock):
    """A clock that also writes a rank's position to a file, which other processes of the machine can read after the
    rank's death. The file is exact; the last beat may be half a second older."""

    _page: mmap.mmap | None = None

    def leave_place(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = place_file(folder, self.rank)
        path.write_bytes(bytes(PLACE_BYTES))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PLACE_BYTES)

    def enter(self, phase: str, step: int | None = None, layer: int | None = None) -> None:
        super().enter(phase, step, layer)
        if self._page is not None:
            self._page[:PLACE_BYTES] = f"{self.phase} {self.step} {self.layer}".encode().ljust(PLACE_BYTES)


def place_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.place"


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a job ended. code: the exit status of all processes. reporter: the rank that found the fault."""

    line: str
    code: int
    reporter: int


def read_beats(store: Store, num_ranks: int, known: Container[int] = ()) -> dict[int, Beat]:
    """The last heartbeat of each rank that has sent one. known: ranks from which a beat was read before. Raises
    RuntimeError or OSError if the store is gone."""
    present = [rank for rank in range(num_ranks) if rank in known or store.check([f"beat/{rank}"])]
    texts = store.multi_get([f"beat/{rank}" for rank in present]) if present else []
    beats = {}
    for rank, text in zip(present, texts, strict=True):
        fields = json.loads(text)
        beats[rank] = Beat(**(fields | {"order": tuple(fields["order"])}))
    return beats


def stopped_words(store: Store, num_ranks: int, stopping: signal.Signals) -> str:
    """The message of a job that ends because its launcher got a signal: the position of the rank furthest behind."""
    beats = read_beats(store, num_ranks)
    if not beats:
        return f"stopped by {stopping.name} in phase setup, before any rank sent a heartbeat"
    rank = min(beats, key=lambda rank: beats[rank].order)
    return f"stopped by {stopping.name}; rank {rank} was in {beats[rank].words}"


def read_fault(store: Store) -> Fault | None:
    """The fault that a rank has written to the store, or None if there is no fault or no store any more."""
    try:
        return Fault(**json.loads(store.get(KEY))) if store.check([KEY]) else None
    except (RuntimeError, OSError):
        return None


class Lookout:
    """Reads the beats of all ranks and finds lost ranks.

    store: a connection of its own, because a waiting call blocks a connection; None for a job of one process.
    folder: the folder of the ranks' position files. rank: this rank, -1 for a launcher.
    """

    def __init__(self, store: Store | None, num_ranks: int, folder: Path, rank: int = -1) -> None:
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder
        self._store = store
        self._known: dict[int, Beat] = {}
        self._heard: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._still: dict[int, int] = {}
        self._gone: set[int] = set()
        self._looked = time.monotonic()
        self._lost_since: float | None = None

    def look(self) -> Fault | None:
        """The fault, if any. A launcher calls this every `INTERVAL` seconds. It reports a lost rank itself if no rank
        does so within `SILENCE` seconds, because ranks that wait with the GIL held cannot."""
        assert self._store is not None
        fault = read_fault(self._store)
        if fault is not None:
            return fault
        self._forgive()
        self._listen()
        now = time.monotonic()
        words = self._lost_words(now)
        if words is None:
            self._lost_since = None
            return None
        self._lost_since = self._lost_since or now
        if now - self._lost_since < SILENCE:
            return None
        return self._publish(f"{words} (the launcher reports)", FAULT)

    def place_of(self, rank: int) -> str:
        """The last known position of a rank, in words."""
        with contextlib.suppress(RuntimeError, OSError):
            self._listen()
        return self._last_place(rank).words if rank in self._known else "phase setup"

    def _lost_words(self, now: float) -> str | None:
        for rank, beat in self._known.items():
            if beat.state != "finished" and self._lost(rank, beat, now):
                return f"rank {rank} stopped answering in {self._last_place(rank).words}"
        return None

    def _forgive(self) -> None:
        """Extends all deadlines by the time for which this process itself did not run."""
        now = time.monotonic()
        lost, self._looked = now - self._looked - INTERVAL, now
        if lost > INTERVAL:
            for since in (self._heard, self._moved):
                since.update({rank: at + lost for rank, at in since.items()})

    def _listen(self) -> None:
        assert self._store is not None
        now = time.monotonic()
        for rank, beat in read_beats(self._store, self.num_ranks, self._known).items():
            before = self._known.get(rank)
            if before is None or beat.count != before.count:
                self._heard[rank] = now
            if before is None or (beat.order, beat.phase) != (before.order, before.phase):
                self._moved[rank], self._still[rank] = now, beat.count
            self._known[rank] = beat

    def _lost(self, rank: int, beat: Beat, now: float) -> bool:
        """Whether a rank is dead or stopped. On this machine: its process is stopped, or has ended at two checks in a
        row (its last beat may arrive between them). On another machine: its beats have stopped."""
        silent = now - self._heard[rank]
        if not beat.machine or beat.machine != this_machine():
            return silent > (HELD if beat.holds else SILENCE)
        state = process_state(beat.pid)
        if state:
            self._gone.discard(rank)
            if state in "Tt":
                return silent > SILENCE
            return silent > (HELD if self._held(rank, now) else STARVED)
        again = rank in self._gone
        self._gone.add(rank)
        return again

    def _held(self, rank: int, now: float) -> bool:
        """Whether a rank is silent because it holds the GIL while it waits for the tokens of other ranks."""
        silent = now - self._heard[rank] > 2 * INTERVAL
        return silent and self._known[rank].holds and self._last_place(rank).phase == "dispatch"

    def _last_place(self, rank: int) -> Beat:
        """The position in the rank's file, if this machine has the file and it is not older than the last beat."""
        beat = self._known[rank]
        try:
            phase, step, layer = place_file(self.folder, rank).read_text().split()
            later = dataclasses.replace(beat, phase=phase, step=int(step), layer=int(layer))
        except (OSError, ValueError):
            return beat
        return later if later.step >= beat.step else beat

    def _publish(self, line: str, code: int) -> Fault:
        """Writes a fault to the store. Returns the first fault that any rank has written, with which all ranks end."""
        assert self._store is not None
        fault = Fault(line, code, self.rank)
        try:
            text = self._store.compare_set(KEY, "", json.dumps(dataclasses.asdict(fault)))
            return Fault(**json.loads(text))
        except (RuntimeError, OSError, ValueError):
            return fault


@functools.cache
def this_machine() -> str:
    """A name for the host and its process namespace. Processes with equal names see each other's process ids."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{platform.node()} {space}"


def process_state(pid: int) -> str:
    """The state of a process of this machine: R, S, D or T (stopped) as in /proc/PID/stat; "" if it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state in "ZX" else state
