"""Whole runs as a user starts them: loads are a replay's, results are of the replay's schema."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from epsim.launch import rank as rank_module
from epsim.launch import worker
from epsim.launch.inline import run_inline
from epsim.launch.options import RunOptions
from epsim.placement.base import Cluster
from epsim.policies.base import Batch
from epsim.policies.copies import Copies
from epsim.policies.registry import kinds
from epsim.policies.splits import Even
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.results import read_results
from epsim.runtime.exchange.collectives import TorchExchange
from epsim.runtime.faults import Watch
from epsim.runtime.telemetry import read_telemetry
from epsim.score.formulas import METRICS
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import TokenBlock
from tests.launch.forked import run_forked
from tests.launch.processes import EPSIM, TORCHRUN, environment, run, survivors

TraceMaker = Callable[..., StoredTrace]
Epsim = Callable[..., tuple[int, str, str]]
POLICIES = [
    "contiguous",
    "eplb+random",
    "eplb+static",
    "eplb+lplb",
    "eplb+lplb(counts=gathered)+waterfill",
    "eplb+oea(k0=1)+lplb",
]
TIMED = {"bytes_read", "layer_time_us", "throughput_gain"}


def policies(texts: list[str]) -> list[str]:
    return [part for text in texts for part in ("--policy", text)]


def test_one_rank_in_this_process(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=4, shared_cost=1.0)
    done = run([*EPSIM, "run", trace.path, "--model", "tiny", *policies(["eplb"]), "--out", tmp_path / "out"])
    assert (done.code, done.err) == (0, "")
    assert "Measured loads are those of a replay, integer for integer" in done.out
    results = read_results(tmp_path / "out" / "results.json")
    assert results["run"]["exchange"] == "torch"
    assert (results["run"]["device"], results["run"]["dtype"]) == ("CPU", "float32")
    with pytest.raises(ValueError, match="--ranks 2: inline is one process, one rank; give --launcher torchrun"):
        run_inline(RunOptions("sample", ("eplb",), model="tiny", out=tmp_path / "x", ranks=2))


@dataclasses.dataclass(frozen=True, slots=True)
class Forgetful(Even):
    """Its runtime form loses the first expert of the first token; its quotas, which the replay uses, do not."""

    name: ClassVar[str] = "forgetful"

    def physical_ids(
        self, batch: Batch, rank_counts: torch.Tensor, fixed: torch.Tensor, copies: Copies, seed: int
    ) -> torch.Tensor:
        ids = Even.physical_ids(self, batch, rank_counts, fixed, copies, seed)
        ids[:1, :, 0] = -1
        return ids


@pytest.mark.parametrize("entry", ["epsim run", "the worker under a plain torchrun"])
def test_loads_that_are_not_a_replays_are_a_fault(
    make_trace: TraceMaker, epsim: Epsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], entry: str,
) -> None:  # fmt: skip
    trace, out = make_trace("tokens", steps=3, tokens=16, shared_cost=1.0), tmp_path / "out"
    monkeypatch.setitem(kinds()["split"], "forgetful", Forgetful)
    words = [trace.path, "--model", "tiny", "--redundant", "8", *policies(["eplb", "bad=eplb+forgetful"]), "--out", out]
    if entry == "epsim run":
        code, printed, err = epsim("run", *words)
    else:
        given = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(SystemExit) as stopped:
            worker.main([str(word) for word in words])
        printed, err = capsys.readouterr()
        code = int(stopped.value.code or 0)
    assert code == 1
    # The first two steps are planned on. The last has two layers.
    wrong = (
        "epsim: measured loads are not those of a replay, which is a fault of a policy or of epsim (2 differences by "
        "stack, step and layer): stack bad, step 2, layer 0, rank 0 served 31 routed assignments and 16 shared-expert "
        "tokens, but 32 and 16 in the replay"
    )
    assert err.splitlines()[-1] == wrong
    assert "peak/mean" in printed
    results = read_results(out / "results.json")
    assert (results["run"]["equals_replay"], "epsim: " + results["run"]["note"]) == (False, wrong)


@pytest.mark.parametrize("holds", [False, True])
def test_the_watch_knows_what_the_exchange_holds(
    make_trace: TraceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    made: list[Watch] = []

    class Seen(Watch):
        def start(self) -> None:
            made.append(self)

    monkeypatch.setattr(rank_module, "Watch", Seen)
    monkeypatch.setattr(TorchExchange, "holds_interpreter", holds)
    trace = make_trace("tokens", steps=2, tokens=8)
    run_inline(RunOptions(str(trace.path), ("contiguous",), model="tiny", out=tmp_path / "out", device="cpu"))
    assert [watch.beat().holds for watch in made] == [holds]


@pytest.mark.slow
def test_four_ranks_measure_what_a_replay_predicts(make_trace: TraceMaker, tmp_path: Path) -> None:
    """Every kind of stack, in one job; then `epsim replay`'s own function on the same steps and history."""
    trace = scored(make_trace("tokens", steps=10, tokens=300, shared_cost=1.0), tmp_path)
    out = tmp_path / "out"
    shape = ["--model", "tiny", "--nodes", "2", "--redundant", "4"]
    done = run(
        [*EPSIM, "run", trace.path, *shape, *policies(POLICIES), "--launcher", "torchrun", "--ranks", "4", "--out", out]
    )
    assert (done.code, done.err) == (0, "")
    results, predicted = read_results(out / "results.json"), read_results(out / "predicted.json")
    assert results["run"]["equals_replay"] is True
    options = ReplayOptions(Cluster(4, 2, 4), tuple(("", parse_stack(text)) for text in POLICIES))
    replayed = replay(trace, options)
    for mine, told, theirs in zip(results["stacks"], predicted["stacks"], replayed["stacks"], strict=True):
        assert told["metrics"] == theirs["metrics"]
        assert told["versus_first"] == theirs["versus_first"]
        for key in METRICS:
            if key in TIMED:
                assert mine["metrics"][key]["mean"] is not None
            else:
                assert mine["metrics"][key] == theirs["metrics"][key], key
    rows = read_telemetry(out / "telemetry")
    assert rows.num_rows == 5 * len(POLICIES) * 2 * 4
    check_rows(rows.to_pylist())
    files = sorted(path.name for path in (out / "telemetry").iterdir())
    assert files == [f"rank-0000{rank}.parquet" for rank in range(4)]
    assert pq.read_table(out / "telemetry" / files[2])["rank"].unique().to_pylist() == [2]
    assert not survivors(out)
    compared = run([*EPSIM, "compare", out])
    assert compared.code == 0
    peak = f"{results['stacks'][3]['metrics']['peak']['mean']:,.4g}"
    assert any(line.count(peak) == 2 and "eplb+lplb " in line for line in compared.out.splitlines())


def scored(trace: StoredTrace, folder: Path) -> StoredTrace:
    """The trace with router scores that agree with its choices."""
    rng = np.random.default_rng(5)
    meta = dataclasses.replace(trace.meta, num_scores=trace.meta.num_experts, phase="decode")
    path = folder / "scored.parquet"
    with TraceWriter(path, meta) as writer:
        for block in trace.blocks():
            assert isinstance(block, TokenBlock)
            scores = rng.random((len(block.token_step), meta.num_layers, meta.num_experts)) * 0.4
            np.put_along_axis(scores, block.expert_ids.astype(np.int64), 0.0, axis=2)
            first = np.linspace(0.9, 0.5, meta.top_k) * np.ones(block.expert_ids.shape)
            np.put_along_axis(scores, block.expert_ids.astype(np.int64), first, axis=2)
            writer.append(dataclasses.replace(block, scores=scores.astype(np.float16)))
    return StoredTrace(path)


def check_rows(rows: list[dict[str, Any]]) -> None:
    """What leaves arrives; every assignment is served once."""
    for at in range(0, len(rows), 4):
        four = rows[at : at + 4]
        assert len({(row["step"], row["stack"], row["layer"]) for row in four}) == 1
        assert sum(row["assignments"] for row in four) == sum(row["routed"] for row in four)
        assert sum(row["tokens"] for row in four) == sum(row["shared_tokens"] for row in four) == 300
        for rank, row in enumerate(four):
            assert row["rank"] == rank
            assert row["rows_to"][rank] <= row["tokens"]
            assert row["left_node"] <= row["left_rank"] <= row["assignments"]
            away = sum(row["rows_to"]) - row["rows_to"][rank]
            assert away <= row["left_rank"] + row["shared_left_rank"]


@pytest.mark.slow
def test_a_trained_models_router_chooses(make_trace: TraceMaker, tmp_path: Path) -> None:
    """What it chose lands in a trace that replays to the loads; every stack is fed the same text."""
    pytest.importorskip("transformers")
    from epsim.traces.model.config import ModelShape, build_model

    torch.manual_seed(0)
    shape = ModelShape(vocabulary=300, num_layers=2, hidden=32, num_heads=2, num_experts=8, top_k=2, intermediate=16)
    model = build_model(shape)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if ".experts." in name:
                weights.mul_(20)  # what they give matters to the layer after
    model.save_pretrained(tmp_path / "model")
    trace = in_phases(make_trace("tokens", steps=6, tokens=30, ranks=3, shared_cost=1.0), tmp_path)
    out = tmp_path / "out"
    stacks = ["eplb", "eplb+lplb", "eplb+pruned(k0=1)+lplb", "eplb+oea(k0=1,union=rank)"]
    command: list[str | Path] = [trace.path, "--model", tmp_path / "model", "--redundant", "2", *policies(stacks)]
    command += ["--sequence", "6", "--context", "5", "--out", out]
    every = {"environment": {"EPSIM_CACHE": tmp_path / "nothing"}}
    for done in run_forked(2, command, dict.fromkeys(range(2), every)):
        assert done.code == 0, done.err
    results = read_results(out / "results.json")
    assert results["run"]["equals_replay"] is True
    words = "random token ids (no corpus prepared), decode steps after 5 tokens of context"
    assert results["run"]["input"] == words
    assert results["stacks"][2]["metrics"]["kept_mass"]["mean"] < 1
    given = trace.blocks(3)
    sizes = np.concatenate([np.bincount(block.token_step) for block in given])  # type: ignore[union-attr]
    chosen = []
    for number in range(4):
        (block,) = StoredTrace(out / f"routed-{number}.parquet").blocks()
        assert isinstance(block, TokenBlock)
        assert block.steps.tolist() == [3, 4, 5]
        assert block.phase is not None
        assert block.phase.tolist() == ["decode", "prefill", "decode"]
        assert np.array_equal(np.bincount(block.token_step), sizes)
        assert (block.scores is not None) == (number >= 2)
        chosen.append(block.expert_ids)
    # The first layer sees the same under every stack, the second what a policy left of its first.
    assert np.array_equal(chosen[0], chosen[1])
    assert np.array_equal(chosen[0][:, 0], chosen[2][:, 0])
    assert not np.array_equal(chosen[0][:, 1], chosen[2][:, 1])


def in_phases(trace: StoredTrace, folder: Path) -> StoredTrace:
    """The trace with steps that are prefill and decode in turn."""
    path = folder / "phases.parquet"
    with TraceWriter(path, dataclasses.replace(trace.meta, phase="mixed")) as writer:
        for block in trace.blocks():
            assert isinstance(block, TokenBlock)
            phases = np.array([("prefill", "decode")[step % 2] for step in block.steps.tolist()], dtype=object)
            writer.append(dataclasses.replace(block, phase=phases))
    return StoredTrace(path)


@pytest.mark.slow
def test_the_slurm_file_starts_the_worker(make_trace: TraceMaker, tmp_path: Path) -> None:
    """With stand-ins for Slurm's own commands: one node, two ranks, real processes."""
    for name, text in (("scontrol", "echo localhost"), ("srun", 'shift; exec "$@"')):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
    path = f"{tmp_path}:{Path(TORCHRUN[0]).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "RANKS_PER_NODE": "2"}
    trace = make_trace("tokens", steps=4)
    batch = Path(__file__).resolve().parents[2] / "launch" / "slurm.sbatch"
    command: list[str | Path] = [
        "bash",
        batch,
        trace.path,
        "--model",
        "tiny",
        *policies(["eplb"]),
        "--out",
        tmp_path / "out",
    ]
    done = run(command, environment(PATH=path, RENDEZVOUS_PORT="0", **slurm))
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["setting"]["ranks"] == 2
    assert results["run"]["equals_replay"] is True
    assert "Measured" not in done.err
