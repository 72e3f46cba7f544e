"""The split against its linear program, and against the definition of its certificate."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.split import Solution, SplitStructure, prepare, solve, solve_batched, solve_gathered, solve_peak
from epsim.kernels.split.reference import solve_reference

TOL = 1e-4


def rank_loads(structure: SplitStructure, split: torch.Tensor) -> torch.Tensor:
    """[B, P] -> [B, R]."""
    return split.reshape(len(split), structure.num_ranks, -1).sum(2)


def chain(num_ranks: int) -> torch.Tensor:
    """[1, 2R]: expert e on ranks e and e + 1, the last of R - 1 experts apart; ends are filled with experts of one copy."""
    left = [num_ranks - 1, *range(num_ranks - 1)]
    right = [*range(num_ranks - 1), num_ranks]
    return torch.tensor([[slot for pair in zip(left, right) for slot in pair]])


def check(structure: SplitStructure, loads: torch.Tensor, layer: torch.Tensor, found: Solution) -> None:
    """Feasible, conserved, the peak as stated, and proven."""
    slots = structure.physical_to_logical[layer]
    assert not found.split.isnan().any()
    assert (found.split >= 0).all()
    assert (found.split <= loads.double().gather(1, slots)).all()
    served = torch.zeros(loads.shape, dtype=torch.float64).scatter_add_(1, slots, found.split)
    torch.testing.assert_close(served, loads.double(), rtol=1e-12, atol=0)
    torch.testing.assert_close(rank_loads(structure, found.split).amax(1), found.peak, rtol=1e-12, atol=0)
    assert not found.unproven.any()
    assert (found.bound <= found.peak).all()


@st.composite
def problems(draw: st.DrawFn, most_ranks: int = 8) -> tuple[SplitStructure, torch.Tensor]:
    """One layer, and loads [1, E] int64."""
    num_ranks = draw(st.integers(1, most_ranks))
    num_physical = num_ranks * draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, num_physical))
    extra = st.integers(0, num_experts - 1)
    slots = [*range(num_experts), *(draw(extra) for _ in range(num_physical - num_experts))]
    slots = draw(st.permutations(slots))
    load = st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 10**9))
    loads = [draw(load) for _ in range(num_experts)]
    return prepare(torch.tensor([slots]), num_ranks, num_experts), torch.tensor([loads])


def optimum_by_subsets(structure: SplitStructure, loads: torch.Tensor) -> Fraction:
    """The largest, over rank sets, of the load that cannot leave the set over its size (Hall's condition, min cut)."""
    num_ranks = structure.num_ranks
    ranks_of: dict[int, set[int]] = {}
    for slot, expert in enumerate(structure.physical_to_logical[0].tolist()):
        ranks_of.setdefault(expert, set()).add(slot // (structure.num_physical // num_ranks))
    best = Fraction(0)
    for count in range(1, num_ranks + 1):
        for chosen in itertools.combinations(range(num_ranks), count):
            inside = sum(int(loads[0, e]) for e, ranks in ranks_of.items() if ranks <= set(chosen))
            best = max(best, Fraction(inside, count))
    return best


@settings(max_examples=300, deadline=None)
@given(problems())
def test_peak_is_the_optimum_over_all_rank_sets(problem: tuple[SplitStructure, torch.Tensor]) -> None:
    structure, loads = problem
    layer = torch.zeros(1, dtype=torch.int64)
    found = solve(structure, loads, layer, TOL)
    check(structure, loads, layer, found)
    optimum = optimum_by_subsets(structure, loads)
    proven = Fraction(int(found.bound_numerator), int(found.bound_size))
    assert proven <= optimum
    assert float(found.peak) <= float(optimum) * (1 + TOL)
    even = loads.double()[0] / torch.bincount(structure.physical_to_logical[0], minlength=loads.shape[1])
    even_peak = rank_loads(structure, even[structure.physical_to_logical]).max()
    assert float(found.peak) <= float(even_peak) * (1 + 1e-12)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_integral_split_reaches_the_optimum_rounded_up(problem: tuple[SplitStructure, torch.Tensor]) -> None:
    structure, loads = problem
    found = solve_gathered(structure, loads[None])
    assert found.split.dtype == torch.int64
    served = torch.zeros_like(loads).scatter_add_(1, structure.physical_to_logical, found.split[0])
    assert (served == loads).all()
    assert (found.split >= 0).all()
    optimum = optimum_by_subsets(structure, loads)
    assert int(found.peak) == -(-optimum.numerator // optimum.denominator)
    assert int(rank_loads(structure, found.split[0]).max()) == int(found.peak)


@pytest.mark.parametrize("num_ranks", [2, 3, 64, 512])
def test_chain_of_two_copy_experts(num_ranks: int) -> None:
    structure = prepare(chain(num_ranks), num_ranks)
    loads = torch.ones(3, num_ranks + 1, dtype=torch.int64)
    loads[0, num_ranks - 1] = 10**9
    loads[1] = torch.arange(num_ranks + 1) ** 2
    loads[2, : num_ranks // 2] = 1000
    layer = torch.zeros(3, dtype=torch.int64)
    found = solve(structure, loads, layer)
    check(structure, loads, layer, found)
    for problem in range(3):
        optimum, _ = solve_reference(structure.physical_to_logical[0], num_ranks, loads[problem])
        assert float(found.peak[problem]) == pytest.approx(optimum, rel=TOL)


def test_light_and_batched_forms_agree() -> None:
    torch.manual_seed(0)
    slots = torch.stack([torch.randperm(24) % 20 for _ in range(3)])
    structure = prepare(slots, 4, 20)
    counts = torch.randint(0, 100, (5, 3, 20))
    found = solve_batched(structure, counts)
    layer = torch.arange(3).repeat(5)
    flat = solve(structure, counts.reshape(15, 20), layer)
    assert torch.equal(found.split.reshape(15, 24), flat.split)
    light = solve_peak(structure, counts.reshape(15, 20), layer)
    assert torch.equal(light.peak, flat.peak)
    assert torch.equal(light.bound, flat.bound)
