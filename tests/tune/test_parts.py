"""The parts of a search, by hand: memory, migration, windows, intervals, candidates, options of serving systems."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epsim.cost.layer_time import LayerTiming
from epsim.engines import SYSTEMS
from epsim.engines.base import Setup, System
from epsim.machines.hardware import load_hardware
from epsim.models.spec import load_model
from epsim.placement.base import Cluster, Placement
from epsim.policies.apply import Setting
from epsim.policies.stack import parse_stack
from epsim.report.content import amount
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import CountsBlock, RankCountsBlock, TokenBlock, TraceMeta
from epsim.tuning.candidates import Candidate, all_candidates, possible_intervals, redundancies
from epsim.tuning.conditions import _permuted, _resized
from epsim.tuning.ideal import ideal_us
from epsim.tuning.memory import Memory, parse_memory
from epsim.tuning.migration import migration
from epsim.tuning.race import affordable
from epsim.tuning.scorer import Part, Problem, score
from epsim.tuning.steps import WindowSums, chosen_blocks, evenly
from tests.tune.cases import GPUS, MakeCounts, hot

V3, H200 = load_model("deepseek-v3"), load_hardware("h200")
SGLANG, VLLM = SYSTEMS
SETUP = Setup("deepseek-ai/DeepSeek-V3", "t.parquet", 16, 2, 8, decode=False)


def command(system: System, candidate: Candidate, setup: Setup = SETUP) -> str:
    """The one that starts the system, where rebalances are affordable from 100 steps on."""
    return system.commands(candidate.deployment, setup, lambda least: max(least, 100))[-1]


def test_memory_of_deepseek_v3() -> None:
    memory = Memory(V3, 141e9, 0.2)
    expert = 3 * 7168 * 2048
    # 16 of 256 experts and the shared one in 58 layers, 61 layers of attention, 3 dense ones; a byte a parameter.
    by_hand = 58 * 17 * expert + 61 * 187e6 + 3 * 396e6
    assert memory.used(16) == pytest.approx(by_hand)
    assert memory.used(17, moving=True) == pytest.approx(by_hand + 58 * expert + 17 * expert)
    most = memory.most_slots(16)
    assert memory.used(most) <= memory.limit < memory.used(most + 1)
    with pytest.raises(ValueError, match=r"DeepSeek-V3 needs 56\.0 GB for weights on each of 16 GPUs"):
        Memory(V3, 60e9, 0.2).most_slots(16)


@pytest.mark.parametrize(("text", "size"), [("141GB", 141e9), ("80GiB", 80 * 2**30), ("96", 96e9), (" 1.5 tb", 1.5e12)])
def test_sizes(text: str, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-3GB", "12 kg", "1e400", "nan"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="--memory-per-gpu"):
        parse_memory(text)


def placed(slots: list[int], ranks: int, nodes: int = 1) -> Placement:
    return Placement(torch.tensor([slots]), max(slots) + 1, ranks, nodes)


def test_migration_by_hand() -> None:
    old, new = placed([0, 1, 2, 3], 2), placed([0, 2, 1, 3], 2)
    found = migration(old, new, H200, V3, layer_ms=10.0)
    # One expert into each rank and out of it, 44 MB at 316 GB/s and beyond by the table's rates; 58 such layers.
    assert found.bytes_moved == pytest.approx(58 * 3 * 7168 * 2048)
    alone = (found.us - 58 * 10e3) / 58
    assert 3 * 7168 * 2048 / 348e3 < alone < 3 * 7168 * 2048 / 290e3
    across = migration(placed([0, 1, 2, 3], 2, 2), placed([0, 2, 1, 3], 2, 2), H200, V3, layer_ms=0.0)
    assert across.us == pytest.approx(58 * 3 * 7168 * 2048 / 47.8e3)
    assert migration(old, old, H200, V3, layer_ms=10.0).us == 0
    # The same experts in other slots of their rank do not move.
    assert migration(old, placed([1, 0, 3, 2], 2), H200, V3, layer_ms=10.0).bytes_moved == 0
    # Where a rank sends one expert to three others, sending takes longest.
    spread = migration(placed([0, 1, 2, 3], 4), placed([0, 0, 0, 0, 0, 1, 2, 3], 4), H200, V3, layer_ms=0.0)
    assert spread.us > found.us - 58 * 10e3


def test_windows_are_planned_on_as_they_are(make_counts: MakeCounts) -> None:
    trace = make_counts(np.stack([hot(step % 16) for step in range(30)]))
    counts = np.concatenate([block.counts for block in trace.blocks() if isinstance(block, CountsBlock)])
    sums = WindowSums(trace, [5, 12, 20, 30])
    assert sums.assignments(5, 20) == counts[5:20].sum()
    cluster, stack = Cluster(GPUS), parse_stack("eplb")
    whole = torch.from_numpy(counts[5:20].sum(0, keepdims=True))
    assert sums.plan(stack, cluster, 5, 20).version == stack.placement.plan(whole, cluster).version


def test_chosen_steps_are_those(make_counts: MakeCounts) -> None:
    trace = make_counts(np.stack([hot(step % 16) for step in range(30)]))
    counts = np.concatenate([block.counts for block in trace.blocks() if isinstance(block, CountsBlock)])
    places = np.array([3, 4, 11, 29])
    ((at, block),) = chosen_blocks(trace, places, [1], GPUS)
    assert at.tolist() == places.tolist()
    assert isinstance(block, CountsBlock)
    assert np.array_equal(block.counts, counts[places][:, [1]])
    assert np.array_equal(block.steps, places)


@given(st.integers(0, 50), st.integers(1, 400), st.integers(1, 60))
def test_evenly(first: int, number: int, most: int) -> None:
    places = evenly(first, first + number, most)
    assert len(places) == min(number, most)
    assert first <= places[0]
    assert places[-1] < first + number
    steps = np.diff(places)
    assert not len(steps) or steps.min() >= 1
    assert not len(steps) or steps.max() - steps.min() <= 1


def test_intervals_and_segments() -> None:
    assert possible_intervals(9) == ()
    assert possible_intervals(350) == (10, 20, 50, 100, 200)
    assert possible_intervals(10**4) == (500, 1000, 2000, 5000, 10000)
    part = Part(30, 60)
    assert [part.segment(place, 10) for place in (30, 39, 40, 59)] == [0, 0, 1, 2]
    assert part.bounds([10]) == [20, 30, 40, 50, 60]


def test_redundancies_divide_and_fit() -> None:
    assert redundancies(256, 16, 19) == (0, 16, 32, 48)
    assert redundancies(256, 12, 23) == (8, 20)
    assert redundancies(4, 4, 100) == (0, 4, 8, 12)  # never more slots than there are experts


def test_the_grid_has_no_candidate_twice_and_only_what_the_level_allows() -> None:
    clusters = [Cluster(16, 2, redundant, 8) for redundant in (0, 16, 32)]
    for level in ("counts", "rank_counts", "tokens"):
        found = all_candidates(level, True, 256, clusters, (10, 100))
        assert len({candidate.name for candidate in found}) == len(found)
        for candidate in found:
            candidate.stack.check_level(level, candidate.redundant > 0, True)
        assert found[0].name == "contiguous r0"
        assert {candidate.interval for candidate in found} == {None, 10, 100}
        assert not any(candidate.interval and candidate.stack.placement.name == "searched" for candidate in found)


def test_systems_are_told_what_they_can_run() -> None:
    lp = Candidate(parse_stack("eplb+lplb"), 16, None, parse_stack("eplb+lplb-ipm"))
    flags = shlex.split(command(SGLANG, lp))
    for name, value in (
        ("--ep-num-redundant-experts", "16"),
        ("--ep-dispatch-algorithm", "lp"),
        ("--init-expert-location", "placement-sglang.json"),
        ("--ep-size", "16"),
        ("--nnodes", "2"),
    ):
        assert flags[flags.index(name) + 1] == value
    assert "--enable-eplb" not in flags
    assert "published one" in SGLANG.lacks(Candidate(parse_stack("eplb+lplb"), 16).deployment)
    assert "load" in VLLM.lacks(lp.deployment)
    often = Candidate(parse_stack("eplb"), 32, 100)
    flags = shlex.split(command(SGLANG, often))
    assert flags[flags.index("--eplb-rebalance-num-iterations") + 1] == "100"
    assert "--enable-eplb" in flags
    assert "--init-expert-location" not in flags
    words = shlex.split(command(VLLM, often))
    config = json.loads(words[words.index("--eplb-config") + 1])
    assert config == {"num_redundant_experts": 32, "window_size": 100, "step_interval": 100}
    water = Candidate(parse_stack("eplb+random+waterfill(load=routed+local,counts=local)"), 16)
    assert "--enable-waterfill" in shlex.split(command(SGLANG, water))
    assert not SGLANG.lacks(water.deployment)
    assert SGLANG.lacks(Candidate(parse_stack("eplb+lplb+waterfill-joint"), 0).deployment)
    assert VLLM.lacks(Candidate(parse_stack("searched"), 0).deployment)
    assert "router" in VLLM.lacks(Candidate(parse_stack("eplb+oea(k0=4)"), 0).deployment)


def test_commands_of_several_hosts_are_pasted_on_each() -> None:
    often = Candidate(parse_stack("eplb"), 32, 100)
    alone = dataclasses.replace(SETUP, nodes=1)
    for system in SYSTEMS:
        assert "$" not in command(system, often, alone)

    def words(text: str, node: int) -> list[str]:
        done = subprocess.run(
            ["sh", "-c", f'for word in {text}; do echo "$word"; done'],
            env={"NODE": str(node), "HEAD": "10.0.0.1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    flags = words(command(SGLANG, often), 1)
    assert flags[-4:] == ["--dist-init-addr", "10.0.0.1:20000", "--node-rank", "1"]
    first, second = (words(command(VLLM, often), node) for node in (0, 1))
    assert second == [*(one if one != "0" else "8" for one in first), "--headless"]
    assert second[second.index("--data-parallel-start-rank") + 1] == "8"
    assert second[second.index("--data-parallel-size-local") + 1] == "8"
    assert second[second.index("--data-parallel-address") + 1] == "10.0.0.1"


@pytest.mark.parametrize(
    ("size", "sign", "shown"), [(2.6e9, "+", "+2.6 GB"), (0.0, "+", "+0.0 GB"), (-3.2e7, "+", "-32 MB")]
)
def test_amounts_of_memory_are_never_rounded_to_nothing(size: float, sign: str, shown: str) -> None:
    assert amount(size, sign) == shown


@pytest.mark.parametrize("tokens", [160, 4096, 65536])
@pytest.mark.parametrize("number", [20, 180, 400])
def test_a_round_on_tokens_costs_what_it_may(tokens: int, number: int) -> None:
    problem = cast(
        Problem, SimpleNamespace(meta=SimpleNamespace(num_layers=58, level="tokens"), tokens_a_step=float(tokens))
    )
    steps, layers = affordable(problem, number, 48)
    # 0.3 ms a step and layer and 0.65 us a token, as measured; at least 4 steps of 2 layers.
    spent = steps * layers * number * (300e-6 + 0.65e-6 * tokens)
    assert spent <= 45 or (steps, layers) == (4, 2)
    assert spent <= 140
    assert steps * layers >= min(48 * 58, 45 / (number * (300e-6 + 0.65e-6 * tokens)) / 2)


def test_row_groups_without_a_chosen_step_are_not_read(
    make_trace: Callable[..., StoredTrace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = next(iter(make_trace("counts", steps=40, experts=16).blocks()))
    assert isinstance(whole, CountsBlock)
    with TraceWriter(tmp_path / "many.parquet", TraceMeta("counts", 2, 16, 2), group_bytes=4 * 2 * 16 * 8) as writer:
        writer.append(whole)
    trace = StoredTrace(tmp_path / "many.parquet")
    assert trace.group_starts().tolist() == list(range(0, 41, 4))
    read: list[int | None] = []
    real = StoredTrace._read

    def reading(self: StoredTrace, file: Any, group: int | None, *more: Any) -> Any:
        read.append(group)
        return real(self, file, group, *more)

    monkeypatch.setattr(StoredTrace, "_read", reading)
    places = np.array([1, 7, 21, 22, 39])
    found = list(chosen_blocks(trace, places, None, GPUS))
    assert read == [0, 1, 5, 9]
    assert np.concatenate([at for at, _ in found]).tolist() == places.tolist()
    counts = np.concatenate([block.counts for _, block in found if isinstance(block, CountsBlock)])
    assert np.array_equal(counts, whole.counts[places])


def test_nothing_beats_the_ideal(make_counts: MakeCounts, timing: LayerTiming) -> None:
    trace = make_counts(np.stack([hot(step % 16) for step in range(24)]), tokens=512)
    setting = Setting(0, 0.0, 2, trace.meta.layers, rows=True)
    sums = WindowSums(trace, [8, 24])
    problem = Problem(trace, trace.meta, Cluster(GPUS), timing, setting, sums, 0.0, 512.0)
    candidates = [
        Candidate(parse_stack(text), red) for text in ("contiguous", "eplb", "eplb+lplb") for red in (0, 4, 16)
    ]
    places = np.arange(8, 24)
    best = ideal_us(problem, places)
    for times in score(problem, candidates, Part(8, 24), places).values():
        assert (times.step_us >= best * (1 - 1e-9)).all()


def test_fewer_tokens_are_whole_ones_of_the_same_experts() -> None:
    rng = np.random.default_rng(0)
    counts = rng.multinomial(400, np.ones(8) / 8, size=(3, 2)).astype(np.int64)
    block = CountsBlock(np.arange(3), counts)
    for part in (block, RankCountsBlock(np.arange(3), counts[:, :, None])):
        fewer = _resized(part, 1 / 4, 2, 0)
        assert not isinstance(fewer, TokenBlock)
        assert (fewer.counts <= part.counts).all()
        assert (fewer.counts.sum(-1) == 100).all()
        more = _resized(part, 4, 2, 0)
        assert not isinstance(more, TokenBlock)
        assert np.array_equal(more.counts, part.counts * 4)


def test_permuted_experts_keep_their_skew() -> None:
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(6), (10, 2, 1)), axis=2)[:, :, :3].astype(np.int16)
    ids[0, 0, 2] = -1
    tokens = TokenBlock(np.array([4]), np.zeros(10, np.int64), np.zeros(10, np.int64), ids)
    order = np.stack([rng.permutation(6), rng.permutation(6)])
    moved = _permuted(tokens, order)
    counts = _permuted(tokens.to_counts(6), order)
    assert isinstance(moved, TokenBlock)
    assert isinstance(counts, CountsBlock)
    assert np.array_equal(moved.to_counts(6).counts, counts.counts)
    assert np.array_equal(np.sort(counts.counts), np.sort(tokens.to_counts(6).counts))
