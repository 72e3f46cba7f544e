"""Solves the split with a proof of optimality: one call for all problems of a batch, on a CPU or GPU."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch

from epsim.kernels.split.structure import Floats, SplitStructure

Backend: TypeAlias = Literal["auto", "cpu", "cuda"]
"""auto: the CUDA device of the loads if they are on one and CuPy is installed, else the CPU."""

MAX_SWEEPS = 100_000
EXACT = 2.0**53
"""Integers below this are exact in float64."""
REFUSED = {
    1: "a load is negative, not a number, or too large to sum",
    2: "loads sum to 2^53 or more, beyond exact integers: scale them down",
    3: "the placement has no such layer",
}
CHUNK = 512
"""The number of problems that a thread solves at a time, small enough for their loads to stay in its cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """The solutions of B problems (or of any leading shape).

    split [B, P] float64 (int64 from `solve_gathered`): the load of each slot, 0 for an empty slot; [B, 0] from
    `solve_peak`. peak [B] float64: the peak load of this split. bound [B] float64: a lower bound; no split has a lower
    peak. bound_numerator, bound_size [B]: bound = load that cannot leave a set of ranks / number of ranks of the set.
    The numerator is int64 and exact for integer loads, else float64. sweeps [B] int64: the number of water-filling
    sweeps and rounds of augmenting paths. status [B] int64: 0, or a key of `REFUSED`: why the problem was refused. A
    refused problem has an infinite peak and a split of zeros. Only CUDA devices report it in this way, because raising
    an error would wait for the device. tol: the requested relative gap.
    """

    split: torch.Tensor
    peak: torch.Tensor
    bound: torch.Tensor
    bound_numerator: torch.Tensor
    bound_size: torch.Tensor
    sweeps: torch.Tensor
    status: torch.Tensor
    tol: float

    @property
    def unproven(self) -> torch.Tensor:
        """[B] bool: problems whose split is not proven optimal: its peak is above the bound by more than tol, or, for
        an integral split, above the bound rounded up."""
        if not self.split.is_floating_point():
            return self.peak > -(-self.bound_numerator // self.bound_size)
        return self.peak > self.bound * (1 + self.tol)


def solve(
    structure: SplitStructure,
    loads: torch.Tensor,
    layer: torch.Tensor,
    tol: float = 1e-4,
    start: torch.Tensor | None = None,
    backend: Backend = "auto",
    max_sweeps: int = MAX_SWEEPS,
) -> Solution:
    """Splits each expert's load over its slots so that the peak load is lowest, with a proof.

    loads [B, E] float64 or int64, >= 0: the load of each expert. layer [B] int64: the layer of each problem.
    start [B, P]: a split to start from, such as that of the last batch; it is scaled to the new loads.
    A problem that reaches max_sweeps before `peak <= bound * (1 + tol)` is in `Solution.unproven`. CPU and GPU give the
    same bits. Raises ValueError for shapes and types that do not fit, for negative loads, for loads whose sum is not
    finite, and for integer loads that sum to 2^53 or more. On a CUDA device such loads are reported by
    `Solution.status`.
    """
    return _solve(structure, loads, layer, tol, start, backend, max_sweeps, want_split=True)


def solve_peak(
    structure: SplitStructure,
    loads: torch.Tensor,
    layer: torch.Tensor,
    tol: float = 1e-4,
    backend: Backend = "auto",
    max_sweeps: int = MAX_SWEEPS,
) -> Solution:
    """As `solve`, but without computing the split: `Solution.split` is [B, 0]."""
    return _solve(structure, loads, layer, tol, None, backend, max_sweeps, want_split=False)


def solve_batched(
    structure: SplitStructure,
    counts: torch.Tensor,
    tol: float = 1e-4,
    start: torch.Tensor | None = None,
    backend: Backend = "auto",
    want_split: bool = True,
) -> Solution:
    """Solves counts [..., L, E], with any leading axes (start [..., L, P]). Returns a Solution of [..., L] problems.

    want_split: whether to compute `Solution.split`; otherwise only the peak is computed, as in `solve_peak`.
    """
    lead, layer = _leading(structure, counts)
    flat_start = None if start is None else start.reshape(-1, structure.num_physical)
    flat = counts.reshape(-1, structure.num_experts)
    return _reshaped(_solve(structure, flat, layer, tol, flat_start, backend, MAX_SWEEPS, want_split), lead)


def solve_gathered(structure: SplitStructure, counts: torch.Tensor, backend: Backend = "auto") -> Solution:
    """The integral split: counts [..., L, E] int64 -> split [..., L, P] int64 whose peak is ceil(M*).

    M* is the optimum, the lowest peak of real-valued splits. The result depends on the counts alone and is computed in
    integers, so all ranks and the simulator get the same split. Raises ValueError as `solve` does.
    """
    if counts.is_floating_point():
        raise ValueError(f"the integral split needs integer loads, not {counts.dtype}")
    lead, layer = _leading(structure, counts)
    flat = counts.reshape(-1, structure.num_experts)
    return _reshaped(_solve(structure, flat, layer, 0.0, None, backend, MAX_SWEEPS, want_split=True, whole=True), lead)


def _leading(structure: SplitStructure, counts: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """The shape [..., L] of the problems, and the layer of each problem after flattening."""
    num_layers, num_experts = structure.num_layers, structure.num_experts
    if counts.ndim < 2 or tuple(counts.shape[-2:]) != (num_layers, num_experts):
        raise ValueError(f"counts are {list(counts.shape)}, not [..., {num_layers} layers, {num_experts} experts]")
    lead = tuple(counts.shape[:-1])
    return lead, torch.arange(num_layers, device=counts.device).expand(lead).reshape(-1)


def _reshaped(flat: Solution, lead: tuple[int, ...]) -> Solution:
    names = ("peak", "bound", "bound_numerator", "bound_size", "sweeps", "status")
    shaped = {name: getattr(flat, name).reshape(lead) for name in names}
    return replace(flat, split=flat.split.reshape(*lead, flat.split.shape[-1]), **shaped)


def _solve(
    structure: SplitStructure,
    loads: torch.Tensor,
    layer: torch.Tensor,
    tol: float,
    start: torch.Tensor | None,
    backend: Backend,
    max_sweeps: int,
    want_split: bool,
    whole: bool = False,
) -> Solution:
    for name, tensor in (("loads", loads), ("start", start)):
        if tensor is not None and tensor.is_complex():
            raise ValueError(f"{name} are {tensor.dtype}, not real numbers")
    if loads.ndim != 2 or loads.shape[1] != structure.num_experts:
        raise ValueError(f"loads are {list(loads.shape)}, not [problems, {structure.num_experts} experts]")
    num_problems = loads.shape[0]
    if tuple(layer.shape) != (num_problems,) or layer.dtype != torch.int64:
        raise ValueError(f"layer is {list(layer.shape)} {layer.dtype}, not [{num_problems}] int64")
    if start is not None and tuple(start.shape) != (num_problems, structure.num_physical):
        raise ValueError(f"start is {list(start.shape)}, not [{num_problems}, {structure.num_physical} slots]")
    if not whole and not 1e-9 <= tol < 1:
        raise ValueError(f"tol {tol} is outside 1e-9..1")
    if max_sweeps < 0:
        raise ValueError(f"max_sweeps {max_sweeps} is negative")
    if backend not in ("auto", "cpu", "cuda"):
        raise ValueError(f"split backend {backend!r} is not one of auto, cpu, cuda")
    too_large = math.inf if loads.is_floating_point() else EXACT
    if backend == "cuda" or (backend == "auto" and loads.is_cuda):
        from epsim.kernels.split import cuda

        if cuda.available():
            on_gpu = loads if loads.is_cuda else loads.to("cuda")
            results = cuda.solve(structure, on_gpu, layer, tol, start, max_sweeps, too_large, whole, want_split)
            split, peak, bound, numerator, size, sweeps, status = (tensor.to(loads.device) for tensor in results)
            return Solution(split, peak, bound, numerator, size, sweeps, status, tol)
        if backend == "cuda":
            raise ValueError("split backend cuda needs a CUDA device and CuPy (pip install epsim[gpu]); or use cpu")
    if num_problems and not 0 <= int(layer.min()) <= int(layer.max()) < structure.num_layers:
        raise ValueError(f"layer has a number outside 0..{structure.num_layers - 1}")
    from epsim.kernels.split import cpu

    integral = not loads.is_floating_point()
    no_split = torch.empty(num_problems, 0, dtype=torch.float64)
    split = torch.empty(num_problems, structure.num_physical, dtype=torch.float64) if want_split else no_split
    peak, numerator = torch.empty(2, num_problems, dtype=torch.float64)
    size, sweeps, status = torch.empty(3, num_problems, dtype=torch.int64)

    def run(first: int) -> None:
        part = slice(first, first + CHUNK)
        begin = torch.empty(0, structure.num_physical) if start is None else start[part].detach()
        cpu.solve_range(
            _floats(loads[part]),
            layer[part].cpu().contiguous().numpy(),
            structure.tables,
            _floats(begin),
            tol,
            max_sweeps,
            too_large,
            whole,
            (split[part] if want_split else split[:0]).numpy(),
            peak[part].numpy(),
            numerator[part].numpy(),
            size[part].numpy(),
            sweeps[part].numpy(),
            status[part].numpy(),
        )

    _spread(run, range(0, num_problems, CHUNK))
    bad = status.nonzero()
    if len(bad):
        worst = int(bad[0, 0])
        raise ValueError(f"problem {worst}: {REFUSED[int(status[worst]) if integral else cpu.BAD_LOAD]}")
    device = loads.device
    # A rounding error may put the bound above the peak. Then the peak is the bound.
    return Solution(
        split=(split.to(torch.int64) if whole else split).to(device),
        peak=peak.to(device),
        bound=torch.minimum(numerator / size, peak).to(device),
        bound_numerator=(numerator.to(torch.int64) if integral else numerator).to(device),
        bound_size=size.to(device),
        sweeps=sweeps.to(device),
        status=status.to(device),
        tol=tol,
    )


def _floats(values: torch.Tensor) -> Floats:
    if values.is_floating_point() and values.element_size() < 4:
        values = values.double()  # NumPy has no bfloat16
    # Converted by NumPy, because PyTorch would start threads inside ours.
    return np.ascontiguousarray(values.detach().cpu().numpy(), dtype=np.float64)


def _spread(run: Callable[[int], None], firsts: range) -> None:
    """Runs the chunks in as many threads as PyTorch uses. The compiled code releases the GIL."""
    num_threads = min(torch.get_num_threads(), len(firsts))
    if num_threads <= 1:
        for first in firsts:
            run(first)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, firsts))
