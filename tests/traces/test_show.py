"""What a trace holds, against figures counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from epsim.traces.show import summarize
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import CountsBlock, TokenBlock, TraceMeta


def test_counts(tmp_path: Path) -> None:
    meta = TraceMeta("counts", 2, 4, 2, layers=(3, 5), shared_cost=1.0, model="m", notes=("a note",))
    counts = np.array([[[4, 0, 0, 0], [1, 1, 1, 1]], [[0, 2, 2, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [5, 1, 1, 1]]])
    with TraceWriter(tmp_path / "t.parquet", meta, group_bytes=64) as writer:
        writer.append(CountsBlock(np.array([7, 8, 9]), counts))
    summary = summarize(StoredTrace(tmp_path / "t.parquet"))
    assert (summary.num_steps, summary.first_step, summary.last_step) == (3, 7, 9)
    first, second = summary.skew
    assert (first.layer, first.assignments, first.hottest, first.idle) == (3, 8, 0, 1)
    assert first.overall == pytest.approx(4 / 2)
    # Steps 7 and 8 have tokens in layer 3: 4 / 1 and 2 / 1.
    assert first.per_step == pytest.approx((4 + 2) / 2)
    assert (second.layer, second.assignments, second.hottest) == (5, 12, 0)
    assert second.overall == pytest.approx(6 / 3)
    assert second.per_step == pytest.approx((1 + 5 / 2) / 2)
    assert summary.tokens_per_step == (2.0, 2.0, 4.0)
    assert summary.total_tokens == 8
    lines = summary.lines()
    assert ("layers", "2 (3, 5)") in lines
    assert ("experts", "4, top-2") in lines
    assert lines[-1] == ("note", "a note")


def test_tokens(tmp_path: Path) -> None:
    meta = TraceMeta("tokens", 1, 4, 2, num_source_ranks=2, origin="composed", phase="decode")
    ids = np.array([[[0, 1]], [[0, 2]], [[0, 3]]])
    domain = np.array(["x", "y", "y"], dtype=object)
    block = TokenBlock(np.array([0, 1]), np.array([0, 0, 1]), np.array([0, 1, 0]), ids, domain=domain)
    with TraceWriter(tmp_path / "t.parquet", meta) as writer:
        writer.append(block)
    summary = summarize(StoredTrace(tmp_path / "t.parquet"))
    assert summary.domains == (("y", 2), ("x", 1))
    assert summary.skew[0].overall == pytest.approx(3 / 1.5)
    assert summary.skew[0].per_step == pytest.approx(2.0)
    assert summary.total_tokens == 3
    assert ("domains", "y 2, x 1") in summary.lines()


def test_an_empty_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.parquet", TraceMeta("counts", 1, 4, 2)):
        pass
    summary = summarize(StoredTrace(tmp_path / "t.parquet"))
    assert (summary.num_steps, summary.total_tokens, summary.skew[0].overall) == (0, 0.0, 0.0)
    assert ("steps", "0") in summary.lines()
