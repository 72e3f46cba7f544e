"""Detects ranks that stop: every rank writes heartbeats to a store, and a thread on each rank watches them (beats.py).

Without this, collectives wait for minutes or forever when a rank is gone, and their errors do not name it. The first
rank that notices prints one line with the lost rank, phase, step and layer. Then all processes end at once.
Finished steps are on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from epsim import stops
from epsim.files import CannotWriteError, message_line
from epsim.runtime import beats
from epsim.runtime.beats import FAULT, INTERVAL, SILENCE, Beat, Fault, JobClock, Lookout, State, read_fault
from epsim.runtime.phases import LAYER_PHASES, PhaseError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

VERDICT = SILENCE + 8 * INTERVAL
"""Seconds that a rank with a failed collective, or a stop signal, waits for the others to find the lost rank."""
START_PATIENCE = 300.0
"""Seconds until a rank's first beat must arrive."""
UNTIMED = ("setup", "results")
"""Phases without a time limit, as long as the process beats."""


class Watch(Lookout):
    """Sends the heartbeats of one rank and watches the other ranks, in a separate thread.

    patience: seconds that the rank furthest behind may stay in one phase, six times as many while warming up. The owner
    keeps `turn` (-1: warming up) and `state` up to date, and sets `layer_index` (from layer numbers) and `holds`
    (`Exchange.holds_interpreter`).
    """

    def __init__(
        self, store: Store | None, rank: int, num_ranks: int, clock: JobClock, folder: Path, patience: float = 20.0
    ) -> None:
        super().__init__(store, num_ranks, folder, rank)
        self.clock, self.patience = clock, patience
        self.turn = -1
        self.layer_index: dict[int, int] = {}
        self.state: State = "running"
        self.holds = False
        if store is not None:
            store.set_timeout(timedelta(seconds=10))
        self._count = 0
        self._begun = time.monotonic()
        self._stopped_at: float | None = None
        self._stopped_by = signal.SIGTERM
        self._parent = os.getppid()
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="epsim-watch", daemon=True)

    def start(self) -> None:
        """Sends the first beat and starts the thread. A job of one process has neither."""
        if self._store is not None:
            self._beat()
            self._thread.start()

    def answering_stops(self) -> AbstractContextManager[None]:
        """Inside the block, a signal that asks this process to stop is reported with the rank's position."""
        if self._store is None:
            return stops.line_at_stop(self.stop_line)
        return stops.answered(self.note_stop)

    def stop_line(self, by: signal.Signals) -> str:
        return f"stopped by {by.name}; rank {self.rank} was in {self.beat().words}"

    def note_stop(self, by: signal.Signals) -> None:
        """Tells the thread that a signal asks this process to stop."""
        if self._stopped_at is None:
            self._stopped_by, self._stopped_at = by, time.monotonic()

    def close(self) -> None:
        """Ends the thread: faults of others no longer end this rank."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def finish(self, holds_store: bool = False) -> None:
        """Ends the watch. holds_store: the store ends with this process, so wait briefly for the others' last beats."""
        self.close()
        if self._stopped_at is not None:
            stops.end(self._stopped_by)
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError, OSError):  # the process that holds the store may have ended
            self._beat()  # the last beat, which says that this process finishes
            deadline = time.monotonic() + SILENCE
            while holds_store and time.monotonic() < deadline:
                self._listen()
                if all(beat.state == "finished" for beat in self._known.values()):
                    return
                time.sleep(INTERVAL / 10)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends every process because of an error on this rank, or because of the rank whose loss led to it.

        EPSIM_DEBUG=1: the traceback takes the place of the line.
        """
        if self._store is None:
            raise error
        if isinstance(error, PhaseError):
            self._end(self._publish(message_line(str(error)), FAULT))
        where = f"rank {self.rank}, {self.beat().words}"
        details = "".join(traceback.format_exception(error)) if os.environ.get("EPSIM_DEBUG") else ""
        if isinstance(error, ValueError | OSError) and not isinstance(error, ConnectionError):
            bad_input = self.clock.phase == "setup" or isinstance(error, CannotWriteError)
            code = beats.BAD_INPUT if bad_input else FAULT
            self._end(self._publish(f"{where}: {details or message_line(str(error))}", code))
        # A collective fails on the ranks that still live: the watch finds out who does not.
        deadline = time.monotonic() + VERDICT
        while time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(INTERVAL)
        self._end(self._publish(f"{where}: {details or f'{type(error).__name__}: {message_line(str(error))}'}", FAULT))

    def beat(self) -> Beat:
        clock, turn = self.clock, self.turn
        phase = clock.phase  # read after the turn, so that the pair is never ahead of the rank
        # "idle" follows a layer's last phase: between layers, and when a rank waits for its GPU after a step.
        last = len(LAYER_PHASES) + 1
        position = LAYER_PHASES.index(phase) + 1 if phase in LAYER_PHASES else (0 if phase == "setup" else last)
        order = (turn, self.layer_index.get(clock.layer, -1), position)
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
            machine=beats.this_machine(),
            holds=self.holds,
        )

    def _beat(self) -> None:
        assert self._store is not None
        self._count += 1
        self._store.set(f"beat/{self.rank}", json.dumps(dataclasses.asdict(self.beat())))

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            try:
                self._forgive()
                self._beat()
                self._listen()
                fault = self._verdict()
            except (RuntimeError, OSError) as error:
                if self._over.is_set() or self.state == "finished":
                    return
                # The launcher, or the process that holds the store, is gone.
                gone = f"rank {self.rank} lost the job's store in {self.beat().words} ({message_line(str(error))[:80]})"
                fault = Fault(gone, FAULT, self.rank)
            if fault is not None and not self._over.is_set():
                self._end(fault)

    def _verdict(self) -> Fault | None:
        assert self._store is not None
        fault = read_fault(self._store)
        if fault is not None:
            return fault
        now = time.monotonic()
        known = self._known
        words = self._lost_words(now)
        if words is not None:
            return self._publish(f"{words} (rank {self.rank} reports)", FAULT)
        if os.getppid() != self._parent:
            return self._publish(f"the launcher ended; rank {self.rank} was in {self.beat().words}", FAULT)
        if self._stopped_at is not None:
            return self._stopped(now, self._stopped_at)
        missing = [rank for rank in range(self.num_ranks) if rank not in known]
        if missing:
            if now - self._begun > START_PATIENCE:
                return self._publish(f"rank {missing[0]} never reached phase setup (rank {self.rank} reports)", FAULT)
            return None
        own_beat = known[self.rank]
        for rank, beat in known.items():
            if beat.state != "running" and own_beat.state == "running" and own_beat.begun > beat.order[0]:
                return self._publish(
                    f"rank {rank} finished after step {beat.step}, but rank {self.rank} is in {own_beat.words}: "
                    "give every rank the same number of steps",
                    FAULT,
                )
        running = {rank: beat for rank, beat in known.items() if beat.state == "running"}
        # A rank that waits with the interpreter held is ahead of its last beat and not the cause.
        running = {rank: beat for rank, beat in running.items() if not self._held(rank, now)} or running
        behind = [rank for rank in running if running[rank].order == min(b.order for b in running.values())]
        # Of the ranks at the same position, those inside a collective wait for others and are not the cause.
        behind = [rank for rank in behind if not running[rank].waiting] or behind
        if behind and running[behind[0]].phase not in UNTIMED:
            beat = running[behind[0]]
            patience = self.patience * (6 if beat.order[0] < 0 else 1)
            if all(now - self._moved[rank] > patience and self._beats_since(rank) >= patience for rank in behind):
                who = f"rank {behind[0]} hangs" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))} hang"
                line = f"{who} in {beat.words} for {patience:g} s (rank {self.rank} reports); --timeout allows more"
                return self._publish(line, FAULT)
        return None

    def _beats_since(self, rank: int) -> float:
        """Seconds counted by a rank's beats since it last moved. On a busy machine beats are late, and a rank that gets
        no CPU time does not hang."""
        return 2 * INTERVAL * (self._known[rank].count - self._still[rank])

    def _stopped(self, now: float, stopped_at: float) -> Fault | None:
        """The fault after a stop signal. None as long as another rank may be dead: launchers stop all ranks if one
        dies, and then the dead rank is the fault."""
        by = self._stopped_by
        others = [beat for rank, beat in self._known.items() if rank != self.rank]
        if all(beat.stopping or beat.state == "finished" for beat in others):
            return self._publish(self.stop_line(by), 128 + by)
        # A beat that arrives an interval after the signal was sent after the signal.
        alive = all(self._heard[beat_of] > stopped_at + 2 * INTERVAL for beat_of in self._known)
        if alive or now - stopped_at > VERDICT:
            return self._publish(f"rank {self.rank} was stopped by {by.name} in {self.beat().words}", 128 + by)
        return None

    def _end(self, fault: Fault) -> NoReturn:
        """Prints one line per node (by the rank that found the fault, on other nodes by the first rank) and exits
        without the interpreter's shutdown, which would wait for the main thread and its collective."""
        self._ending.acquire()
        first_here = os.environ.get("LOCAL_RANK", "0") == "0" and not _same_node(self.rank, fault.reporter)
        if fault.reporter == self.rank or first_here:
            print(f"epsim: {fault.line}", file=sys.stderr, flush=True)
        time.sleep(2 * INTERVAL)  # the others can read the fault before this process's end causes new ones
        stops.clean_up()
        os._exit(fault.code)


def _in_collective() -> bool:
    """Whether the main thread is inside a call of torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename


def _same_node(rank: int, other: int) -> bool:
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or 1 << 30
    return rank // per_node == other // per_node
