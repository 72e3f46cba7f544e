"""Assignment of shared-expert tokens, by number and by token, compared with an integer program."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.water import assign, pour

COSTS = [1.0, 0.5, 2.0, 0.75, 3.3]


@st.composite
def problems(draw: st.DrawFn, most_ranks: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed loads and tokens [R]."""
    num_ranks = draw(st.integers(1, most_ranks))
    load = st.one_of(st.integers(0, 5), st.integers(0, 60), st.integers(0, 1000))
    routed = [draw(load) for _ in range(num_ranks)]
    tokens = [draw(st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 200))) for _ in range(num_ranks)]
    return torch.tensor(routed), torch.tensor(tokens)


def reference(routed: torch.Tensor, tokens: torch.Tensor, cost: float, most: torch.Tensor | None) -> tuple[int, int]:
    """The lowest peak by OR-Tools, in 2^-20 assignments, and the fewest tokens off their source rank at this peak."""
    from ortools.sat.python import cp_model

    num_ranks = len(routed)
    unit = round(cost * 2**20)
    least = 0
    peak_found: int | None = None
    for goal in ("peak", "away"):
        model = cp_model.CpModel()
        sent = [
            [
                model.new_int_var(0, int(tokens[u] if most is None or u == v else most[u, v]), "")
                for v in range(num_ranks)
            ]
            for u in range(num_ranks)
        ]
        peak = model.new_int_var(0, 2**45, "")
        for v in range(num_ranks):
            model.add(sum(sent[u][v] for u in range(num_ranks)) * unit + (int(routed[v]) << 20) <= peak)
            model.add(sum(sent[v]) == int(tokens[v]))
        if peak_found is None:
            model.minimize(peak)
        else:
            model.add(peak == peak_found)
            model.minimize(sum(sent[u][v] for u in range(num_ranks) for v in range(num_ranks) if u != v))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model) == cp_model.OPTIMAL
        least = round(solver.objective_value)
        if goal == "peak":
            peak_found = least
    assert peak_found is not None
    return peak_found, least


def check(routed: torch.Tensor, tokens: torch.Tensor, quotas: torch.Tensor) -> None:
    assert bool((quotas >= 0).all())
    assert torch.equal(quotas.sum(-1), tokens)


@settings(max_examples=80, deadline=None)
@given(problems(), st.sampled_from(COSTS))
def test_poured_anywhere_the_peak_and_what_moves_are_least(
    problem: tuple[torch.Tensor, torch.Tensor], cost: float
) -> None:
    routed, tokens = problem
    node = torch.zeros_like(routed)
    quotas, peak = pour(routed, tokens, cost, node)
    check(routed, tokens, quotas)
    best, away = reference(routed, tokens, cost, None)
    assert float(peak) == best / 2**20
    assert int(tokens.sum() - quotas.diagonal().sum()) == away


@settings(max_examples=80, deadline=None)
@given(problems(), st.sampled_from(COSTS), st.randoms(use_true_random=False))
def test_with_bounds_the_peak_is_least(problem: tuple[torch.Tensor, torch.Tensor], cost: float, random: object) -> None:
    routed, tokens = problem
    num_ranks = len(routed)
    most = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    for u in range(num_ranks):
        left = int(tokens[u])
        for v in range(num_ranks):
            most[u, v] = random.randint(0, left)  # type: ignore[attr-defined]
            left -= int(most[u, v])
    quotas, peak = pour(routed, tokens, cost, torch.zeros_like(routed), most)
    check(routed, tokens, quotas)
    off = ~torch.eye(num_ranks, dtype=torch.bool)
    assert bool((quotas <= most)[off].all())
    assert float(peak) == reference(routed, tokens, cost, most)[0] / 2**20


@settings(deadline=None)
@given(problems(12), st.sampled_from([1.0, 0.5, 0.25]))
def test_where_tokens_divide_assignments_it_is_the_rounded_mean_or_the_routed_peak(
    problem: tuple[torch.Tensor, torch.Tensor], cost: float
) -> None:
    routed, tokens = problem
    _, peak = pour(routed, tokens, cost, torch.zeros_like(routed))
    mean = Fraction(int(routed.sum()) + int(tokens.sum()) * Fraction(cost), len(routed))
    step = Fraction(cost)
    assert Fraction(float(peak)) == max(int(routed.max()), math.ceil(mean / step) * step)


def test_tokens_leave_for_their_own_node_first_and_spread() -> None:
    node = torch.tensor([0, 0, 0, 1, 1, 1])
    quotas, peak = pour(torch.tensor([100, 40, 40, 40, 40, 40]), torch.tensor([30, 9, 9, 9, 9, 9]), 1.0, node)
    assert float(peak) == 100
    assert quotas[0].tolist() == [0, 15, 15, 0, 0, 0]
    assert quotas[1:, 1:].tolist() == torch.diag(torch.tensor([9] * 5)).tolist()
    # 10 tokens fit on the other rank of the node; the others go to the other node.
    quotas, _ = pour(torch.tensor([100, 81, 40, 40]), torch.tensor([30, 9, 9, 9]), 1.0, torch.tensor([0, 0, 1, 1]))
    assert quotas[0].tolist() == [0, 10, 10, 10]


def test_a_chain_of_bounds() -> None:
    # Rank 0 may send only to rank 1, rank 1 only to rank 2.
    most = torch.tensor([[0, 9, 0], [0, 0, 6], [0, 0, 0]])
    quotas, peak = pour(torch.tensor([30, 20, 0]), torch.tensor([10, 10, 10]), 1.0, torch.zeros(3).long(), most)
    # At most 6 tokens leave ranks 0 and 1, so these keep a load of 50 + 20 - 6.
    assert quotas.tolist() == [[2, 8, 0], [0, 4, 6], [0, 0, 10]]
    assert float(peak) == 32


def test_leading_axes_nothing_to_do_and_too_much() -> None:
    routed = torch.tensor([[[5, 1], [3, 3]], [[0, 0], [9, 0]]])
    tokens = torch.tensor([[[2, 2], [0, 0]], [[0, 0], [4, 0]]])
    quotas, peak = pour(routed, tokens, 1.0, torch.zeros(2).long())
    assert peak.tolist() == [[5, 3], [0, 9]]
    assert quotas[0, 0].tolist() == [[0, 2], [0, 2]]
    assert quotas[1, 1].tolist() == [[0, 4], [0, 0]]
    assert pour(routed[:0], tokens[:0], 1.0, torch.zeros(2).long())[0].shape == (0, 2, 2, 2)
    with pytest.raises(ValueError, match="more than 2\\^40"):
        pour(torch.tensor([2**40, 1]), torch.tensor([1, 1]), 1.0, torch.zeros(2).long())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tokens": torch.ones(2, dtype=torch.int64)}, "do not fit"),
        ({"node_of_rank": torch.zeros(1, dtype=torch.int64)}, "do not fit"),
        ({"most": torch.zeros(3, 2, dtype=torch.int64)}, r"most is \[3, 2\], not \[3, 3\]"),
        ({"routed": torch.tensor([1, -1, 0])}, "routed must be integers >= 0"),
        ({"tokens": torch.ones(3)}, "tokens must be integers >= 0"),
        ({"most": -torch.ones(3, 3, dtype=torch.int64)}, "most must be integers >= 0"),
        ({"routed": torch.tensor(1), "tokens": torch.tensor(1)}, "do not fit"),
        *[({"cost": cost}, "not a finite number above 0") for cost in (0.0, -1.0, math.nan, math.inf)],
    ],
)
def test_what_does_not_fit_is_told_in_one_line(changed: dict[str, Any], says: str) -> None:
    three = torch.ones(3, dtype=torch.int64)
    arguments: dict[str, Any] = {"routed": three, "tokens": three, "cost": 1.0, "node_of_rank": 0 * three} | changed
    with pytest.raises(ValueError, match=says):
        pour(**arguments)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.uint16])
def test_any_integer_type_gives_the_same(kind: torch.dtype) -> None:
    routed, tokens, node = torch.tensor([[100, 7, 3]]), torch.tensor([[90, 70, 0]]), torch.tensor([0, 0, 1])
    most = torch.tensor([[[0, 50, 20], [3, 0, 60], [0, 0, 0]]])
    for limit in (None, most):
        plain, peak = pour(routed, tokens, 1.0, node, limit)
        narrow = None if limit is None else limit.to(kind)
        quotas, same = pour(routed.to(kind), tokens.to(kind), 1.0, node.to(kind), narrow)
        assert quotas.dtype == torch.int64
        assert torch.equal(quotas, plain)
        assert (float(same), float(peak)) == ((100.0, 100.0) if limit is None else (120.0, 120.0))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_tokens_of_one_rank_by_their_quotas(seed: int, num_ranks: int, top_k: int, number: int) -> None:
    """Quotas of at most a k-th of the rank's assignments on another are served by tokens that visit it, all of them."""
    generator = torch.Generator().manual_seed(seed)
    visited = torch.randint(-1, num_ranks, (number, top_k), generator=generator)
    own = int(torch.randint(num_ranks, (1,), generator=generator))
    there = torch.bincount(visited.flatten() + 1, minlength=num_ranks + 1)[1:]
    most = there // top_k
    quotas = (most * torch.rand(num_ranks, generator=generator).round()).long()
    quotas[own] = 0
    quotas[own] = number - quotas.sum()
    zeros = torch.zeros(number, dtype=torch.int64)
    ranks = assign(zeros, torch.full_like(zeros, own), visited, quotas[None])
    assert torch.equal(torch.bincount(ranks, minlength=num_ranks), quotas)
    assert bool(((ranks == own) | (visited == ranks[:, None]).any(1)).all())


def test_tokens_that_must_go_elsewhere_are_the_first() -> None:
    visited = torch.tensor([[0, 1], [1, -1], [0, 0], [0, 0]])
    ranks = assign(torch.zeros(4).long(), torch.zeros(4).long(), visited, torch.tensor([[1, 1, 2]]))
    assert ranks.tolist() == [1, 2, 2, 0]
    blind = assign(torch.zeros(4).long(), torch.zeros(4).long(), None, torch.tensor([[1, 1, 2]]))
    assert blind.tolist() == [1, 2, 2, 0]
    assert assign(torch.zeros(0).long(), torch.zeros(0).long(), None, torch.zeros(0, 3).long()).shape == (0,)


def test_groups_do_not_mix() -> None:
    group = torch.tensor([2, 0, 2, 0, 2])
    source = torch.tensor([1, 0, 1, 0, 1])
    quotas = torch.tensor([[1, 1], [7, 7], [2, 1]])
    assert assign(group, source, None, quotas).tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("row", [[2, 6], [6, 2], [1, 2], [5, -1], [-1, 5]])
def test_quotas_of_other_numbers_of_tokens_are_refused(row: list[int]) -> None:
    """Compiled code would write outside the arrays."""
    zeros = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"quotas do not fit: groups have \[4\] tokens, but quotas sum to"):
        assign(zeros, zeros, None, torch.tensor([row]))
