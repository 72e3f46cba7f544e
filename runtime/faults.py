"""Who is at what, and who has stopped: every rank beats into a store, and a thread on each rank watches all of them.

Collectives wait for minutes or for ever when a rank is gone, and then say little. Here the first rank that notices
names the rank, phase, step and layer in one line, and every process ends at once, finished steps safe on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import mmap
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Container
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

from epsim.runtime.phases import PHASES, PhaseClock, PhaseError
from epsim.traces.files import message_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PLACE_BYTES = 64
State: TypeAlias = Literal["running", "closing", "finished"]
"""closing: all steps done, results under way."""

INTERVAL = 0.5
SILENCE = 6.0
"""Seconds without a beat after which a process is taken for dead or stopped, where it cannot be looked at."""
VERDICT = SILENCE + 8 * INTERVAL
"""Seconds that a rank whose collective failed, or that was told to stop, leaves the others to find out who is gone."""
STARVED = 18.0
"""The same for a process of this machine that is seen to run: a busy machine may keep it from beating for seconds."""
START_PATIENCE = 300.0
"""Seconds that a rank may take to its first beat."""
UNTIMED = ("setup", "results")
"""Phases that may take as long as they like, as long as the process beats."""
STOPPING = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a job to stop; the second is a terminal's Ctrl-C."""
FAULT, BAD_INPUT = 1, 2
KEY = "fault"


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a rank is. order: (turn, place of the layer, place of the phase), which grows along the job; a turn is one
    step under one stack, numbered by those done before it. stopping: it was told to stop. waiting: inside a
    collective. pid: of its process; machine: where that number means it (`this_machine`)."""

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


class Watch:
    """Beats for one rank and watches the others from a thread of its own.

    store: a connection that nothing else uses, since a waiting call holds it; None for a job of one process, which
    watches nobody. folder: where ranks leave their places. patience: seconds that the rank furthest behind may stay in
    one phase, six times as many while warming up. The owner sets `turn` (-1: warming up), `layer_place` (of each
    layer's number) and `state` as it goes.
    """

    def __init__(
        self, store: Store | None, rank: int, num_ranks: int, clock: JobClock, folder: Path, patience: float = 20.0
    ) -> None:
        self.folder = folder
        self.rank, self.num_ranks, self.clock, self.patience = rank, num_ranks, clock, patience
        self.turn = -1
        self.layer_place: dict[int, int] = {}
        self.state: State = "running"
        self._store = store
        if store is not None:
            store.set_timeout(timedelta(seconds=10))
        self._count = 0
        self._known: dict[int, Beat] = {}
        self._heard: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._still: dict[int, int] = {}
        self._gone: set[int] = set()
        self._looked = time.monotonic()
        self._begun = time.monotonic()
        self._stopped_at: float | None = None
        self._stopped_by = signal.SIGTERM
        self._signals: int | None = None
        self._parent = os.getppid()
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="epsim-watch", daemon=True)

    def start(self, signals: bool = True) -> None:
        """signals: those that stop a job are taken by this thread, since the main one may be inside a collective."""
        if self._store is None:
            return
        if signals:
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            for stopping in STOPPING:
                signal.signal(stopping, lambda number, frame: None)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            os.set_blocking(reading, False)
            self._signals = reading
        self._beat()
        self._thread.start()

    def finish(self, holds_store: bool = False) -> None:
        """The job is over; faults of others no longer concern this rank. holds_store: the store ends with this process,
        which waits for the others' last beat, a moment at most."""
        self._over.set()
        if self._store is None:
            return
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(RuntimeError, OSError):  # whoever holds the store may have ended
            self._beat()  # the last: this process ends by itself
            deadline = time.monotonic() + SILENCE
            while holds_store and time.monotonic() < deadline:
                self._listen()
                if all(beat.state == "finished" for beat in self._known.values()):
                    return
                time.sleep(INTERVAL / 10)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends every process because of an error on this rank, or because of the rank whose loss led to it."""
        if self._store is None:
            raise error
        if isinstance(error, PhaseError):
            self._end(self._publish(message_line(str(error)), FAULT))
        where = f"rank {self.rank}, {self.beat().words}"
        if isinstance(error, ValueError | OSError) and not isinstance(error, ConnectionError):
            code = BAD_INPUT if self.clock.phase == "setup" else FAULT
            self._end(self._publish(f"{where}: {message_line(str(error))}", code))
        # A collective fails on the ranks that still live: the watch finds out who does not.
        deadline = time.monotonic() + VERDICT
        while time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(INTERVAL)
        self._end(self._publish(f"{where}: {type(error).__name__}: {message_line(str(error))}", FAULT))

    def beat(self) -> Beat:
        clock, turn = self.clock, self.turn
        phase = clock.phase  # after the turn: together they are never ahead of the rank
        # "idle" follows a layer's last phase: between layers, and where a rank waits for its GPU at a step's end.
        place = PHASES.index(phase) + 1 if phase in PHASES else (0 if phase == "setup" else len(PHASES) + 1)
        order = (turn, self.layer_place.get(clock.layer, -1), place)
        return Beat(
            count=self._count,
            order=order,
            phase=phase,
            step=clock.step,
            layer=clock.layer,
            state=self.state,
            stopping=self._stopped_at is not None,
            waiting=_in_collective(),
            pid=os.getpid(),
            machine=this_machine(),
        )

    def _beat(self) -> None:
        assert self._store is not None
        self._count += 1
        self._store.set(f"beat/{self.rank}", json.dumps(dataclasses.asdict(self.beat())))

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            try:
                self._forgive()
                self._take_signals()
                self._beat()
                self._listen()
                fault = self._look()
            except (RuntimeError, OSError) as error:
                if self._over.is_set() or self.state == "finished":
                    return
                # Whoever started the job, or held the store, is gone.
                gone = f"rank {self.rank} lost the job's store in {self.beat().words} ({message_line(str(error))[:80]})"
                fault = Fault(gone, FAULT, self.rank)
            if fault is not None and not self._over.is_set():
                self._end(fault)

    def _forgive(self) -> None:
        """What this rank did not look at, since it was kept from running itself, it holds against nobody."""
        now = time.monotonic()
        lost, self._looked = now - self._looked - INTERVAL, now
        if lost > INTERVAL:
            for since in (self._heard, self._moved):
                since.update({rank: at + lost for rank, at in since.items()})

    def _take_signals(self) -> None:
        if self._signals is not None and self._stopped_at is None:
            try:
                got = os.read(self._signals, 64)
            except BlockingIOError:
                return
            for stopping in STOPPING:
                if stopping in got:
                    self._stopped_by, self._stopped_at = stopping, time.monotonic()

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

    def _look(self) -> Fault | None:
        assert self._store is not None
        told = read_fault(self._store)
        if told is not None:
            return told
        now = time.monotonic()
        known = self._known
        for rank, beat in known.items():
            if beat.state != "finished" and self._lost(rank, beat, now):
                words = self._last_place(rank).words
                return self._publish(f"rank {rank} stopped answering in {words} (rank {self.rank} reports)", FAULT)
        if self._stopped_at is not None:
            return self._stopped(now)
        if os.getppid() != self._parent:
            return self._publish(f"the launcher ended; rank {self.rank} was in {self.beat().words}", FAULT)
        missing = [rank for rank in range(self.num_ranks) if rank not in known]
        if missing:
            if now - self._begun > START_PATIENCE:
                return self._publish(f"rank {missing[0]} never came to phase setup (rank {self.rank} reports)", FAULT)
            return None
        own = known[self.rank]
        for rank, beat in known.items():
            if beat.state != "running" and own.state == "running" and own.begun > beat.order[0]:
                return self._publish(
                    f"rank {rank} finished after step {beat.step}, but rank {self.rank} is in {own.words}: "
                    "give every rank the same number of steps",
                    FAULT,
                )
        running = {rank: beat for rank, beat in known.items() if beat.state == "running"}
        behind = [rank for rank in running if running[rank].order == min(b.order for b in running.values())]
        # Of those at the same place, the ones that wait for others are not to blame.
        behind = [rank for rank in behind if not running[rank].waiting] or behind
        if behind and running[behind[0]].phase not in UNTIMED:
            beat = running[behind[0]]
            patience = self.patience * (6 if beat.order[0] < 0 else 1)
            if all(now - self._moved[rank] > patience and self._beats_since(rank) >= patience for rank in behind):
                who = f"rank {behind[0]} hangs" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))} hang"
                line = f"{who} in {beat.words} for {patience:g} s (rank {self.rank} reports); --timeout gives more"
                return self._publish(line, FAULT)
        return None

    def _lost(self, rank: int, beat: Beat, now: float) -> bool:
        """Whether a rank is dead or stopped. On this machine the process itself tells: where it is gone at two looks
        (between them its last beat can come), or where it does not run; else silence does."""
        silent = now - self._heard[rank]
        if not beat.machine or beat.machine != this_machine():
            return silent > SILENCE
        state = process_state(beat.pid)
        if state:
            self._gone.discard(rank)
            return silent > (SILENCE if state in "Tt" else STARVED)
        again = rank in self._gone
        self._gone.add(rank)
        return again

    def _beats_since(self, rank: int) -> float:
        """Seconds that a rank's beats since its last move stand for; on a busy machine they come late, and a rank that
        is kept from running is not one that hangs."""
        return 2 * INTERVAL * (self._known[rank].count - self._still[rank])

    def _last_place(self, rank: int) -> Beat:
        """The place that a silent rank left, if this machine has it and it is later than its last beat."""
        beat = self._known[rank]
        try:
            phase, step, layer = place_file(self.folder, rank).read_text().split()
            later = dataclasses.replace(beat, phase=phase, step=int(step), layer=int(layer))
        except (OSError, ValueError):
            return beat
        return later if later.step >= beat.step else beat

    def _stopped(self, now: float) -> Fault | None:
        """Told to stop: as soon as all others are too, it is the job that was stopped; if not, one rank was, or it is
        the launcher's answer to a rank's death, which the beats will show."""
        assert self._stopped_at is not None
        by = self._stopped_by
        others = [beat for rank, beat in self._known.items() if rank != self.rank]
        if all(beat.stopping or beat.state == "finished" for beat in others):
            return self._publish(f"stopped by {by.name}; rank {self.rank} was in {self.beat().words}", 128 + by)
        if now - self._stopped_at > VERDICT:
            return self._publish(f"rank {self.rank} was stopped by {by.name} in {self.beat().words}", 128 + by)
        return None

    def _publish(self, line: str, code: int) -> Fault:
        """The first fault told is the one that all ranks end with."""
        assert self._store is not None
        fault = Fault(line, code, self.rank)
        try:
            text = self._store.compare_set(KEY, "", json.dumps(dataclasses.asdict(fault)))
            return Fault(**json.loads(text))
        except (RuntimeError, OSError, ValueError):
            return fault

    def _end(self, fault: Fault) -> NoReturn:
        """One line a node: from whoever found the fault, and on other nodes from the first rank. Leaves without the
        interpreter's own end, which would wait for the main thread and its collective."""
        self._ending.acquire()
        first_here = os.environ.get("LOCAL_RANK", "0") == "0" and not _same_node(self.rank, fault.reporter)
        if fault.reporter == self.rank or first_here:
            print(f"epsim: {fault.line}", file=sys.stderr, flush=True)
        time.sleep(2 * INTERVAL)  # lets the others read the fault before this process's end causes new ones
        os._exit(fault.code)


def _in_collective() -> bool:
    """Whether the main thread is inside torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename


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


def _same_node(rank: int, other: int) -> bool:
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or 1 << 30
    return rank // per_node == other // per_node
