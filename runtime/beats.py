"""Who is at what: every rank beats into a store and leaves its place in a file; who reads them can tell who is lost."""

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

from epsim.runtime.phases import PHASES, PhaseClock

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PLACE_BYTES = 64
State: TypeAlias = Literal["running", "closing", "finished"]
"""closing: all steps done, results under way."""

INTERVAL = 0.5
SILENCE = 6.0
"""Seconds without a beat after which a process is taken for dead or stopped, where it cannot be looked at."""
STARVED = 18.0
"""The same for a process of this machine that is seen to run: a busy machine may keep it from beating for seconds."""
HELD = 120.0
"""The same in a dispatch that waits with the interpreter held; deep_ep itself gives up after 100 s."""
FAULT, BAD_INPUT = 1, 2
KEY = "fault"


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a rank is. order: (turn, place of the layer, place of the phase), which grows along the job; a turn is one
    step under one stack, numbered by those done before it. stopping: it was told to stop. waiting: inside a
    collective. pid: of its process; machine: where that number means it (`this_machine`). holds: its dispatch waits for
    the others with Python's interpreter held, so that meanwhile it cannot beat."""

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
        """Turns begun so far. Between turns, while telemetry is written, none is under way."""
        return self.order[0] + (self.phase in PHASES)

    @property
    def words(self) -> str:
        words = f"phase {self.phase}"
        if self.step >= 0 and self.phase != "setup":
            words += f", step {self.step}"
        return words + (f", layer {self.layer}" if self.layer >= 0 and self.phase in PHASES else "")


class JobClock(PhaseClock):
    """Leaves a rank's place in a file as it goes, which other processes of its machine can read when it is dead; beats
    alone are half a second old."""

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
    """Why a job ended. code: the exit status of every process; reporter: the rank that found it."""

    line: str
    code: int
    reporter: int


def read_beats(store: Store, num_ranks: int, known: Container[int] = ()) -> dict[int, Beat]:
    """The last beat of each rank that has beaten; known: those that are known to have. Raises RuntimeError or OSError
    where the store is gone."""
    there = [rank for rank in range(num_ranks) if rank in known or store.check([f"beat/{rank}"])]
    texts = store.multi_get([f"beat/{rank}" for rank in there]) if there else []
    found = {}
    for rank, text in zip(there, texts, strict=True):
        fields = json.loads(text)
        found[rank] = Beat(**(fields | {"order": tuple(fields["order"])}))
    return found


def stopped_words(store: Store, num_ranks: int, stopping: signal.Signals) -> str:
    """A job that its launcher is told to stop: where the rank furthest behind was."""
    beats = read_beats(store, num_ranks)
    if not beats:
        return f"stopped by {stopping.name} in phase setup, before ranks had met"
    rank = min(beats, key=lambda one: beats[one].order)
    return f"stopped by {stopping.name}; rank {rank} was in {beats[rank].words}"


def read_fault(store: Store) -> Fault | None:
    """The fault that any rank has told the store, None where there is none or the store is gone."""
    try:
        return Fault(**json.loads(store.get(KEY))) if store.check([KEY]) else None
    except (RuntimeError, OSError):
        return None


class Lookout:
    """Listens to the beats of all ranks, and tells which of them is lost.

    store: a connection that nothing else uses, since a waiting call holds it; None for a job of one process, which
    has nobody to listen to. folder: where ranks leave their places. rank: who looks, -1 for a launcher.
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
        """For a launcher, every `INTERVAL`: the fault that a rank has told; or that a rank is lost, where for `SILENCE`
        seconds none has said so: those that wait for it with the interpreter held cannot."""
        assert self._store is not None
        told = read_fault(self._store)
        if told is not None:
            return told
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
        """Where a rank was when it was last heard of."""
        with contextlib.suppress(RuntimeError, OSError):
            self._listen()
        return self._last_place(rank).words if rank in self._known else "phase setup"

    def _lost_words(self, now: float) -> str | None:
        for rank, beat in self._known.items():
            if beat.state != "finished" and self._lost(rank, beat, now):
                return f"rank {rank} stopped answering in {self._last_place(rank).words}"
        return None

    def _forgive(self) -> None:
        """What this process did not look at, since it was kept from running itself, it holds against nobody."""
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
        """Whether a rank is dead or stopped. On this machine the process itself tells: where it is gone at two looks
        (between them its last beat can come), or where it does not run; else silence does."""
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
        """Whether it is silent because it waits for the others' tokens with the interpreter held."""
        silent = now - self._heard[rank] > 2 * INTERVAL
        return silent and self._known[rank].holds and self._last_place(rank).phase == "dispatch"

    def _last_place(self, rank: int) -> Beat:
        """The place that a silent rank left, if this machine has it and it is later than its last beat."""
        beat = self._known[rank]
        try:
            phase, step, layer = place_file(self.folder, rank).read_text().split()
            later = dataclasses.replace(beat, phase=phase, step=int(step), layer=int(layer))
        except (OSError, ValueError):
            return beat
        return later if later.step >= beat.step else beat

    def _publish(self, line: str, code: int) -> Fault:
        """The first fault told is the one that all ranks end with."""
        assert self._store is not None
        fault = Fault(line, code, self.rank)
        try:
            text = self._store.compare_set(KEY, "", json.dumps(dataclasses.asdict(fault)))
            return Fault(**json.loads(text))
        except (RuntimeError, OSError, ValueError):
            return fault


@functools.cache
def this_machine() -> str:
    """Where process numbers mean the same processes: a host and its namespace of them."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{platform.node()} {space}"


def process_state(pid: int) -> str:
    """Of a process of this machine: R, S, D, T (stopped) as in /proc/PID/stat, empty where it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state in "ZX" else state
