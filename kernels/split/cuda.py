"""The split on CUDA devices: split.cu, a warp a problem, compiled by NVRTC at first use; CuPy keeps it on disk.

Equal to the CPU form bit for bit. One launch on PyTorch's current stream, nothing read back: it can be captured in a
CUDA graph once a first call has compiled it and has moved the structure's tables to the device.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from epsim.kernels.split.structure import SplitStructure

NUM_INVERSES = 33
NEAR = 32
"""Up to as many ranks a lane keeps a rank."""
TWIN = 0x8000
SIZES = ("ranks", "experts", "slots", "fixed", "rows", "replicated", "copies", "waves", "twins", "staged")
ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in ("tables", "loads", "layer", "start", "split", "peak", "bound", "numerator")]
    + [(name, np.uint64) for name in ("size", "sweeps", "status")]
    + [("tol", np.float64), ("too_large", np.float64)]
    + [(name, np.int32) for name in ("problems", "layers", "table_bytes", "integral", "limit", "whole", *SIZES)],
    align=True,
)
"""split.cu's Arguments."""
Section: TypeAlias = tuple[Any, int, type]
"""Values of a table, how many there is place for, and their type."""
INVERSE_UNITS = np.array([0, *((2**32 - 1) // n for n in range(1, NUM_INVERSES))], np.uint32)


def available() -> bool:
    """Whether CuPy is installed and PyTorch sees a CUDA device."""
    return importlib.util.find_spec("cupy") is not None and torch.cuda.is_available()


def pack(structure: SplitStructure) -> tuple[npt.NDArray[np.uint8], dict[str, int]]:
    """The tables as split.cu's `place_table` reads them: [L, bytes], and the sizes that its sections have."""
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
        place = np.where(source < num_experts, even_copies + source, source - num_experts)
        place[twin[:, 0]] |= TWIN
        fixed_expert = t.fixed_expert[fixed[0] : fixed[-1]]
        counts = (num, len(rank), t.num_paired[at], len(starts) - 1, pair_waves, len(twin), 0, 0)
        staged: list[Section] = [
            (counts, 8, np.uint16),
            (mask, sizes["replicated"], np.uint32),
            (t.expert[first:end], sizes["replicated"], np.uint16),
            (starting, sizes["replicated"] + 1, np.uint16),
            (place, sizes["slots"], np.uint16),
            (twin.ravel(), 3 * sizes["twins"], np.uint16),
        ]
        if near:
            fixed_row = np.full((sizes["rows"], num_ranks), num_experts)
            for r in range(num_ranks):
                here = t.fixed_expert[fixed[r] : fixed[r + 1]]
                fixed_row[: len(here), r] = here
            wave_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) if num else np.empty(0, np.int64)
            wave_mask, wave_copy = np.zeros((2, sizes["waves"], num_ranks), np.uint32)
            wave_mask[wave_of[owner], rank] = mask[owner]
            wave_copy[wave_of[owner], rank] = owner.astype(np.uint32) << 16 | np.arange(len(rank), dtype=np.uint32)
            members = np.zeros(sizes["waves"], np.uint16)
            np.maximum.at(members, wave_of, np.diff(starting).astype(np.uint16))
            staged += [
                (t.copy_until[copies], sizes["copies"], np.float64),
                (INVERSE_UNITS, len(INVERSE_UNITS), np.uint32),
                (wave_mask.ravel(), wave_mask.size, np.uint32),
                (wave_copy.ravel(), wave_copy.size, np.uint32),
                (fixed_row.ravel(), fixed_row.size, np.uint16),
                (members, sizes["waves"], np.uint16),
                (wave_of, sizes["replicated"], np.uint16),
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
    """The sections one after the other, each from a multiple of 8 bytes on, padded to a multiple of 16."""
    row = b""
    for values, length, kind in sections:
        padded: npt.NDArray[Any] = np.zeros(length, kind)
        padded[: len(values)] = values
        row += padded.tobytes()
        row += bytes(-len(row) % 8)
    return row + bytes(-len(row) % 16)


def _waves(structure: SplitStructure, at: int) -> tuple[list[int], int]:
    """Where each wave of a layer's experts begins (a wave: neighbours in order that share no rank, one a lane), with
    the end of the last, and how many of the waves are of pairs."""
    t = structure.tables
    first, end = t.expert_start[at], t.expert_start[at + 1]
    ranks = t.copy_rank[t.layer_copies[at] : t.layer_copies[at + 1]].tolist()
    num_pairs = int(t.num_paired[at]) // 2
    starts, pair_waves = [0], 0
    taken: set[int] = set()
    for k, (begin, stop) in enumerate(pairwise(t.copy_start[first + at : end + at + 1].tolist())):
        here = ranks[begin:stop]
        if k == num_pairs or k - starts[-1] == NEAR or not taken.isdisjoint(here):
            if k > starts[-1]:
                starts.append(k)
            taken = set()
        if k == num_pairs:
            pair_waves = len(starts) - 1
        taken.update(here)
    if end - first > starts[-1]:
        starts.append(int(end - first))
    return starts, len(starts) - 1 if num_pairs == end - first else pair_waves


def shared_bytes(sizes: dict[str, int]) -> int:
    """Shared memory of a problem, as split.cu's `solve` lays it out: what is staged of a layer's table, and state."""
    ranks, replicated = sizes["ranks"], sizes["replicated"]
    words = (sizes["copies"] + 1) // 2 * 2 + sizes["experts"] + 1 + 2 * ranks + replicated
    if ranks <= NEAR:
        words += replicated + NEAR // 2
        words = (words + 1) // 2 * 2 + max(2 * sizes["waves"] * ranks, -(-(replicated + sizes["copies"]) // 2))
    else:
        words += NUM_INVERSES + 4 * -(-ranks // 4) + -(-ranks // 2)
    return sizes["staged"] + 8 * words


def source() -> str:
    """split.cu with its own headers in place: CuPy looks up binaries by the text that it is given."""
    text = Path(__file__).with_name("split.cu").read_text()
    return re.sub(r'#include "(\w+\.cuh)"', lambda found: Path(__file__).with_name(found[1]).read_text(), text)


@functools.cache
def _kernel(device: int, name: str, shared: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        kernel = _module().get_function(name)
        if shared > 48 * 1024:
            kernel.max_dynamic_shared_size_bytes = shared
        return kernel


@functools.cache
def _module() -> Any:
    import cupy

    # No contraction: sums and products are rounded as on the CPU.
    return cupy.RawModule(code=source(), options=("--std=c++17", "--fmad=false"))


def _on_device(structure: SplitStructure, device: torch.device) -> tuple[torch.Tensor, dict[str, int]]:
    found: tuple[torch.Tensor, dict[str, int]] | None = structure.on_device.get(device)
    if found is None:
        tables, sizes = pack(structure)
        found = structure.on_device[device] = torch.from_numpy(tables.copy()).to(device), sizes
    return found


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
) -> tuple[torch.Tensor, ...]:
    """loads [B, E], layer [B] int64, start [B, P] or None, on one CUDA device -> the tensors of a Solution, in order.

    `whole`: the integral split. A problem that the CPU form refuses has a status instead of OK, an infinite peak, and a
    split of zeros.
    """
    import cupy

    device = loads.device
    tables, sizes = _on_device(structure, device)
    integral = not loads.is_floating_point()
    loads = loads.detach().to(torch.int64 if integral else torch.float64).contiguous()
    layer = layer.to(device).contiguous()
    start = None if start is None else start.detach().to(device, torch.float64).contiguous()
    num = len(loads)
    split = torch.empty(
        num, structure.num_physical * want_split, dtype=torch.int64 if whole else torch.float64, device=device
    )
    peak, bound = torch.empty(2, num, dtype=torch.float64, device=device)
    numerator = torch.empty(num, dtype=loads.dtype, device=device)
    size, sweeps, status = torch.empty(3, num, dtype=torch.int64, device=device)
    if num:
        table_bytes = tables.shape[1]
        values = {
            "tables": tables.data_ptr(),
            "loads": loads.data_ptr(),
            "layer": layer.data_ptr(),
            "start": 0 if start is None else start.data_ptr(),
            "split": split.data_ptr() if want_split else 0,
            "peak": peak.data_ptr(),
            "bound": bound.data_ptr(),
            "numerator": numerator.data_ptr(),
            "size": size.data_ptr(),
            "sweeps": sweeps.data_ptr(),
            "status": status.data_ptr(),
            "tol": tol,
            "too_large": too_large,
            "problems": num,
            "layers": structure.num_layers,
            "table_bytes": table_bytes,
            "integral": integral,
            "limit": min(max_sweeps, 2**30),
            "whole": whole,
            **sizes,
        }
        arguments = np.array([tuple(values[name] for name in ARGUMENTS.names or ())], ARGUMENTS)
        shared = shared_bytes(sizes)
        index = torch.cuda.current_device() if device.index is None else device.index
        kernel = _kernel(index, "split_near" if structure.num_ranks <= NEAR else "split_far", shared)
        with cupy.cuda.Device(index), cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, index):
            kernel((num,), (32,), (arguments,), shared_mem=shared)
    return split, peak, bound, numerator, size, sweeps, status
