"""Rounding against exact fractions, tokens against quotas, and how near the optimum it stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Cluster, Placement
from epsim.policies.base import Batch, local_index
from epsim.policies.copies import Copies
from epsim.policies.rounding import ONE, fixed_point, offsets, sampled_ids, systematic_ids, systematic_quotas
from epsim.policies.splits import Even, Lplb
from epsim.policies.stack import placement_policy
from epsim.traces.trace import TokenBlock

DrawProblem = Callable[..., tuple[Placement, TokenBlock]]


def random_fractions(seed: int, steps: int, copies: Copies) -> torch.Tensor:
    """[S, L, P]: random shares, many of them 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(steps, *copies.slot.shape, generator=generator, dtype=torch.float64) - 0.4
    weight = weight.clamp(min=0) + 1e-12 * torch.rand(weight.shape, generator=generator, dtype=torch.float64)
    slots = copies.placement.physical_to_logical.expand_as(weight) + 1  # 0: empty
    num_layers, num_experts = copies.number.shape
    whole = torch.zeros(steps, num_layers, num_experts + 1, dtype=torch.float64).scatter_add_(-1, slots, weight)
    return torch.where(slots > 0, weight / whole.gather(-1, slots), 0)


def batch_of(block: TokenBlock, layers: int) -> Batch:
    token_step, source = torch.from_numpy(block.token_step), torch.from_numpy(block.source_rank)
    ids = torch.from_numpy(block.expert_ids).to(torch.int64)
    local = local_index(token_step, source)
    return Batch(torch.from_numpy(block.steps), 3 + torch.arange(layers), token_step, source, ids, local)


def slots_of(placement: Placement, layer: int, expert: int) -> list[int]:
    return (placement.physical_to_logical[layer] == expert).nonzero()[:, 0].tolist()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 12))
def test_fixed_point_is_the_nearest_and_the_last_copy_takes_the_rest(
    draw_problem: DrawProblem, seed: int, ranks: int, experts: int, redundant: int
) -> None:
    placement, _ = draw_problem(seed, experts=experts, ranks=ranks, nodes=1, redundant=redundant, top_k=1)
    copies = Copies(placement)
    fractions = random_fractions(seed, 2, copies)
    fixed = fixed_point(fractions, copies)
    for step in range(2):
        for layer in range(placement.num_layers):
            for expert in range(experts):
                slots = slots_of(placement, layer, expert)
                expected = [round(Fraction(float(fractions[step, layer, slot])) * ONE) for slot in slots[:-1]]
                while sum(expected) > ONE:
                    last = max(i for i, part in enumerate(expected) if part)
                    expected[last] -= min(expected[last], sum(expected) - ONE)
                assert fixed[step, layer, slots].tolist() == [*expected, ONE - sum(expected)]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 12), st.sampled_from([9, 2**53 // 9])
)
def test_quotas_follow_the_written_rule(
    draw_problem: DrawProblem, seed: int, ranks: int, experts: int, redundant: int, most: int
) -> None:
    placement, _ = draw_problem(seed, experts=experts, ranks=ranks, nodes=1, redundant=redundant, top_k=1)
    copies = Copies(placement)
    fixed = fixed_point(random_fractions(seed, 2, copies), copies)
    shape = (2, placement.num_layers, ranks, experts)
    counts = torch.from_numpy(np.random.default_rng(seed).integers(0, most, shape))
    quotas = systematic_quotas(counts, fixed, copies)
    offset = offsets(ranks, experts, fixed.device)
    for step, layer, rank, expert in np.ndindex(shape):
        slots, number = slots_of(placement, layer, expert), int(counts[step, layer, rank, expert])
        start, upper, total = Fraction(int(offset[rank, expert]), ONE), Fraction(0), 0
        for slot in slots:
            upper += Fraction(int(fixed[step, layer, slot]), ONE)
            # The tokens j < number with (j + start) / number below the copy's upper end.
            below = min(max(-((-upper * number + start) // 1), 0), number)
            assert int(quotas[step, layer, rank, slot]) == below - total
            total = below
        assert total == number


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 9), st.integers(0, 12), st.booleans())
def test_tokens_fill_the_quotas_exactly(
    draw_problem: DrawProblem, seed: int, ranks: int, experts: int, redundant: int, blanks: bool
) -> None:
    placement, block = draw_problem(
        seed, experts=experts, ranks=ranks, nodes=1, redundant=redundant, blanks=blanks, tokens=60
    )
    copies = Copies(placement)
    fixed = fixed_point(random_fractions(seed, 3, copies), copies)
    batch = batch_of(block, placement.num_layers)
    ids = systematic_ids(batch, fixed, copies)
    assert torch.equal(ids >= 0, batch.expert_ids >= 0)
    found = TokenBlock(block.steps, block.token_step, block.source_rank, ids.numpy())
    counts = torch.from_numpy(block.to_rank_counts(ranks, experts).counts)
    expected = systematic_quotas(counts, fixed, copies)
    assert np.array_equal(found.to_rank_counts(ranks, placement.num_physical).counts, expected.numpy())


@pytest.mark.parametrize("offset", [0, 1, ONE // 4 - 1, ONE // 4, ONE - 1])
def test_points_on_a_boundary_belong_to_the_next_copy_in_both_forms(
    monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    monkeypatch.setattr("epsim.policies.rounding.offsets", lambda *_: torch.full((1, 1), offset))
    copies = Copies(Placement(torch.zeros(1, 4, dtype=torch.int64), 1, 1))
    fixed = torch.tensor([[[1, ONE // 4 - 1, ONE // 2, ONE // 4]]])
    for number in range(1, 9):
        zero = torch.zeros(number, dtype=torch.int64)
        batch = Batch(zero[:1], zero[:1], zero, zero, zero[:, None, None], torch.arange(number))
        points = [((j << 20) + offset) // number for j in range(number)]
        expected = [sum(point >= end for end in (1, ONE // 4, ONE // 4 * 3)) for point in points]
        assert systematic_ids(batch, fixed, copies)[:, 0, 0].tolist() == expected
        quotas = systematic_quotas(torch.tensor([[[[number]]]]), fixed, copies)[0, 0, 0]
        assert quotas.tolist() == [expected.count(slot) for slot in range(4)]


def test_no_copy_is_further_than_one_token_from_its_share_on_a_rank(draw_problem: DrawProblem) -> None:
    placement, block = draw_problem(0, tokens=2000, redundant=20)
    copies = Copies(placement)
    fixed = fixed_point(random_fractions(0, 3, copies), copies)
    counts = torch.from_numpy(block.to_rank_counts(4, 16).counts)
    experts = placement.physical_to_logical[:, None].expand(3, -1, 4, -1)
    exact = counts.gather(-1, experts.clamp(min=0)) * fixed[:, :, None] / ONE  # fixed is 0 for an empty slot
    assert float((systematic_quotas(counts, fixed, copies) - exact).abs().max()) < 1


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_ranks_with_the_same_number_of_tokens_together_hit_the_shares(number: int) -> None:
    # 16 ranks, one expert with copies of 3/8, 1/2 and 1/8: staggered points are spread evenly over the whole.
    slots = torch.tensor([[0, 0, 0] + [1] * 13])
    placement = Placement(slots, 2, 16)
    copies = Copies(placement)
    fractions = torch.tensor([0.375, 0.5, 0.125] + [1 / 13] * 13, dtype=torch.float64)[None, None]
    counts = torch.zeros(1, 1, 16, 2, dtype=torch.int64)
    counts[..., 0] = number
    quotas = systematic_quotas(counts, fixed_point(fractions, copies), copies).sum(2)[0, 0, :3]
    assert float((quotas - 16 * number * fractions[0, 0, :3]).abs().max()) <= 1


@pytest.mark.parametrize("sampled", [False, True])
def test_one_rank_alone_gives_its_tokens_the_same_copies(draw_problem: DrawProblem, sampled: bool) -> None:
    placement, block = draw_problem(3, tokens=200, redundant=16, blanks=True)
    copies = Copies(placement)
    fixed = fixed_point(random_fractions(3, 3, copies), copies)
    batch = batch_of(block, 2)

    def ids(part: Batch, fractions: torch.Tensor) -> torch.Tensor:
        return sampled_ids(part, fractions, copies, 11) if sampled else systematic_ids(part, fractions, copies)

    together = ids(batch, fixed)
    for rank in range(4):
        own = batch.source_rank == rank
        token_step, source = batch.token_step[own], batch.source_rank[own]
        alone = Batch(
            batch.steps, batch.layers, token_step, source, batch.expert_ids[own], local_index(token_step, source)
        )
        assert torch.equal(ids(alone, fixed), together[own])
        for step in range(3):
            own_step = own & (batch.token_step == step)
            place = torch.zeros(int(own_step.sum()), dtype=torch.int64)
            one = Batch(
                batch.steps[step : step + 1],
                batch.layers,
                place,
                batch.source_rank[own_step],
                batch.expert_ids[own_step],
                torch.arange(len(place)),
            )
            assert torch.equal(ids(one, fixed[step : step + 1]), together[own_step])


def test_other_seeds_steps_and_layers_draw_otherwise_and_frequencies_are_the_fractions() -> None:
    slots = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 1]])
    copies = Copies(Placement(slots, 2, 2))
    fractions = torch.tensor([0.6, 0.3, 0.1, 1.0], dtype=torch.float64).expand(2, 2, 4)
    fixed = fixed_point(fractions, copies)
    tokens = 20_000
    token_step = torch.arange(2).repeat_interleave(tokens)
    source = torch.zeros_like(token_step)
    expert_ids = torch.zeros(2 * tokens, 2, 1, dtype=torch.int64)
    batch = Batch(
        torch.tensor([4, 9]), torch.tensor([3, 5]), token_step, source, expert_ids, local_index(token_step, source)
    )
    ids = sampled_ids(batch, fixed, copies, 1)[:, :, 0]
    for column in (ids[:tokens, 0], ids[tokens:, 0], ids[:tokens, 1]):
        share = torch.bincount(column, minlength=3).double() / tokens
        assert float((share - fractions[0, 0, :3]).abs().max()) < 0.015
    swapped = dataclasses.replace(batch, layers=torch.tensor([5, 3]))
    assert torch.equal(sampled_ids(swapped, fixed, copies, 1)[:, :, 0], ids.flip(1))
    # Independent draws agree with probability 0.36 + 0.09 + 0.01.
    others = (ids[tokens:, 0], ids[:tokens, 1], sampled_ids(batch, fixed, copies, 2)[:tokens, 0, 0])
    for other in others:
        assert abs(float((ids[:tokens, 0] == other).double().mean()) - 0.46) < 0.02


def largest_remainder(rank_counts: torch.Tensor, fractions: torch.Tensor, copies: Copies) -> torch.Tensor:
    """[S, L, R, P]: each rank for itself, the remaining tokens to the largest remainders."""
    experts = copies.placement.physical_to_logical[:, None].expand(*rank_counts.shape[:-1], -1)
    exact = rank_counts.gather(-1, experts) * fractions[:, :, None]
    whole = (exact + 1e-9).floor()
    rest = torch.zeros(rank_counts.shape, dtype=torch.float64).scatter_add_(-1, experts, exact - whole)
    # In the order of experts and, within one, of falling remainders: the first `rest` of each get one more.
    order = (4.0 * experts - (exact - whole)).argsort(dim=-1, stable=True)
    ordered = experts.gather(-1, order)
    first = copies.first[:, None].expand(rank_counts.shape).gather(-1, ordered)
    more = (torch.arange(order.shape[-1]) - first < rest.round().gather(-1, ordered)).double()
    return whole.scatter_add(-1, order, more).to(torch.int64)


def sampled_quotas(rank_counts: torch.Tensor, fractions: torch.Tensor, copies: Copies) -> torch.Tensor:
    rng = np.random.default_rng(0)
    served = np.zeros((*rank_counts.shape[:-1], copies.placement.num_physical), dtype=np.int64)
    for layer in range(rank_counts.shape[1]):
        for expert in range(rank_counts.shape[3]):
            slots = slots_of(copies.placement, layer, expert)
            share = fractions[:, layer, slots].numpy()
            for step in range(rank_counts.shape[0]):
                drawn = rng.multinomial(rank_counts[step, layer, :, expert].numpy(), share[step] / share[step].sum())
                served[step, layer][:, slots] = drawn
    return torch.from_numpy(served)


def test_staggered_systematic_rounding_stays_nearer_the_optimum_than_the_alternatives() -> None:
    # 256 experts of DeepSeek-V3's skew, top-8, 16 ranks, 32 redundant, 128 tokens a step that drifted since planning.
    rng = np.random.default_rng(0)
    popular = rng.gamma(0.7, size=(6, 256)) + 1e-3

    def tokens(steps: int, count: int, drift: float) -> np.ndarray[Any, Any]:
        keys = np.log(popular) + drift * np.random.default_rng(1).normal(size=popular.shape)
        keys = keys + rng.gumbel(size=(steps * count, *popular.shape))
        return np.argpartition(-keys, 8, axis=2)[:, :, :8]

    history = TokenBlock(np.arange(1), np.zeros(4096, int), np.zeros(4096, int), tokens(1, 4096, 0.0))
    counts = torch.from_numpy(history.to_counts(256).counts)
    copies = Copies(placement_policy("eplb").plan(counts, Cluster(16, 2, 32)))
    steps = 25
    block = TokenBlock(
        np.arange(steps), np.repeat(np.arange(steps), 128), np.tile(np.arange(128) // 8, steps), tokens(steps, 128, 0.5)
    )
    rank_counts = torch.from_numpy(block.to_rank_counts(16, 256).counts)
    fractions = Lplb().fractions(rank_counts.sum(2), copies)
    optimum = copies.per_rank(fractions * copies.per_slot(rank_counts.sum(2))).amax(-1)

    def excess(served: torch.Tensor) -> float:
        return float((copies.per_rank(served.sum(2)).amax(-1) / optimum).mean() - 1)

    systematic = excess(systematic_quotas(rank_counts, fixed_point(fractions, copies), copies))
    largest = excess(largest_remainder(rank_counts, fractions, copies))
    sampled = excess(sampled_quotas(rank_counts, fractions, copies))
    even = Even().fractions(rank_counts.sum(2), copies)
    print(f"over the optimum: systematic {systematic:.2%}, largest remainder {largest:.2%}, sampled {sampled:.2%}")
    assert systematic < 0.025
    assert largest > 1.7 * systematic
    assert sampled > 1.7 * systematic
    assert excess(systematic_quotas(rank_counts, fixed_point(even, copies), copies)) > 0.1
