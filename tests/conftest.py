"""Traces that tests draw for themselves, and the command as a user types it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from epsim.cli.main import main
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import Block, TokenBlock, TraceMeta
from tests.skips import pytest_sessionfinish, pytest_terminal_summary

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary"]
TraceMaker = Callable[..., StoredTrace]
Epsim = Callable[..., tuple[int, str, str]]

# The tests run in as many processes as there are cores.
torch.set_num_threads(1)
# The first example of a property may compile, and the machine may be busy.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Files made for a test hold the time they were made at, which must not be part of a test's name."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture
def make_trace(tmp_path: Path) -> TraceMaker:
    """make_trace(level, steps=, layers=, experts=, top_k=, tokens=, ranks=, seed=, name=, **meta): skewed, drifting."""

    def make(
        level: str = "tokens",
        *,
        steps: int = 6,
        layers: int = 2,
        experts: int = 8,
        top_k: int = 2,
        tokens: int = 64,
        ranks: int = 4,
        seed: int = 0,
        name: str = "trace.parquet",
        **meta: Any,
    ) -> StoredTrace:
        rng = np.random.default_rng(seed)
        skew = rng.gumbel(size=(layers, experts)) * 1.5
        ids = np.empty((steps * tokens, layers, top_k), dtype=np.int16)
        for step in range(steps):
            skew += 0.2 * rng.normal(size=skew.shape)
            keys = skew + rng.gumbel(size=(tokens, layers, experts))
            ids[step * tokens : (step + 1) * tokens] = np.argsort(-keys, axis=2)[:, :, :top_k]
        tokens_block = TokenBlock(
            steps=np.arange(steps),
            token_step=np.repeat(np.arange(steps), tokens),
            source_rank=np.tile(np.arange(tokens) * ranks // tokens, steps),
            expert_ids=ids,
        )
        block: Block = tokens_block
        if level == "rank_counts":
            block = tokens_block.to_rank_counts(ranks, experts)
        elif level == "counts":
            block = tokens_block.to_counts(experts)
        num_ranks = 0 if level == "counts" else ranks
        described = TraceMeta(level, layers, experts, top_k, num_ranks, **meta)  # type: ignore[arg-type]
        path = tmp_path / name
        with TraceWriter(path, described) as writer:
            writer.append(block)
        return StoredTrace(path)

    return make


@pytest.fixture
def epsim(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Epsim:
    """epsim(*arguments) -> exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["epsim", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, captured.out, captured.err

    return run
