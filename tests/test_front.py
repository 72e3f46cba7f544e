"""`import epsim`: what it gives, how fast, and that it answers as the commands do."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import epsim
from epsim import front
from epsim.cli.app import app
from epsim.options import parameters
from epsim.policies.stack import parse_stack
from epsim.requests import LaunchOptions, LoadRequest, PlanRequest, ReplayRequest, TuneRequest
from tests.conftest import Epsim, TraceMaker
from tests.docs.blocks import ROOT, blocks, processor_seconds

FUNCTIONS: dict[str, type] = {"load": LoadRequest, "replay": ReplayRequest, "plan": PlanRequest, "tune": TuneRequest}
FUNCTIONS["run"] = LaunchOptions


def test_import_is_fast_and_loads_nothing_heavy() -> None:
    assert min(processor_seconds([sys.executable, "-c", "import epsim"]) for _ in range(5)) < 0.1
    code = "import epsim, sys; assert not {'torch', 'numpy', 'pyarrow', 'numba', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tune_needs_a_model_and_hardware() -> None:
    """Classes that it inherits from have defaults for both."""
    required = [entry.name for entry in parameters(TuneRequest) if entry.required]
    assert required == ["trace", "model", "hardware", "gpus"]
    with pytest.raises(TypeError, match="model"):
        epsim.tune("sample", hardware="h200", gpus=8)  # type: ignore[call-arg]


def test_no_module_takes_the_name_of_a_function() -> None:
    """Importing it would put the module in the function's place."""
    assert not {module.name for module in pkgutil.iter_modules(epsim.__path__)} & set(epsim.__all__)
    importlib.import_module("epsim.replaying")
    assert inspect.isfunction(epsim.replay)
    assert "Results" in epsim.__all__
    assert epsim.Results is importlib.import_module("epsim.report.results").Results
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = epsim.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "request_class"), FUNCTIONS.items())
def test_signature_and_help(name: str, request_class: type) -> None:
    function = getattr(epsim, name)
    shown = inspect.signature(function).parameters
    assert set(shown) == {field.name for field in dataclasses.fields(request_class)}
    for entry in parameters(request_class):
        required = shown[entry.name].default is inspect.Parameter.empty
        assert required == entry.required
        assert required or shown[entry.name].default == entry.default
        assert f"    {entry.name}: {entry.about.help}" in function.__doc__
        assert "Annotated" not in str(shown[entry.name])
    assert ">>> " in function.__doc__
    assert next(iter(shown)) == "trace"


def test_every_option_of_a_command_is_a_parameter() -> None:
    from typer.main import get_command

    commands = get_command(app).commands  # type: ignore[attr-defined]
    printed = {"out", "json_output", "format_name"}
    for name in ("replay", "plan", "tune", "run"):
        options = {parameter.name for parameter in commands[name].params} - printed
        assert options <= set(inspect.signature(getattr(epsim, name)).parameters), name


def test_a_replay_equals_the_commands(request: pytest.FixtureRequest, make_trace: TraceMaker) -> None:
    command: Epsim = request.getfixturevalue("epsim")
    path = make_trace("tokens", shared_cost=1.0).path
    words = ["--ranks", "4", "--nodes", "2", "--redundant", "4", "--seed", "3", "--min-tokens", "2", "--json"]
    code, printed, _ = command("replay", path, "--policy", "eplb", "--policy", "best=eplb+lplb", *words)
    assert code == 0
    expected = json.loads(printed)
    policies = ["eplb", "best=eplb+lplb"]
    results = epsim.replay(path, policies, ranks=4, nodes=2, redundant=4, seed=3, min_tokens=2)
    said = results.data["setting"].pop("command")
    assert said.startswith(f"epsim replay {path} --policy eplb --policy best=eplb+lplb --ranks 4 --nodes 2 ")
    expected["setting"].pop("command")
    assert results.data == expected
    loaded = epsim.replay(epsim.load(str(path)), parse_stack("eplb"), ranks=4, nodes=2, redundant=4, min_tokens=2)
    assert loaded.data["trace"]["name"] == path.name
    assert loaded.stacks["eplb"].metrics.peak.mean == results.stacks["eplb"].metrics.peak.mean


def test_progress_goes_from_nothing_to_all(make_trace: TraceMaker) -> None:
    seen: list[tuple[str, float]] = []
    epsim.replay(make_trace("counts"), "eplb", ranks=4, progress=lambda words, share: seen.append((words, share)))
    assert seen[0] == ("reading", 0.0)
    assert seen[-1] == ("replaying", 1.0)
    shares = [share for _, share in seen]
    assert shares == sorted(shares)


def test_mistakes(make_trace: TraceMaker) -> None:
    trace = make_trace("counts")
    with pytest.raises(ValueError, match=r"^--ranks 0: give at least 1$"):
        epsim.replay(trace, "eplb", ranks=0)
    with pytest.raises(ValueError, match=r"^--device tpu: choose cpu, cuda$"):
        epsim.replay(trace, "eplb", ranks=4, device="tpu")
    with pytest.raises(ValueError, match="overlap and --expert-table say how times are predicted: give --hardware"):
        epsim.replay(trace, "eplb", ranks=4, overlap=True)
    with pytest.raises(ValueError, match="unknown placement 'no'"):
        epsim.plan(trace, "no", ranks=4)
    with pytest.raises(FileNotFoundError, match="nowhere: no such file"):
        epsim.load("nowhere")
    with pytest.raises(TypeError, match=r"replay\(\): missing a required argument: 'ranks'"):
        epsim.replay(trace, "eplb")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"replay\(\): got an unexpected keyword argument 'rank'"):
        epsim.replay(trace, "eplb", ranks=4, rank=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="nothing to compare"):
        epsim.compare()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": "4"}, "--ranks '4': give a whole number"),
        ({"ranks": 4.0}, "--ranks 4.0: give a whole number"),
        ({"ranks": [4]}, r"--ranks \[4\]: give a whole number"),
        ({"ranks": None}, "--ranks None: give a whole number"),
        ({"seed": True}, "--seed True: give a whole number"),
        ({"nodes": np.float64(1)}, r"--nodes .*1.0.*: give a whole number"),
        ({"plan_share": "half"}, "--plan-share 'half': give a number"),
        ({"overlap": 1, "hardware": "h200"}, "--overlap 1: give True or False"),
        ({"model": 1}, "--model 1: give a text"),
        ({"trace": 1}, "trace 1: give a text"),
        ({"policies": [None]}, "None is not a policy stack: give a text or a PolicyStack"),
    ],
)
def test_a_value_of_another_type(make_trace: TraceMaker, given: dict[str, Any], says: str) -> None:
    usual: dict[str, Any] = {"trace": make_trace("counts"), "policies": "eplb", "ranks": 4}
    with pytest.raises(ValueError, match=f"^{says}$"):
        epsim.replay(**usual | given)


def test_numbers_of_numpy_and_policies_of_any_iterable(make_trace: TraceMaker) -> None:
    trace, stacks = make_trace("tokens"), ("contiguous", "eplb+random")
    plain = epsim.replay(trace, stacks, ranks=4, nodes=2, redundant=4, seed=3, shared_cost=1.0)
    numbers = {"ranks": np.int64(4), "nodes": np.int32(2), "redundant": np.uint8(4), "seed": np.int64(3)}
    given: dict[str, Any] = {**numbers, "shared_cost": np.float32(1), "command": plain.data["setting"]["command"]}
    with_numpy = epsim.replay(trace, (text for text in stacks), **given)  # type: ignore[arg-type]
    assert with_numpy.data == plain.data


def examples(text: str, name: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(text, {"epsim": epsim}, name, None, 0)


PAGE = "\n".join(blocks(ROOT / "docs" / "python.md", "pycon"))


@pytest.mark.slow
def test_the_page_in_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = examples(PAGE, "python.md")
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(page) == (0, len(page.examples))
    assert len(page.examples) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load", "replay", "plan", "compare"])
def test_examples_of_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = examples(getattr(front, name).__doc__, name)
    assert doctest.DocTestRunner().run(found) == (0, len(found.examples))
    assert found.examples


@pytest.mark.parametrize("name", ["tune", "run"])
def test_examples_of_docstrings_that_take_long_are_those_of_the_page(name: str) -> None:
    page = {(example.source, example.want) for example in examples(PAGE, "python.md").examples}
    found = examples(getattr(front, name).__doc__, name).examples
    assert found
    assert {(example.source, example.want) for example in found} <= page
