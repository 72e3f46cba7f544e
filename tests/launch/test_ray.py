"""Gangs of Ray actors on a cluster of this machine alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from epsim.results import read_results
from epsim.runtime.telemetry import read_telemetry
from epsim.traces.store import StoredTrace
from tests.launch.processes import EPSIM, environment, run

pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = pytest.mark.slow
TraceMaker = Callable[..., StoredTrace]


def test_a_gang_that_lost_a_rank_goes_on(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=12, shared_cost=1.0)
    out = tmp_path / "out"
    options = ["--model", "tiny", "--policy", "contiguous", "--policy", "eplb+lplb", "--redundant", "2"]
    command: list[str | Path] = [*EPSIM, "run", trace.path, *options, "--launcher", "ray", "--cpus", "2", "--out", out]
    done = run(command, environment(EPSIM_TRIAL_FAULT="kill:rank=1,step=8,layer=1,phase=dispatch"))
    assert done.code == 0, done.err
    assert len(done.lines) == 1
    assert done.lines[0].startswith("epsim: rank 1 stopped answering in phase dispatch, step 8, layer 1 (rank 0 rep")
    assert done.lines[0].endswith("; starting again after the last complete step (1 of 2)")
    table = read_telemetry(out / "telemetry")
    rows = [tuple(row) for row in zip(*(table[name].to_pylist() for name in ("step", "stack", "layer", "rank")))]
    assert rows == list(itertools.product(range(6, 12), range(2), range(2), range(2)))
    assert read_results(out / "results.json")["run"]["equals_replay"] is True


def test_sixteen_ranks(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=4, experts=32, tokens=64, ranks=16, shared_cost=1.0)
    out = tmp_path / "out"
    stacks = ["contiguous", "eplb+lplb", "eplb+lplb(counts=gathered)+waterfill"]
    policies = [part for stack in stacks for part in ("--policy", stack)]
    options = ["--model", "tiny", *policies, "--redundant", "16", "--nodes", "2"]
    command: list[str | Path] = [*EPSIM, "run", trace.path, *options, "--launcher", "ray", "--cpus", "16"]
    done = run([*command, "--out", out])
    assert (done.code, done.err) == (0, "")
    results = read_results(out / "results.json")
    assert results["setting"]["ranks"] == 16
    assert results["run"]["equals_replay"] is True
    assert read_telemetry(out / "telemetry").num_rows == 2 * 3 * 2 * 16
