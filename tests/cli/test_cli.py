"""The commands as a user types them: answers, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epsim.results import check_results
from epsim.traces.store import StoredTrace
from tests.conftest import Epsim, TraceMaker

CLUSTER = ["--ranks", "4", "--redundant", "4"]


def test_replay_prints_a_table_and_writes_the_report(epsim: Epsim, make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", shared_cost=1.0)
    out = tmp_path / "out"
    code, printed, err = epsim(
        "replay",
        trace.path,
        *CLUSTER,
        "--nodes",
        "2",
        "--policy",
        "eplb",
        "--policy",
        "best=eplb+lplb+waterfill",
        "--out",
        out,
    )
    assert (code, err) == (0, "")
    results = json.loads((out / "results.json").read_text())
    check_results(results)
    assert sorted(p.name for p in out.iterdir()) == ["pictures", "report.html", "report.md", "results.json"]
    assert [entry.get("name") for entry in results["stacks"]] == [None, "best"]
    assert results["verdict"] in " ".join(printed.split())
    for entry in results["stacks"]:
        assert f"{entry['metrics']['max_over_mean']['mean']:.3f}" in printed
    assert "peak / mean" in printed  # the formula beside the figure
    assert results["setting"]["command"].startswith("epsim replay ")


def test_json_output_is_results_json(epsim: Epsim, make_trace: TraceMaker) -> None:
    code, printed, _ = epsim("replay", make_trace("counts").path, *CLUSTER, "--policy", "eplb", "--json")
    assert code == 0
    check_results(json.loads(printed))


def test_history_and_hindsight(epsim: Epsim, make_trace: TraceMaker) -> None:
    trace, other = make_trace("counts"), make_trace("counts", seed=1, name="other.parquet")
    for history, word in ((other.path, "planned on other.parquet"), (trace.path, "hindsight")):
        arguments = ("replay", trace.path, *CLUSTER, "--policy", "eplb", "--history", history, "--json")
        code, printed, _ = epsim(*arguments)
        assert code == 0
        results = json.loads(printed)
        assert word in results["setting"]["history"]
        assert results["trace"]["steps_scored"] == trace.num_steps


@pytest.mark.parametrize("format_name", ["sglang", "vllm", "trtllm", "epsim"])
def test_plan_writes_a_file(epsim: Epsim, make_trace: TraceMaker, tmp_path: Path, format_name: str) -> None:
    path = tmp_path / "placement.json"
    code, printed, err = epsim(
        "plan", make_trace("counts").path, *CLUSTER, "--placement", "eplb", "-o", path, "--format", format_name
    )
    assert (code, err) == (0, "")
    assert path.stat().st_size > 0
    assert str(path) in printed


def test_import_show_and_synthesize(epsim: Epsim, tmp_path: Path) -> None:
    source, stored, drawn = tmp_path / "counts.json", tmp_path / "t.parquet", tmp_path / "d.parquet"
    counts = [[[5, 1, 2, 0], [0, 0, 0, 0]], [[1, 1, 3, 3], [0, 0, 0, 0]]]
    source.write_text(json.dumps({"logical_count": counts}))
    code, _, err = epsim("traces", "import", source, "-o", stored, "--top-k", "2")
    assert (code, err) == (0, "")
    code, printed, _ = epsim("traces", "show", stored)
    assert code == 0
    assert "recorded" in printed
    assert "dense" in printed
    code, _, err = epsim(
        "traces",
        "synthesize",
        stored,
        "-o",
        drawn,
        "--steps",
        "3",
        "--step-tokens",
        "32",
        "--ranks",
        "4",
        "--seed",
        "1",
    )
    assert (code, err) == (0, "")
    trace = StoredTrace(drawn)
    assert (trace.meta.origin, trace.meta.level, trace.num_steps) == ("drawn", "tokens", 3)


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch executed",))


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Hostile input by name: the file, and a word its error must hold."""

    def file(name: str, content: bytes | str) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def counts(values: Any) -> str:
        return json.dumps({"logical_count": values})

    ids = folder / "ids.npy"
    np.save(ids, np.array([[[0, 1]], [[2, 9]]], dtype=np.int16))
    return {
        "missing": (folder / "missing.json", "missing.json"),
        "empty": (file("empty.json", ""), "empty.json"),
        "truncated": (file("truncated.json", counts([[[1, 2]]])[:-6]), "truncated.json"),
        "truncated parquet": (file("cut.parquet", b"PAR1" + b"\0" * 50), "cut.parquet"),
        "pickle with code": (file("code.pt", pickle.dumps(Code())), "code.pt"),
        "garbage": (file("garbage.bin", bytes(range(256)) * 8), "garbage.bin"),
        "nan": (file("nan.json", '{"logical_count": [[[1, NaN, 2, 3]]]}'), "nan.json"),
        "negative": (file("negative.json", counts([[[1, -1, 2, 3]]])), "negative"),
        "fractional": (file("fraction.json", counts([[[1, 0.5, 2, 3]]])), "fraction.json"),
        "ragged": (file("ragged.json", counts([[[1, 2, 3, 4], [1, 2, 3]]])), "ragged.json"),
        "out of range": (ids, "--experts 8"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "missing", "empty", "truncated", "truncated parquet", "pickle with code", "garbage", "nan", "negative",
        "fractional", "ragged", "out of range",
    ],
)  # fmt: skip
def test_bad_files(epsim: Epsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    path, word = bad_files(tmp_path)[name]
    out = tmp_path / "out"
    code, printed, err = epsim(
        "replay", path, *CLUSTER, "--policy", "contiguous", "--top-k", "2", "--experts", "8", "--out", out
    )
    assert code == 2
    assert printed == ""
    assert err.startswith("epsim: ")
    assert err.count("\n") == 1
    assert word in err
    assert not out.exists() or not list(out.iterdir())
    assert not (tmp_path / "executed").exists()
    code, _, err = epsim(
        "traces", "import", path, "-o", tmp_path / "imported.parquet", "--top-k", "2", "--experts", "8"
    )
    assert code == 2
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("*imported*"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ranks", "4", "--policy", "eblp"], "eplb"),
        (["--ranks", "4", "--policy", "eplb+lplb(tol=1)"], "tol"),
        (["--ranks", "4", "--policy", "eplb+contiguous"], "two policies"),
        (["--ranks", "4", "--policy", ""], "empty"),
        (["--ranks", "4", "--policy", "a+b=eplb"], "a+b"),
        (["--ranks", "3", "--policy", "eplb"], "--redundant"),
        (["--ranks", "0", "--policy", "eplb"], "--ranks"),
        (["--ranks", "4", "--nodes", "5", "--policy", "eplb"], "--nodes"),
        (["--ranks", "4", "--redundant", "-4", "--policy", "eplb"], "--redundant"),
        (["--ranks", "4", "--policy", "eplb", "--policy", "eplb"], "twice"),
        (["--ranks", "4"], "--policy"),
        (["--policy", "eplb"], "--ranks"),
        (["--ranks", "four", "--policy", "eplb"], "--ranks"),
        (["--ranks", "4", "--policy", "eplb", "--wrong"], "--wrong"),
        (["--ranks", "4", "--policy", "eplb", "--shared-cost", "-1"], "--shared-cost"),
        (["--ranks", "4", "--policy", "eplb", "--shared-cost", "nan"], "--shared-cost"),
        (["--ranks", "4", "--policy", "eplb", "--plan-share", "0"], "--plan-share"),
        (["--ranks", "4", "--policy", "eplb", "--out", "/dev/null"], "--out"),
    ],
)
def test_bad_options(epsim: Epsim, make_trace: TraceMaker, arguments: list[str], word: str) -> None:
    code, printed, err = epsim("replay", make_trace("counts").path, *arguments)
    assert code == 2
    assert printed == ""
    assert err.count("\n") == 1
    assert word in err


@pytest.mark.parametrize("command", [[], ["traces"], ["model"]])
def test_no_arguments_show_the_help(epsim: Epsim, command: list[str]) -> None:
    code, printed, err = epsim(*command)
    assert (code, err) == (0, "")
    assert "Commands:" in printed


@pytest.mark.parametrize("command", [["frobnicate"], ["traces", "frobnicate"], ["plan"]])
def test_bad_commands(epsim: Epsim, command: list[str]) -> None:
    code, _, err = epsim(*command)
    assert code == 2
    assert err.count("\n") == 1


def test_too_coarse_a_trace_names_the_way_out(epsim: Epsim, make_trace: TraceMaker) -> None:
    code, _, err = epsim("replay", make_trace("counts").path, *CLUSTER, "--policy", "eplb+random")
    assert code == 2
    assert "epsim traces synthesize" in err


def test_version_and_interrupt() -> None:
    done = subprocess.run([sys.executable, "-m", "epsim.cli", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("epsim ")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ranks", "1000000", "--policy", "eplb"], "--ranks"),
        (["--ranks", "4", "--redundant", str(10**12), "--policy", "eplb"], "--redundant"),
        (["--ranks", "4", "--policy", "eplb", "--seed", "-1"], "--seed"),
        (["--ranks", "4", "--policy", "eplb", "--seed", str(2**63)], "--seed"),
        (["--ranks", "4", "--policy", "eplb", "--shared-cost", "1e308"], "--shared-cost"),
        (["--ranks", "4", "--policy", "a\x1b[31m=eplb"], "printable characters"),
        (["--ranks", "4", "--policy", "x" * 99 + "=eplb"], "1 to 60"),
        (["--ranks", "4", "--policy", "eplb" * 9999], "unknown policy"),
        (["--ranks", "4", "--policy", "eplb", "--out", "/dev/null/x"], "--out"),
    ],
)
def test_hostile_options(epsim: Epsim, make_trace: TraceMaker, arguments: list[str], word: str) -> None:
    code, printed, err = epsim("replay", make_trace("counts").path, *arguments)
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert word in err
    assert len(err) < 800
    assert err.strip().isprintable()


def test_an_output_that_takes_no_more(make_trace: TraceMaker) -> None:
    words = [sys.executable, "-m", "epsim.cli", "traces", "show", str(make_trace("counts").path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "epsim: standard output: No space left on device: direct it elsewhere\n"


def test_a_pipe_as_target_stays_a_pipe(epsim: Epsim, make_trace: TraceMaker, tmp_path: Path) -> None:
    trace, pipe = make_trace("counts"), tmp_path / "pipe"
    os.mkfifo(pipe)
    for command in (["traces", "import"], ["traces", "synthesize"], ["plan", "--ranks", "4"]):
        code, _, err = epsim(*command, trace.path, "-o", pipe)
        assert code == 2
        assert "a device or pipe" in err
    assert pipe.is_fifo()
    code, _, err = epsim("traces", "synthesize", trace.path, "-o", trace.path)
    assert (code, "is also a source" in err) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_command_leaves_nothing(make_trace: TraceMaker, tmp_path: Path, number: int) -> None:
    trace, out = make_trace("counts"), tmp_path / "out"
    out.mkdir()
    arguments = ["traces", "synthesize", trace.path, "-o", out / "t", "--steps", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "epsim.cli", *map(str, arguments)],
        stderr=subprocess.DEVNULL,
        # Ctrl-C is ignored where tests run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 60
    while not list(out.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not list(out.iterdir())


def test_output_cut_short_is_no_error(make_trace: TraceMaker) -> None:
    command = f"{sys.executable} -m epsim.cli traces show {make_trace('counts').path}"
    for rest in ("| true", ">&-"):
        done = subprocess.run(f"{command} {rest}", shell=True, capture_output=True, text=True)
        assert done.stderr == ""
