"""Decode steps composed from sequences, and streams cut into steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.traces.compose import Tokens, arrange, blocks, compose, deal, schedule
from epsim.traces.options import ImportOptions

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def make_tokens(lengths: list[int]) -> Tokens:
    """Token i has the ids (i // 100, 100 + i % 100) in its one layer, so that it can be told from all others."""
    index = np.arange(sum(lengths))
    ids = np.stack([index // 100, 100 + index % 100], axis=1)[:, None, :]
    return Tokens(ids, sequence=np.repeat(np.arange(len(lengths)), lengths))


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, batch=st.integers(1, 20), ranks=st.integers(1, 20))
def test_every_token_once_in_its_sequence_s_order(lengths: list[int], batch: int, ranks: int) -> None:
    tokens = make_tokens(lengths)
    arranged = arrange(tokens, ImportOptions(batch=batch, ranks=ranks))
    assert sorted(arranged.order.tolist()) == list(range(sum(lengths)))
    step = np.empty(len(tokens), dtype=np.int64)
    step[arranged.order] = arranged.step
    assert tokens.sequence is not None
    for sequence in range(len(lengths)):
        own = step[tokens.sequence == sequence]
        # A sequence makes one token a step, without a pause.
        assert (np.diff(own) == 1).all()
    in_step = np.bincount(arranged.step)
    assert in_step.max() <= batch
    assert in_step.min() >= 1
    assert (np.diff(arranged.step) >= 0).all()
    assert arranged.source_rank.max() < ranks
    assert (arranged.origin, arranged.phase, arranged.num_source_ranks) == ("composed", "decode", ranks)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, batch=st.integers(1, 20))
def test_places_are_never_shared_nor_left_idle(lengths: list[int], batch: int) -> None:
    start, place = schedule(np.array(lengths), batch)
    for p in range(batch):
        own = np.flatnonzero(place == p)
        ends = start[own] + np.array(lengths)[own]
        np.testing.assert_array_equal(start[own][1:], ends[:-1])
    # Sequences start in their order.
    assert (np.diff(start) >= 0).all()


def test_first_tokens_do_not_align() -> None:
    start, place = schedule(np.full(64, 300), 64)
    assert place.tolist() == list(range(64))
    assert start.tolist() == list(range(64))


def test_short_sequences_do_not_starve_the_batch() -> None:
    """64 places of sequences of 2 tokens: all places are busy from the third step on."""
    start, _ = schedule(np.full(640, 2), 64)
    in_step = np.bincount(np.concatenate([start, start + 1]))
    assert (in_step[2:-2] == 64).all()


def test_source_rank_by_place() -> None:
    arranged = compose(np.arange(8).repeat(20), ImportOptions(batch=8, ranks=4))
    middle = arranged.source_rank[arranged.step == 10]
    assert middle.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_defaults_are_noted() -> None:
    notes = " | ".join(compose(np.arange(4).repeat(3), ImportOptions()).notes)
    assert "4 sequences in" in notes
    assert "(default --batch)" in notes
    assert "(default --ranks)" in notes
    assert "the batch size is 4, not 64: the recording has only 4 sequences" in notes


def test_sequence_numbers_may_be_any_and_interleaved() -> None:
    """Requests 7 and 3 with their lines mixed: the first seen takes the first place."""
    arranged = compose(np.array([7, 3, 7, 3, 7]), ImportOptions(batch=2, ranks=2))
    assert arranged.order.tolist() == [0, 2, 1, 4, 3]
    assert arranged.step.tolist() == [0, 1, 1, 2, 2]
    assert arranged.source_rank.tolist() == [0, 0, 1, 0, 1]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, size=st.integers(1, 50))
def test_blocks_hold_the_arranged_tokens(lengths: list[int], size: int) -> None:
    tokens = make_tokens(lengths)
    arranged = arrange(tokens, ImportOptions(batch=7, ranks=3))
    made = list(blocks(tokens, arranged, block_tokens=size))
    step = np.concatenate([b.steps[b.token_step] for b in made])
    np.testing.assert_array_equal(step, arranged.step)
    ids: Any = np.concatenate([b.expert_ids for b in made])
    np.testing.assert_array_equal(ids, tokens.expert_ids[arranged.order])
    assert all(len(b.token_step) <= size or len(b.steps) == 1 for b in made)


def test_options_choose_the_way() -> None:
    several, single = make_tokens([3, 3]), make_tokens([6])
    assert arrange(several, ImportOptions()).origin == "composed"
    assert arrange(several, ImportOptions(step_tokens=4)).step.tolist() == [0, 0, 0, 0, 1, 1]
    assert arrange(single, ImportOptions()).step.tolist() == [0] * 6
    assert arrange(single, ImportOptions(batch=1)).step.tolist() == list(range(6))
    stepped = Tokens(several.expert_ids, step=np.array([5, 4, 5, 4, 5, 4]))
    arranged = arrange(stepped, ImportOptions(ranks=2))
    assert arranged.order.tolist() == [1, 3, 5, 0, 2, 4]
    assert arranged.source_rank.tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(("num_tokens", "num_ranks"), [(10, 4), (3, 8), (16, 4), (1, 1)])
def test_deal_gives_contiguous_equal_shares(num_tokens: int, num_ranks: int) -> None:
    ranks = deal(np.zeros(num_tokens, dtype=np.int64), num_ranks)
    counts = np.bincount(ranks, minlength=num_ranks)
    assert counts.max() - counts.min() <= 1
    assert (np.diff(ranks) >= 0).all()
