"""Starts real processes with gloo, once per world size, and returns the result of each process."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = ["torch", "torch.distributed", "epsim.runtime.layer", "epsim.runtime.relocation", "epsim.runtime.recording"]
WARM = "tests.runtime.warm"


def launch(
    size: int, program: Callable[..., Any], *args: Any, seconds: float = 300, backend: str = "gloo"
) -> list[Any]:
    """program(rank, *args) in `size` processes of a group (with nccl, one a GPU) -> what each returned, by rank.

    Raises RuntimeError with the traceback of the first rank that failed, and where they take too long.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # Processes take over this path, and find `program` by its module's name.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, WARM] if backend == "gloo" else PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        processes = [
            context.Process(target=_run, args=(rank, size, folder, results, program, args, backend), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(processes: list[Any], results: Any, seconds: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(processes):
        try:
            rank, failure, result = results.get(timeout=1)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in found]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"ranks {dead} died, {sorted(found)} returned, within {seconds} s") from None
            continue
        if failure:
            raise RuntimeError(f"rank {rank}:\n{failure}")
        found[rank] = result
    return [found[rank] for rank in range(len(processes))]


def _run(
    rank: int, size: int, folder: str, results: Any, program: Callable[..., Any], args: tuple[Any, ...], backend: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        device = None
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
            device_id=device,
        )
        results.put((rank, "", program(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        results.put((rank, traceback.format_exc(), None))
    results.close()
    results.join_thread()
