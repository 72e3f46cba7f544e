"""Whole stacks on blocks of all levels: nothing is lost, levels agree, and what does not fit is told."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Placement, node_of_rank
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.base import Batch, local_index
from epsim.policies.grammar import policy_text
from epsim.policies.load import Load
from epsim.policies.rounding import fixed_point
from epsim.policies.stack import parse_stack
from epsim.traces.trace import Block, CountsBlock, RankCountsBlock, TokenBlock
from tests.policies.registered import every, stack_of

DrawProblem = Callable[..., tuple[Placement, TokenBlock]]
Bound = Callable[..., BoundStack]

SPLITS = tuple(policy_text(split) for split in every("split"))
PAIRS = tuple(
    f"{policy_text(split)}+{policy_text(shared)}"
    for split, shared in itertools.product(every("split"), every("shared"))
    if stack_of(split=split, shared=shared) is not None
)


def check_conserved(load: Load, counts: torch.Tensor, top_k: int, tokens: torch.Tensor, cost: float) -> None:
    """counts [S, L, E], tokens [S, L]: what there was."""
    assert torch.equal(load.assignments, counts.sum(-1))
    if load.rounded:
        assert load.routed.dtype == load.shared_tokens.dtype == torch.int64
        assert torch.equal(load.routed.sum(-1), load.assignments)
    else:
        assert torch.allclose(load.routed.sum(-1), load.assignments.double(), rtol=1e-12, atol=1e-9)
    assert torch.allclose(load.routed_real.sum(-1), load.assignments.double(), rtol=1e-9, atol=1e-9)
    assert torch.allclose(load.tokens, tokens.double())
    assert torch.allclose(load.shared_tokens.sum(-1).double(), tokens.double() * (cost > 0))
    assert torch.allclose(load.shared, load.shared_tokens.double() * cost)
    assert torch.allclose(load.total, load.routed + load.shared)
    assert float(load.routed.min() if load.routed.numel() else 0) >= 0
    # A rank works if and only if one of its experts does, and no expert is lost or invented.
    assert torch.equal(load.active > 0, load.routed > 1e-6 * load.assignments[..., None])
    assert bool((load.active.sum(-1) >= (counts > 0).sum(-1)).all())


@settings(deadline=None, max_examples=120)
@given(
    st.integers(0, 10**6),
    st.sampled_from(PAIRS),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 10)),
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(0, 150)),
    st.tuples(st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()),
)
def test_every_policy_conserves_tokens(
    draw_problem: DrawProblem,
    bound: Bound,
    seed: int,
    text: str,
    cluster: tuple[int, int, int],
    size: tuple[int, int, int],
    model: tuple[int, float, bool],
) -> None:
    (ranks, nodes, redundant), (steps, experts, tokens), (top_k, cost, blanks) = cluster, size, model
    nodes, top_k = min(nodes, ranks), min(top_k, experts)
    placement, block = draw_problem(
        seed, steps=steps, experts=experts, top_k=top_k, ranks=ranks, nodes=nodes, redundant=redundant,
        tokens=tokens, blanks=blanks,
    )  # fmt: skip
    on_placement = bound(text, placement, top_k, cost, seed)
    rank_counts = block.to_rank_counts(ranks, experts)
    counts = torch.from_numpy(rank_counts.counts.sum(2))
    present = torch.from_numpy((block.expert_ids.astype(np.int64) >= 0).any(2)).double()
    of_step = torch.from_numpy(block.token_step) == torch.arange(steps)[:, None]
    tokens_there = of_step.double() @ present
    load = on_placement.load(block)
    check_conserved(load, counts, top_k, tokens_there, cost)
    assert load.rounded
    for part in (rank_counts, rank_counts.to_counts()):
        level = "counts" if isinstance(part, CountsBlock) else "rank_counts"
        needed = on_placement.stack.required_level(on_placement.copies.redundant, cost > 0)
        if (needed == "tokens") or (needed == "rank_counts" and level == "counts"):
            with pytest.raises(ValueError, match="epsim traces synthesize"):
                on_placement.load(part)
        elif not (blanks and cost and level == "rank_counts"):
            coarse = on_placement.load(part)
            check_conserved(coarse, counts, top_k, counts.sum(-1).double() / top_k, cost)
            assert coarse.rounded == (level == "rank_counts")


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["even", "lplb", "lplb(counts=gathered)", "static"]),
    st.sampled_from(["local", "waterfill(candidates=all)", "waterfill(candidates=all,load=routed+local,counts=local)"]),
    st.integers(1, 5),
    st.integers(0, 12),
)
def test_tokens_and_counts_by_rank_give_the_same_load(
    draw_problem: DrawProblem, bound: Bound, seed: int, split: str, shared: str, ranks: int, redundant: int
) -> None:
    placement, block = draw_problem(seed, ranks=ranks, nodes=1, redundant=redundant, tokens=300)
    on_placement = bound(f"{split}+{shared}", placement)
    fine = on_placement.load(block)
    coarse = on_placement.load(block.to_rank_counts(ranks, 16))
    for field in dataclasses.fields(Load):
        a, b = getattr(fine, field.name), getattr(coarse, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    if split in ("even", "lplb") and shared == "local":
        real = on_placement.load(block.to_counts(16))
        assert torch.allclose(real.routed, fine.routed_real, rtol=1e-9, atol=1e-9)
        # One token per source rank and copy, at most, is moved by rounding.
        copies_per_rank = placement.slots_per_rank
        assert float((fine.routed - real.routed).abs().max()) <= ranks * copies_per_rank


@pytest.mark.parametrize("split", SPLITS)
def test_loads_are_those_of_the_physical_experts(draw_problem: DrawProblem, bound: Bound, split: str) -> None:
    placement, block = draw_problem(2, ranks=4, nodes=2, redundant=12, tokens=200, blanks=True)
    on_placement = bound(split, placement)
    copies = on_placement.copies
    by_rank = torch.from_numpy(block.to_rank_counts(4, 16).counts)
    fixed = fixed_point(on_placement.split.fractions(by_rank.sum(2), copies), copies)
    token_step, source = torch.from_numpy(block.token_step), torch.from_numpy(block.source_rank)
    layers = torch.tensor(on_placement.setting.layers)
    logical = torch.from_numpy(block.expert_ids)
    batch = Batch(torch.from_numpy(block.steps), layers, token_step, source, logical, local_index(token_step, source))
    ids = on_placement.split.physical_ids(batch, by_rank, fixed, copies, 7)
    load = on_placement.load(block)
    node = node_of_rank(4, 2).tolist()
    routed, away_rank, away_node = torch.zeros(3, 2, 4), torch.zeros(3, 2), torch.zeros(3, 2)
    hit: set[tuple[int, int, int]] = set()
    for token, layer, place in np.ndindex(*ids.shape):
        slot, step, home = int(ids[token, layer, place]), int(token_step[token]), int(source[token])
        if logical[token, layer, place] < 0:
            assert slot == -1
            continue
        assert placement.physical_to_logical[layer, slot] == logical[token, layer, place]
        rank = slot // placement.slots_per_rank
        routed[step, layer, rank] += 1
        away_rank[step, layer] += rank != home
        away_node[step, layer] += node[rank] != node[home]
        hit.add((step, layer, slot))
    assert torch.equal(load.routed, routed.long())
    assert load.remote_rank is not None
    assert load.remote_node is not None
    assert torch.equal(load.remote_rank, away_rank.long())
    assert torch.equal(load.remote_node, away_node.long())
    for step, layer, rank in np.ndindex(3, 2, 4):
        here = [slot for s, i, slot in hit if (s, i) == (step, layer) and slot // placement.slots_per_rank == rank]
        assert int(load.active[step, layer, rank]) == len(here)


@pytest.mark.parametrize("text", ["lplb", "lplb-sampled+waterfill", "static+waterfill(candidates=all)"])
def test_steps_taken_in_parts_or_in_other_blocks_give_the_same(
    draw_problem: DrawProblem, bound: Bound, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, block = draw_problem(4, steps=6, tokens=150)
    on_placement = bound(text, placement)
    whole = on_placement.load(block)
    monkeypatch.setattr("epsim.policies.apply.CELLS", 1)
    parts = on_placement.load(block)
    late = block.token_step >= 4
    tail = TokenBlock(block.steps[4:], block.token_step[late] - 4, block.source_rank[late], block.expert_ids[late])
    last = on_placement.load(tail)
    for name in ("routed", "routed_real", "shared_tokens", "active", "remote_rank", "shared_remote_node", "tokens"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
        assert torch.equal(getattr(whole, name)[4:], getattr(last, name))


@pytest.mark.parametrize("split", SPLITS)
def test_one_rank_serves_everything(draw_problem: DrawProblem, bound: Bound, split: str) -> None:
    placement, block = draw_problem(5, ranks=1, nodes=1, redundant=4)
    load = bound(f"{split}+waterfill", placement).load(block)
    assert torch.equal(load.routed[..., 0], load.assignments)
    assert torch.equal(load.shared[..., 0], load.tokens)
    assert not bool(load.remote_rank.any())  # type: ignore[union-attr]


@pytest.mark.parametrize("split", SPLITS)
def test_one_expert_with_a_copy_on_every_rank(bound: Bound, split: str) -> None:
    placement = Placement(torch.zeros(1, 4, dtype=torch.int64), 1, 4, 2)
    source = np.repeat(np.arange(4), 50)
    block = TokenBlock(np.arange(1), np.zeros(200, int), source, np.zeros((200, 1, 1), int))
    load = bound(split, placement, top_k=1).load(block)
    assert int(load.routed.sum()) == 200
    if split in ("even", "static", "lplb"):
        assert load.routed.tolist() == [[[50, 50, 50, 50]]]
        assert load.active.tolist() == [[[1, 1, 1, 1]]]
    if split == "static":
        assert load.remote_rank.tolist() == [[0]]  # type: ignore[union-attr]


@pytest.mark.parametrize("split", SPLITS)
def test_without_redundancy_all_splits_are_one_and_need_counts_only(
    draw_problem: DrawProblem, bound: Bound, split: str
) -> None:
    placement, block = draw_problem(6, redundant=0)
    counts = block.to_counts(16)
    load = bound(split, placement).load(counts)
    layer = torch.arange(2)[:, None]
    expected = torch.from_numpy(counts.counts)[:, layer, placement.physical_to_logical].reshape(3, 2, 4, 4).sum(-1)
    assert torch.equal(load.routed, expected.double())
    assert torch.equal(bound(split, placement).load(block).routed, expected)


@pytest.mark.parametrize("text", PAIRS)
def test_no_steps_and_no_tokens(draw_problem: DrawProblem, bound: Bound, text: str) -> None:
    placement, block = draw_problem(7, steps=2, tokens=0)
    load = bound(text, placement).load(block)
    assert load.total.tolist() == torch.zeros(2, 2, 4).tolist()
    assert not bool(load.active.any())
    none = TokenBlock(block.steps[:0], block.token_step, block.source_rank, block.expert_ids)
    assert bound(text, placement).load(none).total.shape == (0, 2, 4)
    if text == "lplb+local":
        assert bound(text, placement).load(none.to_rank_counts(4, 16)).total.shape == (0, 2, 4)
        assert bound(text, placement).load(none.to_rank_counts(4, 16).to_counts()).total.shape == (0, 2, 4)


def test_the_seed_matters_to_draws_only(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, block = draw_problem(8, redundant=12, tokens=300)

    def routed(text: str, seed: int) -> torch.Tensor:
        return bound(text, placement, seed=seed).load(block).routed

    assert torch.equal(routed("random", 1), routed("random", 1))
    assert not torch.equal(routed("random", 1), routed("random", 2))
    assert torch.equal(routed("lplb", 1), routed("lplb", 2))


def test_tokens_are_counted_as_they_are_present(bound: Bound) -> None:
    placement = Placement(torch.tensor([[0, 1, 2, 3]]), 4, 2)
    ids = np.array([[[0, 1]], [[2, -1]], [[-1, -1]], [[3, 0]]])
    block = TokenBlock(np.arange(1), np.zeros(4, int), np.array([0, 0, 0, 1]), ids)
    load = bound("even", placement).load(block)
    assert load.tokens.tolist() == [[3.0]]
    assert load.shared_tokens.tolist() == [[[2, 1]]]
    assert load.assignments.tolist() == [[5]]


def test_small_integer_ids_are_taken(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, block = draw_problem(9, redundant=12)
    small = dataclasses.replace(block, expert_ids=block.expert_ids.astype(np.int16))
    for text in ("random", "lplb+waterfill"):
        assert torch.equal(bound(text, placement).load(small).total, bound(text, placement).load(block).total)


def bad_blocks(block: TokenBlock) -> list[tuple[str, Block, str]]:
    counts, by_rank = block.to_counts(16), block.to_rank_counts(4, 16)
    negative, huge, odd = counts.counts.copy(), counts.counts.copy(), by_rank.counts.copy()
    negative[1, 0, 3] = -2
    huge[0, 0, :2] = 2**52 + 1
    odd[1, 0, 2, 5] += 1
    ids = block.expert_ids.copy()
    ids[3, 1, 0] = 16
    return [
        ("even", CountsBlock(counts.steps, negative), "a count is -2: counts are 0 or more"),
        ("even", CountsBlock(counts.steps, huge), "more than 2^53 assignments"),
        ("even", CountsBlock(counts.steps, counts.counts[:, :1]), "do not fit the placement: expected [3, 2, 16]"),
        ("even", RankCountsBlock(counts.steps, by_rank.counts[:, :, :3]), "expected [3, 2, 4, 16]"),
        ("even", RankCountsBlock(counts.steps, odd), "not a multiple of top-k 2: the shared expert needs whole tokens"),
        ("even", dataclasses.replace(block, expert_ids=ids), "an expert outside 0..15"),
        ("even", dataclasses.replace(block, source_rank=block.source_rank + 1), "source rank is outside 0..3"),
        ("even", dataclasses.replace(block, expert_ids=ids[:, :1]), "tokens of 1 layers do not fit"),
        ("static", counts, "epsim traces synthesize"),
        ("lplb-ipm", by_rank, "epsim traces synthesize"),
    ]


@pytest.mark.parametrize("case", range(10))
def test_what_does_not_fit_is_told_in_one_line(draw_problem: DrawProblem, bound: Bound, case: int) -> None:
    placement, block = draw_problem(10)
    text, bad, says = bad_blocks(block)[case]
    with pytest.raises(ValueError) as error:
        bound(text, placement).load(bad)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_fractional_tokens_are_no_matter_without_a_shared_expert(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, block = draw_problem(10)
    by_rank = block.to_rank_counts(4, 16)
    by_rank.counts[1, 0, 2, 5] += 1
    load = bound("even", placement, shared_cost=0.0).load(by_rank)
    assert float(load.tokens[1, 0]) == int(load.assignments[1, 0]) / 2


def test_layer_numbers_must_be_the_placements() -> None:
    placement = Placement(torch.tensor([[0, 1]]), 2, 2)
    with pytest.raises(ValueError, match="2 layer numbers given for a placement of 1 layers"):
        bind(parse_stack("even"), placement, Setting(0, 1.0, 1, (0, 1)))


def test_shared_work_is_counted_in_double_precision(draw_problem: DrawProblem, bound: Bound) -> None:
    placement, tokens = draw_problem(3, tokens=400)
    for block in (tokens, tokens.to_rank_counts(4, 16), tokens.to_counts(16)):
        load = bound("contiguous", placement, shared_cost=0.1).load(block)
        assert load.shared.dtype == load.total.dtype == torch.float64
        assert torch.equal(load.shared, load.shared_tokens.double() * 0.1)
