"""Workers as Ray actors, on a cluster or on a local cluster that is started for the sweep."""

import importlib
import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from epsim.files import message_line, reason
from epsim.parallel import cores
from epsim.sweep.cells import Cell
from epsim.sweep.sources import Opening
from epsim.sweep.work import Died, Done, Failed, Job, Outcome, perform

LOCAL = "local"
CONNECTING = 10.0
"""Seconds to wait for a cluster's host to answer."""


class SweepActor:
    """One worker; `ray.remote` makes it an actor."""

    def __init__(self, threads: int) -> None:
        import torch

        os.environ["EPSIM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        self._folder = Path(tempfile.mkdtemp(prefix="epsim-sweep-"))
        self._here: dict[Path, Path] = {}

    def perform(self, job: Cell, files: list[Any]) -> Done | Failed:
        """Performs a job. files: (path, Ray object of the content) of each trace, for machines without these files."""
        import ray

        for path, content in files:
            if path not in self._here:
                self._here[path] = path
                if not path.exists():
                    self._here[path] = self._folder / f"{len(self._here)}.parquet"
                    self._here[path].write_bytes(ray.get(content))
        trace = replace(job.trace, path=self._here[job.trace.path])
        history = job.history and replace(job.history, path=self._here[job.history.path])
        return perform(replace(job, trace=trace, history=history))


class RayWorkers:
    """Actors with one CPU each. num_workers: None for the number of CPUs of the cluster."""

    def __init__(self, address: str, num_workers: int | None, threads: int = 1) -> None:
        """Raises ValueError with one line if Ray is not installed, or the cluster does not answer or is too small."""
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ValueError("--ray needs Ray: pip install 'epsim[ray]'") from None
        self._ray = ray
        self._threads = threads
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet = {"log_to_driver": False, "logging_level": "CRITICAL"}
        if address == LOCAL:
            there = num_workers or cores()
            ray.init(num_cpus=there, include_dashboard=False, **quiet)
        else:
            _answers(address)
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                line = message_line(str(error).splitlines()[0])
                raise ValueError(f"--ray {address}: {line}: give a cluster's address, auto or local") from None
            there = int(ray.cluster_resources().get("CPU", 0))
        # Ray prints messages about dead workers to stdout, which belongs to the sweep, and cannot be told not to.
        printing: Any = importlib.import_module("ray._private.worker")
        if hasattr(printing, "_worker_logs_enabled"):
            printing._worker_logs_enabled = False
        self._num_workers = num_workers or there
        if self._num_workers > there or there < 1:
            ray.shutdown()
            raise ValueError(f"--workers {self._num_workers}: the cluster has {there} CPUs: give fewer")
        self._actors: dict[int, Any] = {}
        self._busy: dict[Any, int] = {}
        self._contents: dict[Path, Any] = {}

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def give(self, worker: int, job: Job) -> None:
        assert isinstance(job, Cell), "traces are made on the machine of the sweep"
        if worker not in self._actors:
            made = self._ray.remote(SweepActor).options(num_cpus=1, max_restarts=0)
            self._actors[worker] = made.remote(self._threads)
        files = [(opening.path, self._content(opening)) for opening in job.openings]
        self._busy[self._actors[worker].perform.remote(job, files)] = worker

    def wait(self) -> list[tuple[int, Outcome]]:
        ready, _ = self._ray.wait(list(self._busy), num_returns=1)
        found: list[tuple[int, Outcome]] = []
        for reference in ready:
            worker = self._busy.pop(reference)
            try:
                found.append((worker, self._ray.get(reference)))
            except self._ray.exceptions.RayError as error:
                self._ray.kill(self._actors.pop(worker))
                found.append((worker, Died(_why(error))))
        return found

    def close(self) -> None:
        self._ray.shutdown()

    def _content(self, opening: Opening) -> Any:
        """The Ray object of a trace's content, stored once; on a local cluster nothing is copied."""
        if len(self._ray.nodes()) < 2:
            return None
        if opening.path not in self._contents:
            self._contents[opening.path] = self._ray.put(opening.path.read_bytes())
        return self._contents[opening.path]


def _answers(address: str) -> None:
    """Raises ValueError if nothing answers at HOST:PORT, for which Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECTING).close()
    except OSError as error:
        raise ValueError(f"--ray {address}: {reason(error)}: give a cluster's address, auto or local") from None


def _why(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return message_line(f"its Ray worker failed: {type(cause).__name__}: {cause}")
    kind = type(error).__name__
    return f"its Ray worker is gone ({kind}): out of memory, a machine failed, or epsim is not installed on it"
