"""The words of a trace: descriptions that check themselves, blocks whose levels follow from one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.traces.trace import TokenBlock, TraceMeta


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999), num_tokens=st.integers(0, 30), num_steps=st.integers(1, 4), num_ranks=st.integers(1, 4)
)
def test_counts_follow_from_tokens(seed: int, num_tokens: int, num_steps: int, num_ranks: int) -> None:
    """Against a count by loops; -1 counts nowhere."""
    rng = np.random.default_rng(seed)
    ids = rng.random((num_tokens, 2, 5)).argsort(axis=2)[..., :3] - rng.integers(0, 2)
    step = np.sort(rng.integers(0, num_steps, num_tokens))
    rank = rng.integers(0, num_ranks, num_tokens)
    block = TokenBlock(np.arange(num_steps), step, rank, ids.astype(np.int16))
    expected = np.zeros((num_steps, 2, num_ranks, 5), dtype=np.int64)
    for token, layer, slot in np.ndindex(*ids.shape):
        if ids[token, layer, slot] >= 0:
            expected[step[token], layer, rank[token], ids[token, layer, slot]] += 1
    by_rank = block.to_rank_counts(num_ranks, 5)
    np.testing.assert_array_equal(by_rank.counts, expected)
    np.testing.assert_array_equal(by_rank.to_counts().counts, expected.sum(axis=2))
    np.testing.assert_array_equal(block.to_counts(5).counts, expected.sum(axis=2))


def test_meta_as_json() -> None:
    meta = TraceMeta("tokens", 2, 8, 2, 4, 0.5, "m", "decode", "composed", (3, 5), 8, "s", ("a", "b"))
    assert TraceMeta.from_json(meta.to_json()) == meta
    assert TraceMeta("counts", 3, 8, 2).layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "other"}, "trace level 'other' is not one of counts, rank_counts, tokens"),
        ({"num_layers": 0}, "needs layers and experts"),
        ({"top_k": 9}, "top-k 9 is outside 1..8"),
        ({"top_k": 0}, "top-k 0 is outside 1..8"),
        ({"layers": (1,)}, "1 layer numbers given for 2 layers"),
        ({"level": "rank_counts"}, "needs the number of source ranks"),
        ({"shared_cost": float("inf")}, "shared_cost inf"),
    ],
)
def test_meta_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceMeta(**{"level": "counts", "num_layers": 2, "num_experts": 8, "top_k": 2, **fields})
