"""Replay end to end, against loads worked out apart from the engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.kernels.split.reference import solve_reference
from epsim.placement.base import Cluster
from epsim.placement.eplb import rebalance_experts
from epsim.policies.stack import parse_stack, placement_policy
from epsim.replaying import ReplayOptions, replay
from epsim.report.content import memory_words, reasons
from epsim.results import ResultsData, check_results
from epsim.traces.importing import open_trace
from epsim.traces.options import ImportOptions
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import CountsBlock, TokenBlock, TraceMeta

TraceMaker = Callable[..., StoredTrace]


def options(*stacks: str, ranks: int = 4, redundant: int = 4, **more: Any) -> ReplayOptions:
    nodes = more.pop("nodes", 1)
    return ReplayOptions(Cluster(ranks, nodes, redundant), tuple(("", parse_stack(text)) for text in stacks), **more)


def mean(results: ResultsData, stack: int, key: str) -> float:
    value = results["stacks"][stack]["metrics"][key]["mean"]
    assert value is not None, results["stacks"][stack]["metrics"][key]
    return float(value)


def counts_of(trace: StoredTrace) -> np.ndarray[Any, np.dtype[np.int64]]:
    blocks = []
    for block in trace.blocks():
        blocks.append(block.to_counts(trace.meta.num_experts) if isinstance(block, TokenBlock) else block)
    return np.concatenate([block.counts for block in blocks if isinstance(block, CountsBlock)])


def test_even_and_lplb_at_counts_level_equal_a_loop(make_trace: TraceMaker) -> None:
    trace = make_trace("counts", steps=10, layers=3, experts=12, tokens=200)
    results = replay(trace, options("eplb", "eplb+lplb"))
    counts = counts_of(trace)
    placement = placement_policy("eplb").plan(torch.from_numpy(counts[:5].sum(0))[None], Cluster(4, 1, 4))
    even, best, means = [], [], []
    for step in range(5, 10):
        for layer in range(3):
            slots = placement.physical_to_logical[layer].numpy()
            copies = np.bincount(slots, minlength=12)
            loads = (counts[step, layer] / copies)[slots].reshape(4, 4).sum(1)
            even.append(loads.max())
            means.append(loads.mean())
            best.append(
                solve_reference(placement.physical_to_logical[layer], 4, torch.from_numpy(counts[step, layer]))[0]
            )
    ratio = np.array(even) / np.array(means)
    assert mean(results, 0, "peak") == pytest.approx(np.mean(even), rel=1e-12)
    assert mean(results, 0, "max_over_mean") == pytest.approx(ratio.mean(), rel=1e-12)
    assert results["stacks"][0]["metrics"]["max_over_mean"]["p95"] == pytest.approx(np.percentile(ratio, 95), rel=1e-6)
    assert mean(results, 1, "peak") == pytest.approx(np.mean(best), rel=2e-4)
    assert mean(results, 0, "optimality_gap") == pytest.approx((np.array(even) / best - 1).mean(), abs=2e-4)
    assert mean(results, 1, "gap_split") <= 1.01e-4
    difference = results["stacks"][1]["versus_first"]["peak"]
    assert difference["difference"] == pytest.approx(np.mean(best) - np.mean(even), abs=2e-4 * np.mean(even))
    assert difference["low"] <= difference["difference"] <= difference["high"]
    assert results["trace"]["steps_planned"] == 5
    assert results["trace"]["steps_scored"] == 5
    check_results(results)


def test_even_planned_on_its_own_file_reproduces_eplbs_balance(make_trace: TraceMaker) -> None:
    trace = make_trace("counts", steps=1, layers=3, experts=12, tokens=500)
    results = replay(trace, options("eplb"), trace, history_name="itself")
    counts = torch.from_numpy(counts_of(trace))
    placement = placement_policy("eplb").plan(counts, Cluster(4, 1, 4))
    slots = placement.physical_to_logical
    per_slot = (counts[0].double() / placement.copies).gather(1, slots)
    per_rank = per_slot.reshape(3, 4, -1).sum(-1)
    own = (per_rank.mean(1) / per_rank.amax(1)).mean()
    assert mean(results, 0, "balancedness") == pytest.approx(float(own), rel=1e-12)
    assert "hindsight" in results["setting"]["history"]


def store(path: Path, counts: np.ndarray[Any, np.dtype[np.int64]]) -> StoredTrace:
    """counts [S, L, E]"""
    _, num_layers, num_experts = counts.shape
    with TraceWriter(path, TraceMeta("counts", num_layers, num_experts, 2)) as writer:
        writer.append(CountsBlock(np.arange(len(counts)), counts))
    return StoredTrace(path)


def test_a_history_of_the_scored_steps_is_hindsight_under_any_name(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=6)
    other = make_trace("tokens", steps=6, seed=1, name="other.parquet")
    counts = counts_of(trace)
    copied = StoredTrace(shutil.copy(trace.path, tmp_path / "copy.parquet"))
    (tmp_path / "hard.parquet").hardlink_to(trace.path)
    histories = {
        "same steps that they are scored on": [
            copied,
            StoredTrace(tmp_path / "hard.parquet"),
            store(tmp_path / "counted.parquet", np.concatenate([counts_of(other), counts])),
        ],
        "counts with the same sum as": [store(tmp_path / "sum.parquet", counts.sum(0, keepdims=True))],
        "with 2 of the 6 scored steps": [store(tmp_path / "part.parquet", counts[1:3])],
    }
    for words, of_that_kind in histories.items():
        for history in of_that_kind:
            said = replay(trace, options("eplb"), history, history_name="h")["setting"]["history"]
            assert words in said
            assert "hindsight" in said
    assert replay(trace, options("eplb"), other, history_name="h")["setting"]["history"] == "placements planned on h"
    unused = replay(trace, options("contiguous"), trace, history_name="h")["setting"]["history"]
    assert unused == "no placement needs a history"


@pytest.mark.recordings
def test_even_reproduces_eplbs_balance_on_deepseek_v3() -> None:
    """Planned and scored on the same file, the routed balance is EPLB's own figure, from its weights and its maps."""
    path = Path(__file__).resolve().parents[1] / "../shared/traces/deepseek-v3-sglang/prefill_in2048.json"
    if not path.exists():
        pytest.skip("needs recordings that are not part of the repository")
    trace = open_trace(path, ImportOptions(model="deepseek-v3"))
    results = replay(trace, options("eplb", ranks=16, redundant=32, nodes=2), trace)
    weight = torch.tensor(json.loads(path.read_text())["logical_count"], dtype=torch.float64)[3:]
    physical_to_logical, _, copies = rebalance_experts(weight, 288, 1, 2, 16)
    per_rank = (weight / copies).gather(1, physical_to_logical).reshape(58, 16, 18).sum(2)
    own = per_rank.mean(1) / per_rank.amax(1)
    assert mean(results, 0, "routed_balancedness") == pytest.approx(float(own.mean()), rel=1e-12)
    assert 0.99 < float(own.mean()) < 1


def test_total_load_with_a_shared_expert(make_trace: TraceMaker) -> None:
    trace = make_trace("tokens", steps=4, tokens=512, ranks=4, shared_cost=1.0)
    results = replay(trace, options("contiguous", "contiguous+waterfill(candidates=all)", redundant=0))
    for stack in (0, 1):
        # 512 tokens of 2 routed and 1 shared assignments on 4 ranks.
        assert mean(results, stack, "mean_load") == 512 * 3 / 4
        assert mean(results, stack, "routed_mean_load") == 512 * 2 / 4
    # The slowest rank's routed load is far above the mean: it keeps none of the shared work that can go elsewhere.
    assert mean(results, 1, "peak") < mean(results, 0, "peak") - 100
    assert mean(results, 1, "peak") == mean(results, 1, "routed_peak")
    assert mean(results, 0, "routed_peak") == mean(results, 1, "routed_peak")
    metrics = results["stacks"][1]["metrics"]
    assert metrics["gap_shared"]["mean"] is not None
    assert 0 < metrics["remote_rank_share"]["mean"] < 1


def test_shared_cost_option_wins_over_the_trace(make_trace: TraceMaker) -> None:
    trace = make_trace("tokens", shared_cost=1.0)
    results = replay(trace, options("eplb+waterfill", shared_cost=0.0))
    assert "routed_peak" not in results["stacks"][0]["metrics"]
    assert any("waterfill" in note for note in results["stacks"][0]["notes"])


@pytest.mark.parametrize("level", ["counts", "rank_counts", "tokens"])
def test_levels_agree_on_what_they_share(make_trace: TraceMaker, level: str) -> None:
    results = replay(make_trace(level, steps=8), options("contiguous", "eplb", redundant=0))
    assert mean(results, 0, "mean_load") == 64 * 2 / 4
    whole = replay(make_trace("tokens", steps=8, name="again.parquet"), options("contiguous", "eplb", redundant=0))
    for stack in (0, 1):  # without copies nothing is rounded, so the levels agree exactly
        assert mean(results, stack, "peak") == mean(whole, stack, "peak")
        assert mean(results, stack, "active_experts") == mean(whole, stack, "active_experts")
        remote = results["stacks"][stack]["metrics"]["remote_rank_share"]
        assert (remote["mean"] is None) == (level == "counts")


def test_block_size_changes_nothing(make_trace: TraceMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = options("eplb", "eplb+lplb", "eplb+random", "eplb+lplb-sampled+waterfill", shared_cost=1.0)
    whole = replay(make_trace("tokens", steps=12, tokens=256), stacks)
    monkeypatch.setattr("epsim.replaying.BLOCK_BYTES", 1)
    monkeypatch.setattr("epsim.planning.BLOCK_BYTES", 1)
    parts = replay(make_trace("tokens", steps=12, tokens=256, name="again.parquet"), stacks)
    assert parts["stacks"] == whole["stacks"]


def test_percentiles_of_large_peaks_are_exact(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "large.parquet", TraceMeta("counts", 1, 2, 1)) as writer:
        writer.append(CountsBlock(np.arange(3), 2**24 + np.array([[[1, 0]], [[3, 2]], [[5, 0]]])))
    peak = replay(StoredTrace(tmp_path / "large.parquet"), options("contiguous", ranks=2, redundant=0))
    assert peak["stacks"][0]["metrics"]["peak"]["p50"] == 2**24 + 3


def test_seed_moves_the_draws_and_nothing_else(make_trace: TraceMaker) -> None:
    def run(seed: int) -> ResultsData:
        trace = make_trace("tokens", name=f"{seed}.parquet", tokens=256, seed=3)
        return replay(trace, options("eplb+lplb", "eplb+random", seed=seed))

    first, other, again = run(0), run(1), run(0)
    assert first["stacks"] == again["stacks"]
    assert mean(first, 0, "peak") == mean(other, 0, "peak")
    assert mean(first, 1, "peak") != mean(other, 1, "peak")


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "ranks", "redundant"),
    [(1, 1, 1, 1, 0), (2, 8, 2, 1, 0), (1, 1, 1, 4, 3), (1, 4, 4, 4, 0), (1, 8, 2, 8, 8)],
)
def test_corner_shapes(
    make_trace: TraceMaker, layers: int, experts: int, top_k: int, ranks: int, redundant: int
) -> None:
    trace = make_trace("tokens", layers=layers, experts=experts, top_k=top_k, ranks=ranks, tokens=32)
    stacks = ["contiguous", "eplb+lplb", "searched+static", "eplb+random+waterfill"]
    results = replay(trace, options(*stacks, ranks=ranks, redundant=redundant, shared_cost=1.0))
    for stack in range(4):
        assert mean(results, stack, "routed_mean_load") == 32 * top_k / ranks
        if ranks == 1:
            assert mean(results, stack, "max_over_mean") == 1
            assert mean(results, stack, "remote_rank_share") == 0


def test_steps_without_tokens_do_not_count(make_trace: TraceMaker) -> None:
    from epsim.traces.store import TraceWriter
    from epsim.traces.trace import TraceMeta

    path = make_trace("counts").path.with_name("gaps.parquet")
    counts = np.zeros((4, 2, 4), dtype=np.int64)
    counts[0, :] = counts[2, 0] = [8, 0, 0, 0]
    with TraceWriter(path, TraceMeta("counts", 2, 4, 1)) as writer:
        writer.append(CountsBlock(np.arange(4), counts))
    results = replay(StoredTrace(path), options("contiguous", ranks=2, redundant=0))
    assert mean(results, 0, "max_over_mean") == 2
    assert results["stacks"][0]["max_over_mean_by_layer"] == [2, 2]
    assert results["stacks"][0]["load_over_mean_by_rank"] == [2, 0]
    assert results["trace"]["steps_planned"] == 0
    counts[:] = 0
    with TraceWriter(path, TraceMeta("counts", 2, 4, 1)) as writer:
        writer.append(CountsBlock(np.arange(4), counts))
    empty = replay(StoredTrace(path), options("contiguous", "eplb+lplb", ranks=2, redundant=0))
    assert empty["stacks"][0]["metrics"]["peak"]["mean"] is None
    check_results(empty)


def test_what_cannot_be_replayed_is_said(make_trace: TraceMaker) -> None:
    counts = make_trace("counts")
    with pytest.raises(ValueError, match="synthesize"):
        replay(counts, options("eplb+random"))
    with pytest.raises(ValueError, match="--redundant"):
        replay(counts, options("eplb", redundant=3))
    with pytest.raises(ValueError, match="--history"):
        replay(make_trace("counts", steps=1, name="one.parquet"), options("eplb"))
    with pytest.raises(ValueError, match="16 experts"):
        replay(counts, options("eplb"), make_trace("counts", experts=16, name="other.parquet"))
    with pytest.raises(ValueError, match="lacks layer 1"):
        replay(counts, options("eplb"), make_trace("counts", layers=1, name="short.parquet"))
    with pytest.raises(ValueError, match="given twice"):
        options("eplb", "even+eplb")
    with pytest.raises(ValueError, match="plan-share"):
        options("eplb", plan_share=1.0)


def test_memory_stays_bounded_while_streaming(make_trace: TraceMaker) -> None:
    """A trace of 60,000 pairs (123 MB of counts) replays in less than its size above what loading the engine takes."""
    trace = make_trace("counts", steps=100, layers=20, experts=256, top_k=8, tokens=512)
    code = f"""
import resource
import numpy as np
from epsim.placement.base import Cluster
from epsim.placement.eplb import rebalance_experts
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import CountsBlock
small = StoredTrace({str(trace.path)!r})
options = ReplayOptions(Cluster(16, 2, 32), (("", parse_stack("eplb")), ("", parse_stack("eplb+lplb"))))
replay(small, options)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = {str(trace.path.with_name("long.parquet"))!r}
with TraceWriter(path, small.meta) as writer:
    for round in range(30):
        for block in small.blocks():
            writer.append(CountsBlock(block.steps + 100 * round, block.counts))
replay(StoredTrace(path), options)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 117


def test_many_source_ranks_make_small_blocks(make_trace: TraceMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts by source rank take memory however few tokens a step has; how steps are cut changes no figure."""
    from epsim import replaying as module

    trace = make_trace("tokens", steps=8, tokens=4, ranks=4)
    options = ReplayOptions(Cluster(4, 1, 4), (("", parse_stack("eplb+lplb")),))
    whole = replay(trace, options)["stacks"][0]["metrics"]
    step_bytes = 8 * 2 * (8 + 4) * 4
    monkeypatch.setattr(module, "COUNTS_BYTES", 3 * step_bytes)
    assert module._steps_a_block(trace.meta, 8 + 4, 4) == 3
    assert replay(trace, options)["stacks"][0]["metrics"] == whole


def test_a_report_with_the_memory_of_experts_does_not_call_their_size_unknown(tmp_path: Path) -> None:
    meta = TraceMeta("counts", 1, 256, 8, model="deepseek-v3", phase="prefill")
    with TraceWriter(tmp_path / "v3.parquet", meta) as writer:
        writer.append(CountsBlock(np.arange(4), np.full((4, 1, 256), 8)))
    options = ReplayOptions(Cluster(8, 1, 8), (("", parse_stack("contiguous")),))
    results = replay(StoredTrace(tmp_path / "v3.parquet"), options)
    assert "42 MiB per rank" in memory_words(results)
    assert dict(reasons(results))["bytes_read"] == "no bytes are counted without --hardware"
