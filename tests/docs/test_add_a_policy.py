"""docs/add-a-policy.md from nothing: the package that the page shows is written, installed and used by its commands."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epsim.placement.base import Cluster, Placement
from epsim.policies.base import Batch, RouterWork, SharedWork
from epsim.policies.copies import Copies
from epsim.policies.registry import kinds
from tests.docs.blocks import ROOT, commands

PAGE = ROOT / "docs" / "add-a-policy.md"
CLASSES = {"greedy": "Greedy", "min_share": "MinShare", "by_slack": "BySlack", "below_mean": "BelowMean",
           "strong_channels": "StrongChannels"}  # fmt: skip
NAMES = [name.replace("_", "-") for name in CLASSES]
OPTIONS = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
Call = Callable[..., subprocess.CompletedProcess[str]]


def write_package(folder: Path) -> Path:
    """The files of the page, each in a block ```LANGUAGE file=PATH."""
    for found in re.finditer(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        path = folder / found[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found[2], encoding="utf-8")
    return folder


def by_hand(package: Path, target: Path) -> Path:
    """What `pip install --target` leaves, in short."""
    shutil.copytree(package / "my_policies", target / "my_policies")
    entries = (package / "pyproject.toml").read_text().split('[project.entry-points."epsim.policies"]\n')[1]
    lines = entries.split("\n\n")[0].replace('"', "")
    info = target / "my_policies-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[epsim.policies]\n{lines}\n")
    return target


def caller(target: Path, folder: Path) -> Call:
    """call(*words) runs a module of Python in `folder`, where the package in `target` is installed."""
    path = os.pathsep.join([str(target), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def call(*words: str, cwd: Path = folder) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)

    return call


def policy(package: Path, module: str) -> Any:
    spec = importlib.util.spec_from_file_location(module, package / "my_policies" / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded  # where a dataclass looks for the names of its types
    try:
        spec.loader.exec_module(loaded)
    finally:
        del sys.modules[module]
    return getattr(loaded, CLASSES[module])


# The values of each example.


def test_greedy(tmp_path: Path) -> None:
    greedy = policy(write_package(tmp_path), "greedy")
    history = torch.tensor([[[9, 1, 1, 1]], [[1, 4, 8, 3]]])
    # Loads 10, 5, 9, 4: experts 0 and 2 are copied, and each rank has a copy of both.
    planned = greedy().plan(history, Cluster(num_ranks=2, num_redundant=2))
    assert planned.physical_to_logical.tolist() == [[0, 2, 3, 1, 0, 2]]
    # Loads 1, 4, 8, 3, without copies.
    planned = greedy(recent=1).plan(history, Cluster(num_ranks=2))
    assert planned.physical_to_logical.tolist() == [[2, 0, 1, 3]]
    with pytest.raises(ValueError, match=r"greedy: recent=-1: give 0 or more"):
        greedy(recent=-1)


def test_min_share(tmp_path: Path) -> None:
    router = policy(write_package(tmp_path), "min_share")
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.4, 0.35, 0.25]])
    scores = torch.cat([weights, torch.zeros(3, 1)], -1)
    ids = torch.arange(3).expand(3, 3)
    routed = router(0.3).route(RouterWork(scores, scores, ids, weights, torch.tensor([True, False, True])))
    assert routed.expert_ids.tolist() == [[0, 1, -1], [0, 1, 2], [0, 1, -1]]
    torch.testing.assert_close(routed.weights[0], torch.tensor([0.625, 0.375, 0.0]))
    assert torch.equal(routed.weights[1], weights[1])
    # The best expert stays, even where none reaches the share.
    assert router(0.9).route(RouterWork(scores, scores, ids, weights, torch.ones(3) > 0)).expert_ids[:, 0].tolist() == [
        0, 0, 0,
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"min-share: share=1: give a number between 0 and 1"):
        router(1)


def test_by_slack(tmp_path: Path) -> None:
    split = policy(write_package(tmp_path), "by_slack")
    # Expert 0 on both ranks; experts 1 and 2 on one; an empty slot.
    copies = Copies(Placement(torch.tensor([[0, 1, -1, 0, 2, -1]]), num_experts=3, num_ranks=2))
    fractions = split().fractions(torch.tensor([[100, 2, 8]]), copies)
    # Other loads 2 and 8: weights 1/3 and 1/9.
    torch.testing.assert_close(fractions, torch.tensor([[0.75, 1, 0, 0.25, 1, 0]], dtype=torch.float64))


def test_below_mean(tmp_path: Path) -> None:
    shared = policy(write_package(tmp_path), "below_mean")
    source = torch.tensor([0, 0, 0, 1, 2, 1])
    ids = torch.tensor([[[0, 1]], [[0, 1]], [[0, -1]], [[2, 2]], [[-1, -1]], [[2, 2]]])
    ranks = torch.tensor([[[1, 2]], [[1, 2]], [[1, -1]], [[0, 0]], [[-1, -1]], [[1, 2]]])
    local = torch.tensor([0, 1, 2, 0, 0, 1])
    batch = Batch(torch.tensor([0]), torch.tensor([3]), torch.zeros(6).long(), source, ids, local)
    routed = torch.tensor([[[6, 4, 5]]])
    nothing = torch.zeros(1, 1, 3, 3)
    work = SharedWork(1.0, 0, 2, 2, batch.steps, batch.layers, routed, nothing, nothing[0], source, batch, ranks)
    # Ranks 1 and 2 are light. Tokens take turns; own ranks count too; a token without experts has no rank.
    assert shared().token_ranks(work).tolist() == [[1], [2], [1], [1], [-1], [1]]
    heavy = dataclasses.replace(work, routed=torch.tensor([[[9, 1, 9]]]), expert_ranks=ranks.clamp(max=0))
    assert shared().token_ranks(heavy).tolist() == [[0], [0], [0], [1], [-1], [1]]


def test_strong_channels(tmp_path: Path) -> None:
    reader = policy(write_package(tmp_path), "strong_channels")
    tokens, active = torch.tensor([0, 4, 8]), torch.tensor([0, 4, 4])
    matrix = 10 * 20 * 2.0
    # A token needs half of the channels, two tokens three quarters.
    expected = torch.tensor([0, 4 * matrix * 2, 4 * matrix * 2.5], dtype=torch.float64)
    assert torch.equal(reader(0.5).bytes_read(tokens, active, 10, 20, 2.0, 8), expected)


# The package as it is used.


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Call]:
    """The folder of the package, installed by pip, and what runs commands there."""
    package = write_package(tmp_path_factory.mktemp("my-policies"))
    target = tmp_path_factory.mktemp("target")
    call = caller(target, package)
    done = call("pip", "install", *OPTIONS, "--target", str(target), ".")
    assert done.returncode == 0, done.stderr
    return package, call


def result(call: Call, command: str, out: Path) -> tuple[dict[str, Any], str]:
    """The results.json of the page's command that begins with `command`, and what it printed."""
    (line,) = [line for line in commands(PAGE) if line.startswith(f"epsim {command} ")]
    done = call("epsim.cli", *shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr
    return json.loads((out / "results.json").read_text()), done.stdout


def test_every_kind_has_an_example() -> None:
    text = PAGE.read_text("utf-8")
    table = text.split("| kind | what it decides |")[1].split("\n\n")[0]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == list(kinds())
    assert re.findall(r"^([\w-]+) = \"my_policies", text, re.MULTILINE) == NAMES


@pytest.mark.slow
def test_replay_and_its_report(used: tuple[Path, Call]) -> None:
    package, call = used
    results, _ = result(call, "replay", package / "replayed")
    metrics = {entry["stack"]: entry["metrics"] for entry in results["stacks"]}
    for stack, key, other in (
        ("greedy", "peak", "contiguous"),
        ("greedy+by-slack", "peak", "greedy"),
        ("greedy+below-mean", "peak", "greedy"),
        ("greedy+min-share(share=0.1)", "active_experts", "greedy"),
        ("greedy+strong-channels(share=0.3)", "bytes_read", "greedy"),
    ):
        assert metrics[stack][key]["mean"] < metrics[other][key]["mean"], stack
    assert metrics["greedy(recent=50)"]["peak"]["mean"] != metrics["greedy"]["peak"]["mean"]
    page, text = ((package / "replayed" / f"report.{form}").read_text() for form in ("html", "md"))
    for name in NAMES:
        assert name in page
        assert name in text
    for note in ("min-share acts on decode tokens alone", "assumed to choose channels independently"):
        assert note in text


@pytest.mark.slow
def test_loads_of_two_processes_are_those_of_a_replay(used: tuple[Path, Call]) -> None:
    package, call = used
    results, printed = result(call, "run", package / "measured")
    assert results["run"]["ranks"] == 2
    assert results["run"]["equals_replay"] is True
    assert "Measured loads are those of a replay, integer for integer" in printed
    stacks = "+".join(entry["stack"] for entry in results["stacks"])
    assert all(name in stacks for name in NAMES[:-1])


@pytest.mark.slow
def test_a_run_refuses_a_reader(used: tuple[Path, Call]) -> None:
    stack = "eplb+strong-channels(0.3)"
    words = ("run", "sample", "--model", "tiny", "--ranks", "1", "--device", "cpu", "--policy", stack, "--out", "none")
    done = used[1]("epsim.cli", *words)
    expected = "epsim: 'eplb+strong-channels(share=0.3)': a run reads whole experts: leave strong-channels out\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.slow
def test_tune_scores_them(used: tuple[Path, Call]) -> None:
    package, call = used
    results, _ = result(call, "tune", package / "tuned")
    scored = {one["stack"]: one["gain_choosing"] for one in results["tune"]["candidates"] if one["interval"] is None}
    gains = [scored[stack] for stack in ("greedy+by-slack+below-mean",
                                         "greedy+min-share(share=0.1)+strong-channels(share=0.3)")]  # fmt: skip
    assert all(isinstance(gain, float) and gain != 0 for gain in gains)
    assert len(set(gains)) == 2


@pytest.mark.slow
def test_sweep_and_its_report(used: tuple[Path, Call]) -> None:
    package, call = used
    results, _ = result(call, "sweep", package / "swept")
    assert results["kind"] == "sweep"
    (line,) = [line for line in commands(PAGE) if line.startswith("epsim report")]
    assert call("epsim.cli", *shlex.split(line)[1:]).returncode == 0
    text = (package / "pages" / "report.md").read_text()
    assert all(name in text for name in NAMES)


@pytest.mark.slow
def test_the_tests_of_all_policies_find_them(used: tuple[Path, Call]) -> None:
    chosen = " or ".join([*NAMES, "readers", "names_are_unique", "costs_less"])
    words = ("pytest", "tests/policies", "-k", chosen, "-vv", "-p", "no:cacheprovider")
    done = used[1](*words, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    for name in NAMES[:-1]:
        assert re.search(rf"\[[^\]]*{name}[^\]]*\] PASSED", done.stdout), name
    assert "test_readers_read_at_most_what_there_is PASSED" in done.stdout


# A package with a mistake.


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("pyproject.toml", "greedy:Greedy", "greedy:Gredy", "cannot be loaded (AttributeError: module"),
        (
            "my_policies/greedy.py",
            '= "greedy"',
            '= "eplb"',
            "there is another policy named 'eplb': uninstall the package",
        ),
        (
            "my_policies/greedy.py",
            "(PlacementPolicy)",
            "",
            "is not a policy: give a frozen dataclass with a name, derived",
        ),
        ("my_policies/greedy.py", "frozen=True, ", "", "is not a policy: write @dataclass(frozen=True)"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, file: str, old: str, new: str, says: str) -> None:
    package = write_package(tmp_path / "package")
    text = (package / file).read_text()
    assert text.count(old) == 1
    (package / file).write_text(text.replace(old, new))
    call = caller(by_hand(package, tmp_path / "target"), tmp_path)
    done = call("epsim.cli", "replay", "sample", "--ranks", "8", "--policy", "greedy")
    assert done.returncode == 2
    assert done.stderr.startswith("epsim: package my-policies 0.1: entry point greedy = my_policies.greedy:")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
