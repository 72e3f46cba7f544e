"""Small traces of counts whose best answer is known by construction, and a model that fits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epsim.cost.layer_time import LayerTiming, load_timing
from epsim.results import ResultsData
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import CountsBlock, TraceMeta
from epsim.tuning.tune import TuneOptions, tune
from tests.tune.cases import EXPERTS, GPUS, LAYERS, MODEL, TOP_K, MakeCounts, RunTune


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(MODEL)
    return path


@pytest.fixture
def timing(model: Path) -> LayerTiming:
    return load_timing("h200", str(model), 1, "prefill")


@pytest.fixture
def make_counts(tmp_path: Path) -> MakeCounts:
    """make_counts(shares [S, E], tokens=, seed=, name=): every layer's counts drawn from its step's shares."""

    def make(shares: Any, tokens: int = 32768, seed: int = 0, name: str = "counts.parquet") -> StoredTrace:
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(tokens * TOP_K, np.repeat(np.asarray(shares)[:, None], LAYERS, axis=1))
        meta = TraceMeta("counts", LAYERS, EXPERTS, TOP_K, phase="prefill", shared_cost=0.0)
        with TraceWriter(tmp_path / name, meta) as writer:
            writer.append(CountsBlock(np.arange(len(counts)), counts.astype(np.int64)))
        return StoredTrace(tmp_path / name)

    return make


@pytest.fixture
def run_tune(timing: LayerTiming) -> RunTune:
    """run_tune(trace, **options) -> results, on 4 GPUs of 141 GB."""

    def run(trace: StoredTrace, **options: Any) -> ResultsData:
        return tune(trace, TuneOptions(**({"gpus": GPUS, "nodes": 1, "groups": 1, "memory": 141e9} | options)), timing)

    return run
