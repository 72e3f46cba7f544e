"""Compiles and launches reader.cu: its arguments and sizes. NVRTC compiles at first use; CuPy caches on disk."""

import functools
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from epsim.kernels.reader.build import LayerSketch
from epsim.kernels.reader.codes import BLOCK
from epsim.kernels.split.launch import compiled, launch, macros, with_headers

SKETCH = ("codes", "scales", "norms", "signs", "basis", "coefficients")
GIVEN = ("x", "ids", "weights", *SKETCH, "gate_up", "down", "kept_of")
"""The tensors that every kernel of the reader takes."""
POINTERS = (*GIVEN, "estimates", "scores", "parts", "mapped", "kept", "output", "ended")
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in POINTERS] + [("stride", np.int64), ("tokens", np.int32)], align=True
)
"""The struct Arguments of reader.cu."""
WARPS = 16
THREADS = 32 * WARPS
LONGEST, MOST_CHANNELS, MOST_EXPERTS, MAP = 3072, 16384, 32, 32
CHOOSING = 4096 * 4 + 1024 * 8
"""Bytes of shared memory for choosing channels: bins and candidates."""
MOST_SHARED = 227 << 10
"""Bytes of shared memory that a block may have (compute capability 9.0)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The constants of reader.cu.

    columns: experts per token. coordinates: how many of each 128 are read. rank: of the map, 0 for none. gelu: true for
    GELU, false for SiLU.
    """

    hidden: int
    inter: int
    columns: int
    coordinates: int
    rank: int
    gelu: bool

    @property
    def definitions(self) -> dict[str, int]:
        return macros(self, "buffers", "gathering", "shared")

    @property
    def words(self) -> int:
        """The number of 32-bit words with one bit per channel of a token."""
        return -(-self.columns * self.inter // 32)

    @property
    def scores(self) -> int:
        """The number of scores of a token, rounded up to a multiple of 64."""
        return -(-self.columns * self.inter // 64) * 64

    @property
    def buffers(self) -> int:
        """The number of screen tasks whose codes a block holds. With two, the next codes load during computation."""
        return 2 if self._fixed + self._screening(2) <= MOST_SHARED else 1

    @property
    def gathering(self) -> int:
        """The number of channels whose rows a block holds in shared memory, at most one per warp."""
        return max(min((MOST_SHARED - self._fixed) // (6 * self.hidden), WARPS), 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: the struct Shared of reader.cu."""
        turns = max(self._screening(self.buffers), self.gathering * 6 * self.hidden)
        return (turns + self._fixed) // 128 * 128

    def _screening(self, buffers: int) -> int:
        blocks = self.hidden // BLOCK
        return blocks * (buffers * (self.coordinates * 37 + 4) + 1280) + 16 + CHOOSING

    @property
    def _fixed(self) -> int:
        """Bytes of shared memory that a block needs in all stages, with padding."""
        by_channel = 2 * self.columns * self.inter + 4 * self.words
        return 2 * self.hidden + WARPS * (128 + 16 + 8 + 8) + THREADS * 4 + by_channel + 64 + 512


def uncovered_sketch(coordinates: int, rank: int) -> str | None:
    """The reason why no kernel of the reader supports these coordinates or this rank of the map, or None."""
    if coordinates % 16 or not 0 < coordinates <= BLOCK:
        return f"{coordinates} coordinates of {BLOCK} are not a multiple of 16"
    if rank not in (0, MAP):
        return f"a map of rank {rank}, not {MAP}"
    return None


def uncovered(sizes: Sizes) -> str | None:
    """The reason why reader.cu cannot run these sizes, or None if it can."""
    if sizes.hidden % BLOCK or sizes.hidden > LONGEST:
        return f"hidden {sizes.hidden} is not a multiple of {BLOCK} up to {LONGEST}"
    if not 0 < sizes.columns <= MOST_EXPERTS:
        return f"a token has {sizes.columns} experts, not 1 to {MOST_EXPERTS}"
    if sizes.columns * sizes.inter > MOST_CHANNELS:
        return f"{sizes.columns} experts of {sizes.inter} channels are more than {MOST_CHANNELS} channels of a token"
    return uncovered_sketch(sizes.coordinates, sizes.rank)


INSTRUCTIONS = ("hopper.cuh", "halves.cuh")
"""Headers with inline PTX for instructions that CUDA C++ lacks."""


def source(without: Container[str] = ()) -> str:
    """The source of reader.cu with its headers inlined, except those in `without`."""
    return with_headers(Path(__file__).with_name("reader.cu"), without)


@functools.cache
def blocks_of(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(device: int, sizes: Sizes) -> int:
    return compiled(device, source(), sizes.definitions, "reader", sizes.shared)


def workspace(sizes: Sizes, tokens: int, blocks: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The words that blocks exchange, for up to `tokens` tokens. Each word has a tag, the number of the launch that
    wrote it, by which blocks recognise zeros and words of earlier launches as old."""
    rows = max(blocks, tokens)
    estimates = (tokens, sizes.columns, sizes.inter)
    words = {
        "estimates": estimates,
        "scores": (tokens, sizes.scores),
        "parts": (rows, sizes.hidden),
        "mapped": (rows, MAP),
    }
    return {name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in words.items()}


@functools.cache
def _ended(device: int) -> torch.Tensor:
    """The number of blocks that have ended, over all launches. All kernels share it: they have equally many blocks."""
    return torch.zeros(1, dtype=torch.int64, device=f"cuda:{device}")


_workspaces: dict[tuple[int, Sizes, int], dict[str, torch.Tensor]] = {}
"""Workspaces by device, sizes and most tokens. They are never freed, because CUDA graphs may hold their addresses."""


def _workspace(sizes: Sizes, tokens: int, device: int) -> dict[str, torch.Tensor]:
    most = 1 << max(tokens - 1, 15).bit_length()
    key = (device, sizes, most)
    if key not in _workspaces:
        if torch.cuda.is_current_stream_capturing():
            # During a capture, the zeros would not be written now but in every replay.
            raise ValueError(f"read {tokens} tokens once before capturing such a read in a CUDA graph")
        _workspaces[key] = workspace(sizes, most, blocks_of(device), torch.device("cuda", device))
        torch.cuda.synchronize(device)
    return {**_workspaces[key], "ended": _ended(device)}


def addresses(
    names: tuple[str, ...],
    sketch: LayerSketch,
    x: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    kept: torch.Tensor | None,
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The address of each named tensor (0 if there is none), and the tensors by name, including a new output."""
    held = {name: getattr(sketch, name) for name in SKETCH} | {"x": x, **tensors}
    held["output"] = torch.empty(len(x), sketch.hidden, dtype=torch.bfloat16, device=x.device)
    if kept is not None:
        held["kept"] = kept
    return [held[name].data_ptr() if name in held else 0 for name in names], held


def argument_of(
    sketch: LayerSketch, x: torch.Tensor, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None
) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """An ARGUMENTS record and the tensors it points to, including the output."""
    pointers, held = addresses(POINTERS, sketch, x, tensors, kept)
    return np.array([(*pointers, x.stride(0), len(x))], ARGUMENTS), held


def fused(
    sizes: Sizes, sketch: LayerSketch, x: torch.Tensor, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None
) -> torch.Tensor:
    """`read` in one launch. tensors: ids, weights, gate_up, down (transposed), kept_of."""
    device = x.device.index
    blocks = blocks_of(device)
    argument, held = argument_of(sketch, x, {**tensors, **_workspace(sizes, len(x), device)}, kept)
    stream = torch.cuda.current_stream().cuda_stream
    # Blocks wait for each other, so all must run at the same time. There is one block per multiprocessor, and a launch
    # begins early only after all blocks of the previous launch have begun.
    launch(_kernel(device, sizes), (blocks,), THREADS, sizes.shared, stream, argument, early=True)
    return held["output"]
