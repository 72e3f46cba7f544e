"""The collectives of balancing by direct access to the memory of peer GPUs: one small kernel, without NCCL.

It works for GPUs of one host that can access each other's memory, and can be captured in a CUDA graph. The memory comes
from `torch.distributed._symmetric_memory`; CuPy (NVRTC) compiles the kernel.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from epsim.runtime.collective import Collective

MOST_RANKS = 8
THREADS = 512
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in ("mine", "out", "buffers", "calls")]
    + [(name, np.int32) for name in ("rank", "ranks", "words", "capacity", "sum")],
    align=True,
)
"""The struct Arguments of peer.cu."""


@functools.cache
def _kernel(device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return cupy.RawModule(code=Path(__file__).with_name("peer.cu").read_text()).get_function("share")


def obstacle(device: torch.device, group: dist.ProcessGroup | None) -> str | None:
    """The reason why peer memory cannot be used, or None."""
    if device.type != "cuda":
        return "it needs GPUs"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install epsim[gpu])"
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if not 2 <= size <= MOST_RANKS:
        return f"{size} ranks, but it supports 2 to {MOST_RANKS}"
    if size > torch.cuda.device_count():
        return f"{size} ranks on {torch.cuda.device_count()} GPUs of this host"
    device_index = device.index if device.index is not None else torch.cuda.current_device()
    if not all(torch.cuda.can_device_access_peer(device_index, peer) for peer in range(size) if peer != device_index):
        return "the GPUs cannot access each other's memory"
    return None


class PeerCollective(Collective):
    """A `Collective` for at most `capacity` numbers per rank. The result of a call is valid until the next call. All
    calls of an object must be on one stream, in the same order on every rank. The constructor is collective."""

    name = "peer"

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, capacity: int) -> None:
        super().__init__(group)
        import torch.distributed._symmetric_memory as symmetric

        self.capacity, self.device = capacity, device
        group = group or dist.group.WORLD
        assert group is not None
        words = 2 * self.size * capacity + self.size
        self._buffer = symmetric.empty(words, dtype=torch.int64, device=device)
        self._buffer.zero_()
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self._buffer, group.group_name)
        dist.barrier(group)
        peers = [self._handle.get_buffer(rank, (words,), torch.int64) for rank in range(self.size)]
        addresses = np.array([peer.data_ptr() for peer in peers], np.uint64).view(np.int64)
        self._buffers = torch.from_numpy(addresses.copy()).to(device)
        self._calls = torch.zeros(1, dtype=torch.int32, device=device)
        self._out = torch.empty(self.size * capacity, dtype=torch.int64, device=device)
        self._arguments = np.zeros(1, ARGUMENTS)
        fixed = {"buffers": self._buffers.data_ptr(), "calls": self._calls.data_ptr(), "out": self._out.data_ptr()}
        for name, value in {**fixed, "rank": self.rank, "ranks": self.size, "capacity": capacity}.items():
            self._arguments[name] = value
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.all_reduce(torch.zeros(1, dtype=torch.int64, device=device))  # compiles the kernel
        torch.cuda.synchronize(device)
        self.calls.clear()

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        self.calls["all_reduce"] += 1
        return self._share(values, sums=True).view(values.shape)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        self.calls["all_gather"] += 1
        return self._share(values, sums=False).view(self.size, *values.shape)

    def close(self) -> None:
        """Frees the shared memory after all ranks have ended their calls. Do not replay captured graphs afterwards."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        del self._handle, self._buffer

    def _share(self, values: torch.Tensor, sums: bool) -> torch.Tensor:
        import cupy

        words = values.numel()
        if words > self.capacity or values.dtype != torch.int64:
            raise ValueError(f"{words} numbers of {values.dtype} do not fit {self.capacity} int64 of peer memory")
        arguments, values = self._arguments, values.contiguous()
        arguments["mine"], arguments["words"], arguments["sum"] = values.data_ptr(), words, sums
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with cupy.cuda.Device(self._index), cupy.cuda.ExternalStream(stream, self._index):
            _kernel(self._index)((1,), (THREADS,), (arguments,))
        return self._out[: words if sums else self.size * words]


def choose_collective(
    name: str, group: dist.ProcessGroup | None, device: torch.device, capacity: int
) -> tuple[Collective, str]:
    """The collective `name` and the reason for the choice. This call is collective.

    name: `torch`, `peer`, or `auto` (peer memory if possible, else torch). capacity: numbers per rank, such as E + 1.
    Raises ValueError for `peer` if peer memory cannot be used.
    """
    if name not in ("auto", "peer", "torch"):
        raise ValueError(f"collective {name!r} is not one of auto, peer, torch")
    if name == "torch":
        return Collective(group), "asked for"
    why_not = obstacle(device, group)
    if why_not is None:
        return PeerCollective(group, device, capacity), "asked for" if name == "peer" else "GPUs of one host"
    if name == "peer":
        raise ValueError(f"collective peer cannot be used here: {why_not}: use torch")
    return Collective(group), f"no peer memory: {why_not}"
