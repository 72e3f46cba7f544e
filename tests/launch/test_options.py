"""Options of a run: one command line for launcher and workers, every mistake told before a process starts."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException

from epsim.files import check_out
from epsim.launch import torchrun
from epsim.launch.folder import clear, clear_logs
from epsim.launch.inline import run_inline
from epsim.launch.member import Member
from epsim.launch.options import RunOptions
from epsim.launch.prepare import prepare
from epsim.launch.rank import first_difference, work_of
from epsim.launch.store import connect, serve
from epsim.models.shapes import SHAPES, LayerShape
from epsim.options import parameters, parse_words
from epsim.traces.store import StoredTrace

TraceMaker = Callable[..., StoredTrace]
CONFIG = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
}  # fmt: skip


def test_the_workers_command_line_says_the_same(tmp_path: Path) -> None:
    options = RunOptions(
        "some trace.parquet", ("best=eplb+lplb(counts=gathered)", "contiguous"), model="tiny", out=tmp_path / "a b",
        steps=5, ranks=4, nodes=2, redundant=8, groups=3, layers=1, history="other.parquet", plan_share=0.25, seed=7,
        exchange="torch", device="cpu", dtype="bfloat16", timeout=9.5, hardware="h200", text="a text", sequence=100,
        context=32, launcher="ray",
    )  # fmt: skip
    assert len(options.arguments()) == 1 + 2 * (len(parameters(RunOptions)) - 1 + 1), "an option is left out"
    assert parse_words(RunOptions, options.arguments()) == options
    plain = RunOptions("sample", ("eplb",), model="tiny", out=tmp_path)
    assert plain.arguments() == ["sample", "--model", "tiny", "--policy", "eplb", "--out", str(tmp_path)]
    assert parse_words(RunOptions, plain.arguments()) == plain


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exchange", "smoke"], "--exchange smoke: choose auto, deep_ep, torch"),
        (["--device", "tpu"], "--device tpu: choose auto, cpu, cuda"),
        (["--launcher", "moon"], "--launcher moon: choose inline, torchrun, ray"),
        (["--steps", "0"], "--steps 0: give at least 1"),
        (["--timeout", "0"], "--timeout 0.0: give at least 1"),
        (["--steps", "many"], "--steps"),
        (["--seed", "-1"], "--seed -1: give at least 0"),
        (["--redundant", "1000000000"], "--redundant 1000000000: give at most 65536"),
        (["--ranks", "1000000000"], "--ranks 1000000000: give at most 65536"),
        (["--context", "0"], "--context 0: give at least 1"),
        (["--device", "cuda", "--dtype", "float32"], "--dtype float32: on GPUs experts compute in bfloat16"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_words(RunOptions, ["sample", "--model", "tiny", "--policy", "eplb", "--out", "x", *arguments])


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
        ({"policies": ("eplb+topk-channels(0.2)",)}, "a run reads whole experts: leave topk-channels out"),
        ({"trace": "nowhere.parquet"}, "no such file"),
        ({"hardware": "abacus"}, "--hardware abacus: give one of"),
        ({"text": "some.txt"}, "--text, --sequence and --context are for a trained model"),
        ({"policies": ("eplb+oea(k0=1)",)}, "router oea needs router scores, and .* holds none"),
    ],
)
def test_what_does_not_fit_the_trace(
    make_trace: TraceMaker, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    trace = make_trace("tokens", steps=12)
    options: dict[str, Any] = {"trace": str(trace.path), "model": "tiny", "policies": ("eplb",), "out": tmp_path}
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        prepare(RunOptions(**options | changed), 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "damaged"),
        ("[]", "not a table of settings"),
        ("{}", "has no hidden_size"),
        (json.dumps(CONFIG | {"num_experts": "8"}), "num_experts of the model's config is '8', not a whole number"),
        (json.dumps(CONFIG | {"hidden_size": 0}), "hidden is 0, give at least 1"),
        (json.dumps(CONFIG | {"num_experts_per_tok": -2}), "top_k is -2, give at least 1"),
    ],
)
def test_a_model_that_is_none(make_trace: TraceMaker, tmp_path: Path, config: str, words: str) -> None:
    trace, model = make_trace("tokens", steps=4), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(config)
    with pytest.raises(ValueError, match=words):
        prepare(RunOptions(str(trace.path), ("eplb",), model=str(model), out=tmp_path / "out"), 2)


def test_a_router_policy_finds_no_decode_step(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", phase="prefill")
    with pytest.raises(ValueError, match=r"router oea acts on decode steps, and .* has phase prefill"):
        prepare(RunOptions(str(trace.path), ("eplb+oea(k0=1)",), model="tiny", out=tmp_path), 2)


def test_steps_without_a_token(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=3, tokens=0)
    with pytest.raises(ValueError, match="no token in the 2 steps to run"):
        prepare(RunOptions(str(trace.path), ("contiguous", "eplb"), model="tiny", out=tmp_path, plan_share=0.3), 2)


def test_times_are_predicted_for_the_layers_that_run(make_trace: TraceMaker, tmp_path: Path) -> None:
    """Weights of the shape, nothing beside the layers, the kernels that runs use."""
    trace = make_trace("tokens", shared_cost=0.5)
    timing = prepare(RunOptions(str(trace.path), ("eplb",), model="tiny", out=tmp_path, hardware="h200"), 2).timing
    assert timing is not None
    assert (timing.kernels, timing.hardware.name, timing.model.moe_layers) == ("normal", "H200", 2)
    assert (timing.model.expert_bytes, timing.model.shared_cost) == (3 * 64 * 32 * 2, 0.5)
    assert timing.rest_us(torch.tensor([100.0])).tolist() == [0.0]


@pytest.mark.parametrize(("cost", "width"), [(0.0, 0), (0.01, 8), (0.5, 16), (0.6, 16), (1.0, 32)])
def test_a_shared_expert_as_wide_as_gpus_take_it(
    make_trace: TraceMaker, tmp_path: Path, cost: float, width: int
) -> None:
    trace = make_trace("tokens", shared_cost=cost)
    prepared = prepare(RunOptions(str(trace.path), ("eplb",), model="tiny", out=tmp_path), 2)
    assert prepared.shape.shared_intermediate == width
    noted = [f"shared cost {width / 32:g} of tiny, not the trace's {cost:g}"] if width != cost * 32 else []
    assert list(prepared.notes) == noted


def test_what_an_earlier_run_left_goes_and_nothing_else(tmp_path: Path) -> None:
    written = [
        "results.json",
        "predicted.json",
        "routed-0.parquet",
        "routed-11.parquet",
        "telemetry/rank-00007.parquet",
    ]
    written += ["telemetry/rank-00008.arrows", "telemetry/rank-00008.place", "logs/epsim-17_x/attempt_0/0/stderr.log"]
    others = ["trace.parquet", "report.html", "telemetry/notes.txt", "telemetry/rank-1.parquet", "logs/mine.log"]
    for name in (*written, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    there = RunOptions("sample", ("eplb",), model="tiny", out=tmp_path)
    for inputs in ({"trace": "routed-11.parquet"}, {"history": "telemetry"}, {"text": "results.json"}, {"trace": "."}):
        path: dict[str, Any] = {name: str(tmp_path / at) for name, at in inputs.items()}
        with pytest.raises(
            ValueError, match="is part of the earlier run in it, which would be removed: give another folder"
        ):
            clear(dataclasses.replace(there, **path))
    assert all((tmp_path / name).exists() for name in written)
    clear(dataclasses.replace(there, trace=str(tmp_path / "trace.parquet")))
    assert (tmp_path / written[-1]).exists()
    clear_logs(tmp_path)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(others)
    clear(dataclasses.replace(there, out=tmp_path / "nothing here"))
    clear_logs(tmp_path / "nothing here")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set: start this by torchrun"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a whole number"),
        ({"RANK": "2"}, "RANK is 2, and WORLD_SIZE 2: ranks are 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1"}, "RANK is '-1', not a whole number"),
        ({"EPSIM_STORE": "here"}, "EPSIM_STORE is 'here', not HOST:PORT"),
    ],
)
def test_an_environment_that_is_not_torchruns(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], words: str
) -> None:
    sound = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    for name, value in (sound | changed).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        Member.from_environment()


def test_where_no_store_can_be() -> None:
    with pytest.raises(OSError, match=r"to be on nowhere\.invalid: no such host"):
        connect("nowhere.invalid", 29400)
    held = serve("127.0.0.1")
    with pytest.raises(OSError, match=r"port \d+ of 127\.0\.0\.1 cannot be opened"):
        serve("127.0.0.1", held.port)


def test_counts_are_too_coarse_to_run(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("counts")
    with pytest.raises(
        ValueError, match=r"needs tokens, but the trace holds only counts: draw a trace of tokens .* synthesize"
    ):
        prepare(RunOptions(str(trace.path), ("eplb",), model="tiny", out=tmp_path), 2)


def test_tokens_go_to_the_ranks_that_a_replay_gives_them(make_trace: TraceMaker, tmp_path: Path) -> None:
    """Four source ranks folded to two; the first layers alone; the steps after those planned on."""
    trace = make_trace("tokens", steps=6, ranks=4, tokens=8)
    options = RunOptions(str(trace.path), ("eplb",), model="tiny", out=tmp_path, steps=2, layers=1)
    prepared = prepare(options, 2)
    (block,) = prepared.blocks()
    assert block.steps.tolist() == [3, 4]
    assert block.source_rank.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert prepared.max_tokens == 4
    (whole,) = trace.blocks(3, 5)
    assert block.expert_ids[:, 0].tolist() == whole.expert_ids[:, 0].tolist()  # type: ignore[union-attr]
    (later,) = prepared.blocks(1)
    assert later.steps.tolist() == [4]


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("/dev/full", "--out /dev/full: is a file; give a folder"),
        ("/dev/full/x", "--out /dev/full/x: not a directory: give another folder"),
        ("", "--out names no folder: give one"),
        ("given", r"--out .*/given: is a file; give a folder"),
        ("taken", r".*/taken/results.json is a folder: give a file to write to"),
    ],
)
def test_where_results_cannot_be_written(tmp_path: Path, out: str, words: str) -> None:
    """Told alike by the launcher and by a worker that another launcher started."""
    (tmp_path / "given").touch()
    (tmp_path / "taken" / "results.json").mkdir(parents=True)
    folder = tmp_path / out if out in ("given", "taken") else out
    options = RunOptions("sample", ("contiguous",), model="tiny", out=folder, layers=1, steps=1)
    with pytest.raises(ValueError, match=words):
        check_out(options.out)
    with pytest.raises(ValueError, match=words):
        run_inline(options)


def test_ranks_tell_other_work_by_its_fingerprint(make_trace: TraceMaker, tmp_path: Path) -> None:
    def print_of(trace: StoredTrace, **more: Any) -> str:
        return prepare(RunOptions(str(trace.path), ("eplb",), model="tiny", out=tmp_path, **more), 2).fingerprint

    one, other = make_trace("tokens"), make_trace("tokens", seed=1, name="other.parquet")
    assert print_of(one) == print_of(one)
    assert len({print_of(one), print_of(other), print_of(one, steps=2), print_of(one, layers=1)}) == 4


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"steps": 2}, "2 steps to run and rank 0 3 steps to run: give every rank the same trace and the same options"),
        ({"layers": 1}, "another trace, or other layers of it than rank 0"),
        ({"policies": ("eplb-global",)}, "other policies than rank 0"),
        ({"seed": 1}, "--seed 1 and rank 0 --seed 0"),
        ({"redundant": 2}, "--redundant 2 and rank 0 --redundant 0"),
        ({"nodes": 2}, "--nodes 2 and rank 0 --nodes 1"),
        ({"model": "wide"}, "another model than rank 0"),
    ],
)
def test_ranks_with_other_options_are_told(
    make_trace: TraceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    """Weights, draws and places would be others, and every output wrong."""
    monkeypatch.setitem(SHAPES, "wide", LayerShape("wide", 128, 32, 8, 2))
    given: dict[str, Any] = {"trace": str(make_trace("tokens").path), "model": "tiny", "policies": ("eplb",)}
    one, other = (prepare(RunOptions(out=tmp_path, **given | more), 2) for more in ({}, changed))
    said = first_difference([work_of(one), work_of(one), work_of(other)])
    assert said.startswith(f"rank 2 has {words}" if words else "")
    assert bool(said) is bool(words)


@pytest.mark.parametrize("stopping", [signal.SIGTERM, signal.SIGINT])
def test_a_job_stopped_before_its_ranks_met(
    make_trace: TraceMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stopping: signal.Signals,
) -> None:
    def stopped(*given: Any) -> Any:
        raise SignalException("stopped", stopping)

    monkeypatch.setattr(torchrun, "elastic_launch", stopped)
    monkeypatch.setattr(torchrun, "_end_those_that_cannot", lambda *given: None)
    before = dict(os.environ)
    with pytest.raises(SystemExit) as ended:
        torchrun.run_torchrun(
            RunOptions(str(make_trace("tokens").path), ("eplb",), model="tiny", out=tmp_path, ranks=2)
        )
    assert ended.value.code == 128 + stopping
    assert dict(os.environ) == before  # a later worker in this process would read the variables for workers
    words = f"stopped by {stopping.name} in phase setup, before any rank sent a heartbeat"
    assert capsys.readouterr().err == f"epsim: {words}\n"
