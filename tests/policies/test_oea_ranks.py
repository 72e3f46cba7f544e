"""Which rank serves which active expert, oea-ep, and the split that wakes one copy an expert."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epsim.policies.copies import Copies
from epsim.policies.one_copy import OneCopy, held_by_rank
from epsim.policies.rounding import ONE, fixed_point
from epsim.policies.routing import matching
from epsim.policies.routing.matching import active_ranks
from epsim.policies.routing.oea import Oea
from epsim.policies.routing.ranks import OeaEp
from tests.policies.conftest import random_placement
from tests.policies.test_oea import active, draw_scores, experts_of, work_of


def draw_copies(rng: np.random.Generator, experts: int, ranks: int, most: int) -> np.ndarray[Any, Any]:
    """[E, R] bool: each expert on 1 to `most` ranks."""
    holds = np.zeros((experts, ranks), dtype=bool)
    for expert in range(experts):
        holds[expert, rng.choice(ranks, rng.integers(1, most + 1), replace=False)] = True
    return holds


def fits(experts: list[int], holds: np.ndarray[Any, Any], most: int) -> bool:
    """Whether the experts find ranks with at most `most` each: Hall's condition over all sets of ranks."""
    num_ranks = holds.shape[1]
    for size in range(num_ranks + 1):
        for ranks in itertools.combinations(range(num_ranks), size):
            outside = [rank for rank in range(num_ranks) if rank not in ranks]
            bound_there = sum(not holds[expert, outside].any() for expert in experts)
            if bound_there > size * most:
                return False
    return True


@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 4), copies=st.integers(1, 3))
def test_busiest_rank_is_least_and_what_is_added_is_worth_most(seed: int, ranks: int, copies: int) -> None:
    rng = np.random.default_rng(seed)
    experts = 7
    holds = draw_copies(rng, experts, ranks, min(copies, ranks))
    must = rng.random(experts) < 0.4
    want = np.where(must, 0, rng.integers(0, 4, experts))
    found = active_ranks(torch.from_numpy(must), torch.from_numpy(want), torch.from_numpy(holds)).numpy()
    chosen = np.flatnonzero(found >= 0)
    assert must[chosen].sum() == must.sum()
    assert holds[chosen, found[chosen]].all()
    base = np.flatnonzero(must).tolist()
    most = next(m for m in range(experts + 1) if fits(base, holds, m))
    assert np.bincount(found[chosen], minlength=ranks).max() == most
    others = [e for e in range(experts) if not must[e] and want[e] > 0]
    best = 0
    for size in range(len(others) + 1):
        for extra in itertools.combinations(others, size):
            if fits([*base, *extra], holds, most):
                best = max(best, int(want[list(extra)].sum()))
    assert want[chosen].sum() == best
    assert all(must[e] or want[e] > 0 for e in chosen)


@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 5))
def test_single_copies_by_tensors_are_the_matching(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    holds = np.stack([draw_copies(rng, 20, ranks, 1) for _ in range(3)])
    must, want = rng.random((3, 20)) < 0.3, rng.integers(0, 3, (3, 20))
    want[must] = 0
    by_tensors = active_ranks(torch.from_numpy(must), torch.from_numpy(want), torch.from_numpy(holds)).numpy()
    by_paths = np.empty((3, 20), dtype=np.int64)
    matching._match_all(must, want, holds, by_paths)
    np.testing.assert_array_equal(by_tensors, by_paths)


@given(seed=st.integers(0, 10**6), copies=st.integers(1, 2), k0=st.integers(1, 3))
def test_oea_ep_fills_ranks_up_to_the_busiest(seed: int, copies: int, k0: int) -> None:
    rng = np.random.default_rng(seed)
    holds = draw_copies(rng, 16, 4, copies)
    scores = draw_scores(seed, 9, 16)
    work = work_of(scores, 4, holds=torch.from_numpy(holds))
    plain, filled = active(Oea(str(k0)).route(work)), OeaEp(str(k0)).route(work)
    read = active(filled)
    most = next(m for m in range(17) if fits(sorted(plain), holds, m))
    assert plain <= read
    assert fits(sorted(read), holds, most)
    chosen = set(work.expert_ids.flatten().tolist())
    assert read <= chosen
    for expert in chosen - read:
        assert not fits(sorted(read | {expert}), holds, most), "a rank had room for an expert that a token wants"
    for row, ids in zip(scores, experts_of(filled), strict=True):
        assert ids == sorted(sorted(read, key=lambda e: (-np.float32(row[e]), e))[:4])


def test_want_is_what_experts_weigh_and_prefill_keeps_its_choice() -> None:
    scores = torch.full((4, 8), 0.001)
    # Bases 0, 1 (rank 0) and 7 (rank 1): rank 1 adds one of 5 (wanted once, much) and 6 (twice, less in all).
    for row, (first, second, share) in enumerate([(0, 5, 0.4), (1, 6, 0.1), (7, 6, 0.1), (0, 1, 0.3)]):
        scores[row, first], scores[row, second] = 0.5, share
    holds = torch.eye(2, dtype=torch.bool).repeat_interleave(4, 0)
    work = work_of(scores, 2, holds=holds)
    assert active(OeaEp("1").route(work)) == {0, 1, 5, 7}
    # As prefill, the last token reads 0 and 1 anyway, and the one that wants 5 no longer counts.
    prefill = dataclasses.replace(work, decode=torch.tensor([False, True, True, True]))
    routed = OeaEp("1").route(prefill)
    assert routed.expert_ids[0].tolist() == [0, 5]
    assert active(routed) == {0, 1, 5, 7}, "5 is read for prefill: rank 1 is as full as rank 0"


@pytest.mark.parametrize("seed", range(4))
def test_one_copy_wakes_one_copy_each_and_the_fewest_of_a_rank(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, 2, 10, 6, 4, 2)
    copies = Copies(placement)
    counts = torch.from_numpy(rng.integers(0, 4, (3, 2, 10)) * (rng.random((3, 2, 10)) < 0.6))
    fractions = OneCopy().fractions(counts, copies)
    assert set(fractions.flatten().tolist()) == {0.0, 1.0}
    per_slot = fractions * copies.per_slot(counts)
    holds = held_by_rank(copies).numpy()
    for step, layer in itertools.product(range(3), range(2)):
        slots = placement.physical_to_logical[layer] + 1  # 0: empty
        per_expert = torch.zeros(11, dtype=torch.float64).index_add_(0, slots, fractions[step, layer])
        assert per_expert.tolist() == [0, *[1] * 10]
        needed = counts[step, layer].nonzero().flatten().tolist()
        most = next(m for m in range(11) if fits(needed, holds[layer], m))
        by_rank = (per_slot[step, layer] > 0).reshape(4, -1).sum(1)
        assert int(by_rank.max()) == most
    assert set(fixed_point(fractions, copies).flatten().tolist()) == {0, ONE}
