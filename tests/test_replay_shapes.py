"""Replay over all shapes of clusters and traces: what holds for any of them."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.results import ResultsData, check_results
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import Block, TokenBlock, TraceMeta

CAUSES = ("gap_placement", "gap_split", "gap_rounding", "gap_shared")
STACKS = ("contiguous", "eplb", "eplb+lplb", "eplb+static", "eplb+random", "eplb+lplb-sampled", "eplb+lplb-ipm")


def draw_trace(path: Path, level: str, sizes: tuple[int, int, int, int], ranks: int, cost: float) -> StoredTrace:
    """sizes: steps, tokens a step, experts, top-k; 2 layers."""
    steps, tokens, experts, top_k = sizes
    rng = np.random.default_rng(sum(sizes))
    keys = 2 * rng.gumbel(size=(2, experts)) + rng.gumbel(size=(steps * tokens, 2, experts))
    source = np.tile(np.arange(tokens) * ranks // max(tokens, 1), steps)
    place = np.repeat(np.arange(steps), tokens)
    ids = np.argsort(-keys, axis=2)[:, :, :top_k].astype(np.int16)
    block: Block = TokenBlock(np.arange(steps), place, source, ids)
    assert isinstance(block, TokenBlock)
    if level != "tokens":
        block = block.to_rank_counts(ranks, experts) if level == "rank_counts" else block.to_counts(experts)
    num_ranks = 0 if level == "counts" else ranks
    meta = TraceMeta(level, 2, experts, top_k, num_ranks, shared_cost=cost)  # type: ignore[arg-type]
    with TraceWriter(path, meta) as writer:
        writer.append(block)
    return StoredTrace(path)


def check_metrics(metrics: ResultsData, prefix: str, num_ranks: int, whole_steps: bool) -> None:
    """whole_steps: a single pair has tokens, so that means of ratios multiply as the ratios do."""
    ratio = metrics[f"{prefix}max_over_mean"]
    assert 1 - 1e-9 <= ratio["mean"] <= num_ranks * (1 + 1e-9)
    causes = [metrics[prefix + cause]["mean"] for cause in CAUSES]
    assert all(cause is None or cause >= 0 for cause in causes)
    if whole_steps:
        assert math.prod(1 + (cause or 0) for cause in causes) == pytest.approx(ratio["mean"], rel=1e-9)
    if num_ranks == 1:
        assert ratio["max"] == pytest.approx(1)
        assert metrics[f"{prefix}optimality_gap"]["max"] == pytest.approx(0, abs=1e-9)
    remote = metrics[f"{prefix}remote_rank_share"]["mean"]
    if remote is not None:
        assert 0 <= metrics[f"{prefix}remote_node_share"]["mean"] <= remote + 1e-12 <= 1 + 1e-12


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["counts", "rank_counts", "tokens"]),
    st.tuples(st.integers(2, 4), st.integers(0, 90), st.integers(1, 20), st.integers(1, 20)),
    st.sampled_from([1, 2, 3, 7, 16, 64]),
    st.integers(1, 64),
    st.integers(0, 400),
    st.sampled_from([0.0, 1.0, 0.3]),
)
def test_any_shape(
    level: str, sizes: tuple[int, int, int, int], ranks: int, nodes: int, redundant: int, cost: float
) -> None:
    """Nodes that do not divide ranks, more slots than experts times ranks, one expert, all chosen, no tokens."""
    steps, tokens, experts, top_k = sizes
    sizes = (steps, tokens, experts, min(top_k, experts))
    redundant = -(-(experts + redundant) // ranks) * ranks - experts
    with tempfile.TemporaryDirectory() as folder:
        trace = draw_trace(Path(folder, "trace.parquet"), level, sizes, ranks, cost)
        able = []
        for text in STACKS:
            stack = parse_stack(text)
            try:
                stack.check_level(trace.meta.level, redundant > 0, cost > 0)
            except ValueError:
                continue
            able.append(("", stack))
        results = replay(trace, ReplayOptions(Cluster(ranks, min(nodes, ranks), redundant), tuple(able)))
    check_results(results)
    assert len(results["stacks"]) == len(able) >= 3
    single = results["trace"]["steps_scored"] == 1 and experts == sizes[3]  # then the two layers are alike
    for entry in results["stacks"]:
        if not tokens:
            assert entry["metrics"]["peak"]["mean"] is None
            continue
        for prefix in ("", "routed_") if cost else ("",):
            check_metrics(entry["metrics"], prefix, ranks, single and entry["stack"] in ("contiguous", "eplb"))
        assert sum(entry["load_over_mean_by_rank"]) == pytest.approx(ranks)
