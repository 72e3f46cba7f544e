"""The steps of one phase, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from epsim.traces.select import select_steps
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import Block, TokenBlock, TraceMeta


def test_steps_of_one_phase(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    token_step = np.sort(rng.integers(6, size=40))
    ids = rng.permuted(np.tile(np.arange(4), (40, 2, 1)), axis=2)[:, :, :2].astype(np.int16)
    phase = np.array(["prefill", "decode", "decode", "prefill", "decode", "prefill"], dtype=object)
    domain = np.array([f"d{i % 3}" for i in range(40)], dtype=object)
    path = tmp_path / "mixed.parquet"
    with TraceWriter(path, TraceMeta("tokens", 2, 4, 2, num_source_ranks=1, phase="mixed")) as writer:
        writer.append(TokenBlock(np.arange(6) * 3, token_step, np.zeros(40, int), ids, domain=domain, phase=phase))
    chosen = select_steps(StoredTrace(path), tmp_path / "decode.parquet", "decode")
    (block,) = chosen.blocks()
    assert isinstance(block, TokenBlock)
    tokens = np.isin(token_step, [1, 2, 4])
    assert block.steps.tolist() == [3, 6, 12]
    assert np.array_equal(block.expert_ids, ids[tokens])
    assert block.domain is not None
    assert block.domain.tolist() == domain[tokens].tolist()
    assert np.array_equal(block.steps[block.token_step], token_step[tokens] * 3)
    assert chosen.meta.phase == "decode"
    assert chosen.meta.notes[-1] == "only the 3 decode steps of at least 1 tokens, of 6 steps"
    with pytest.raises(ValueError, match="no training steps"):
        select_steps(StoredTrace(path), tmp_path / "none.parquet", "training")
    assert not (tmp_path / "none.parquet").exists()


def test_a_trace_of_one_phase_says_so(make_trace: Callable[..., StoredTrace], tmp_path: Path) -> None:
    trace = make_trace("counts", phase="decode")
    with pytest.raises(ValueError, match="all of the trace is decode"):
        select_steps(trace, tmp_path / "none.parquet", "prefill")


@pytest.mark.parametrize("level", ["counts", "rank_counts", "tokens"])
def test_steps_with_enough_tokens(tmp_path: Path, level: str) -> None:
    sizes = np.array([3, 0, 5, 4, 1])
    ids = np.tile(np.array([[[0, 1], [2, 3]]], dtype=np.int16), (sizes.sum(), 1, 1))
    token_step = np.repeat(np.arange(5), sizes)
    block: Block = TokenBlock(np.arange(5), token_step, np.zeros(sizes.sum(), int), ids)
    assert isinstance(block, TokenBlock)
    if level != "tokens":
        block = block.to_counts(4) if level == "counts" else block.to_rank_counts(1, 4)
    path = tmp_path / "all.parquet"
    with TraceWriter(path, TraceMeta(level, 2, 4, 2, num_source_ranks=1)) as writer:  # type: ignore[arg-type]
        writer.append(block)
    chosen = select_steps(StoredTrace(path), tmp_path / "some.parquet", min_tokens=4)
    assert [int(step) for part in chosen.blocks() for step in part.steps] == [2, 3]
    with pytest.raises(ValueError, match="at least 6 tokens"):
        select_steps(StoredTrace(path), tmp_path / "none.parquet", min_tokens=6)
