"""`epsim tune` as a user types it: answers and files, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from epsim.results import check_results
from tests.conftest import Epsim
from tests.tune.cases import MakeCounts, hot

STATIONARY = np.tile(hot(0), (40, 1))


@pytest.fixture
def asked(make_counts: MakeCounts, model: Path) -> list[str]:
    trace = make_counts(STATIONARY)
    return ["tune", str(trace.path), "--model", str(model), "--hardware", "h200", "--policy", "eplb"]


def test_answers_are_printed_and_written(epsim: Epsim, asked: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, printed, err = epsim(*asked, "--gpus", "4", "--redundant", "0", "--memory-per-gpu", "141GB", "--out", out)
    assert (code, err) == (0, "")
    assert sorted(path.name for path in out.iterdir() if path.suffix != ".png")[-1] == "results.json"
    results = json.loads((out / "results.json").read_text())
    check_results(results)
    one_line = " ".join(printed.split())
    assert results["verdict"] in one_line
    for line in results["tune"]["words"]:
        assert " ".join(line["text"].split()) in one_line
    for one in results["tune"]["answers"]:
        for command in one["commands"]:
            assert command in printed  # not wrapped, to be pasted
    assert results["setting"]["command"].startswith("epsim tune ")


def test_to_paste_stands_beside_the_commands(epsim: Epsim, asked: list[str]) -> None:
    code, printed, _ = epsim(*asked, "--gpus", "16", "--redundant", "0")
    assert code == 0
    lines = printed.splitlines()
    number = next(n for n, line in enumerate(lines) if line.startswith("to paste: "))
    assert [line.split()[0] for line in lines[number + 1 : -1]] == ["python", "vllm"]
    assert "cluster: 16 GPUs on 2 nodes" in lines


def test_json_is_results_json(epsim: Epsim, asked: list[str]) -> None:
    code, printed, _ = epsim(*asked, "--gpus", "4", "--redundant", "0", "--json")
    assert code == 0
    results = json.loads(printed)
    check_results(results)
    gains = {row["name"]: row["gain"] for row in results["tune"]["candidates"]}
    assert gains["eplb r0"]["mean"] > 0.5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "11"], "11 ranks on 2 nodes"),
        (["--gpus", "6", "--redundant", "1"], "do not divide among 6 ranks"),
        (["--gpus", "4", "--memory-per-gpu", "100MB"], "give more --gpus or --memory-per-gpu"),
        (["--gpus", "4", "--memory-per-gpu", "1MB"], "MB of 1 MB are for weights"),
        (["--gpus", "4", "--memory-per-gpu", "much"], "--memory-per-gpu much"),
        (["--gpus", "4", "--kv-share", "1"], "--kv-share"),
        (["--gpus", "4", "--hardware", "h9000"], "--hardware h9000: give one of"),
        (["--gpus", "4", "--model", "deepseek-v9"], "--model deepseek-v9: give one of"),
        (["--gpus", "4", "--model", "qwen3-30b-a3b"], "128 experts, top-8; the trace has 16, top-2"),
        (["--gpus", "4", "--policy", "best"], "unknown policy 'best'"),
        (["--gpus", "4", "--policy", "eplb+oea(k0=1)"], "--quality-loss"),
        (["--gpus", "4", "--interval", "1000"], "--interval 1000"),
        (["--gpus", "4", "--worth", "2"], "--worth"),
        (["--gpus", "4", "--rebalance-layer-ms", "-1"], "--rebalance-layer-ms"),
        (["--gpus", "4", "--nodes", "3"], "4 ranks on 3 nodes"),
    ],
)
def test_mistakes_cost_one_line(epsim: Epsim, asked: list[str], tmp_path: Path, more: list[str], words: str) -> None:
    out = tmp_path / "out"
    code, printed, err = epsim(*asked, *more, "--out", out)
    assert (code, printed) == (2, "")
    assert err.startswith("epsim: ")
    assert err.count("\n") == 1
    assert words in err
    assert not out.exists() or not list(out.iterdir())


def test_a_missing_trace_and_a_recording_of_one_step(epsim: Epsim, model: Path, tmp_path: Path) -> None:
    code, _, err = epsim("tune", tmp_path / "none.parquet", "--model", model, "--hardware", "h200", "--gpus", "4")
    assert (code, err.count("\n")) == (2, 1)
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"logical_count": [[4] * 16, [4] * 16]}))
    code, _, err = epsim("tune", counts, "--model", model, "--hardware", "h200", "--gpus", "4", "--top-k", "2")
    assert code == 2
    assert "holds 1 step," in err


def test_the_plan_command_reads_the_trace_as_tune_did(
    epsim: Epsim, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--gpus", "4", "--redundant", "0", "--min-tokens", "3", "--phase", "prefill", "--json"]
    code, printed, _ = epsim(*asked, *more)
    assert code == 0
    command = next(one for one in json.loads(printed)["tune"]["answers"] if one["for"] == "sglang")["commands"][0]
    assert "--min-tokens 3 --phase prefill" in command
    monkeypatch.chdir(tmp_path)
    code, printed, err = epsim(*shlex.split(command)[1:])
    assert (code, err) == (0, "")
    assert printed.startswith("placement-sglang.json: eplb for 4 ranks, 16 slots a layer")


def test_an_empty_layer_is_no_hindrance(epsim: Epsim, make_counts: MakeCounts, model: Path) -> None:
    from epsim.traces.store import StoredTrace, TraceWriter
    from epsim.traces.trace import CountsBlock

    trace = make_counts(STATIONARY)
    block = next(iter(trace.blocks()))
    assert isinstance(block, CountsBlock)
    block.counts[:, 1] = 0
    block.counts[3] = 0
    path = trace.path.with_name("holes.parquet")
    with TraceWriter(path, trace.meta) as writer:
        writer.append(block)
    assert StoredTrace(path).num_steps == 40
    arguments = ("--hardware", "h200", "--gpus", "4", "--policy", "eplb", "--redundant", "0", "--json")
    code, printed, err = epsim("tune", path, "--model", model, *arguments)
    assert (code, err) == (0, "")
    gains = {row["name"]: row["gain"] for row in json.loads(printed)["tune"]["candidates"]}
    assert gains["eplb r0"]["low"] > 0.5


@pytest.mark.parametrize("policy", ["eplb", "contiguous"])
def test_experts_that_do_not_divide_among_the_gpus(
    epsim: Epsim, make_counts: MakeCounts, model: Path, policy: str
) -> None:
    """The baseline has redundant experts then, which vLLM has with EPLB alone."""
    trace = make_counts(np.full_like(STATIONARY, 1 / STATIONARY.shape[1]))
    words = ["tune", trace.path, "--model", model, "--hardware", "h200", "--gpus", "3", "--worth", "0.9"]
    code, printed, err = epsim(*words, "--policy", policy, "--json")
    assert (code, err) == (0, "")
    results = json.loads(printed)
    vllm = next(one for one in results["tune"]["answers"] if one["for"] == "vllm")
    said = next(one["text"] for one in results["tune"]["words"] if one["about"] == "vLLM")
    assert not vllm["advised"]
    assert "has no redundant experts without EPLB" in said
    if policy == "contiguous":
        assert said.endswith("it cannot run the baseline.")
        assert vllm["commands"] == []
    else:
        assert said.endswith(f"its own baseline is {vllm['name']}.")
        assert vllm["name"].startswith("eplb")
        assert f'"num_redundant_experts": {vllm["redundant"]}' in vllm["commands"][0]
        assert vllm["redundant"] > 0
