"""Recorded source ranks brought to the replayed ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from epsim.traces.regroup import regroup, regroup_note
from epsim.traces.trace import CountsBlock, RankCountsBlock, TokenBlock, TraceMeta


def make_meta(**fields: Any) -> TraceMeta:
    return TraceMeta(**{"level": "tokens", "num_layers": 1, "num_experts": 4, "top_k": 1, **fields})


STEP = np.array([0] * 8 + [1] * 4)
TOKENS = TokenBlock(
    np.array([5, 6]), STEP, np.array([0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3]), (np.arange(12) % 4).reshape(12, 1, 1)
)


def test_tokens() -> None:
    meta = make_meta(num_source_ranks=4)
    assert regroup(TOKENS, meta, 4) is TOKENS
    folded = regroup(TOKENS, meta, 2)
    assert isinstance(folded, TokenBlock)
    assert folded.source_rank.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert regroup_note(meta, 2) == "4 source ranks folded to 2: 2 adjacent ranks become one"
    for recorded in (0, 4):
        dealt = regroup(TOKENS, make_meta(num_source_ranks=recorded), 3)
        assert isinstance(dealt, TokenBlock)
        assert dealt.source_rank.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 0, 0, 1, 2]
        np.testing.assert_array_equal(dealt.expert_ids, TOKENS.expert_ids)
    assert "source ranks unknown: the tokens of each step are dealt to 3" in regroup_note(make_meta(), 3)
    assert "4 source ranks cannot be folded to 3: the tokens of each step are dealt" in regroup_note(meta, 3)
    assert "cannot be folded to 8" in regroup_note(meta, 8)


def test_rank_counts() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (2, 1, 4, 4))
    block = RankCountsBlock(np.array([5, 6]), counts)
    meta = make_meta(level="rank_counts", num_source_ranks=4)
    assert regroup(block, meta, 4) is block
    folded = regroup(block, meta, 2)
    assert isinstance(folded, RankCountsBlock)
    np.testing.assert_array_equal(folded.counts[:, :, 0], counts[:, :, 0] + counts[:, :, 1])
    np.testing.assert_array_equal(folded.counts[:, :, 1], counts[:, :, 2] + counts[:, :, 3])
    for ranks in (3, 8):
        plain = regroup(block, meta, ranks)
        assert isinstance(plain, CountsBlock)
        np.testing.assert_array_equal(plain.counts, counts.sum(axis=2))
        assert f"4 source ranks cannot be folded to {ranks}: source ranks dropped" in regroup_note(meta, ranks)


def test_counts_stay() -> None:
    block = CountsBlock(np.array([0]), np.ones((1, 1, 4), dtype=np.int64))
    assert regroup(block, make_meta(level="counts"), 4) is block
    assert regroup_note(make_meta(level="counts"), 4) == "source ranks unknown: counts level"


def test_folding_agrees_between_levels() -> None:
    meta = make_meta(num_source_ranks=4)
    by_rank = TOKENS.to_rank_counts(4, 4)
    folded = regroup(by_rank, make_meta(level="rank_counts", num_source_ranks=4), 2)
    tokens = regroup(TOKENS, meta, 2)
    assert isinstance(tokens, TokenBlock)
    assert isinstance(folded, RankCountsBlock)
    np.testing.assert_array_equal(tokens.to_rank_counts(2, 4).counts, folded.counts)
