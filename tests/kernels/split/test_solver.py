"""The split, compared with its linear program and with the definition of its bound."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.split import Solution, SplitStructure, prepare, solve, solve_batched, solve_gathered, solve_peak
from epsim.kernels.split.problems import chain, clique
from epsim.kernels.split.reference import solve_reference

TOL = 1e-4
ONE_LAYER = torch.zeros(1, dtype=torch.int64)


def rank_loads(structure: SplitStructure, split: torch.Tensor) -> torch.Tensor:
    """[B, P] -> [B, R]."""
    return split.reshape(len(split), structure.num_ranks, -1).sum(2)


def even_split(structure: SplitStructure, loads: torch.Tensor) -> torch.Tensor:
    """One layer: [B, E] -> [B, P], every physical expert of an expert alike."""
    slots = structure.physical_to_logical[0] + 1  # 0: empty
    each = loads.double() / torch.bincount(slots, minlength=structure.num_experts + 1)[1:]
    return torch.nn.functional.pad(each, (1, 0))[:, slots]


def check(structure: SplitStructure, loads: torch.Tensor, layer: torch.Tensor, found: Solution) -> None:
    """Checks that slots are in [0, load] and sum to the loads, that the peak is as reported, and that it is proven."""
    slots = structure.physical_to_logical[layer] + 1
    loads = torch.nn.functional.pad(loads.double(), (1, 0))  # an empty slot has none
    assert ((found.split >= 0) & (found.split <= loads.gather(1, slots))).all()
    served = torch.zeros_like(loads).scatter_add_(1, slots, found.split.double())
    torch.testing.assert_close(served, loads, rtol=1e-13, atol=0)
    torch.testing.assert_close(rank_loads(structure, found.split).amax(1), found.peak, rtol=1e-13, atol=0)
    assert (found.bound <= found.peak).all()
    assert (found.peak <= found.bound * (1 + found.tol)).all()
    assert not found.unproven.any()


@st.composite
def problems(draw: st.DrawFn, most_ranks: int = 8) -> tuple[SplitStructure, torch.Tensor]:
    """One layer, and integer loads [1, E]."""
    num_ranks = draw(st.integers(1, most_ranks))
    num_physical = num_ranks * draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, num_physical))
    extra = st.integers(-1, num_experts - 1)  # -1: an empty slot
    slots = draw(st.permutations([*range(num_experts), *(draw(extra) for _ in range(num_physical - num_experts))]))
    load = st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 10**9))
    loads = [draw(load) for _ in range(num_experts)]
    return prepare(torch.tensor([slots]), num_ranks, num_experts), torch.tensor([loads])


def optimum_by_subsets(structure: SplitStructure, loads: torch.Tensor) -> tuple[Fraction, set[Fraction]]:
    """The largest, over rank sets, of the load that cannot leave the set over its size (Hall's condition); and all."""
    num_ranks = structure.num_ranks
    ranks_of: dict[int, set[int]] = {}
    for slot, expert in enumerate(structure.physical_to_logical[0].tolist()):
        if expert >= 0:
            ranks_of.setdefault(expert, set()).add(slot // (structure.num_physical // num_ranks))
    means = set()
    for count in range(1, num_ranks + 1):
        for chosen in itertools.combinations(range(num_ranks), count):
            inside = sum(int(loads[0, e]) for e, ranks in ranks_of.items() if ranks <= set(chosen))
            means.add(Fraction(inside, count))
    return max(means), means


@settings(max_examples=250, deadline=None)
@given(problems(), st.sampled_from([1e-2, TOL, 1e-9]))
def test_peak_is_the_optimum_over_all_rank_sets(problem: tuple[SplitStructure, torch.Tensor], tol: float) -> None:
    structure, loads = problem
    found = solve(structure, loads, ONE_LAYER, tol)
    check(structure, loads, ONE_LAYER, found)
    optimum, means = optimum_by_subsets(structure, loads)
    assert Fraction(int(found.bound_numerator), int(found.bound_size)) in means
    assert float(optimum) * (1 - 1e-13) <= float(found.peak) <= float(optimum) * (1 + tol)
    assert float(found.bound) == pytest.approx(int(found.bound_numerator) / int(found.bound_size), rel=1e-13)
    assert float(found.peak) <= float(rank_loads(structure, even_split(structure, loads)).max()) * (1 + 1e-13)


@settings(max_examples=250, deadline=None)
@given(problems())
def test_integral_split_reaches_the_optimum_rounded_up(problem: tuple[SplitStructure, torch.Tensor]) -> None:
    structure, loads = problem
    found = solve_gathered(structure, loads[None])
    assert found.split.dtype == torch.int64
    served = torch.zeros(1, structure.num_experts + 1, dtype=torch.int64)
    served.scatter_add_(1, structure.physical_to_logical + 1, found.split[0])
    assert torch.equal(served, torch.nn.functional.pad(loads, (1, 0)))  # an empty slot has none
    assert (found.split >= 0).all()
    optimum, _ = optimum_by_subsets(structure, loads)
    assert int(found.peak) == math.ceil(optimum)
    assert not found.unproven.any()
    assert int(rank_loads(structure, found.split[0]).max()) == math.ceil(optimum)
    assert math.ceil(Fraction(int(found.bound_numerator), int(found.bound_size))) == math.ceil(optimum)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_any_start_gives_a_proven_split(problem: tuple[SplitStructure, torch.Tensor], seed: int) -> None:
    structure, loads = problem
    generator = torch.Generator().manual_seed(seed)
    start = torch.rand(1, structure.num_physical, dtype=torch.float64, generator=generator) * 100 - 30
    start[0, int(start.argmin())] = math.nan
    check(structure, loads, ONE_LAYER, solve(structure, loads, ONE_LAYER, start=start))


@pytest.mark.parametrize("part", [5e-324, 1e-310, 2.5e-31, 3e-31, 1e38, 1e300, math.inf, math.nan, -1.0])
@pytest.mark.parametrize("num_ranks", [5, 32, 40])
def test_a_start_of_extreme_numbers(num_ranks: int, part: float) -> None:
    """In float32 as in float64, a load over the start's may be infinite, and nothing times that is no number."""
    # Experts 0 and 1 are on all ranks but the last two, expert 2 on these.
    everywhere = torch.tensor([[0, 1]] * (num_ranks - 2) + [[2, 3], [2, 4]])
    structure = prepare(everywhere.flatten()[None], num_ranks)
    loads = torch.tensor([[10**9, 10**8, 40, 3, 5]]).repeat(2, 1)
    start = torch.zeros(2, 2 * num_ranks, dtype=torch.float64)
    start[0, :8] = part
    start[1, :3] = start[:, -4] = part
    layer = torch.zeros(2, dtype=torch.int64)
    found = solve(structure, loads, layer, start=start)
    check(structure, loads, layer, found)
    assert found.peak.tolist() == pytest.approx([1.1e9 / (num_ranks - 2)] * 2, rel=TOL)


def random_problem(generator: torch.Generator) -> tuple[torch.Tensor, int, torch.Tensor]:
    """physical_to_logical [P], the number of ranks, and loads [E]: random graphs with empty slots, chains,
    rings, or cliques."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_ranks = draw(2, 16)
    kind = draw(0, 4)
    if kind == 1:
        slots = chain(num_ranks)[0]
    elif kind == 2:
        slots = chain(num_ranks, ring=True)[0]
    elif kind == 3:  # every pair of ranks shares an expert
        num_ranks = draw(3, 7)
        slots = clique(num_ranks)[0]
    else:
        num_physical = num_ranks * draw(1, 6)
        num_experts = draw(max(1, num_physical // 3), num_physical)
        extra = torch.randint(-1, num_experts, (num_physical - num_experts,), generator=generator)
        slots = torch.cat((torch.arange(num_experts), extra))[torch.randperm(num_physical, generator=generator)]
    loads = 10 ** (torch.rand(int(slots.max()) + 1, dtype=torch.float64, generator=generator) * draw(0, 9))
    loads[torch.rand(len(loads), generator=generator) < draw(0, 3) / 10] = 0
    return slots, num_ranks, loads.round().long() if draw(0, 1) else loads


@pytest.mark.parametrize(
    ("seed", "num_problems"), [(0, 200), pytest.param(1, 2000, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_within_tolerance_of_glop(seed: int, num_problems: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for _ in range(num_problems):
        slots, num_ranks, loads = random_problem(generator)
        structure = prepare(slots[None], num_ranks)
        found = solve(structure, loads[None], ONE_LAYER)
        check(structure, loads[None], ONE_LAYER, found)
        optimum, _ = solve_reference(slots, num_ranks, loads)
        assert float(found.peak) >= optimum * (1 - 1e-6)
        worst = max(worst, float(found.peak) / optimum - 1 if optimum else float(found.peak))
    assert worst <= TOL * (1 + 1e-3)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 32, 64, 512])
def test_long_chains_of_two_copy_experts(num_ranks: int, ring: bool) -> None:
    """Plain water-filling takes 2,399 sweeps on 64 ranks."""
    structure = prepare(chain(num_ranks, ring), num_ranks)
    loads = torch.ones(5, structure.num_experts, dtype=torch.int64)
    loads[0, 0] = 10**9
    loads[1] = torch.arange(structure.num_experts) ** 2
    loads[2, : num_ranks // 2] = 1000
    loads[3, ::3] = 0
    loads[4] = torch.randint(10**6, loads[4].shape, generator=torch.Generator().manual_seed(num_ranks))
    layer = torch.zeros(5, dtype=torch.int64)
    found = solve(structure, loads, layer)
    check(structure, loads, layer, found)
    assert int(found.sweeps.max()) <= 100
    whole = solve_gathered(structure, loads[:, None])
    for problem in range(5):
        optimum, _ = solve_reference(structure.physical_to_logical[0], num_ranks, loads[problem])
        assert float(found.peak[problem]) == pytest.approx(optimum, rel=TOL)
        assert math.ceil(optimum * (1 - 1e-6)) <= int(whole.peak[problem, 0]) <= math.ceil(optimum * (1 + 1e-6))


@pytest.mark.parametrize("skew", [0.0, 1.0, 9.0])
def test_largest_shape(skew: float) -> None:
    """512 ranks, 1,024 slots, from one hot expert with a copy on every rank to hundreds with two."""
    generator = torch.Generator().manual_seed(0)
    everywhere = torch.stack((torch.zeros(512, dtype=torch.int64), torch.arange(1, 513)), dim=1).flatten()
    scattered = torch.cat((torch.arange(600), torch.randint(600, (424,), generator=generator)))
    scattered = scattered[torch.randperm(1024, generator=generator)]
    for slots in (everywhere, scattered):
        structure = prepare(slots[None], 512)
        loads = 10 ** (torch.rand(4, structure.num_experts, dtype=torch.float64, generator=generator) * skew)
        loads[1, 1:] = 0
        layer = torch.zeros(4, dtype=torch.int64)
        found = solve(structure, loads, layer)
        check(structure, loads, layer, found)
        optimum, _ = solve_reference(slots, 512, loads[0])
        assert float(found.peak[0]) == pytest.approx(optimum, rel=TOL)


def test_hot_expert_on_every_rank_flattens_all() -> None:
    slots = torch.stack((torch.zeros(8, dtype=torch.int64), torch.arange(1, 9)), dim=1).flatten()
    structure = prepare(slots[None], 8)
    loads = torch.tensor([[36, 1, 2, 3, 4, 5, 6, 7, 8]])
    found = solve(structure, loads, ONE_LAYER, tol=1e-9)
    torch.testing.assert_close(rank_loads(structure, found.split), torch.full((1, 8), 9.0, dtype=torch.float64))
    assert found.split[0, ::2].tolist() == pytest.approx([8, 7, 6, 5, 4, 3, 2, 1])
    assert (int(found.bound_numerator), int(found.bound_size)) == (72, 8)


def test_nothing_to_split() -> None:
    """No load; one rank; no redundancy; one expert."""
    idle = solve(prepare(torch.tensor([[0, 1, 1, 2]]), 2), torch.zeros(1, 3, dtype=torch.int64), ONE_LAYER)
    assert idle.split.tolist() == [[0, 0, 0, 0]]
    assert (float(idle.peak), float(idle.bound), bool(idle.unproven)) == (0, 0, False)
    alone = solve(prepare(torch.tensor([[0, 1, 1, 2]]), 1), torch.tensor([[3, 8, 1]]), ONE_LAYER)
    assert alone.split.tolist() == [[3, 4, 4, 1]]
    assert (float(alone.peak), float(alone.bound)) == (12, 12)
    single = solve(prepare(torch.tensor([[2, 0, 1, 3]]), 2), torch.tensor([[3, 8, 1, 5]]), ONE_LAYER)
    assert single.split.tolist() == [[1, 3, 8, 5]]
    assert (float(single.peak), float(single.bound)) == (13, 13)
    one = solve(prepare(torch.tensor([[0, 0, 0, 0]]), 4), torch.tensor([[10]]), ONE_LAYER)
    assert one.split.tolist() == [[2.5, 2.5, 2.5, 2.5]]
    empty = solve(prepare(torch.tensor([[0, 1]]), 2), torch.zeros(0, 2, dtype=torch.int64), ONE_LAYER[:0])
    assert empty.split.shape == (0, 2)


def test_slots_of_one_expert_on_one_rank_share_evenly() -> None:
    structure = prepare(torch.tensor([[0, 0, 1, 0, 2, 3]]), 2)
    loads = torch.tensor([[70, 20, 10, 20]])
    found = solve(structure, loads, ONE_LAYER, tol=1e-9)
    torch.testing.assert_close(found.split, torch.tensor([[20.0, 20, 20, 30, 10, 20]], dtype=torch.float64))
    whole = solve_gathered(structure, torch.tensor([[[71, 20, 10, 20]]])).split[0, 0]
    assert int(whole[:3].sum()) in (60, 61)
    assert abs(int(whole[0] - whole[1])) <= 1


def test_start_near_the_answer_saves_sweeps() -> None:
    generator = torch.Generator().manual_seed(0)
    structure = prepare(chain(64, ring=True), 64)
    layer = torch.zeros(50, dtype=torch.int64)
    loads = torch.randint(1000, 2000, (50, 64), generator=generator)
    cold = solve(structure, loads, layer)
    drifted = loads + torch.randint(0, 3, loads.shape, generator=generator)
    again = solve(structure, drifted, layer, start=cold.split)
    check(structure, drifted, layer, again)
    assert float(again.sweeps.double().mean()) < float(solve(structure, drifted, layer).sweeps.double().mean())


def test_layers_batches_and_light_form_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.stack([torch.randperm(24, generator=generator) % 20 for _ in range(3)])
    structure = prepare(slots, 4, 20)
    counts = torch.randint(0, 100, (700, 3, 20), generator=generator)
    batched = solve_batched(structure, counts)
    assert batched.split.shape == (700, 3, 24)
    flat = counts.reshape(-1, 20)
    layer = torch.arange(3).repeat(700)
    found = solve(structure, flat, layer)
    check(structure, flat, layer, found)
    assert torch.equal(batched.split.reshape(-1, 24), found.split)
    light = solve_peak(structure, flat, layer)
    assert light.split.shape == (2100, 0)
    for one, other in ((light.peak, found.peak), (light.bound, found.bound), (batched.peak.flatten(), found.peak)):
        assert torch.equal(one, other)
    for number in (0, 1, 2, 1500):
        alone = solve(prepare(slots[number % 3][None], 4, 20), flat[number][None], ONE_LAYER)
        assert torch.equal(alone.split[0], found.split[number])


def test_spent_sweeps_are_reported() -> None:
    structure = prepare(chain(64), 64)
    loads = torch.zeros(2, 65, dtype=torch.int64)
    loads[0, 0] = 10**6
    found = solve(structure, loads, torch.zeros(2, dtype=torch.int64), max_sweeps=3)
    assert found.sweeps.tolist()[0] == 3
    assert found.unproven.tolist() == [True, False]
    assert float(found.split[0].sum()) == pytest.approx(10**6)


@settings(max_examples=60, deadline=None)
@given(
    problems(),
    st.sampled_from([torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float16, torch.float32]),
    st.booleans(),
)
def test_loads_of_any_real_type_and_layout_are_taken(
    problem: tuple[SplitStructure, torch.Tensor], kind: torch.dtype, by_column: bool
) -> None:
    structure, loads = problem
    given_loads = (loads % 200).to(kind).repeat(3, 1)
    if by_column:
        given_loads = given_loads.t().contiguous().t()
    layer = torch.zeros(3, dtype=torch.int64)
    start = torch.rand(structure.num_physical, 3, generator=torch.Generator().manual_seed(0)).t()
    found = solve(structure, given_loads, layer, start=start)
    plain = solve(structure, given_loads.double(), layer, start=start.double().contiguous())
    assert torch.equal(found.split, plain.split)
    assert torch.equal(found.peak, plain.peak)
    check(structure, given_loads, layer, found)


def test_bad_loads_are_refused() -> None:
    structure = prepare(torch.tensor([[0, 1, 1, 2]]), 2)
    layer = torch.zeros(2, dtype=torch.int64)
    good = [1.0, 1.0, 1.0]
    for bad in ([1.0, -1.0, 1.0], [math.nan, 1.0, 1.0], [1.0, 1.0, math.inf], [1e308, 1e308, 0.0]):
        with pytest.raises(ValueError, match="problem 1: a load is negative, not a number, or too large"):
            solve(structure, torch.tensor([good, bad], dtype=torch.float64), layer)
    with pytest.raises(ValueError, match=r"problem 0: loads sum to 2\^53"):
        solve(structure, torch.tensor([[2**53, 0, 0], [1, 1, 1]]), layer)
    with pytest.raises(ValueError, match=r"problem 1: loads sum to 2\^53"):
        solve_gathered(structure, torch.tensor([[[1, 1, 1]], [[2**52, 2**52, 0]]]))
    huge = solve(structure, torch.tensor([[2**52, 2**51, 2**50]]), ONE_LAYER)
    assert int(huge.bound_numerator) == 2**52
    with pytest.raises(ValueError, match="needs integer loads"):
        solve_gathered(structure, torch.ones(1, 1, 3))
    with pytest.raises(ValueError, match=r"loads are \[2, 4\], not \[problems, 3 experts\]"):
        solve(structure, torch.ones(2, 4), layer)
    with pytest.raises(ValueError, match=r"outside 0\.\.0"):
        solve(structure, torch.ones(2, 3), layer + 1)
    with pytest.raises(ValueError, match="tol 0 is outside"):
        solve(structure, torch.ones(2, 3), layer, tol=0)
    with pytest.raises(ValueError, match=r"loads are torch\.complex64, not real"):
        solve(structure, torch.ones(2, 3, dtype=torch.complex64), layer)
    with pytest.raises(ValueError, match=r"start are torch\.complex64, not real"):
        solve(structure, torch.ones(2, 3), layer, start=torch.ones(2, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"loads are \[\], not \[problems, 3 experts\]"):
        solve(structure, torch.tensor(1.0), layer)
    with pytest.raises(ValueError, match="max_sweeps -1 is negative"):
        solve(structure, torch.ones(2, 3), layer, max_sweeps=-1)
    with pytest.raises(ValueError, match=r"start is \[1, 4\]"):
        solve(structure, torch.ones(2, 3), layer, start=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"counts are \[5, 3\]"):
        solve_batched(structure, torch.ones(5, 3))
