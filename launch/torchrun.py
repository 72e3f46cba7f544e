"""Runs several ranks on this machine with PyTorch's elastic launcher. A fault is reported in one line.

For several machines start `torchrun --nnodes ... -m epsim.launch.worker ...` on each (launch/README.md).
"""

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from epsim import stops
from epsim.files import message_line
from epsim.launch.folder import LOGS, RESULTS, TELEMETRY, clear, clear_logs
from epsim.launch.options import RunOptions
from epsim.launch.prepare import prepare
from epsim.launch.store import for_watch, serve
from epsim.launch.worker import LAUNCHER
from epsim.results import ResultsData, read_results
from epsim.runtime.beats import (
    BAD_INPUT,
    FAULT,
    INTERVAL,
    SILENCE,
    Fault,
    Lookout,
    read_beats,
    read_fault,
    stopped_words,
)

DEFAULT_RANKS = 4
GRACE = 5.0
"""Seconds after a fault after which processes that still run are killed."""


def run_torchrun(options: RunOptions) -> ResultsData:
    """Runs the job. Raises ValueError or OSError for a mistake in the options. After a fault, prints a line on stderr
    and raises SystemExit."""
    num_ranks = options.ranks or (torch.cuda.device_count() if torch.cuda.is_available() else 0) or DEFAULT_RANKS
    prepare(options, num_ranks)
    clear(options)
    clear_logs(options.folder)
    store = serve("127.0.0.1")
    logs = options.folder / LOGS
    # For workers, which inherit it. They end by themselves when they learn of a fault; those that cannot are killed.
    before = dict(os.environ)
    os.environ |= {"EPSIM_STORE": f"127.0.0.1:{store.port}", LAUNCHER: str(os.getpid())}
    os.environ |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(SILENCE + GRACE))}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.ERROR)  # hides the elastic launcher's long report of a fault
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"epsim-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=os.fspath(logs), redirects=Std.ALL),
    )
    faults = for_watch(store, 0)
    lookout = Lookout(faults, num_ranks, options.folder / TELEMETRY)
    over = threading.Event()
    killer = threading.Thread(target=_end_those_that_cannot, args=(lookout, faults, num_ranks, over))
    killer.start()
    arguments = ["-m", "epsim.launch.worker", *options.arguments()]

    def stop_line(by: signal.Signals) -> str:
        fault = read_fault(faults)
        return fault.line if fault else stopped_words(faults, num_ranks, by)

    try:
        with stops.line_at_stop(stop_line):
            elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stopped:  # its own signal handlers raise this
        stops.wait_if_ending()
        print(f"epsim: {stop_line(signal.Signals(stopped.sigval))}", file=sys.stderr)
        sys.exit(128 + int(stopped.sigval))
    except ChildFailedError as error:
        stops.wait_if_ending()
        fault = read_fault(faults) or _without_words(error, logs, lookout)
        print(f"epsim: {fault.line}", file=sys.stderr)
        sys.exit(fault.code)
    finally:
        # A thread that still uses the store while Python shuts down aborts the process.
        over.set()
        killer.join()
        logging.disable(logging.NOTSET)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
    return read_results(options.folder / RESULTS)


def _end_those_that_cannot(lookout: Lookout, faults: Any, num_ranks: int, over: threading.Event) -> None:
    """Kills workers that cannot react to a fault, because they are stopped (SIGSTOP) or stuck inside a driver. Returns
    early if the workers are over."""
    while lookout.look() is None:
        if over.wait(INTERVAL):
            return
    if over.wait(GRACE):
        return
    for beat in read_beats(faults, num_ranks).values():
        if _parent_of(beat.pid) == os.getpid():
            os.kill(beat.pid, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _without_words(error: ChildFailedError, logs: Path, lookout: Lookout) -> Fault:
    """The fault of a worker that ended before it could report one: the last line of its stderr, if any."""
    rank, failure = error.get_first_failure()
    words = ""
    for path in logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        words = message_line(lines[-1].removeprefix("epsim: ")) if lines else ""
    code = failure.exitcode
    by = next((by for by in stops.SIGNALS if code in (-by, 128 + by)), None)
    if by is not None:
        return Fault(f"rank {rank} was stopped by {by.name} in {lookout.place_of(rank)}", 128 + by, rank)
    if code == BAD_INPUT and words:
        return Fault(words, BAD_INPUT, rank)
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return Fault(f"rank {rank} {how} in {lookout.place_of(rank)}{f': {words}' if words else ''} ({logs})", FAULT, rank)
