"""Compiles and launches decode.cu: its arguments and sizes. NVRTC compiles at first use; CuPy caches on disk."""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epsim.kernels.split.launch import compiled, launch, macros, with_headers

POINTERS = ("hidden", "ids", "weights", "gate_up", "down", "rows", "activated", "output", "counts", "arrived")
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [("stride", np.int64)]
    + [(name, np.int32) for name in ("tokens", "experts", "columns")],
    align=True,
)
"""The struct Arguments of decode.cu."""
WARPS, LONGEST, MOST_EXPERTS, MOST_PAIRS, MOST_STAGES = 8, 1024, 512, 1024, 8
THREADS = 32 * (WARPS + 1)


def pitch(inner: int) -> int:
    """Bytes between rows of a stage in shared memory, as in decode.cu."""
    size = 2 * min(inner, LONGEST)
    return size + (64 if size % 128 == 0 else 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The constants of decode.cu. tokens: 8, 16, 32 or 64. experts: a multiple of 32. shared: bytes per block."""

    hidden: int
    inter: int
    tokens: int
    experts: int
    pairs: int
    shared: int

    @property
    def stage(self) -> int:
        return 16 * max(pitch(self.hidden), pitch(self.inter))

    @property
    def stages(self) -> int:
        tiles = self.tokens // 8
        partial = (2 if tiles <= 2 else 1) * WARPS * tiles * 512
        scratch = max(partial, WARPS * self.tokens * 80)
        routing = 14 * self.experts + 5 * self.pairs + 64 + 4 * MOST_STAGES
        room = (self.shared - scratch - routing - 16 * MOST_STAGES) // self.stage
        return min(room, MOST_STAGES)

    @property
    def definitions(self) -> dict[str, int]:
        return macros(self, "stages")


def sizes_of(tokens: int, columns: int, experts: int, hidden: int, inter: int, shared: int) -> Sizes:
    most = next(size for size in (8, 16, 32, 64) if tokens <= size)
    return Sizes(hidden, inter, most, -(-experts // 32) * 32, -(-most * columns // 16) * 16, shared)


def source() -> str:
    """The source of decode.cu with its header inlined."""
    return with_headers(Path(__file__).with_name("decode.cu"))


@functools.cache
def available(device: int) -> bool:
    """Whether CuPy is installed and the device has compute capability 9.0."""
    return importlib.util.find_spec("cupy") is not None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _properties(device: int) -> tuple[int, int]:
    """The number of multiprocessors, and the most bytes of shared memory per block."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


@functools.cache
def _kernel(device: int, sizes: Sizes) -> int:
    return compiled(device, source(), sizes.definitions, "experts", sizes.shared)


@functools.cache
def _arrived(device: int) -> torch.Tensor:
    """The counters of decode.cu. All launches share them. A launch fills the GPU, so no two run at the same time."""
    return torch.zeros(2, dtype=torch.int64, device=f"cuda:{device}")


def uncovered(hidden: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, slots: int) -> str | None:
    """The reason why decode.cu cannot compute these experts, or None if it can."""
    size, inter = gate_up.shape[2], gate_up.shape[1] // 2
    if size % 32 or inter % 32:
        return f"hidden {size} and intermediate {inter} are not both multiples of 32"
    if slots > MOST_EXPERTS or ids.numel() > MOST_PAIRS:
        return f"{slots} experts and {ids.numel()} pairs, more than {MOST_EXPERTS} and {MOST_PAIRS}"
    if hidden.dtype != torch.bfloat16 or hidden.stride(0) % 8 or hidden.data_ptr() % 16:
        return "hidden states are not bfloat16 with rows that begin at multiples of 16 bytes"
    return None


def fused(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> torch.Tensor:
    """`decode` in one launch."""
    device = hidden.device.index
    (tokens, columns), (_, size, inter) = ids.shape, down.shape
    slots = len(gate_up) if rows is None else len(rows)
    blocks, shared = _properties(device)
    sizes = sizes_of(tokens, columns, slots, size, inter, shared)
    function = _kernel(device, sizes)
    output = torch.empty(tokens, size, dtype=torch.bfloat16, device=hidden.device)
    activated = torch.empty(sizes.pairs, inter, dtype=torch.bfloat16, device=hidden.device)
    pointers = [
        0 if tensor is None else tensor.data_ptr()
        for tensor in (hidden, ids, weights, gate_up, down, rows, activated, output, counts, _arrived(device))
    ]
    arguments = np.array([(*pointers, hidden.stride(0), tokens, slots, columns)], ARGUMENTS)
    stream = torch.cuda.current_stream().cuda_stream
    launch(function, (blocks,), THREADS, shared, stream, arguments, early=False, together=True)
    return output
