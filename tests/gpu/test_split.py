"""The split on the GPU gives the same bits as on the CPU, reports refused problems, and can be captured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epsim.kernels.split import Solution, SplitStructure, cuda, prepare, solve, solve_batched, solve_gathered
from epsim.kernels.split.problems import chain, clique

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda.available(), reason="needs a GPU and CuPy")]


def assert_same(there: Solution, here: Solution) -> None:
    for name in ("split", "peak", "bound", "bound_numerator", "bound_size", "sweeps", "status"):
        assert getattr(there, name).is_cuda
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name


def random_structure(num_ranks: int, num_experts: int, rng: np.random.Generator) -> SplitStructure:
    num_slots = num_ranks * (-(-num_experts // num_ranks) + 4)
    more = np.minimum(rng.geometric(0.05, num_slots - num_experts) - 1, num_experts - 1)
    slots = np.concatenate((np.arange(num_experts), more))
    return prepare(torch.from_numpy(np.stack([rng.permutation(slots) for _ in range(3)])), num_ranks, num_experts)


@pytest.mark.parametrize("num_ranks", [1, 2, 13, 16, 32, 33, 64])
def test_random_placements_are_split_alike(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    structure = random_structure(num_ranks, 4 * num_ranks, rng)
    for counts in (
        torch.from_numpy(rng.integers(0, 5000, (120, 3, 4 * num_ranks))),
        torch.from_numpy(rng.lognormal(0, 2, (120, 3, 4 * num_ranks))),
    ):
        assert counts[:40, :, 0].numel() <= cuda.FEW < counts[..., 0].numel()  # by several warps a problem, and by one
        for part in (counts[:40], counts):
            here, there = solve_batched(structure, part), solve_batched(structure, part.cuda())
            assert_same(there, here)
            assert not there.unproven.any()
            start = torch.roll(here.split, 1, 0)
            warm = solve_batched(structure, part.cuda(), start=start.cuda())
            assert_same(warm, solve_batched(structure, part, start=start))
        if not counts.is_floating_point():
            for part in (counts[:40], counts):
                assert_same(solve_gathered(structure, part.cuda()), solve_gathered(structure, part))


@pytest.mark.parametrize(
    ("slots", "num_ranks"), [(chain(32), 32), (chain(200), 200), (clique(16), 16), (chain(512), 512)]
)
def test_hard_placements_are_split_alike(slots: torch.Tensor, num_ranks: int) -> None:
    structure = prepare(slots, num_ranks)
    rng = np.random.default_rng(0)
    wide = torch.from_numpy(np.floor(10 ** (9 * rng.random((40, 1, structure.num_experts)))).astype(np.int64))
    assert_same(solve_batched(structure, wide.cuda()), solve_batched(structure, wide))
    assert_same(solve_gathered(structure, wide.cuda()), solve_gathered(structure, wide))


def test_refused_problems_have_a_status_and_the_others_are_solved() -> None:
    structure = prepare(chain(4), 4)
    loads = torch.ones(5, 5, dtype=torch.float64)
    loads[1, 2], loads[2, 0] = -1, torch.nan
    layer = torch.zeros(5, dtype=torch.int64)
    layer[3] = 1
    found = solve(structure, loads.cuda(), layer.cuda())
    assert found.status.tolist() == [0, 1, 1, 3, 0]
    assert found.unproven.tolist() == [False, True, True, True, False]
    assert found.peak[[0, 4]].tolist() == [1.25, 1.25]
    large = solve(structure, torch.full((1, 5), 2**51, device="cuda"), layer[:1].cuda())
    assert large.status.tolist() == [2]


def test_a_captured_launch_reads_what_its_buffers_hold() -> None:
    rng = np.random.default_rng(0)
    structure = random_structure(16, 64, rng)
    counts = torch.from_numpy(rng.integers(0, 5000, (4, 3, 64)))
    loads, layer = counts[0].cuda(), torch.arange(3, device="cuda")
    solve(structure, loads, layer)
    out = cuda.empty(3, structure.num_physical, loads.device)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = solve(structure, loads, layer)
        given = cuda.solve(structure, loads, layer, 1e-4, None, 1000, 2.0**53, False, True, out)
    assert given is out
    for step in counts:
        loads.copy_(step)
        captured.replay()
        torch.cuda.synchronize()
        here = solve(structure, step, layer.cpu())
        assert_same(found, here)
        assert torch.equal(out.split.cpu(), here.split)
        assert torch.equal(out.peak.cpu(), here.peak)


def test_launches_in_a_row_read_what_came_just_before() -> None:
    # They stage a layer's table before the kernel before them has ended: of which layer is then only guessed.
    rng = np.random.default_rng(1)
    structure = random_structure(16, 64, rng)
    counts = torch.from_numpy(rng.integers(0, 5000, (6, 64)))
    given, layers = counts.cuda(), torch.tensor([2, 0, 1, 1, 0, 2])
    given_layers = layers.cuda()
    loads, layer = torch.empty_like(given[:1]), torch.zeros(1, dtype=torch.int64, device="cuda")
    start = torch.zeros(1, structure.num_physical, dtype=torch.float64, device="cuda")

    def run() -> list[Solution]:
        found = []
        for i in range(6):
            loads.copy_(given[i : i + 1])
            layer.add_(given_layers[i] - layer)
            found.append(solve(structure, loads, layer, start=start))
            start.copy_(found[-1].split)
        return found

    run()
    start.zero_()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = run()
    captured.replay()
    start.zero_()
    begin = torch.zeros(1, structure.num_physical, dtype=torch.float64)
    for i, (one, again) in enumerate(zip(found, run(), strict=True)):
        here = solve(structure, counts[i : i + 1], layers[i : i + 1], start=begin)
        assert_same(one, here)
        assert_same(again, here)
        begin = here.split
