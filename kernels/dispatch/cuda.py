"""dispatch.cu: its arguments, sizes and compiled kernels; by NVRTC at first use, CuPy keeps them on disk."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epsim.kernels.split.launch import with_headers

MOST_EXPERTS, MOST_SLOTS, MOST_ASSIGNMENTS = 1 << 10, (1 << 16) - 1, 1 << 22
"""What dispatch.cu's words and tables hold."""
BUFFERS = ("counts", "own", "words", "ends", "routed", "step", "physical", "shared_rank", "slots_out")
POINTERS = ("ids", "rows", "loads", "split", *BUFFERS, "first", "copies", "nearest", "node")
NUMBERS = ("tokens", "top_k", "experts", "slots", "ranks", "rank", "follow", "shared", "global", "plus_local")
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [(name, np.int64) for name in ("seed_key", "layer_key", "cost")]
    + [(name, np.int32) for name in NUMBERS],
    align=True,
)
"""state.cuh's Arguments."""
SYSTEMATIC, SAMPLES, GATHERED, STATIC = range(4)
NO_SHARED, LOCAL, VISITED, EVERY = range(4)
COST_BITS = 20
WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Threads of a block; `count`'s threads, blocks, and the ids that a thread has at a time; the source ranks that a
    thread of `serve` has; `assign`'s most blocks."""

    threads: int = 256
    count_threads: int = 512
    count_blocks: int = 8
    items: int = 8
    sources: int = 4
    most_blocks: int = 264

    def threads_of(self, name: str) -> int:
        return self.count_threads if name == "count" else self.threads

    @property
    def options(self) -> tuple[str, ...]:
        return (
            f"-DTHREADS={self.threads}",
            f"-DCOUNT_THREADS={self.count_threads}",
            f"-DCOUNT_BLOCKS={self.count_blocks}",
            f"-DITEMS={self.items}",
            f"-DSOURCES={self.sources}",
        )


def available() -> bool:
    """Whether CuPy is installed and PyTorch's current CUDA device has clusters of blocks (compute capability 9.0)."""
    found = importlib.util.find_spec("cupy") is not None and torch.cuda.is_available()
    return found and torch.cuda.get_device_capability() >= (9, 0)


def source() -> str:
    """dispatch.cu with its headers in place."""
    return with_headers(Path(__file__).with_name("dispatch.cu"))


@functools.cache
def _module(sizes: Sizes) -> Any:
    import cupy

    # No contraction: sums and products are rounded as on the CPU.
    return cupy.RawModule(code=source(), options=("--std=c++17", "--fmad=false", *sizes.options))


@functools.cache
def kernel(device: int, sizes: Sizes, name: str, shared: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        found = _module(sizes).get_function(name)
        if shared > 48 * 1024:
            found.max_dynamic_shared_size_bytes = shared
        return found


def finalise(bits: int) -> int:
    """SplitMix64's finaliser, as in epsim/policies/hashing.py and state.cuh."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & WORD
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & WORD
    return bits ^ bits >> 31


def first_link(part: int) -> int:
    """The key of a chain of one part, as a signed 64-bit number."""
    return int(np.uint64(finalise((part + 0x9E3779B97F4A7C15) & WORD)).astype(np.int64))


def shared_bytes(name: str, sizes: Sizes, experts: int, num_slots: int, num_ranks: int) -> int:
    """Shared memory of a block, as the kernel of that name lays it out."""
    threads, count_warps = sizes.threads, sizes.count_threads // 32
    ends = [4 * num_slots] * 2 + [4 * experts] * 2 + [2 * num_slots]
    spans = {
        "count": [4 * (experts + 1)] * 3 + [8 * count_warps * experts],
        "total": [8 * threads],
        "quotas": [4 * threads // 32 * 5 * (num_ranks + 1)],
        "serve": ends,
        "assign": [*ends, *[8 * num_ranks] * 3, 8, 4, 4 * threads, 8 * threads],
    }
    return sum(-(-span // 16) * 16 for span in spans[name])
