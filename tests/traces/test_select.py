"""The steps of one phase, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from epsim.traces.select import select_phase
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import TokenBlock, TraceMeta


def test_steps_of_one_phase(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    token_step = np.sort(rng.integers(6, size=40))
    ids = rng.permuted(np.tile(np.arange(4), (40, 2, 1)), axis=2)[:, :, :2].astype(np.int16)
    phase = np.array(["prefill", "decode", "decode", "prefill", "decode", "prefill"], dtype=object)
    domain = np.array([f"d{i % 3}" for i in range(40)], dtype=object)
    path = tmp_path / "mixed.parquet"
    with TraceWriter(path, TraceMeta("tokens", 2, 4, 2, num_source_ranks=1, phase="mixed")) as writer:
        writer.append(TokenBlock(np.arange(6) * 3, token_step, np.zeros(40, int), ids, domain=domain, phase=phase))
    chosen = select_phase(StoredTrace(path), "decode", tmp_path / "decode.parquet")
    (block,) = chosen.blocks()
    assert isinstance(block, TokenBlock)
    tokens = np.isin(token_step, [1, 2, 4])
    assert block.steps.tolist() == [3, 6, 12]
    assert np.array_equal(block.expert_ids, ids[tokens])
    assert block.domain is not None
    assert block.domain.tolist() == domain[tokens].tolist()
    assert np.array_equal(block.steps[block.token_step], token_step[tokens] * 3)
    assert chosen.meta.phase == "decode"
    assert chosen.meta.notes[-1] == "only the 3 decode steps of 6"
    with pytest.raises(ValueError, match="no step of that phase"):
        select_phase(StoredTrace(path), "training", tmp_path / "none.parquet")
    assert not (tmp_path / "none.parquet").exists()


def test_a_trace_of_one_phase_says_so(make_trace: Callable[..., StoredTrace], tmp_path: Path) -> None:
    trace = make_trace("counts", phase="decode")
    with pytest.raises(ValueError, match="all of it is decode"):
        select_phase(trace, "prefill", tmp_path / "none.parquet")
