"""The timed split, compared with its integer program, with the token form, and with its own bound."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.split import SplitStructure, prepare, solve_gathered
from epsim.kernels.split.problems import chain, clique, drifted_counts
from epsim.kernels.timed import FEW_COPIES, TimedSolution, solve_timed
from epsim.kernels.timed.solver import LARGEST, whole_costs
from epsim.placement.base import Cluster
from epsim.policies.stack import placement_policy
from tests.kernels.timed.reference import solve_reference

RECORDINGS = Path(__file__).resolve().parents[3] / "../shared/traces/deepseek-v3-sglang"
COSTS = st.sampled_from([(1, 0), (0, 1), (1, 1), (1, 5), (1, 50), (3, 7), (7, 250), (10, 3), (1000, 1)])


def rank_costs(structure: SplitStructure, split: torch.Tensor, a: float, b: float) -> torch.Tensor:
    """[..., P] -> [...]: a * tokens + b * active of the dearest rank."""
    per_rank = split.reshape(*split.shape[:-1], structure.num_ranks, -1)
    return (a * per_rank.sum(-1) + b * (per_rank > 0).sum(-1)).amax(-1).double()


def check(structure: SplitStructure, counts: torch.Tensor, a: float, b: float, found: TimedSolution) -> None:
    """Every token once, costs as stated, bounded, and none dearer than the token form's."""
    slots = structure.physical_to_logical.expand(found.split.shape) + 1
    assert bool((found.split >= 0).all())
    counted = torch.nn.functional.pad(counts, (1, 0))  # an empty slot has no tokens
    assert torch.equal(torch.zeros_like(counted).scatter_add_(-1, slots, found.split), counted)
    cost = rank_costs(structure, found.split, a, b)
    torch.testing.assert_close(found.cost, cost, rtol=1e-8, atol=0)
    assert bool((found.bound <= found.cost).all())
    assert torch.equal(found.proven, found.bound == found.cost)
    tokens_form = rank_costs(structure, solve_gathered(structure, counts).split, a, b)
    assert bool((cost <= tokens_form * (1 + 1e-8)).all())


@st.composite
def problems(
    draw: st.DrawFn, ranks: int, slots: int, redundant: int, largest: int = 10**6
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Slots [P], ranks, counts [E]: at most so many ranks, slots a rank and redundant slots; experts may be twins; some
    slots may be empty."""
    num_ranks = draw(st.integers(1, ranks))
    num_physical = num_ranks * draw(st.integers(1, slots))
    num_experts = draw(st.integers(max(1, num_physical - redundant), num_physical))
    extra = [draw(st.integers(-1, num_experts - 1)) for _ in range(num_physical - num_experts)]
    placed = draw(st.permutations([*range(num_experts), *extra]))
    number = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 30), st.integers(0, largest))
    counts = [draw(number) for _ in range(num_experts)]
    return torch.tensor(placed), num_ranks, torch.tensor(counts)


def copies_in_question(slots: torch.Tensor, num_ranks: int) -> int:
    """(expert, rank) pairs of experts on several ranks."""
    rank = torch.arange(len(slots)) // (len(slots) // num_ranks)
    pairs = {(int(e), int(r)) for e, r in zip(slots, rank) if e >= 0}
    experts = [expert for expert, _ in pairs]
    return sum(experts.count(expert) > 1 for expert in experts)


@settings(max_examples=150, deadline=None)
@given(problems(ranks=4, slots=4, redundant=7), COSTS)
def test_small_problems_are_solved_exactly(
    problem: tuple[torch.Tensor, int, torch.Tensor], costs: tuple[int, int]
) -> None:
    slots, num_ranks, counts = problem
    assert copies_in_question(slots, num_ranks) <= FEW_COPIES
    structure = prepare(slots[None], num_ranks, len(counts))
    found = solve_timed(structure, counts[None], *costs)
    check(structure, counts[None], *costs, found)
    best, bound, _ = solve_reference(slots, num_ranks, counts, *costs)
    assert best == bound
    assert float(found.cost[0]) == pytest.approx(best, rel=1e-12)
    assert bool(found.proven[0])


HOSTILE = {
    "chain": (chain(9), 9),
    "ring": (chain(8, ring=True), 8),
    "clique": (clique(4), 4),
    "twins": (torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 0, 1, 2, 2]]), 3),
    "all_everywhere": (torch.tensor([[0, 1, 2, 3] * 4]), 4),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("costs", [(1, 7), (5, 13), (0, 1), (1, 0)])
def test_hostile_small_problems_are_solved_exactly(name: str, costs: tuple[int, int]) -> None:
    slots, num_ranks = HOSTILE[name]
    num_experts = int(slots.max()) + 1
    structure = prepare(slots, num_ranks, num_experts)
    rng = np.random.default_rng(3)
    many = [
        rng.integers(1, 12, num_experts),  # near ties of tokens and openings
        np.full(num_experts, 5),
        np.eye(num_experts, dtype=int)[-1] * 1000,
        rng.integers(0, 2, num_experts),
        (10 ** rng.uniform(0, 6, num_experts)).astype(int),
    ]
    counts = torch.from_numpy(np.stack(many))[:, None]
    found = solve_timed(structure, counts, *costs)
    check(structure, counts, *costs, found)
    for step in range(len(many)):
        best, bound, _ = solve_reference(slots[0], num_ranks, counts[step, 0], *costs)
        assert (float(found.cost[step, 0]), bool(found.proven[step, 0])) == (best, True)
        assert best == bound


@settings(max_examples=60, deadline=None)
@given(problems(ranks=12, slots=6, redundant=40), COSTS)
def test_larger_problems_are_bounded_and_never_dearer(
    problem: tuple[torch.Tensor, int, torch.Tensor], costs: tuple[int, int]
) -> None:
    slots, num_ranks, counts = problem
    structure = prepare(slots[None], num_ranks, len(counts))
    check(structure, counts[None], *costs, solve_timed(structure, counts[None], *costs))


@settings(max_examples=30, deadline=None)
@given(problems(ranks=5, slots=4, redundant=8, largest=60), COSTS, st.integers(0, 40))
def test_a_search_cut_short_proves_nothing_false(
    problem: tuple[torch.Tensor, int, torch.Tensor], costs: tuple[int, int], nodes: int
) -> None:
    slots, num_ranks, counts = problem
    structure = prepare(slots[None], num_ranks, len(counts))
    found = solve_timed(structure, counts[None], *costs, few_copies=0, most_nodes=nodes, target_nodes=5)
    check(structure, counts[None], *costs, found)
    best, proven, _ = solve_reference(slots, num_ranks, counts, *costs)
    assert best == proven
    assert float(found.bound[0]) <= best * (1 + 1e-12)
    assert int(found.nodes[0]) <= nodes


@settings(max_examples=40, deadline=None)
@given(problems(ranks=8, slots=5, redundant=20), st.sampled_from([0.25, 1, 1000]))
def test_without_openings_it_is_the_token_form(problem: tuple[torch.Tensor, int, torch.Tensor], a: float) -> None:
    slots, num_ranks, counts = problem
    structure = prepare(slots[None], num_ranks, len(counts))
    found = solve_timed(structure, counts[None], a, 0)
    tokens_form = solve_gathered(structure, counts[None])
    per_rank = (found.split.reshape(num_ranks, -1).sum(1), tokens_form.split.reshape(num_ranks, -1).sum(1))
    assert bool(found.proven[0])
    assert int(per_rank[0].max()) == int(per_rank[1].max())


def test_by_active_experts_alone_tokens_do_not_matter() -> None:
    # Ten experts with tokens, all on both ranks: five each, whatever they hold.
    slots = torch.tensor([[*range(10), *range(10)]])
    counts = torch.tensor([[10**9, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    found = solve_timed(prepare(slots, 2, 10), counts, 0, 3.5)
    assert (float(found.cost), bool(found.proven)) == (5 * 3.5, True)


def test_closing_copies_pays_until_tokens_weigh_more() -> None:
    structure = prepare(torch.tensor([[0, 1, 0, 1]]), 2, 2)
    found = solve_timed(structure, torch.tensor([[[10, 6]], [[100, 2]]]), 1, 8)
    assert found.split.tolist() == [[[10, 0, 0, 6]], [[55, 0, 45, 2]]]
    assert found.cost.tolist() == [[18], [63]]


def test_slots_of_one_expert_on_one_rank_are_one() -> None:
    found = solve_timed(prepare(torch.tensor([[0, 0, 1, 1, 1, 2]]), 2, 3), torch.tensor([[8, 3, 1]]), 1, 2)
    assert found.split.tolist() == [[8, 0, 0, 3, 0, 1]]
    assert found.cost.tolist() == [10]


def test_no_tokens_one_token_one_rank_one_expert() -> None:
    structure = prepare(torch.tensor([[0, 1, 1, 0]]), 2, 2)
    found = solve_timed(structure, torch.tensor([[[0, 0]], [[1, 0]]]), 2, 3)
    assert found.cost.tolist() == [[0], [5]]
    assert bool(found.proven.all())
    assert int(found.split.sum()) == 1
    alone = solve_timed(prepare(torch.tensor([[0, 1]]), 1, 2), torch.tensor([[4, 0]]), 2, 3)
    assert (alone.split.tolist(), alone.cost.tolist()) == ([[4, 0]], [11])
    one = solve_timed(prepare(torch.tensor([[0, 0, 0]]), 3, 1), torch.tensor([[4]]), 1, 3)
    assert (one.cost.tolist(), one.proven.tolist()) == ([5], [True])  # 2 + 1 + 1 tokens; a single copy costs 7
    empty = solve_timed(structure, torch.zeros(0, 1, 2, dtype=torch.int64), 1, 1)
    assert empty.split.shape == (0, 1, 4)


def test_a_problem_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(5)
    slots = torch.stack([torch.randperm(24, generator=generator) % 18 for _ in range(3)])
    structure = prepare(slots, 6, 18)
    counts = torch.randint(0, 40, (7, 3, 18), generator=generator)
    together = solve_timed(structure, counts, 1, 20)
    for step in range(7):
        alone = solve_timed(structure, counts[step], 1, 20)
        assert torch.equal(alone.split, together.split[step])
        assert torch.equal(alone.bound, together.bound[step])


@pytest.mark.parametrize(
    ("a", "b", "whole"),
    [
        (1, 150, (1, 150)),
        (0.35, 12.5, (7, 250)),
        (0, 7.3, (0, 1)),
        (1e-3, 0, (1, 0)),
        (0.1, 1e9 + 0.1, (1, LARGEST)),
        (1e-30, 1, (1, LARGEST)),
        (1 / 3, 1, (round(LARGEST / 3), LARGEST)),
    ],
)
def test_whole_costs(a: float, b: float, whole: tuple[int, int]) -> None:
    assert whole_costs(a, b) == whole


@pytest.mark.parametrize(
    ("counts", "a", "b", "says"),
    [
        ([1, 2], -1.0, 1.0, "a=-1.0 is not a valid cost"),
        ([1, 2], 1.0, float("inf"), "b=inf is not a valid cost"),
        ([1, 2], float("nan"), 1.0, "a=nan is not a valid cost"),
        ([1, 2], 0.0, 0.0, "nothing to minimise"),
        ([1, -2], 1.0, 1.0, "a load is negative"),
        ([1, 2**31], 1.0, 1.0, "more than 2^31"),
        ([1, 2, 3], 1.0, 1.0, "counts are [1, 3], not [..., 1 layers, 2 experts]"),
        ([1, float("nan")], 1.0, 1.0, "needs integer loads"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(counts: list[float], a: float, b: float, says: str) -> None:
    structure = prepare(torch.tensor([[0, 1]]), 1, 2)
    with pytest.raises(ValueError) as error:
        solve_timed(structure, torch.tensor([counts]), a, b)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.recordings
@pytest.mark.parametrize(
    ("tokens", "b", "gain"), [(8, 150.0, 0.06), (32, 30.0, 0.02), (128, 150.0, 0.02), (128, 4.0, 0)]
)
def test_real_decode_gets_cheaper(tokens: int, b: float, gain: float) -> None:
    """DeepSeek-V3, 16 ranks, 32 redundant, placed on another workload; tokens a rank."""
    if not RECORDINGS.is_dir():
        pytest.skip("needs recordings that are not part of the repository")
    planned, later = (
        np.array(json.loads((RECORDINGS / name).read_text())["logical_count"], dtype=np.int64)[3:13]
        for name in ("decode_in1000out1000.json", "decode_in2000out100.json")
    )
    placement = placement_policy("eplb").plan(torch.from_numpy(planned)[None], Cluster(16, 2, 32))
    structure = prepare(placement.physical_to_logical, 16, 256)
    counts = drifted_counts(planned, later, tokens * 16 * 8, 6, np.random.default_rng(1))
    found = solve_timed(structure, counts, 1, b)
    check(structure, counts, 1, b, found)
    tokens_form = rank_costs(structure, solve_gathered(structure, counts).split, 1, b)
    assert float((found.cost / tokens_form).mean()) < 1 - gain
    assert float((found.cost / found.bound).mean()) < 1.03
