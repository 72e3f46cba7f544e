"""Drawn tokens follow the recorded marginals exactly in law; bounds are at fixed seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.traces.options import SynthesisOptions
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.synthesize import draw_tokens, inclusion, marginals, mixture_walk, synthesize
from epsim.traces.trace import CountsBlock, TokenBlock, TraceMeta


def record(path: Path, counts: Any, top_k: int, **fields: Any) -> StoredTrace:
    """A recording of one step. counts [L, E]."""
    counts = np.asarray(counts, dtype=np.int64)
    meta = TraceMeta("counts", counts.shape[0], counts.shape[1], top_k, source=path.name, **fields)
    with TraceWriter(path, meta) as writer:
        writer.append(CountsBlock(np.array([0]), counts[None]))
    return StoredTrace(path)


def skewed(seed: int, num_layers: int, num_experts: int) -> Any:
    rng = np.random.default_rng(seed)
    return (1e5 * rng.gamma(0.5, size=(num_layers, num_experts))).astype(np.int64) + 1


def draw(p: Any, num_tokens: int, seed: int = 1) -> Any:
    """ids [T, L, k] drawn with inclusion probabilities p [L, E]."""
    ids = np.full((num_tokens, len(p), round(p[0].sum())), -1, dtype=np.int16)
    draw_tokens(p[None], np.zeros(num_tokens, dtype=np.int64), np.uint64(seed), ids)
    return ids


@settings(max_examples=200, deadline=None)
@given(row=st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any), data=st.data())
def test_inclusion_probabilities(row: list[int], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(row)))
    p, num_capped = inclusion(np.array([row]), top_k)
    assert p.min() >= 0
    assert p.max() <= 1 + 1e-12
    assert p.sum() == pytest.approx(top_k)
    share = np.array(row) / sum(row)
    if num_capped == 0:
        if (share * top_k <= 1).all():
            np.testing.assert_allclose(p[0], share * top_k)
    else:
        assert (p[0] >= 1 - 1e-12).sum() >= 1
    # Whoever got more keeps at least as much.
    order = np.argsort(row, kind="stable")
    assert (np.diff(p[0][order]) >= -1e-12).all()


def test_capping_by_hand() -> None:
    """Shares 0.7, 0.2, 0.1 at k = 2: the first in every token, the rest 2 : 1 for the one slot left."""
    p, num_capped = inclusion(np.array([[70, 20, 10]]), 2)
    np.testing.assert_allclose(p, [[1, 2 / 3, 1 / 3]])
    assert num_capped == 1
    # Raising the rest lifts 0.9 over 1 as well.
    p, num_capped = inclusion(np.array([[90, 9, 1]]), 2)
    np.testing.assert_allclose(p, [[1, 0.9, 0.1]])
    assert num_capped == 1
    p, _ = inclusion(np.array([[5, 0, 0, 0]]), 2)
    np.testing.assert_allclose(p, [[1, 1 / 3, 1 / 3, 1 / 3]])


def test_inclusion_frequencies_match_the_marginals() -> None:
    """200,000 tokens: every expert within 4.8 standard errors (of 512), chi-square of all within its 1e-4 bounds."""
    p, _ = inclusion(skewed(0, 4, 128), 8)
    num_tokens = 200_000
    ids = draw(p, num_tokens)
    ordered = np.sort(ids, axis=2)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()
    assert ids.min() >= 0
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=128) for layer in range(4)])
    always = p >= 1 - 1e-12
    assert (counts[always] == num_tokens).all()
    inside = ~always & (p > 0)
    z = (counts - num_tokens * p)[inside] / np.sqrt(num_tokens * p * (1 - p))[inside]
    assert np.abs(z).max() < 4.8
    size = inside.sum()
    assert abs((z**2).sum() - size) < 3.9 * np.sqrt(2 * size)


def test_pairs_are_not_tied_to_an_order() -> None:
    """Equal probabilities: by symmetry each pair of experts meets with probability k (k - 1) / (E (E - 1))."""
    p = np.full((1, 8), 3 / 8)
    num_tokens = 100_000
    ids = draw(p, num_tokens)[:, 0]
    chosen = np.zeros((num_tokens, 8))
    np.put_along_axis(chosen, ids.astype(np.int64), 1, axis=1)
    pairs = (chosen.T @ chosen)[np.triu_indices(8, 1)] / num_tokens
    expected = 3 * 2 / (8 * 7)
    error = np.sqrt(expected * (1 - expected) / num_tokens)
    assert np.abs(pairs - expected).max() < 4.2 * error


def test_layers_and_tokens_are_independent() -> None:
    p = np.full((2, 4), 0.25)
    ids = draw(p, 100_000)[:, :, 0]
    table = np.zeros((4, 4))
    np.add.at(table, (ids[:, 0], ids[:, 1]), 1)
    assert ((table - 6250) ** 2 / 6250).sum() < 42  # chi-square, 15 degrees: 2e-4
    table = np.zeros((4, 4))
    np.add.at(table, (ids[:-1, 0], ids[1:, 0]), 1)
    assert ((table - 6250) ** 2 / 6250).sum() < 42


def test_every_expert_chosen_when_k_is_all() -> None:
    ids = draw(np.ones((1, 5)), 100)
    assert (np.sort(ids[:, 0], axis=1) == np.arange(5)).all()


def test_one_topic_end_to_end(tmp_path: Path) -> None:
    counts = skewed(3, 2, 32)
    source = record(tmp_path / "a.parquet", counts, 4, phase="prefill", shared_cost=1.0, layers=(3, 4))
    options = SynthesisOptions(num_steps=20, tokens_per_step=2000, num_ranks=16, seed=5)
    trace = synthesize([source], tmp_path / "t.parquet", options)
    meta = trace.meta
    assert (meta.level, meta.origin, meta.phase, meta.num_source_ranks) == ("tokens", "drawn", "prefill", 16)
    assert (meta.shared_cost, meta.layers, trace.num_steps) == (1.0, (3, 4), 20)
    p, _ = inclusion(counts, 4)
    z = (marginals(trace) - 40_000 * p) / np.sqrt(np.maximum(40_000 * p * (1 - p), 1e-9))
    assert np.abs(z[p < 1 - 1e-12]).max() < 4.2
    for block in trace.blocks():
        assert isinstance(block, TokenBlock)
        assert (np.bincount(block.source_rank, minlength=16) == 125 * len(block.steps)).all()


def test_the_same_seed_gives_the_same_trace(tmp_path: Path) -> None:
    source = record(tmp_path / "a.parquet", skewed(3, 2, 8), 2)

    def ids(seed: int) -> Any:
        options = SynthesisOptions(num_steps=3, tokens_per_step=10, seed=seed)
        trace = synthesize([source], tmp_path / f"{seed}.parquet", options)
        return np.concatenate([b.expert_ids for b in trace.blocks() if isinstance(b, TokenBlock)])

    np.testing.assert_array_equal(ids(1), ids(1))
    assert (ids(1) != ids(2)).any()


def test_topics_are_mixed_and_named(tmp_path: Path) -> None:
    """Topic a uses experts 0..3, topic b 4..7: every token's experts are of its own topic."""
    a = record(tmp_path / "a.parquet", [[5, 5, 5, 5, 0, 0, 0, 0]], 2)
    b = record(tmp_path / "b.parquet", [[0, 0, 0, 0, 5, 5, 5, 5]], 2)
    trace = synthesize([a, b], tmp_path / "t.parquet", SynthesisOptions(num_steps=30, tokens_per_step=400, seed=2))
    shares = []
    for block in trace.blocks():
        assert isinstance(block, TokenBlock)
        assert block.domain is not None
        of_b = block.domain == "b"
        assert (np.greater_equal(block.expert_ids, 4) == of_b[:, None, None]).all()
        shares += [of_b[block.token_step == s].mean() for s in range(len(block.steps))]
    assert np.std(shares) > 0.05
    # Neighbouring steps are alike, as the walk drifts slowly.
    assert np.abs(np.diff(shares)).mean() < 0.5 * np.std(shares) * np.sqrt(2)


def test_the_walk_is_stationary() -> None:
    rng = np.random.default_rng(0)
    weights = mixture_walk(60_000, 3, drift=0.2, spread=0.7, rng=rng)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    assert weights.min() > 0
    z = np.log(weights[:, 0] / weights[:, 1])
    # The difference of two independent walks of variance 0.49, autocorrelation 0.8.
    assert z.var() == pytest.approx(0.98, rel=0.06)
    assert np.corrcoef(z[:-1], z[1:])[0, 1] == pytest.approx(0.8, abs=0.01)
    even = mixture_walk(5, 4, drift=0.5, spread=0.0, rng=rng)
    np.testing.assert_allclose(even, 0.25)
    still = mixture_walk(5, 4, drift=0.0, spread=1.0, rng=rng)
    np.testing.assert_allclose(still, still[:1].repeat(5, axis=0))


def test_refusals(tmp_path: Path) -> None:
    a = record(tmp_path / "a.parquet", [[1, 1, 1]], 2)
    b = record(tmp_path / "b.parquet", [[1, 1, 1, 1]], 2)
    c = record(tmp_path / "c.parquet", [[1, 1, 1], [0, 0, 0]], 2)
    with pytest.raises(ValueError, match=r"b.parquet: num_experts 4 differs from 3 of .*a.parquet"):
        synthesize([a, b], tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"c.parquet: layer 1 has no tokens to draw from"):
        synthesize([c], tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="no source given"):
        synthesize([], tmp_path / "t.parquet")
    assert not (tmp_path / "t.parquet").exists()
    for options, message in [
        ({"num_steps": 0}, "--steps 0"),
        ({"drift": 1.5}, "--drift 1.5"),
        ({"seed": -1}, "--seed"),
    ]:
        with pytest.raises(ValueError, match=message):
            SynthesisOptions(**options)  # type: ignore[arg-type]
