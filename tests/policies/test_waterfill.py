"""Waterfill against a token-by-token reading of its description."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Placement
from epsim.policies.apply import BoundStack
from epsim.policies.base import Batch, SharedDispatch, SharedWork, local_index
from epsim.policies.hashing import draw, slot_key, token_key
from epsim.policies.rounding import fixed_point
from epsim.policies.shared import Local
from epsim.policies.waterfill import Waterfill
from epsim.traces.trace import CountsBlock, RankCountsBlock, TokenBlock

DrawProblem = Callable[..., tuple[Placement, TokenBlock]]
Bound = Callable[..., BoundStack]


def plain_waterfill(
    policy: Waterfill, block: TokenBlock, ids: np.ndarray[Any, Any], placement: Placement, cost: Fraction, seed: int
) -> np.ndarray[Any, Any]:
    """Physical ids [T, L, k] -> the rank of each token's shared expert [T, L], -1 where the layer has no such token."""
    num_tokens, num_layers, top_k = ids.shape
    num_ranks, slots_per_rank = placement.num_ranks, placement.slots_per_rank
    result = np.full((num_tokens, num_layers), -1)
    for step, layer in itertools.product(range(len(block.steps)), range(num_layers)):
        members = [t for t in range(num_tokens) if block.token_step[t] == step]
        ranks_of = {t: [int(p) // slots_per_rank for p in ids[t, layer] if p >= 0] for t in members}
        present = [t for t in members if ranks_of[t]]
        tokens = [sum(block.source_rank[t] == r for t in present) for r in range(num_ranks)]
        for source in range(num_ranks):
            seen = [t for t in present if policy.counts == "global" or block.source_rank[t] == source]
            load = [sum(ranks_of[t].count(r) for t in seen) for r in range(num_ranks)]
            if policy.load == "routed+local":
                for r in range(num_ranks):
                    if policy.counts == "global" or r == source:
                        load[r] += math.ceil(tokens[r] * cost)
            line = math.ceil((sum(load) + len(seen) * cost) / num_ranks)
            slack = [max(line - load[r], 0) for r in range(num_ranks)]
            own = [t for t in members if block.source_rank[t] == source]
            for local, token in enumerate(own):
                if token not in present:
                    continue
                result[token, layer] = source
                if tokens[source] < 64:
                    continue
                near = {source, *ranks_of[token]} if policy.candidates == "visited" else set(range(num_ranks))
                weight = [slack[r] * (11 if r == source else 10) if r in near else 0 for r in range(num_ranks)]
                if sum(weight) == 0:
                    lightest = min(near, key=lambda r: (load[r], r))
                    if load[source] > Fraction(11, 10) * load[lightest]:
                        result[token, layer] = lightest
                    continue
                key = token_key(seed, *(torch.tensor([int(x)]) for x in (block.steps[step], source, local)))
                number = int(draw(key, slot_key(torch.tensor(3 + 2 * layer), torch.tensor(top_k)), 63))
                point, r = number % sum(weight), 0
                while point >= weight[r]:
                    point -= weight[r]
                    r += 1
                result[token, layer] = r
    return result


def work_of(bound_stack: BoundStack, block: TokenBlock, cost: float) -> tuple[SharedWork, torch.Tensor]:
    placement, copies = bound_stack.copies.placement, bound_stack.copies
    token_step, source = torch.from_numpy(block.token_step), torch.from_numpy(block.source_rank)
    layers = torch.tensor(bound_stack.setting.layers)
    ids = torch.from_numpy(block.expert_ids)
    batch = Batch(torch.from_numpy(block.steps), layers, token_step, source, ids, local_index(token_step, source))
    counts = torch.from_numpy(block.to_rank_counts(placement.num_ranks, placement.num_experts).counts)
    fixed = fixed_point(bound_stack.split.fractions(counts.sum(2), copies), copies)
    physical = bound_stack.split.physical_ids(batch, counts, fixed, copies, bound_stack.setting.seed)
    ranks = torch.where(physical >= 0, physical // placement.slots_per_rank, -1)
    named = TokenBlock(block.steps, block.token_step, block.source_rank, ranks.numpy())
    by_source = torch.from_numpy(named.to_rank_counts(placement.num_ranks, placement.num_ranks).counts)
    present = TokenBlock(
        block.steps, block.token_step, block.source_rank, (ids.amax(2, keepdim=True) >= 0).numpy().astype(int) - 1
    )
    tokens = torch.from_numpy(present.to_rank_counts(placement.num_ranks, 1).counts[..., 0])
    work = SharedWork(
        cost,
        bound_stack.setting.seed,
        ids.shape[2],
        ids.shape[2],
        batch.steps,
        layers,
        by_source.sum(2),
        by_source,
        tokens,
        placement.node_of_rank,
        batch,
        ranks,
    )
    return work, physical


POLICIES: list[Waterfill] = [
    Waterfill(candidates, load, counts)  # type: ignore[arg-type]
    for candidates, load, counts in itertools.product(
        ("visited", "all"), ("routed", "routed+local"), ("global", "local")
    )
]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from(POLICIES),
    st.sampled_from([1.0, 0.25, 2.5]),
    st.sampled_from(["even", "random", "static"]),
    st.integers(1, 5),
    st.sampled_from([40, 150, 300]),
    st.booleans(),
)
def test_every_token_goes_where_the_description_says(
    draw_problem: DrawProblem,
    bound: Bound,
    seed: int,
    policy: Waterfill,
    cost: float,
    split: str,
    ranks: int,
    tokens: int,
    blanks: bool,
) -> None:
    placement, block = draw_problem(
        seed, steps=2, experts=8, ranks=ranks, nodes=1, redundant=4, tokens=tokens, blanks=blanks
    )
    on_placement = bound(split, placement, shared_cost=cost, seed=seed)
    work, physical = work_of(on_placement, block, cost)
    expected = plain_waterfill(policy, block, physical.numpy(), placement, Fraction(cost), seed)
    assert np.array_equal(policy.token_ranks(work).numpy(), expected)


def text_of(policy: Waterfill) -> str:
    return f"waterfill(candidates={policy.candidates},load={policy.load},counts={policy.counts})"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_load_counts_those_tokens(draw_problem: DrawProblem, bound: Bound, policy: Waterfill) -> None:
    placement, block = draw_problem(5, steps=2, experts=8, ranks=3, nodes=3, redundant=4, tokens=300, blanks=True)
    on_placement = bound(f"even+{text_of(policy)}", placement, shared_cost=0.5)
    ranks = policy.token_ranks(work_of(on_placement, block, 0.5)[0])
    load = on_placement.load(block)
    for step, layer, rank in np.ndindex(2, 2, 3):
        there = ranks[block.token_step == step, layer] == rank
        assert int(load.shared_tokens[step, layer, rank]) == int(there.sum())
        assert float(load.shared[step, layer, rank]) == 0.5 * int(there.sum())
    assert load.shared_remote_rank is not None
    away = (ranks != torch.from_numpy(block.source_rank)[:, None]) & (ranks >= 0)
    assert int(load.shared_remote_rank.sum()) == int(away.sum()) > 0


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.candidates == "all"])
def test_all_candidates_need_no_tokens(draw_problem: DrawProblem, bound: Bound, policy: Waterfill) -> None:
    placement, block = draw_problem(6, tokens=400)
    on_placement = bound(f"lplb+{text_of(policy)}", placement)
    coarse = on_placement.load(block.to_rank_counts(4, 16))
    fine = on_placement.load(block)
    assert torch.equal(coarse.shared_tokens, fine.shared_tokens)
    assert int(fine.shared_tokens.sum()) == 1200 * 2


def test_one_rank_alone_sends_its_tokens_to_the_same_ranks(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, block = draw_problem(7, tokens=400)
    work, _ = work_of(bound("lplb", placement), block, 1.0)
    batch = work.batch
    assert batch is not None
    assert work.expert_ranks is not None
    policies: list[SharedDispatch] = [*POLICIES, Local()]
    for policy in policies:
        together = policy.token_ranks(work)
        for rank in range(4):
            own = batch.source_rank == rank
            token_step, source = batch.token_step[own], batch.source_rank[own]
            local = local_index(token_step, source)
            alone = Batch(batch.steps, batch.layers, token_step, source, batch.expert_ids[own], local)
            by_source = torch.zeros_like(work.routed_by_source)
            by_source[:, :, rank] = work.routed_by_source[:, :, rank]
            own_work = dataclasses.replace(
                work, routed_by_source=by_source, batch=alone, expert_ranks=work.expert_ranks[own]
            )
            assert torch.equal(policy.token_ranks(own_work), together[own])


def alone_work(routed: list[int], tokens: list[int], batch: Batch | None, ranks: torch.Tensor | None) -> SharedWork:
    """One step and layer; loads by source rank play no part."""
    zero, load = torch.zeros(1, dtype=torch.int64), torch.tensor(routed)[None, None]
    by_source = torch.zeros(1, 1, len(routed), len(routed), dtype=torch.int64)
    node, waiting = torch.zeros(len(routed), dtype=torch.int64), torch.tensor(tokens)[None, None]
    return SharedWork(1.0, 0, 2, 2, zero, zero, load, by_source, waiting, node, batch, ranks)


def test_water_fills_the_valley_up_to_the_line() -> None:
    routed = [900, 300, 100, 100]
    served = Waterfill(candidates="all").served(alone_work(routed, [200] * 4, None, None)).sum(2)[0, 0]
    assert int(served.sum()) == 800
    assert int(served[0]) == 0
    # The line is (1400 + 800) / 4 = 550; slack 0, 250, 450, 450 shares the 800 tokens.
    assert float((served.double() - torch.tensor([0, 174, 313, 313])).abs().max()) < 50


def test_few_tokens_stay() -> None:
    policy = Waterfill(candidates="all")
    assert policy.served(alone_work([500, 10], [63, 0], None, None))[0, 0].tolist() == [[63, 0], [0, 0]]
    assert policy.served(alone_work([500, 10], [64, 0], None, None))[0, 0].tolist() == [[0, 64], [0, 0]]


@pytest.mark.parametrize(("own_load", "goes_to"), [(880, 0), (881, 1), (700, 0)])
def test_without_slack_only_a_clearly_lighter_rank_takes_tokens(own_load: int, goes_to: int) -> None:
    # Ranks 0, 1 and 2 are above the line; tokens of rank 0 visit ranks 1 (load 800) and 2 (load 850).
    number = 70
    zero = torch.zeros(number, dtype=torch.int64)
    batch = Batch(zero[:1], zero[:1], zero, zero, torch.ones(number, 1, 2, dtype=torch.int64), torch.arange(number))
    visited = torch.tensor([2, 1]).expand(number, 1, 2)
    work = alone_work([own_load, 800, 850, 0, 0, 0], [number, 0, 0, 0, 0, 0], batch, visited)
    assert Waterfill().token_ranks(work)[:, 0].tolist() == [goes_to] * number


def test_too_coarse_and_too_many(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, block = draw_problem(8)
    with pytest.raises(ValueError, match="epsim traces synthesize"):
        bound("waterfill", placement).load(block.to_rank_counts(4, 16))
    counts = np.full((1, 2, 4, 16), 10**9)
    with pytest.raises(ValueError, match="too many to draw one by one"):
        bound("waterfill(candidates=all)", placement).load(RankCountsBlock(np.arange(1), counts))
    with pytest.raises(ValueError, match=r"waterfill\(candidates=all\) in"):
        bound("waterfill(candidates=all)", placement).load(CountsBlock(np.arange(1), counts.sum(2)))


def test_a_shared_expert_that_costs_nothing_changes_nothing(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, block = draw_problem(9)
    on_placement = bound("waterfill", placement, shared_cost=0.0)
    assert "waterfill changes nothing" in on_placement.notes[0]
    for part in (block, block.to_rank_counts(4, 16), block.to_counts(16)):
        load = on_placement.load(part)
        assert not bool(load.shared.any())
        assert torch.equal(load.total, load.routed.double())
    assert ["fewer than 64 tokens" in note for note in bound("waterfill", placement).notes] == [True]
    assert bound("local", placement).notes == ()


@pytest.mark.parametrize("policy", [*POLICIES, Local()])
def test_served_counts_the_tokens_of_each_rank(draw_problem: DrawProblem, bound: Bound, policy: SharedDispatch) -> None:
    placement, block = draw_problem(11, tokens=300, blanks=True)
    work, _ = work_of(bound("even", placement), block, 1.0)
    ranks, served = policy.token_ranks(work), policy.served(work)
    assert work.batch is not None
    assert torch.equal(ranks >= 0, (torch.from_numpy(block.expert_ids) >= 0).any(-1))
    for step, layer, source, rank in itertools.product(range(3), range(2), range(4), range(4)):
        own = (work.batch.token_step == step) & (work.batch.source_rank == source)
        assert int(served[step, layer, source, rank]) == int((ranks[own, layer] == rank).sum())
