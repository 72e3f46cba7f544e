"""reader.cu: its arguments, sizes and compiled kernels; by NVRTC at first use, CuPy keeps them on disk."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from epsim.kernels.reader.build import LayerSketch
from epsim.kernels.reader.codes import BLOCK
from epsim.kernels.split.launch import compiled, launch

POINTERS = (
    "x",
    "ids",
    "weights",
    "codes",
    "scales",
    "norms",
    "signs",
    "basis",
    "coefficients",
    "gate_up",
    "down",
    "kept_of",
    "estimates",
    "scores",
    "parts",
    "mapped",
    "bins",
    "kept",
    "output",
    "arrived",
)
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in POINTERS] + [("stride", np.int64), ("tokens", np.int32)], align=True
)
"""reader.cu's Arguments."""
WARPS = 16
THREADS = 32 * WARPS
LONGEST, MOST_CHANNELS, MOST_EXPERTS, MAP, BINS, RIVALS = 3072, 16384, 32, 32, 4096, 1024
MOST_SHARED = 227 << 10
"""Bytes of shared memory that a block may have (compute capability 9.0)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What reader.cu is compiled for. columns: experts of a token. coordinates: of 128. gelu: SiLU where not."""

    hidden: int
    inter: int
    columns: int
    coordinates: int
    rank: int
    gelu: bool

    @property
    def definitions(self) -> dict[str, int]:
        return {
            "HIDDEN": self.hidden,
            "INTER": self.inter,
            "COLUMNS": self.columns,
            "COORDINATES": self.coordinates,
            "RANK": self.rank,
            "GELU": int(self.gelu),
            "GATHERING": self.gathering,
            "SHARED": self.shared,
        }

    @property
    def gathering(self) -> int:
        """Warps of a block that hold a channel's rows in shared memory, and a sum of outputs."""
        return 8 if self.hidden <= 2048 else 5

    @property
    def words(self) -> int:
        """Of 32 channels, a token's."""
        return -(-self.columns * self.inter // 32)

    @property
    def shared(self) -> int:
        """Bytes of a block, as reader.cu's Shared."""
        channels, blocks = self.columns * self.inter, self.hidden // BLOCK
        own = -(-channels // THREADS) * WARPS
        weights = max(blocks * (self.coordinates * 32 + 640), self.gathering * 6 * self.hidden)
        sums = max(RIVALS * 8 + channels * 4 + 4096, self.gathering * 4 * self.hidden)
        rest = 2 * self.hidden + WARPS * 128 + self.gathering * 16 + blocks * (7 * self.coordinates + 8) + THREADS * 4
        return (weights + sums + rest + 8 * own + WARPS * 4 + 16 + 2 * channels + 1024) // 128 * 128


def uncovered(sizes: Sizes) -> str | None:
    """Why reader.cu cannot, or None."""
    if sizes.hidden % BLOCK or sizes.hidden > LONGEST:
        return f"hidden {sizes.hidden} is no multiple of {BLOCK} up to {LONGEST}"
    if not 0 < sizes.columns <= MOST_EXPERTS:
        return f"a token has {sizes.columns} experts, not 1 to {MOST_EXPERTS}"
    if sizes.columns * sizes.inter > MOST_CHANNELS:
        return f"{sizes.columns} experts of {sizes.inter} channels are more than {MOST_CHANNELS} channels of a token"
    if sizes.coordinates % 16 or not 0 < sizes.coordinates <= BLOCK:
        return f"{sizes.coordinates} coordinates of {BLOCK} are no multiple of 16"
    if sizes.rank not in (0, MAP):
        return f"a map of rank {sizes.rank}, not {MAP}"
    if sizes.shared > MOST_SHARED:
        return f"a block needs {sizes.shared} bytes of shared memory, of which there are {MOST_SHARED}"
    return None


def source() -> str:
    """reader.cu with its headers in place: CuPy looks up binaries by the text that it is given."""
    text = (FOLDER / "reader.cu").read_text()
    for name in PARTS:
        text = text.replace(f'#include "{name}"', (FOLDER / name).read_text())
    for name, path in HEADERS.items():
        text = text.replace(f'#include "{name}"', path.read_text())
    return text


FOLDER = Path(__file__).parent
PARTS = ("screen.cuh", "choose.cuh", "gather.cuh")
HEADERS = {"hopper.cuh": FOLDER.parent / "experts" / "hopper.cuh", "halves.cuh": FOLDER / "halves.cuh"}
"""Instructions that CUDA C++ has no words for."""


@functools.cache
def available(device: int) -> bool:
    """Whether CuPy is installed and the device has what reader.cu uses (compute capability 9.0)."""
    return importlib.util.find_spec("cupy") is not None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def blocks_of(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(device: int, sizes: Sizes) -> int:
    return compiled(device, source(), sizes.definitions, "reader", sizes.shared)


@functools.cache
def _arrived(device: int) -> torch.Tensor:
    """Blocks that came to a meeting. One for all launches: as each takes every multiprocessor, no two run at once."""
    return torch.zeros(1, dtype=torch.int64, device=f"cuda:{device}")


@functools.cache
def _bins(device: int, tokens: int) -> torch.Tensor:
    """Every launch leaves them at zero."""
    return torch.zeros(tokens, BINS, dtype=torch.int32, device=f"cuda:{device}")


def argument_of(
    sizes: Sizes,
    sketch: LayerSketch,
    x: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    kept: torch.Tensor | None,
    blocks: int,
) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """-> an ARGUMENTS record, and all that it points to, the output among them."""
    tokens, device = len(x), x.device
    held = {name: tensor for name, tensor in sketch.tensors().items() if name != "errors"}
    held |= {"x": x, **tensors}
    shape = (tokens, sizes.columns, sizes.inter)
    rows = max(blocks, tokens)
    for name, size in (
        ("estimates", shape),
        ("scores", shape),
        ("parts", (rows, sizes.hidden)),
        ("mapped", (rows, MAP)),
    ):
        held[name] = torch.empty(size, dtype=torch.float32, device=device)
    held["output"] = torch.empty(tokens, sizes.hidden, dtype=torch.bfloat16, device=device)
    if kept is not None:
        held["kept"] = kept
    pointers = [held[name].data_ptr() if name in held else 0 for name in POINTERS]
    return np.array([(*pointers, x.stride(0), tokens)], ARGUMENTS), held


def fused(
    sizes: Sizes, sketch: LayerSketch, x: torch.Tensor, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None
) -> torch.Tensor:
    """As `read`, by one launch. tensors: ids, weights, gate_up, down (transposed), kept_of."""
    device = x.device.index
    blocks = blocks_of(device)
    tensors = {**tensors, "arrived": _arrived(device), "bins": _bins(device, 1 << max(len(x) - 1, 15).bit_length())}
    argument, held = argument_of(sizes, sketch, x, tensors, kept, blocks)
    stream = torch.cuda.current_stream().cuda_stream
    function = _kernel(device, sizes)
    launch(function, (blocks,), THREADS, sizes.shared, stream, argument, early=False, together=True)
    return held["output"]
