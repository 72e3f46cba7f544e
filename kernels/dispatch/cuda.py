"""Compiles dispatch.cu: its arguments and sizes. NVRTC compiles at first use; CuPy caches on disk."""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from epsim.kernels.split.launch import compiled, macros, with_headers

MOST_EXPERTS, MOST_SLOTS, MOST_ASSIGNMENTS = 1 << 10, (1 << 16) - 1, 1 << 22
"""The largest sizes for which the words and tables of dispatch.cu have enough bits."""
BUFFERS = ("counts", "rank_counts", "words", "ends", "routed", "step", "physical", "shared_rank", "slots_out")
POINTERS = ("ids", "rows", "loads", "split", *BUFFERS, "first", "copies", "nearest", "node")
NUMBERS = ("tokens", "top_k", "experts", "slots", "ranks", "rank", "follow", "shared", "global", "plus_local")
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [(name, np.int64) for name in ("seed_key", "layer_key", "cost")]
    + [(name, np.int32) for name in NUMBERS],
    align=True,
)
"""The struct Arguments of state.cuh."""
FOLLOW = {"systematic": 0, "sampled": 1, "gathered": 2, "nearest": 3}
CANDIDATES = {"none": 0, "own": 1, "visited": 2, "all": 3}
"""The numbers in state.cuh of `SplitRule.follow` and `SharedRule.candidates`."""
COST_BITS = 20
WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Launch sizes.

    threads: per block, of all kernels except `count`. count_threads, count_blocks: those of `count`. items: ids that a
    thread of `count` processes at a time. sources: source ranks per thread of `serve`. most_blocks: limit for `assign`.
    """

    threads: int = 256
    count_threads: int = 512
    count_blocks: int = 8
    items: int = 8
    sources: int = 4
    most_blocks: int = 264

    def threads_of(self, name: str) -> int:
        return self.count_threads if name == "count" else self.threads

    @property
    def definitions(self) -> dict[str, int]:
        """The macros of dispatch.cu."""
        return {name: value for name, value in macros(self).items() if name != "MOST_BLOCKS"}


def available() -> bool:
    """Whether CuPy is installed and PyTorch's current CUDA device has clusters of thread blocks (capability 9.0)."""
    usable = importlib.util.find_spec("cupy") is not None and torch.cuda.is_available()
    return usable and torch.cuda.get_device_capability() >= (9, 0)


def source() -> str:
    """The source of dispatch.cu with its headers inlined."""
    return with_headers(Path(__file__).with_name("dispatch.cu"))


@functools.cache
def kernel(device: int, sizes: Sizes, name: str, shared: int) -> int:
    """The driver's handle of a kernel."""
    return compiled(device, source(), sizes.definitions, name, shared, exact=True)


def finalise(bits: int) -> int:
    """The finaliser of SplitMix64, as in epsim/policies/hashing.py and state.cuh."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & WORD
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & WORD
    return bits ^ bits >> 31


def first_link(part: int) -> int:
    """The hash key of a chain of one part, as a signed 64-bit integer."""
    return int(np.uint64(finalise((part + 0x9E3779B97F4A7C15) & WORD)).astype(np.int64))


def shared_bytes(name: str, sizes: Sizes, experts: int, num_slots: int, num_ranks: int) -> int:
    """Bytes of shared memory per block of the kernel of that name."""
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
