"""`--device`: every split goes where it says, and a device that is not there costs one line."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from epsim.cli.main import main
from epsim.kernels.split import cuda, solver
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import Device, ReplayOptions, check_device, replay
from epsim.results import ResultsData
from epsim.traces.store import StoredTrace

STACKS = ("eplb", "eplb+lplb", "eplb+lplb(counts=gathered)+waterfill", "eplb+lplb-sampled")


def replayed(trace: StoredTrace, device: Device) -> ResultsData:
    policies = tuple(("", parse_stack(text)) for text in STACKS)
    return replay(trace, ReplayOptions(Cluster(4, 2, 4), policies, device=device))


def test_every_split_is_solved_on_the_device(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_trace("tokens", shared_cost=1.0)
    asked: list[str] = []
    on_cpu = solver._solve

    def recorded(
        structure: Any, loads: Any, layer: Any, tol: Any, start: Any, backend: str, *rest: Any, **more: Any
    ) -> Any:
        asked.append(backend)
        return on_cpu(structure, loads, layer, tol, start, "cpu", *rest, **more)

    monkeypatch.setattr(solver, "_solve", recorded)
    there = replayed(trace, "cuda")
    # Each problem once: the split, which all stacks of fractions share and which bounds the optimum, and whole tokens.
    assert asked == ["cuda"] * 2
    asked.clear()
    assert replayed(trace, "cpu") == there
    assert asked == ["cpu"] * 2


def test_loads_that_a_gpu_refuses_are_an_error(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = solver._solve

    def refused(*arguments: Any, **more: Any) -> Any:
        found: Any = on_cpu(*arguments[:5], "cpu", *arguments[6:], **more)  # type: ignore[call-arg]
        found.status[1] = 2
        return found

    monkeypatch.setattr(solver, "_solve", refused)
    with pytest.raises(ValueError, match=r"loads sum to 2\^53 or more"):
        replayed(make_trace("tokens"), "cuda")


def test_devices_that_are_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available", lambda: False)
    for device, words in (("cuda", "pip install epsim[gpu]"), ("tpu", "choose cpu, cuda")):
        monkeypatch.setattr(
            sys, "argv", ["epsim", "replay", "sample", "--ranks=16", "--policy=eplb", f"--device={device}"]
        )
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"epsim: --device {device}")
        assert words in printed.err
        assert printed.err.count("\n") == 1
    monkeypatch.setattr(cuda, "available", lambda: True)
    assert check_device("cuda") == "cuda"
