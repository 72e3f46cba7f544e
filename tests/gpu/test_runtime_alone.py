"""The runtime on one GPU: a layer under every stack, NCCL's calls, and whole runs of `epsim run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epsim.results import read_results
from epsim.runtime.telemetry import read_telemetry
from epsim.traces.store import StoredTrace
from tests.gpu import runtime_programs as programs
from tests.gpu.test_runtime import check, check_rerouted
from tests.launch.processes import EPSIM, environment, run
from tests.runtime.worlds import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_outputs_and_loads_of_every_stack() -> None:
    stacks = (*programs.STACKS, *programs.SLOW_FORMS)
    ran = launch(1, programs.run_stacks, 1, "torch", False, False, "torch", stacks, backend="nccl")
    check(ran, 0.01, stacks)


def test_router_policies_act_as_in_a_replay() -> None:
    check_rerouted(launch(1, programs.rerouted, 1, "torch", backend="nccl"))


def test_collectives_by_nccl() -> None:
    size = min(torch.cuda.device_count(), 8)
    assert launch(size, programs.through_nccl, size, backend="nccl") == [True] * size


def test_a_run_is_timed_by_device_events(make_trace: Callable[..., StoredTrace], tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=6, tokens=300, shared_cost=1.0)
    stacks = ["contiguous", "eplb+lplb+waterfill", "eplb+lplb(counts=gathered)+waterfill-joint"]
    policies = [part for text in stacks for part in ("--policy", text)]
    command: list[str | Path] = [*EPSIM, "run", trace.path, "--model", "tiny", *policies, "--redundant", "4"]
    done = run([*command, "--device", "cuda", "--hardware", "h200", "--out", tmp_path])
    assert (done.code, done.err) == (0, "")
    results: Any = read_results(tmp_path / "results.json")
    told = results["run"]
    assert (told["equals_replay"], told["timed_by"], told["dtype"]) == (True, "device events", "bfloat16")
    for entry in results["stacks"]:
        phases = sum(phase["mean"] for phase in entry["phases_us"].values())
        assert entry["metrics"]["layer_time_us"]["mean"] == pytest.approx(phases)
        assert entry["predicted"]["layer_time_us"] > 0
    assert read_telemetry(tmp_path / "telemetry").num_rows == 3 * 3 * 2


def test_a_trained_model_runs(make_trace: Callable[..., StoredTrace], tmp_path: Path) -> None:
    """Prefill as several sequences, its own router, and a router policy; started by torchrun."""
    pytest.importorskip("transformers")
    from epsim.traces.model.config import ModelShape, build_model

    torch.manual_seed(0)
    shape = ModelShape(vocabulary=300, num_layers=2, hidden=64, num_heads=2, num_experts=8, top_k=2, intermediate=32)
    build_model(shape).save_pretrained(tmp_path / "model")
    trace = make_trace("tokens", steps=6, tokens=90, shared_cost=1.0, phase="decode")
    command: list[str | Path] = [*EPSIM, "run", trace.path, "--model", tmp_path / "model", "--redundant", "2"]
    command += ["--policy", "eplb+lplb", "--policy", "eplb+pruned(k0=1)+lplb", "--context", "8", "--device", "cuda"]
    done = run([*command, "--launcher", "torchrun", "--ranks", "1", "--out", tmp_path / "out"], environment())
    assert done.code == 0, done.err
    results = read_results(tmp_path / "out" / "results.json")
    assert results["run"]["equals_replay"] is True
    assert results["stacks"][1]["metrics"]["kept_mass"]["mean"] < 1
