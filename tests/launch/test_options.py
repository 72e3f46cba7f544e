"""Options of a run: one command line for launcher and workers, every mistake told before a process starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epsim.cli_run import parse_arguments
from epsim.launch.options import RunOptions
from epsim.launch.prepare import prepare
from epsim.traces.store import StoredTrace

TraceMaker = Callable[..., StoredTrace]


def test_the_workers_command_line_says_the_same(tmp_path: Path) -> None:
    options = RunOptions(
        "some trace.parquet", "tiny", ("best=eplb+lplb(counts=gathered)", "contiguous"), tmp_path / "a b", 5, 4, 2, 8,
        3, 1, "other.parquet", 0.25, 7, "torch", "cpu", "bfloat16", 9.5,
    )  # fmt: skip
    assert parse_arguments(options.arguments()) == options
    plain = RunOptions("sample", "tiny", ("eplb",), tmp_path)
    assert parse_arguments(plain.arguments()) == plain


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exchange", "smoke"], "--exchange smoke: choose auto, deep_ep, torch"),
        (["--device", "tpu"], "--device tpu: choose auto, cpu, cuda"),
        (["--steps", "0"], "--steps 0: give at least 1"),
        (["--timeout", "0"], "--timeout 0: give 1 to 3600 seconds"),
        (["--steps", "many"], "--steps"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_arguments(["sample", "--model", "tiny", "--policy", "eplb", "--out", "x", *arguments])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "huge"}, "unknown layer shape 'huge'"),
        ({"model": "qwen3-30b-a3b-layer"}, "128 experts, top-8; the trace 8, top-2"),
        ({"ranks": 4}, "--ranks 4, but 2 processes were started"),
        ({"redundant": 1}, "do not divide among 2 ranks: give --redundant 0 or 2"),
        ({"steps": 7}, "--steps 7: .* has 6 steps after the 6 that placements are planned on"),
        ({"layers": 3}, "--layers 3: the trace has 2"),
        ({"policies": ("eplb", "eplb")}, "--policy eplb is given twice"),
        ({"policies": ("eplb+nothing",)}, "unknown policy 'nothing'"),
        ({"trace": "nowhere.parquet"}, "no such file"),
    ],
)
def test_what_does_not_fit_the_trace(
    make_trace: TraceMaker, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    trace = make_trace("tokens", steps=12)
    options: dict[str, Any] = {"trace": str(trace.path), "model": "tiny", "policies": ("eplb",), "out": tmp_path}
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        prepare(RunOptions(**options | changed), 2)


def test_counts_are_too_coarse_to_run(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("counts")
    with pytest.raises(ValueError, match=r"needs tokens, the trace holds counts only: draw tokens .* synthesize"):
        prepare(RunOptions(str(trace.path), "tiny", ("eplb",), tmp_path), 2)


def test_tokens_go_to_the_ranks_that_a_replay_gives_them(make_trace: TraceMaker, tmp_path: Path) -> None:
    """Four source ranks folded to two; the first layers alone; the steps after those planned on."""
    trace = make_trace("tokens", steps=6, ranks=4, tokens=8)
    options = RunOptions(str(trace.path), "tiny", ("eplb",), tmp_path, steps=2, layers=1)
    prepared = prepare(options, 2)
    (block,) = prepared.blocks()
    assert block.steps.tolist() == [3, 4]
    assert block.source_rank.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert prepared.max_tokens == 4
    (whole,) = trace.blocks(3, 5)
    assert block.expert_ids[:, 0].tolist() == whole.expert_ids[:, 0].tolist()  # type: ignore[union-attr]
    (later,) = prepared.blocks(1)
    assert later.steps.tolist() == [4]


def test_ranks_tell_other_work_by_its_fingerprint(make_trace: TraceMaker, tmp_path: Path) -> None:
    def print_of(trace: StoredTrace, **more: Any) -> str:
        return prepare(RunOptions(str(trace.path), "tiny", ("eplb",), tmp_path, **more), 2).fingerprint

    one, other = make_trace("tokens"), make_trace("tokens", seed=1, name="other.parquet")
    assert print_of(one) == print_of(one)
    assert len({print_of(one), print_of(other), print_of(one, steps=2), print_of(one, layers=1)}) == 4
