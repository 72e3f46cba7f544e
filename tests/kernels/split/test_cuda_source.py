"""split.cu, compiled for the host, gives the bits of the CPU form. nvcc, if installed, spills no registers."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from epsim.kernels.split import Solution, SplitStructure, cuda, prepare, solve, solve_gathered
from epsim.kernels.split.problems import chain, clique
from tests.kernels.compiled import compiled


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = cuda.source().replace(Path(cuda.__file__).with_name("device.cuh").read_text(), "")
    return compiled(tmp_path_factory, source, Path(__file__).with_name("warp.h"))


def solve_on_host(
    library: ctypes.CDLL,
    structure: SplitStructure,
    loads: torch.Tensor,
    layer: torch.Tensor,
    start: torch.Tensor | None = None,
    whole: bool = False,
    descending: bool = False,
    wide: bool = False,
) -> Solution:
    packed, sizes = cuda.pack(structure)
    num, integral = len(loads), not loads.is_floating_point()
    kinds = {"split": torch.int64 if whole else torch.float64, "peak": torch.float64, "bound": torch.float64}
    kinds |= {"numerator": torch.int64 if integral else torch.float64}
    kinds |= dict.fromkeys(("size", "sweeps", "status"), torch.int64)
    out = {name: torch.full((num,), -1, dtype=kind) for name, kind in kinds.items()}
    out["split"] = torch.full((num, structure.num_physical), -1, dtype=kinds["split"])
    tables = packed.copy()
    values = {name: tensor.data_ptr() for name, tensor in out.items()}
    values |= {"tables": tables.ctypes.data, "loads": loads.data_ptr(), "layer": layer.data_ptr()}
    values |= {"start": 0 if start is None else start.data_ptr(), "problems": num, "layers": structure.num_layers}
    values |= {"table_bytes": tables.shape[1], "integral": integral, "limit": 100_000, "whole": whole} | sizes
    limits = {"tol": 0.0 if whole else 1e-4, "too_large": 2.0**53 if integral else math.inf}
    arguments = np.array([tuple((values | limits)[name] for name in cuda.ARGUMENTS.names or ())], cuda.ARGUMENTS)
    assert library.bytes_of_arguments() == cuda.ARGUMENTS.itemsize
    shared = cuda.shared_bytes(sizes)
    line = library.run_on_host(ctypes.c_void_p(arguments.ctypes.data), int(descending), int(wide), shared)
    assert line == 0, f"lanes part at line {line}"
    return Solution(
        split=out["split"],
        peak=out["peak"],
        bound=out["bound"],
        bound_numerator=out["numerator"],
        bound_size=out["size"],
        sweeps=out["sweeps"],
        status=out["status"],
        tol=limits["tol"],
    )


def assert_same(left: Solution, right: Solution) -> None:
    for name in ("split", "peak", "bound", "bound_numerator", "bound_size", "sweeps", "status"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


def random_structure(num_ranks: int, num_experts: int, rng: np.random.Generator) -> SplitStructure:
    """Some copies of an expert on one rank; some empty slots."""
    num_slots = num_ranks * (-(-num_experts // num_ranks) + 5)
    more = np.minimum(rng.geometric(0.08, num_slots - num_experts) - 1, num_experts - 1)
    more[rng.random(len(more)) < 0.2] = -1
    slots = np.concatenate((np.arange(num_experts), more))
    return prepare(torch.from_numpy(np.stack([rng.permutation(slots) for _ in range(3)])), num_ranks, num_experts)


@pytest.mark.parametrize(("descending", "wide"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("num_ranks", [1, 2, 11, 16, 32, 35, 70])
def test_random_placements(library: ctypes.CDLL, num_ranks: int, descending: bool, wide: bool) -> None:
    rng = np.random.default_rng(num_ranks)
    num_experts = 5 * num_ranks
    structure = random_structure(num_ranks, num_experts, rng)
    layer = torch.arange(18) % 3
    counts = torch.from_numpy(rng.integers(0, 5000, (18, num_experts)) * (rng.random((18, num_experts)) < 0.9))
    for loads in (counts, torch.from_numpy(rng.lognormal(0, 2, (18, num_experts)))):
        here = solve(structure, loads, layer)
        assert_same(solve_on_host(library, structure, loads, layer, descending=descending, wide=wide), here)
        start = torch.roll(here.split, 3, 0)
        start[:9] *= torch.tensor([5e-324, 1e-36, 1e-34, 1e-32, 1e-30, 1e35, 1e300, math.inf, math.nan])[:, None]
        warm = solve_on_host(library, structure, loads, layer, start=start, descending=descending, wide=wide)
        assert_same(warm, solve(structure, loads, layer, start=start))
    whole = solve_gathered(structure, counts.reshape(6, 3, num_experts))
    found = solve_on_host(library, structure, counts, layer, whole=True, descending=descending, wide=wide)
    assert torch.equal(found.split, whole.split.flatten(0, 1))
    assert torch.equal(found.sweeps, whole.sweeps.flatten())


@pytest.mark.parametrize(
    ("slots", "num_ranks"), [(chain(32), 32), (chain(30, ring=True), 30), (clique(16), 16), (chain(48), 48)]
)
def test_hard_placements(library: ctypes.CDLL, slots: torch.Tensor, num_ranks: int) -> None:
    structure = prepare(slots, num_ranks)
    rng = np.random.default_rng(0)
    loads = torch.from_numpy(np.floor(10 ** (9 * rng.random((12, structure.num_experts)))).astype(np.int64))
    layer = torch.zeros(12, dtype=torch.int64)
    assert_same(solve_on_host(library, structure, loads, layer), solve(structure, loads, layer))


@pytest.mark.parametrize("total", [2**34 + 2**31, 2**53 - 400])
def test_totals_beyond_32_bits(library: ctypes.CDLL, total: int) -> None:
    """Sums of lanes' 27 bits fill 32."""
    rng = np.random.default_rng(0)
    structure = random_structure(24, 384, rng)
    share = rng.dirichlet(np.ones(384), 9)
    loads = torch.from_numpy(np.floor(share * total).astype(np.int64))
    layer = torch.arange(9) % 3
    assert_same(solve_on_host(library, structure, loads, layer), solve(structure, loads, layer))


def test_kinds_of_loads_and_refusals(library: ctypes.CDLL) -> None:
    structure = prepare(chain(4), 4)
    layer = torch.tensor([0, 0, 1, -1])
    for kind in (torch.int64, torch.float64):
        loads = torch.tensor([[3, 1, 4, 1, 5], [3, -1, 4, 1, 5], [1] * 5, [1] * 5], dtype=kind)
        found = solve_on_host(library, structure, loads, layer)
        assert found.status.tolist() == [0, 1, 3, 3]
        assert found.unproven.tolist() == [False, True, True, True]
        assert not found.split[1:].any()
        assert torch.equal(found.split[:1], solve(structure, loads[:1], layer[:1]).split)
    nan = torch.tensor([[math.nan, 1, 1, 1, 1], [math.inf, 1, 1, 1, 1]], dtype=torch.float64)
    assert solve_on_host(library, structure, nan, layer[:2]).status.tolist() == [1, 2]
    assert solve_on_host(library, structure, torch.full((1, 5), 2**51), layer[:1]).status.tolist() == [2]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_it_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    source = tmp_path / "split.cu"
    source.write_text(cuda.source())
    options = ["-arch=sm_90", "-std=c++17", "--fmad=false", "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin"]
    built = subprocess.run(
        ["nvcc", *options, "-o", tmp_path / "split.cubin", source], check=True, capture_output=True, text=True
    )
    assert built.stderr.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 3
