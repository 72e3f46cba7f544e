"""Compiles and launches batch.cu: its arguments and sizes. NVRTC compiles at first use; CuPy caches on disk."""

import functools
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from epsim.kernels.reader.build import LayerSketch
from epsim.kernels.reader.codes import BLOCK, row_bytes
from epsim.kernels.reader.cuda import GIVEN, MAP, MOST_SHARED, addresses, blocks_of, uncovered_sketch
from epsim.kernels.split.launch import compiled, launch, macros, with_headers

POINTERS = (
    *GIVEN, "state", "coordinate", "record", "expert", "start", "token", "weight", "pair_of", "amounts", "scores",
    "bins", "candidates", "channels", "number", "bits", "unit", "activated", "parts", "mapped", "kept", "output",
)  # fmt: skip
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [("stride", np.int64)]
    + [(name, np.int32) for name in ("tokens", "experts", "columns", "stages")],
    align=True,
)
"""The struct Arguments of batch.cu."""
PREPARING, THREADS, SCREENING, PROJECTING = 1024, 256, 128, 128
WARPS, AHEAD, DEPTH, STRIP, FINISHED, LISTED, BINS = 8, 4, 4, 256, 2, 64, 4096
MOST_TOKENS, MOST_EXPERTS, MOST_COLUMNS = 128, 512, 64
FEW_TOKENS = 64
"""For at most this many tokens, the screen processes 8 tokens of an expert at a time; for more tokens, 16."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The constants of batch.cu. `cuda.Sizes` explains them."""

    hidden: int
    inter: int
    coordinates: int
    rank: int
    gelu: bool

    @property
    def definitions(self) -> dict[str, int]:
        return macros(self)

    @property
    def blocks(self) -> int:
        return self.hidden // BLOCK

    @property
    def record(self) -> int:
        """Bytes of a record: a token's chosen coordinates in one block of 128, with their unit."""
        return 2 * self.coordinates + 16

    @property
    def padded(self) -> int:
        """The number of channels, rounded up to a multiple of 32."""
        return -(-self.inter // 32) * 32

    def screening(self, together: int) -> int:
        """Bytes of shared memory of a thread block that screens `together` tokens of an expert at a time."""
        stage = 80 * self.coordinates + 640 + together * self.record
        return AHEAD * stage + 4 * self.blocks * self.coordinates

    @property
    def extending(self) -> int:
        """Bytes of one stage of the kernel `extend`, for all warps."""
        warp_blocks = -(-self.hidden // 32 // WARPS)
        span = -(-warp_blocks // -(-warp_blocks // 8))
        return WARPS * 16 * span * 64

    def stages(self, tokens: int) -> int:
        """The number of stages of `extend`: as many as fit into shared memory with its partial sums, at most 4."""
        return min((MOST_SHARED - self._extending_beside(tokens)) // self.extending, 4)

    def _extending_beside(self, tokens: int) -> int:
        return LISTED * 36 + -(-tokens // 8) * 4096

    def launches(self, tokens: int, experts: int, columns: int, blocks: int) -> Iterator[tuple[str, int, int, int]]:
        """(name, blocks, threads, bytes of shared memory) of each kernel. blocks: the number of blocks of `extend`."""
        most, strips, words = min(experts, tokens * columns), -(-self.hidden // STRIP), self.padded // 32
        pairs = experts * (-(-tokens // 32) * 4 + 4)
        yield "prepare", self.blocks + 1, PREPARING, max(tokens * 513 + 656, pairs) + 15 & ~15
        name, together = ("screen", 8) if tokens <= FEW_TOKENS else ("screen_more", 16)
        yield name, most * -(-row_bytes(self.inter) // 64), SCREENING, self.screening(together)
        yield "choose", most, THREADS, 1024 + 64
        yield "enlist", most, THREADS, words * 8 + 16
        extending = self.stages(tokens) * self.extending + self._extending_beside(tokens)
        yield "extend", blocks, THREADS, extending
        projecting = PROJECTING // 32 * DEPTH * 4096 + -(-self.inter * 2 // 16) * 16
        yield "project", most * (strips + (self.rank > 0)), PROJECTING, projecting
        yield "finish", self.blocks * -(-tokens // FINISHED), THREADS, FINISHED * (128 + 4 * columns)


def uncovered(sizes: Sizes, tokens: int, experts: int, columns: int) -> str | None:
    """The reason why batch.cu cannot run these sizes, or None if it can."""
    if sizes.hidden % BLOCK or sizes.inter % 8:
        return f"hidden {sizes.hidden} is not a multiple of {BLOCK} or intermediate {sizes.inter} not one of 8"
    if (why := uncovered_sketch(sizes.coordinates, sizes.rank)) is not None:
        return why
    if not (tokens <= MOST_TOKENS and experts <= MOST_EXPERTS and 0 < columns <= MOST_COLUMNS):
        return (
            f"{tokens} tokens of {columns} experts of {experts}, more than {MOST_TOKENS}, {MOST_COLUMNS} and "
            f"{MOST_EXPERTS}"
        )
    largest = max(shared for *_, shared in sizes.launches(tokens, experts, columns, 1))
    if largest > MOST_SHARED or sizes.stages(tokens) < 2:
        return f"a block needs {largest} bytes of shared memory, more than {MOST_SHARED}"
    return None


INSTRUCTIONS = ("hopper.cuh", "halves.cuh", "batch_ops.cuh")
"""Headers with inline PTX for instructions that CUDA C++ lacks."""


def source(without: Container[str] = ()) -> str:
    """The source of batch.cu with its headers inlined, except those in `without`."""
    return with_headers(Path(__file__).with_name("batch.cu"), without)


@functools.cache
def _kernel(device: int, sizes: Sizes, name: str) -> int:
    return compiled(device, source(), sizes.definitions, name, MOST_SHARED)


def argument_of(
    sizes: Sizes, sketch: LayerSketch, x: torch.Tensor, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None
) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """An ARGUMENTS record and the tensors it points to, including the output. tensors: ids, weights, gate_up, down
    (transposed), kept_of."""
    (tokens, columns), experts = tensors["ids"].shape, sketch.num_experts
    pairs, channels = tokens * columns, experts * sizes.inter
    shapes: dict[str, tuple[torch.dtype, int]] = {
        "state": (torch.int64, 4),
        "coordinate": (torch.uint8, sizes.blocks * sizes.coordinates),
        "record": (torch.uint8, sizes.blocks * tokens * sizes.record),
        "expert": (torch.int32, experts),
        "start": (torch.int32, experts + 1),
        "token": (torch.int32, pairs),
        "weight": (torch.float32, pairs),
        "pair_of": (torch.int32, pairs),
        "amounts": (torch.float32, pairs * sizes.inter),
        "scores": (torch.int32, channels),
        "bins": (torch.int32, BINS),
        "candidates": (torch.int64, channels),
        "channels": (torch.int16, channels),
        "number": (torch.int32, experts),
        "bits": (torch.int32, experts * sizes.padded // 32),
        "unit": (torch.int32, channels // 8),
        "activated": (torch.bfloat16, pairs * sizes.padded),
        "parts": (torch.float32, pairs * sizes.hidden),
        "mapped": (torch.float32, pairs * MAP),
    }
    # One allocation for all buffers: several allocations would take the host longer than the kernels run.
    begins, end = {}, 0
    for name, (dtype, size) in shapes.items():
        begins[name] = end
        end += -(-size * dtype.itemsize // 256) * 256
    room = torch.empty(end, dtype=torch.uint8, device=x.device)
    buffers = {
        name: room[begins[name] : begins[name] + size * dtype.itemsize].view(dtype)
        for name, (dtype, size) in shapes.items()
    }
    pointers, held = addresses(POINTERS, sketch, x, tensors | buffers, kept)
    return np.array([(*pointers, x.stride(0), tokens, experts, columns, sizes.stages(tokens))], ARGUMENTS), held


def launched(
    sizes: Sizes, sketch: LayerSketch, x: torch.Tensor, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Launches all kernels and returns the tensors of `argument_of`, including the output of `BatchReader.read`."""
    argument, held = argument_of(sizes, sketch, x, tensors, kept)
    stream = torch.cuda.current_stream().cuda_stream
    (tokens, columns), experts = tensors["ids"].shape, sketch.num_experts
    for name, blocks, threads, shared in sizes.launches(tokens, experts, columns, blocks_of(x.device.index)):
        launch(_kernel(x.device.index, sizes, name), (blocks,), threads, shared, stream, argument, early=True)
    return held
