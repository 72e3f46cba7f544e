"""The split on CUDA devices (split.cu), one or eight warps per problem. It gives the same bits as on the CPU.

NVRTC compiles the kernel at first use, and CuPy caches the binary on disk. A call is one launch on PyTorch's current
stream and reads nothing back. It can be captured in a CUDA graph after a first call, which compiles the kernel and
copies the structure's tables to the device.
"""

import functools
import importlib.util
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from epsim.kernels.split.launch import compiled, launch, with_headers
from epsim.kernels.split.structure import SplitStructure

NUM_INVERSES = 33
NEAR = 32
"""Up to this number of ranks, each lane of a warp holds one rank."""
WIDE, FEW = 8, 264
"""A launch of at most FEW problems uses WIDE warps per problem. An H200 solves FEW problems at the same time."""
TWIN = 0x8000
SIZES = ("ranks", "experts", "slots", "fixed", "rows", "replicated", "copies", "waves", "twins", "staged")
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in ("tables", "loads", "layer", "start", "split", "peak", "bound", "numerator")]
    + [(name, np.uint64) for name in ("size", "sweeps", "status")]
    + [("tol", np.float64), ("too_large", np.float64)]
    + [(name, np.int32) for name in ("problems", "layers", "table_bytes", "integral", "limit", "whole", *SIZES)],
    align=True,
)
"""The struct Arguments of split.cu."""
Section: TypeAlias = tuple[Any, int, type]
"""A section of a layer's table: its values, its padded length, and its element type."""
_PACKING = threading.Lock()
"""Threads of a replay share structures: one thread packs the tables, the others wait."""
INVERSE_UNITS = np.array([0, *((2**32 - 1) // n for n in range(1, NUM_INVERSES))], np.uint32)


def available() -> bool:
    """Whether CuPy is installed and PyTorch sees a CUDA device."""
    return importlib.util.find_spec("cupy") is not None and torch.cuda.is_available()


def pack(structure: SplitStructure) -> tuple[npt.NDArray[np.uint8], dict[str, int]]:
    """The tables in the layout that `bind_table` in state.cuh reads, [L, bytes], and the sizes of their sections."""
    t = structure.tables
    num_layers, num_ranks, num_experts = structure.num_layers, structure.num_ranks, structure.num_experts
    near = num_ranks <= NEAR
    waves = [_waves(structure, at) for at in range(num_layers)]
    sizes = {
        "ranks": num_ranks,
        "experts": num_experts,
        "slots": structure.num_physical,
        "fixed": int((t.fixed_start[:, -1] - t.fixed_start[:, 0]).max()),
        "rows": int(np.diff(t.fixed_start, axis=1).max()),
        "replicated": int(np.diff(t.expert_start).max()),
        "copies": int(np.diff(t.layer_copies).max()),
        "waves": max(len(starts) - 1 for starts, _ in waves),
        "twins": int(np.diff(t.twin_start).max()),
    }
    even_copies = (sizes["copies"] + 1) // 2 * 2
    if even_copies + num_experts >= TWIN:
        raise ValueError(f"{num_experts} experts in {structure.num_physical} slots are too many on a GPU")
    rows = []
    for at, (starts, pair_waves) in enumerate(waves):
        copies = slice(t.layer_copies[at], t.layer_copies[at + 1])
        first, end = t.expert_start[at], t.expert_start[at + 1]
        fixed = t.fixed_start[at]
        twin = t.twin[t.twin_start[at] : t.twin_start[at + 1]]
        num = int(end - first)
        starting = t.copy_start[first + at : end + at + 1]
        rank, owner = t.copy_rank[copies], t.copy_expert[copies]
        mask = np.zeros(num, np.uint32)
        np.bitwise_or.at(mask, owner, np.left_shift(np.uint32(1), (rank % NEAR).astype(np.uint32)))
        source = t.source[at]
        expert = np.where(source < 0, num_experts, source)  # a 0 follows the load of the last expert
        load_index = np.where(source < num_experts, even_copies + expert, source - num_experts)
        load_index[twin[:, 0]] |= TWIN
        fixed_expert = t.fixed_expert[fixed[0] : fixed[-1]]
        counts = (num, len(rank), t.num_paired[at], len(starts) - 1, pair_waves, len(twin), 0, 0)
        staged: list[Section] = [
            (counts, 8, np.uint16),
            (mask, sizes["replicated"], np.uint32),
            (t.expert[first:end], sizes["replicated"], np.uint16),
            (starting, sizes["replicated"] + 1, np.uint16),
            (load_index, sizes["slots"], np.uint16),
            (twin.ravel(), 3 * sizes["twins"], np.uint16),
        ]
        if near:
            fixed_row = np.full((sizes["rows"], num_ranks), num_experts)
            for r in range(num_ranks):
                on_rank = t.fixed_expert[fixed[r] : fixed[r + 1]]
                fixed_row[: len(on_rank), r] = on_rank
            wave_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) if num else np.empty(0, np.int64)
            wave_mask, wave_copy = np.zeros((2, sizes["waves"], num_ranks), np.uint32)
            wave_mask[wave_of[owner], rank] = mask[owner]
            wave_copy[wave_of[owner], rank] = owner.astype(np.uint32) << 16 | np.arange(len(rank), dtype=np.uint32)
            members = np.zeros(sizes["waves"] + 1, np.uint16)
            np.maximum.at(members, wave_of, np.diff(starting).astype(np.uint16))
            staged += [
                (t.copy_until[copies], sizes["copies"], np.float64),
                (INVERSE_UNITS, len(INVERSE_UNITS), np.uint32),
                (wave_mask.ravel(), wave_mask.size, np.uint32),
                (wave_copy.ravel(), wave_copy.size, np.uint32),
                (_others(wave_mask).ravel(), wave_mask.size, np.uint32),
                (fixed_row.ravel(), fixed_row.size, np.uint16),
                (np.tile(np.arange(num_ranks), sizes["rows"]), fixed_row.size, np.uint8),
                (members, sizes["waves"] + 1, np.uint16),
            ]
        else:
            staged += [
                (fixed - fixed[0], num_ranks + 1, np.uint16),
                (fixed_expert, sizes["fixed"], np.uint16),
                (starts, sizes["waves"] + 1, np.uint16),
            ]
        others: list[Section] = [
            (t.copy_share[copies], sizes["copies"], np.float64),
            (rank, sizes["copies"], np.uint16),
            (owner, sizes["copies"], np.uint16),
            (t.rank_start[at], num_ranks + 1, np.uint16),
            (t.rank_copy[copies], sizes["copies"], np.uint16),
        ]
        head, tail = (_joined(sections) for sections in ((staged, others) if near else (staged + others, [])))
        sizes["staged"] = len(head)
        rows.append(head + tail)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(num_layers, -1), sizes


def _joined(sections: list[Section]) -> bytes:
    """The concatenated sections. Each is aligned to 8 bytes, the result is padded to a multiple of 16."""
    row = b""
    for values, length, kind in sections:
        padded: npt.NDArray[Any] = np.zeros(length, kind)
        padded[: len(values)] = values
        row += padded.tobytes()
        row += bytes(-len(row) % 8)
    return row + bytes(-len(row) % 16)


def _others(wave_mask: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """[waves, R]: one byte for each of the expert's first three other ranks, as in `Cell` of coarse.cuh."""
    packed = np.zeros_like(wave_mask)
    for (wave, rank), mask in np.ndenumerate(wave_mask):
        others = [r for r in range(NEAR) if r != rank and int(mask) >> r & 1][:3]
        code = [r | 0x40 * (r < rank) for r in others] + [rank | 0x80] * (3 - len(others))
        packed[wave, rank] = code[0] | code[1] << 8 | code[2] << 16 | rank << 24
    return packed


def _waves(structure: SplitStructure, at: int) -> tuple[list[int], int]:
    """The first expert of each wave of a layer, then the end of the last wave; and the number of waves of pairs.

    A wave has up to 32 consecutive experts that share no rank. A pair is an expert with two copies.
    """
    t = structure.tables
    first, end = t.expert_start[at], t.expert_start[at + 1]
    ranks = t.copy_rank[t.layer_copies[at] : t.layer_copies[at + 1]].tolist()
    num_pairs = int(t.num_paired[at]) // 2
    starts, pair_waves = [0], 0
    taken: set[int] = set()
    for k, (begin, stop) in enumerate(pairwise(t.copy_start[first + at : end + at + 1].tolist())):
        expert_ranks = ranks[begin:stop]
        if k == num_pairs or k - starts[-1] == NEAR or not taken.isdisjoint(expert_ranks):
            if k > starts[-1]:
                starts.append(k)
            taken = set()
        if k == num_pairs:
            pair_waves = len(starts) - 1
        taken.update(expert_ranks)
    if end - first > starts[-1]:
        starts.append(int(end - first))
    return starts, len(starts) - 1 if num_pairs == end - first else pair_waves


def shared_bytes(sizes: dict[str, int]) -> int:
    """Bytes of shared memory per problem, as `solve` in split.cu uses it: the staged part of a table, and the state."""
    ranks, replicated = sizes["ranks"], sizes["replicated"]
    words = (sizes["copies"] + 1) // 2 * 2 + sizes["experts"] + 1 + 2 * ranks + replicated
    if ranks <= NEAR:
        words += replicated + 3 * (NEAR // 2) + WIDE + 1 + 3 + 2
        cells = 2 * (sizes["waves"] + 1) * ranks + -(-sizes["waves"] * ranks // 2)
        words = (words + 1) // 2 * 2 + cells
    else:
        words += NUM_INVERSES + 4 * -(-ranks // 4) + -(-ranks // 2)
    return sizes["staged"] + 8 * words


def source() -> str:
    """The text of split.cu with its headers inserted."""
    return with_headers(Path(__file__).with_name("split.cu"))


@functools.cache
def _kernel(device: int, name: str, shared: int) -> int:
    return compiled(device, source(), {}, name, shared, exact=True)


def _on_device(structure: SplitStructure, device: torch.device) -> tuple[torch.Tensor, dict[str, int]]:
    with _PACKING:
        on_device: tuple[torch.Tensor, dict[str, int]] | None = structure.on_device.get(device)
        if on_device is None:
            tables, sizes = pack(structure)
            on_device = structure.on_device[device] = torch.from_numpy(tables.copy()).to(device), sizes
    return on_device


class Out(NamedTuple):
    """The contiguous tensors that `solve` writes for B problems, on one device."""

    split: torch.Tensor  # [B, P] float64, int64 for the integral split; [B, 0] if not wanted
    peak: torch.Tensor  # [B] float64
    bound: torch.Tensor  # [B] float64
    numerator: torch.Tensor  # [B], in the type of the loads
    size: torch.Tensor  # [B] int64
    sweeps: torch.Tensor  # [B] int64
    status: torch.Tensor  # [B] int64


def empty(
    num: int,
    num_physical: int,
    device: torch.device,
    integral: bool = True,
    whole: bool = False,
    want_split: bool = True,
) -> Out:
    """Allocates the tensors for `num` problems. integral: whether loads are integers."""
    peak, bound = torch.empty(2, num, dtype=torch.float64, device=device)
    size, sweeps, status = torch.empty(3, num, dtype=torch.int64, device=device)
    split = torch.empty(num, num_physical * want_split, dtype=torch.int64 if whole else torch.float64, device=device)
    numerator = torch.empty(num, dtype=torch.int64 if integral else torch.float64, device=device)
    return Out(split, peak, bound, numerator, size, sweeps, status)


def solve(
    structure: SplitStructure,
    loads: torch.Tensor,
    layer: torch.Tensor,
    tol: float,
    start: torch.Tensor | None,
    max_sweeps: int,
    too_large: float,
    whole: bool,
    want_split: bool,
    out: Out | None = None,
) -> Out:
    """loads [B, E], layer [B] int64, start [B, P] or None, on one CUDA device -> the tensors of a Solution, in order.

    whole: the integral split. A problem that the CPU form refuses has a status other than OK, an infinite peak, and a
    split of zeros. out: the tensors to write (see `empty`), which are returned. Then nothing is allocated if loads,
    layer and start are contiguous, loads are int64 or float64, and start is float64.
    """
    device = loads.device
    tables, sizes = _on_device(structure, device)
    integral = not loads.is_floating_point()
    loads = loads.detach().to(torch.int64 if integral else torch.float64).contiguous()
    layer = layer.to(device).contiguous()
    start = None if start is None else start.detach().to(device, torch.float64).contiguous()
    num = len(loads)
    if out is None:
        out = empty(num, structure.num_physical, device, integral, whole, want_split)
    if not num:
        return out
    values = {
        "tables": tables.data_ptr(),
        "loads": loads.data_ptr(),
        "layer": layer.data_ptr(),
        "start": 0 if start is None else start.data_ptr(),
        **{name: tensor.data_ptr() for name, tensor in out._asdict().items()},
        "tol": tol,
        "too_large": too_large,
        "problems": num,
        "layers": structure.num_layers,
        "table_bytes": tables.shape[1],
        "integral": integral,
        "limit": min(max_sweeps, 2**30),
        "whole": whole,
        **sizes,
    }
    if not want_split:
        values["split"] = 0
    arguments = np.array([tuple(values[name] for name in ARGUMENTS.names or ())], ARGUMENTS)
    shared = shared_bytes(sizes)
    index = torch.cuda.current_device() if device.index is None else device.index
    name = "split_far" if structure.num_ranks > NEAR else "split_wide" if num <= FEW else "split_near"
    function, threads = _kernel(index, name, shared), 32 * WIDE if name == "split_wide" else 32
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(device).cuda_stream
        # The kernel loads a layer's table before it waits for the previous kernel.
        launch(function, (num,), threads, shared, stream, arguments, early=True)
    return out
