"""Workers as processes of this machine. Each takes one job at a time; the others survive if one dies."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeAlias

from epsim import stops
from epsim.sweep.work import Died, Job, Outcome, perform

Pipe: TypeAlias = "connection.Connection[Any, Any]"


class Pool(Protocol):
    """Workers by number, 0 to num_workers - 1."""

    @property
    def num_workers(self) -> int: ...

    def give(self, worker: int, job: Job) -> None:
        """Gives a job to an idle worker, which is started if needed."""
        ...

    def wait(self) -> list[tuple[int, Outcome]]:
        """Waits for workers that finish their jobs or die, and returns their outcomes."""
        ...

    def close(self) -> None:
        """Ends all workers, even busy ones."""
        ...


class Processes:
    """Workers as new interpreters, which inherit no locks held by threads. threads: per worker."""

    def __init__(self, num_workers: int, threads: int) -> None:
        self._num_workers, self._threads = num_workers, threads
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, tuple[BaseProcess, Pipe]] = {}
        self._busy: dict[Pipe, int] = {}

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def give(self, worker: int, job: Job) -> None:
        if worker not in self._workers:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._threads), daemon=True)
            with _environment(thread_limits(self._threads)):
                process.start()
            theirs.close()
            self._workers[worker] = (process, ours)
        _, pipe = self._workers[worker]
        self._busy[pipe] = worker
        with suppress(OSError):  # It died while idle, which `wait` will report.
            pipe.send(job)

    def wait(self) -> list[tuple[int, Outcome]]:
        found: list[tuple[int, Outcome]] = []
        for pipe in connection.wait(list(self._busy)):
            assert isinstance(pipe, connection.Connection)
            worker = self._busy.pop(pipe)
            try:
                found.append((worker, pipe.recv()))
            except (EOFError, OSError):
                found.append((worker, Died(self._forget(worker))))
        return found

    def close(self) -> None:
        for process, pipe in self._workers.values():
            process.terminate()
            pipe.close()
        deadline = time.monotonic() + stops.GRACE
        for process, _ in self._workers.values():
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()
        self._workers.clear()
        self._busy.clear()

    def _forget(self, worker: int) -> str:
        process, pipe = self._workers.pop(worker)
        pipe.close()
        process.join()
        code = process.exitcode or 0
        if code >= 0:
            return f"its worker ended with code {code}"
        name = signal.Signals(-code).name
        why = ", perhaps because memory ran out: give fewer workers" if name == "SIGKILL" else ""
        return f"its worker was ended by {name}{why}"


def thread_limits(threads: int) -> Mapping[str, str]:
    """The environment variables that limit a process to so many threads."""
    return dict.fromkeys(("EPSIM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _serve(pipe: Pipe, threads: int) -> None:
    """The worker process: receives jobs and sends outcomes until the sweep ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep handles it
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    stops.end_with_parent(parent.pid)
    with stops.handled():
        import torch

        torch.set_num_threads(threads)
        while True:
            try:
                job = pipe.recv()
            except (EOFError, OSError):
                return
            pipe.send(perform(job))
