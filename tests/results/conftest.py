"""Small results of every kind, as the commands write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epsim.launch.inline import run_inline
from epsim.launch.options import RunOptions
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.report.compare import Side, combined, compare
from epsim.results import read_results
from epsim.traces.store import StoredTrace
from tests.sweep.test_drive import swept
from tests.tune.cases import MakeCounts, RunTune, hot
from tests.tune.conftest import make_counts, model, run_tune, timing

__all__ = ["make_counts", "model", "run_tune", "timing"]
GRID = 'policies = ["contiguous", "eplb+lplb"]\nranks = [2, 4]\nseed = [0, 1]\n[[trace]]\npath = "trace.parquet"\n'
_made: dict[str, dict[str, Any]] = {}


@pytest.fixture
def every_kind(
    make_trace: Callable[..., StoredTrace], make_counts: MakeCounts, run_tune: RunTune, tmp_path: Path
) -> dict[str, dict[str, Any]]:
    """{kind: results}: made once, and copied for each test."""
    if not _made:
        trace = make_trace("tokens", steps=8, shared_cost=1.0)
        sides = []
        for name, text in (("a", "eplb+lplb"), ("b", "eplb+lplb+waterfill")):
            stacks = (("", parse_stack("contiguous")), ("best", parse_stack(text)))
            sides.append(Side(name, replay(trace, ReplayOptions(Cluster(4, 2, 4), stacks), trace_name="t")))
        (tmp_path / "grid.toml").write_text(GRID)
        swept(tmp_path / "grid.toml", tmp_path / "sweep")
        trace_file, out = str(tmp_path / "trace.parquet"), str(tmp_path / "run")
        run = RunOptions(trace_file, ("contiguous", "eplb"), model="tiny", out=out, redundant=2, ranks=1)
        _made["replay"] = sides[0].results
        _made["run"] = run_inline(run)
        _made["tune"] = run_tune(make_counts(np.array([hot(step) for step in range(12)])), redundant=(0, 4))
        _made["comparison"] = combined(sides, compare(sides), "epsim compare a b")
        _made["sweep"] = read_results(tmp_path / "sweep" / "results.json")
    return copy.deepcopy(_made)
