"""The machine to measure: its device, its ranks, and the ways to time a call."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Call: TypeAlias = Callable[[], object]

CELL_US = 40_000.0
"""Approximate time of one measurement."""
LONG_US = 2_000.0
"""Longer calls hide the host's time, so they are timed without a CUDA graph, which would keep their memory."""
ROW_OF_CALLS = 6
LEAST, MOST = 5, 40
"""The fewest and most repeats of a measurement."""
SLOW_US = 200_000.0
"""Longer calls are measured once."""
DTYPE = torch.bfloat16
"""The type in which the runtime computes and dispatches."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One process of the measurement: rank `rank` of `size` ranks on `nodes` nodes of equal size, one rank per GPU."""

    device: torch.device
    rank: int = 0
    size: int = 1
    nodes: int = 1

    @classmethod
    def here(cls, device: str) -> Machine:
        """The machine of this process. device: `auto`, `cuda` or `cpu`. Under torchrun it joins the process group that
        the environment describes. Raises ValueError if there is no such device."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device {device}: choose auto, cpu or cuda")
        if device == "cuda" and count < local_size:
            raise ValueError(f"--device cuda: {local_size} ranks on this node, but {count} GPUs that PyTorch sees")
        on_gpu = device == "cuda" or (device == "auto" and count >= local_size)
        chosen = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(chosen)
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size > 1 and not dist.is_initialized():
            # NCCL for GPU tensors, gloo for messages between hosts.
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            # Other ranks wait while rank 0 measures alone; torchrun ends them if it dies.
            dist.init_process_group(backend, timeout=timedelta(hours=2), device_id=chosen if on_gpu else None)
        return cls.in_group(chosen, max(size // local_size, 1))

    @classmethod
    def in_group(cls, device: torch.device, nodes: int = 1) -> Machine:
        """The machine of the default process group; a machine of one rank if there is no group."""
        if not dist.is_initialized():
            return cls(device)
        return cls(device, dist.get_rank(), dist.get_world_size(), nodes)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else _cpu_name()

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors; 0 for a CPU."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count if self.on_gpu else 0

    @property
    def free_bytes(self) -> int:
        if self.on_gpu:
            return torch.cuda.mem_get_info(self.device)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def described(self) -> dict[str, Any]:
        """The fields that describe the measurement in every table: device, command, versions, date."""
        command = shlex.join(["epsim", *sys.argv[1:]])
        return {
            "device": self.name,
            "command": command if self.size == 1 else f"torchrun with {self.size} processes: {command}",
            "versions": versions(self.on_gpu),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        }

    def in_a_row_us(self, calls: Sequence[Call]) -> float:
        """Microseconds of all calls in total, one after the other."""
        return _event_us(calls) if self.on_gpu else _host_us(calls)

    def alone_us(self, calls: Sequence[Call], cell_us: float = CELL_US) -> float:
        """Microseconds per call on this device: the mean over `calls`, which differ only in their inputs.

        All calls are repeated for about cell_us, and the median repeat counts. On a GPU a repeat replays a CUDA graph
        of all calls, so no call may wait for the device."""
        for call in calls:
            call()
        if not self.on_gpu:
            return _repeated(lambda: _host_us(calls)) / len(calls)
        if _event_us(calls) > LONG_US * len(calls):
            # The device waits for the host at the start of a sequence, so make the sequence long.
            many = list(calls) * -(-ROW_OF_CALLS // len(calls))
            return _repeated(lambda: _event_us(many), cell_us) / len(many)
        captured = self._captured(calls)
        us = _repeated(lambda: _event_us([captured.replay]), cell_us) / len(calls)
        captured.reset()
        return us

    def eager_us(self, calls: Sequence[Call]) -> float:
        """Microseconds per call, as `alone_us`, for calls that wait for the device or the host and so cannot be
        captured. If a call takes longer than SLOW_US, it is measured once, after one call to warm up."""

        calls[0]()
        first = self.in_a_row_us(calls[:1])
        if first > SLOW_US:
            return first
        for call in calls:
            call()
        return _repeated(lambda: self.in_a_row_us(calls)) / len(calls)

    def together_us(self, call: Call, group: dist.ProcessGroup | None, repeats: int = 15, inner: int = 5) -> float:
        """Microseconds per call of a collective: each rank's median, and of these the slowest rank's. Every member of
        `group` calls this."""
        for _ in range(3):
            call()
        times = []
        for _ in range(repeats):
            dist.barrier(group=group)
            times.append(self.in_a_row_us([call] * inner) / inner)
        slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return float(slowest)

    def captured_together_us(self, call: Call, group: dist.ProcessGroup | None, inner: int = 20) -> float:
        """`together_us` with a CUDA graph of `inner` calls. Only the first of them waits for late ranks. The call must
        not wait for the device or the host."""
        for _ in range(3):
            call()
        torch.cuda.synchronize(self.device)
        dist.barrier(group=group)
        captured = self._captured([call] * inner)
        us = self.together_us(captured.replay, group, inner=1) / inner
        captured.reset()
        return us

    def in_turn_us(self, calls: Sequence[Call], passes: int, row_us: float = 3000.0) -> list[list[float]]:
        """Microseconds of each call on a GPU, [calls][passes]. In each pass the calls take turns, so that a drift of
        the device's speed affects all equally. A turn replays the call's CUDA graph for about row_us."""
        graphs = []
        for call in calls:
            call()
            graphs.append(self._captured([call]))
        repeats = [max(round(row_us / _event_us([graph.replay] * 2) * 2), 2) for graph in graphs]
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(passes):
            for number in range(len(calls)):
                index = (number + turn * len(calls) // passes) % len(calls)
                times[index].append(_event_us([graphs[index].replay] * repeats[index]) / repeats[index])
        for graph in graphs:
            graph.reset()
        return times

    def _captured(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        # `torch.cuda.graph` would collect garbage and empty the cache each time.
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_stream(self.device)):
            captured.capture_begin(pool=_anchor(self.device)[0].pool(), capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                captured.capture_end()
        return captured


@functools.cache
def _stream(device: torch.device) -> Any:
    """The stream of all captures. Captures on different streams could not reuse each other's memory."""
    stream: Any = torch.cuda.Stream
    return stream(device)


@functools.cache
def _anchor(device: torch.device) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that stays alive, so that later captures reuse the memory of its pool, and a tensor that it needs."""
    value, captured = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(_stream(device)):
        captured.capture_begin(capture_error_mode="thread_local")
        value += 1
        captured.capture_end()
    return captured, value


@functools.cache
def _cpu_name() -> str:
    """The CPU's model on Linux; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def versions(on_gpu: bool) -> str:
    words = [f"torch {torch.__version__}"]
    if on_gpu and dist.is_nccl_available():
        nccl: Any = torch.cuda.nccl
        words.append("nccl " + ".".join(map(str, nccl.version())))
    for name in ("triton", "tokenspeed-deepep", "deep_ep"):
        try:
            words.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(words)


def _repeated(once: Callable[[], float], cell_us: float = CELL_US) -> float:
    """The median over as many repeats as fit in cell_us, between LEAST and MOST."""
    first = once()
    repeats = min(max(round(cell_us / max(first, 1.0)), LEAST), MOST)
    return statistics.median(once() for _ in range(repeats))


def _event_us(calls: Sequence[Call]) -> float:
    event: Any = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _host_us(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) * 1e6
