"""Workers as Ray actors, on an existing cluster or on a local one that is started for the sweep."""

import importlib
import os
import socket
import tempfile
from contextlib import suppress
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

    def __init__(self, threads: int, folder: str = ".") -> None:
        """folder: the command's current folder, for relative paths such as that of `file`."""
        import torch

        with suppress(OSError):  # another machine may not have it
            os.chdir(folder)
        os.environ["EPSIM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        self._folder = Path(tempfile.mkdtemp(prefix="epsim-sweep-"))
        self._local: dict[Path, Path] = {}

    def perform(self, job: Cell, files: list[Any]) -> Done | Failed:
        """Performs a job. files: (path, Ray object with the content) of each trace, for machines without the file."""
        import ray

        for path, content in files:
            if path not in self._local:
                self._local[path] = path
                if not path.exists():
                    self._local[path] = self._folder / f"{len(self._local)}.parquet"
                    self._local[path].write_bytes(ray.get(content))
        trace = replace(job.trace, path=self._local[job.trace.path])
        history = job.history and replace(job.history, path=self._local[job.history.path])
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
            num_cpus = num_workers or cores()
            ray.init(num_cpus=num_cpus, include_dashboard=False, **quiet)
        else:
            _answers(address)
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                line = message_line(str(error).splitlines()[0])
                raise ValueError(f"--ray {address}: {line}: give a cluster's address, auto or local") from None
            num_cpus = int(ray.cluster_resources().get("CPU", 0))
        # Ray prints messages about dead workers to stdout, where the sweep's table goes, and has no option against it.
        printing: Any = importlib.import_module("ray._private.worker")
        if hasattr(printing, "_worker_logs_enabled"):
            printing._worker_logs_enabled = False
        self.num_workers = num_workers or num_cpus
        if self.num_workers > num_cpus or num_cpus < 1:
            ray.shutdown()
            raise ValueError(f"--workers {self.num_workers}: the cluster has {num_cpus} CPUs: give fewer")
        self._actors: dict[int, Any] = {}
        self._busy: dict[Any, int] = {}
        self._contents: dict[Path, Any] = {}

    def give(self, worker: int, job: Job) -> None:
        assert isinstance(job, Cell), "traces are made on the machine of the sweep"
        if worker not in self._actors:
            made = self._ray.remote(SweepActor).options(num_cpus=1, max_restarts=0)
            self._actors[worker] = made.remote(self._threads, os.getcwd())
        files = [(opening.path, self._content(opening)) for opening in job.openings]
        self._busy[self._actors[worker].perform.remote(job, files)] = worker

    def wait(self) -> list[tuple[int, Outcome]]:
        ready, _ = self._ray.wait(list(self._busy), num_returns=1)
        outcomes: list[tuple[int, Outcome]] = []
        for reference in ready:
            worker = self._busy.pop(reference)
            try:
                outcomes.append((worker, self._ray.get(reference)))
            except self._ray.exceptions.RayError as error:
                self._ray.kill(self._actors.pop(worker))
                outcomes.append((worker, Died(_why(error))))
        return outcomes

    def close(self) -> None:
        self._ray.shutdown()

    def _content(self, opening: Opening) -> Any:
        """The Ray object with a trace's content, stored once; None on a single machine, which needs no copy."""
        if len(self._ray.nodes()) < 2:
            return None
        if opening.path not in self._contents:
            self._contents[opening.path] = self._ray.put(opening.path.read_bytes())
        return self._contents[opening.path]


def _answers(address: str) -> None:
    """Raises ValueError if nothing answers at HOST:PORT. Ray itself would wait for minutes."""
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
