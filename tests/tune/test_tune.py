"""Answers on traces where the right one is known by construction, and what must hold of any answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from epsim.cost.layer_time import LayerTiming, load_timing
from epsim.engines import SYSTEMS
from epsim.kernels.reader import ReadBytes
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.report.write import write_report
from epsim.results import check_results, read_results
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import CountsBlock, TokenBlock, TraceMeta
from epsim.tuning.candidates import Candidate
from epsim.tuning.gains import Interval
from epsim.tuning.memory import Memory
from epsim.tuning.tune import TuneOptions, tune
from tests.tune.cases import GPUS, Floats, MakeCounts, RunTune, answered, hot

EPLB = (parse_stack("eplb"),)
STACKS = (*EPLB, parse_stack("eplb+lplb"))
STATIONARY = np.tile(hot(0), (60, 1))


def drifting(steps: int = 240, every: int = 60) -> Floats:
    """Experts of weights 1 to 16, dealt anew every so many steps."""
    rng = np.random.default_rng(5)
    weights = np.stack([rng.permutation(np.arange(1.0, 17.0)) for _ in range(-(-steps // every))])
    shares: Floats = np.repeat(weights / weights.sum(1, keepdims=True), every, axis=0)[:steps]
    return shares


def test_stationary_skew_is_planned_once(make_counts: MakeCounts, run_tune: RunTune, timing: LayerTiming) -> None:
    trace = make_counts(STATIONARY)
    results = run_tune(trace, redundant=(0,))
    best = answered(results)
    assert best["advised"]
    assert (best["stack"], best["redundant"], best["interval"]) == ("eplb", 0, None)
    # Four hot experts of 6/36 each in one place: 24/36 of the work on one rank, and 9/36 at best.
    metrics = {entry["name"]: entry["metrics"] for entry in results["stacks"]}
    assert metrics["contiguous r0"]["max_over_mean"]["mean"] == pytest.approx(4 * 24 / 36, rel=0.01)
    assert metrics["eplb r0"]["max_over_mean"]["mean"] == pytest.approx(1.0, rel=0.01)
    # The same steps by replay, planned on the same steps, take as long.
    options = ReplayOptions(
        Cluster(GPUS), (("", parse_stack("contiguous")), ("", parse_stack("eplb"))), plan_share=39 / 60, timing=timing
    )
    replayed = replay(trace, options)["stacks"]
    for entry, name in zip(replayed, ("contiguous r0", "eplb r0"), strict=True):
        assert entry["metrics"]["layer_time_us"]["mean"] == pytest.approx(metrics[name]["layer_time_us"]["mean"])
    gain = replayed[1]["versus_first"]["throughput_gain"]["difference"]
    assert best["throughput_gain"]["mean"] == pytest.approx(gain, rel=0.01)
    assert best["throughput_gain"]["low"] < gain < best["throughput_gain"]["high"]


def test_rebalancing_is_not_advised_where_nothing_moves(make_counts: MakeCounts, run_tune: RunTune) -> None:
    results = run_tune(make_counts(np.tile(hot(0), (120, 1))), policies=EPLB, redundant=(0,), layer_ms=0.1)
    assert answered(results)["interval"] is None
    found = results["tune"]["rebalancing"]
    assert found["gain_over_planned_once"]["mean"] < 0  # it costs, and there is nothing to gain
    text = next(line["text"] for line in results["tune"]["words"] if line["about"] == "rebalancing")
    assert text.startswith("Not advised")


def test_drifting_hot_experts_are_rebalanced(make_counts: MakeCounts, run_tune: RunTune) -> None:
    results = run_tune(make_counts(drifting()), policies=EPLB, redundant=(0,), layer_ms=0.01)
    best = answered(results)
    assert best["advised"]
    assert best["interval"] is not None
    found = results["tune"]["rebalancing"]
    assert found["gain_over_planned_once"]["low"] > 0
    assert 0 < found["payback_steps"] < found["interval"]  # it recovers its cost
    for system, flag in (("sglang", "--eplb-rebalance-num-iterations"), ("vllm", '"step_interval": ')):
        one = answered(results, system)
        assert f"{flag}{'' if system == 'vllm' else ' '}{one['interval']}" in one["commands"][-1]


def test_dearer_rebalances_never_come_more_often(make_counts: MakeCounts, run_tune: RunTune) -> None:
    trace = make_counts(drifting())
    chosen = []
    for layer_ms in (0.0, 1.0, 20.0, 1000.0):
        interval = answered(run_tune(trace, policies=EPLB, redundant=(0,), layer_ms=layer_ms))["interval"]
        chosen.append(np.inf if interval is None else interval)
    assert chosen == sorted(chosen)
    assert chosen[0] < np.inf
    assert chosen[-1] == np.inf


def test_what_does_not_depend_on_hot_experts_is_not_said_to(
    make_trace: Callable[..., StoredTrace], model: Path
) -> None:
    model.write_text(model.read_text() + "shared_intermediate = 2048\n")
    timing = load_timing("h200", str(model), 1, "prefill")
    trace = make_trace("tokens", steps=12, experts=16, tokens=64, shared_cost=1.0)
    stack = parse_stack("contiguous+waterfill(load=routed+local,counts=local)")
    found = tune(trace, TuneOptions(GPUS, 1, 1, 141e9, policies=(stack,), redundant=(0,)), timing)
    # A fixed cost is saved, whichever experts are hot; vLLM cannot, and that is said.
    assert answered(found)["advised"]
    text = {line["about"]: line["text"] for line in found["tune"]["words"]}
    assert "other experts" not in text["does not pay"]  # experts in order are planned for none
    assert text["vLLM"] == (
        "It has no dispatch of the shared expert (waterfill). On the steps used for choosing, no candidate that it can "
        "run was clearly faster by at least 0.5%."
    )


def test_uniform_routing_pays_for_nothing(make_counts: MakeCounts, run_tune: RunTune) -> None:
    results = run_tune(make_counts(np.full((60, 16), 1 / 16)))
    assert not any(one["advised"] for one in results["tune"]["answers"])
    expected = "Keep contiguous r0: no candidate gains enough to be worth more memory or moving parts."
    assert results["verdict"] == expected
    assert results["setting"]["redundant"] == 0
    assert answered(results, "sglang")["commands"][0].count("redundant") == 0


def test_overhead_larger_than_the_gain_is_not_advised(make_counts: MakeCounts, run_tune: RunTune) -> None:
    stack = parse_stack("eplb+lplb")
    few = run_tune(make_counts(STATIONARY, tokens=64), policies=(stack,), redundant=(4,))
    rows = {row["name"]: row["gain_choosing"] for row in few["tune"]["candidates"]}
    assert rows["eplb+lplb r4"] < min(rows["contiguous r0"], rows["eplb+lplb r0"])  # an all-reduce and a solve each
    assert answered(few)["redundant"] == 0
    many = run_tune(make_counts(STATIONARY, tokens=65536, name="many.parquet"), policies=(stack,), redundant=(4,))
    rows = {row["name"]: row["gain_choosing"] for row in many["tune"]["candidates"]}
    assert rows["eplb+lplb r4"] > 0.5
    assert answered(many)["advised"]
    # With fewer of these tokens it stops paying, somewhere between the two.
    by_tokens = [one for one in many["tune"]["conditions"] if one["condition"].endswith("tokens")]
    assert by_tokens[0]["gain"]["mean"] > by_tokens[-1]["gain"]["mean"]


def test_memory_forbids_redundancy(make_counts: MakeCounts, run_tune: RunTune, timing: LayerTiming) -> None:
    trace = make_counts(STATIONARY)
    memory = Memory(timing.model, 1e9, 0.0)
    exact = memory.used(4)
    results = run_tune(trace, memory=exact, kv_share=0.0)
    assert {row["redundant"] for row in results["tune"]["candidates"]} == {0}
    assert all(row["memory_bytes"] <= exact for row in results["tune"]["candidates"])  # nor a buffer for rebalances
    # vLLM places by rebalancing, for which there is no room.
    assert answered(results)["stack"] == "eplb"
    assert answered(results, "vllm")["stack"] == "contiguous"
    with pytest.raises(ValueError, match="give more --gpus or --memory-per-gpu"):
        run_tune(trace, memory=exact - 1, kv_share=0.0)
    with pytest.raises(ValueError, match=r"--redundant 4 makes 5 slots .* give at most 0"):
        run_tune(trace, memory=exact, kv_share=0.0, redundant=(4,))


def test_steps_held_out_change_nothing_that_is_chosen(make_counts: MakeCounts, run_tune: RunTune) -> None:
    shares = drifting(80, 20)
    other = shares.copy()
    other[54:] = shares[:26, ::-1]  # chosen on steps 24 to 51
    found = [
        run_tune(make_counts(one, name=name), policies=EPLB, redundant=(0, 4), layer_ms=0.01)["tune"]
        for one, name in ((shares, "a.parquet"), (other, "b.parquet"))
    ]
    chosen = [{row["name"]: row["gain_choosing"] for row in one["candidates"]} for one in found]
    assert chosen[0] == chosen[1]
    assert [one["name"] for one in found[0]["answers"]] == [one["name"] for one in found[1]["answers"]]
    held_out = [{row["name"]: row["gain"] for row in one["candidates"]} for one in found]
    assert held_out[0] != held_out[1]


def test_more_memory_is_never_worse(make_counts: MakeCounts, run_tune: RunTune, timing: LayerTiming) -> None:
    trace = make_counts(np.tile(hot(0, number=1, times=12.0), (60, 1)))
    memory, gains, used = Memory(timing.model, 1e9, 0.0), [], []
    for slots in (4, 5, 6, 8, 16):
        limit = memory.used(slots)
        best = answered(run_tune(trace, memory=limit, kv_share=0.0, policies=STACKS))
        assert best["memory_bytes"] <= limit
        gains.append(best["throughput_gain"]["mean"])
        used.append(best["memory_bytes"])
    # One expert alone has 12/27 of the work, more than a rank's share: without a copy of it nothing is balanced.
    assert gains[1] > gains[0] + 0.1
    assert all(1 + later >= (1 + earlier) * 0.994 for earlier, later in pairwise(gains))
    assert used[-1] < memory.used(16)  # what is not worth it is not taken


def test_the_cheapest_of_those_alike_is_chosen(make_counts: MakeCounts, run_tune: RunTune) -> None:
    results = run_tune(make_counts(STATIONARY), policies=STACKS)
    best = answered(results)
    faster = [
        row for row in results["tune"]["candidates"] if row["gain"] and row["memory_bytes"] > best["memory_bytes"]
    ]
    assert all(row["gain"]["mean"] < best["throughput_gain"]["mean"] + 0.02 for row in faster)
    assert best["redundant"] == 0


def test_results_are_the_projects_and_the_same_again(
    make_counts: MakeCounts, run_tune: RunTune, tmp_path: Path
) -> None:
    trace = make_counts(STATIONARY)
    first, again = (run_tune(trace, seed=3, policies=STACKS, redundant=(4,)) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    check_results(first)
    write_report(first, tmp_path / "out")
    assert read_results(tmp_path / "out" / "results.json")["tune"]["baseline"] == "contiguous r0"
    names = [entry["name"] for entry in first["stacks"]]
    assert names[0] == "contiguous r0"
    assert len(set(names)) == len(names)
    assert first["trace"]["steps_scored"] == 60 - first["trace"]["steps_planned"] == 21
    # Each finalist's gain is that of its entry, by another formula for the mean.
    for row in first["tune"]["candidates"]:
        if row["gain"] is not None and row["name"] in names:
            entry = first["stacks"][names.index(row["name"])]
            own = entry["metrics"]["throughput_gain"]["mean"]
            assert row["gain"]["mean"] == pytest.approx(own, abs=0.01)


def test_too_few_steps_empty_steps_and_an_empty_layer(make_counts: MakeCounts, run_tune: RunTune) -> None:
    with pytest.raises(ValueError, match="holds 1 step"):
        run_tune(make_counts(STATIONARY[:1]))
    with pytest.raises(ValueError, match="have no tokens"):
        run_tune(make_counts(STATIONARY, tokens=0, name="none.parquet"))
    with pytest.raises(ValueError, match="--interval 50"):
        run_tune(make_counts(STATIONARY), intervals=(50,))
    few = run_tune(make_counts(STATIONARY[:6], name="few.parquet"), redundant=(0,))
    assert "too short" in next(line["text"] for line in few["tune"]["words"] if line["about"] == "rebalancing")


def test_routers_need_a_named_loss(make_counts: MakeCounts, run_tune: RunTune) -> None:
    trace = make_counts(STATIONARY)
    with pytest.raises(ValueError, match="--quality-loss"):
        run_tune(trace, policies=(parse_stack("eplb+oea(k0=1)"),))
    with pytest.raises(ValueError, match="not a router policy that changes anything"):
        run_tune(trace, routers=("topk",), quality_loss="none")
    with pytest.raises(ValueError, match="works on tokens"):
        run_tune(trace, routers=("oea(k0=1)",), quality_loss="0.1 points of MMLU")


def test_readers_of_channels_need_a_named_loss_and_room_for_their_sketches(
    make_counts: MakeCounts, run_tune: RunTune, timing: LayerTiming
) -> None:
    trace, text = make_counts(STATIONARY), "contiguous+topk-channels(budget=0.4)"
    asked = {"policies": (parse_stack(text),), "redundant": (0,), "quality_loss": "0.01 nats"}
    with pytest.raises(ValueError, match=r"topk-channels\(budget=0.4\) changes the model's output: .*--quality-loss"):
        run_tune(trace, **{**asked, "quality_loss": ""})
    results = run_tune(trace, **asked)
    model, slots = timing.model, 16 // GPUS
    sizes = ReadBytes(model.hidden, model.intermediate)
    memory = Memory(model, 141e9, 0.2)
    with_sketches = memory.used(slots) + model.moe_layers * sizes.resident(slots)
    used = {one["name"]: one["memory_bytes"] for one in results["tune"]["candidates"]}
    assert used == {"contiguous r0": memory.used(slots), f"{text} r0": with_sketches}
    # No system runs it.
    assert not any("channels" in one["name"] for one in results["tune"]["answers"][1:])
    candidate = Candidate(parse_stack(text), 0)
    assert {system.lacks(candidate.deployment) for system in SYSTEMS} == {"no reader of channels (topk-channels)"}
    limit = (memory.used(slots) + with_sketches) / 2 / 0.8
    assert [one["name"] for one in run_tune(trace, **asked, memory=limit)["stacks"]] == ["contiguous r0"]


@pytest.mark.parametrize(
    ("level", "text"),
    [
        ("rank_counts", "eplb+lplb(counts=gathered)+waterfill-joint"),
        ("tokens", "eplb+random+waterfill(load=routed+local,counts=local)"),
        ("tokens", "searched+lplb-ipm"),
    ],
)
def test_finer_levels_are_replayed_as_replay_does(
    make_trace: Callable[..., StoredTrace], model: Path, level: str, text: str
) -> None:
    with_shared = model.read_text() + "shared_intermediate = 2048\n"
    model.write_text(with_shared)
    timing = load_timing("h200", str(model), 1, "prefill")
    trace = make_trace(level, steps=24, experts=16, tokens=512, shared_cost=1.0)
    asked = TuneOptions(GPUS, 1, 1, 141e9, policies=(parse_stack(text),), redundant=(4,), seed=7)
    results = tune(trace, asked, timing)
    planned = results["trace"]["steps_planned"]
    policies = (("", parse_stack("contiguous")), ("", parse_stack(text)))
    replayed = replay(
        trace, ReplayOptions(Cluster(GPUS, 1, 4), policies, seed=7, plan_share=planned / 24, timing=timing)
    )
    own = next(entry for entry in results["stacks"] if entry["name"] == f"{text} r4")
    for key in ("layer_time_us", "max_over_mean", "bytes_read"):
        assert own["metrics"][key] == pytest.approx(replayed["stacks"][1]["metrics"][key]), key
    assert own["metrics"]["gap_rounding"] == replayed["stacks"][1]["metrics"]["gap_rounding"]


def test_a_router_that_is_accepted_is_tried_and_its_loss_told(
    make_trace: Callable[..., StoredTrace], timing: LayerTiming, tmp_path: Path
) -> None:
    plain = make_trace("tokens", steps=12, experts=16, tokens=64, phase="decode")
    rng = np.random.default_rng(0)
    meta = dataclasses.replace(plain.meta, num_scores=16)
    with TraceWriter(tmp_path / "scored.parquet", meta) as writer:
        for block in plain.blocks():
            assert isinstance(block, TokenBlock)
            scores = rng.random((len(block.token_step), 2, 16)).astype(np.float16)
            chosen = np.argsort(-scores.astype(np.float32), axis=2)[:, :, :2].astype(np.int16)
            writer.append(dataclasses.replace(block, scores=scores, expert_ids=chosen))
    asked = TuneOptions(
        GPUS, 1, 1, 141e9, policies=(parse_stack("contiguous+oea(k0=1)"),), redundant=(0,), quality_loss="0.3 points"
    )
    results = tune(StoredTrace(tmp_path / "scored.parquet"), asked, timing)
    assert [entry["name"] for entry in results["stacks"]] == ["contiguous r0", "contiguous+oea(k0=1) r0"]
    assert results["stacks"][1]["metrics"]["kept_mass"]["mean"] < 1
    assert not any("oea" in one["name"] for one in results["tune"]["answers"][1:])  # no system runs it
    first = answered(results)
    if first["advised"]:
        assert "0.3 points" in next(line["text"] for line in results["tune"]["words"] if line["about"] == "run")


@pytest.fixture
def unequal(tmp_path: Path) -> StoredTrace:
    """Sums over whole benchmarks, as steps: 3 to 600 million tokens. Each has its own mix of hot experts."""
    rng = np.random.default_rng(3)
    tokens = np.array([90, 30, 80, 600, 50, 500, 40, 30]) * 10**6
    shares = np.array([hot(0, times=times) for times in rng.uniform(3, 9, len(tokens))])
    counts = (tokens[:, None, None] * 2 * shares[:, None]).astype(np.int64).repeat(2, axis=1)
    with TraceWriter(tmp_path / "sums.parquet", TraceMeta("counts", 2, 16, 2, phase="prefill")) as writer:
        writer.append(CountsBlock(np.arange(len(counts)), counts))
    return StoredTrace(tmp_path / "sums.parquet")


def test_steps_of_very_unequal_size_are_advised_on_by_their_ratios(unequal: StoredTrace, run_tune: RunTune) -> None:
    results = run_tune(unequal, policies=STACKS, redundant=(0, 4))
    assert all(one["advised"] for one in results["tune"]["answers"])
    text = {line["about"]: line["text"] for line in results["tune"]["words"]}
    rows = {row["name"]: row["gain"] for row in results["tune"]["candidates"] if row["gain"] is not None}
    steps = [entry["by_step"]["layer_time_us"] for entry in results["stacks"]]
    for entry, own in zip(results["stacks"], steps, strict=True):
        gain = rows[entry["name"]]
        assert 1 + gain["mean"] == pytest.approx(sum(steps[0]) / sum(own), rel=0.01)
        assert -0.75 <= gain["low"] <= gain["mean"] <= gain["high"] <= 3
        # The table of stacks and the table of candidates of one report do not contradict each other.
        assert entry["versus_first"]["throughput_gain"] == {
            "difference": gain["mean"],
            "low": gain["low"],
            "high": gain["high"],
        }
    for kind, about in (("any", "gain"), ("sglang", "SGLang"), ("vllm", "vLLM")):
        assert str(Interval(**rows[answered(results, kind)["name"]])) in text[about]
    assert str(Interval(**rows[answered(results)["name"]])) in results["verdict"]
    assert results["tune"]["words"][0]["about"] == "warning"
    assert text["warning"].startswith("6 of 6 scored steps are too long for one forward pass: up to 599,999,")


def test_replay_warns_of_the_same_steps(unequal: StoredTrace, make_counts: MakeCounts, timing: LayerTiming) -> None:
    options = ReplayOptions(Cluster(GPUS), (("", EPLB[0]),), timing=timing)
    notes = replay(unequal, options)["trace"]["notes"]
    assert sum("too long for one forward pass: up to 499,999," in note for note in notes) == 1
    for trace, asked in ((make_counts(STATIONARY), options), (unequal, dataclasses.replace(options, timing=None))):
        assert not any("forward pass" in note for note in replay(trace, asked)["trace"]["notes"])


def test_words_have_the_gains_of_the_table_where_steps_differ(make_counts: MakeCounts, run_tune: RunTune) -> None:
    """Six steps with other hot experts each: two held-out steps cannot show a gain, and no sentence says otherwise."""
    shares = np.random.default_rng(1).dirichlet(np.full(16, 0.5), 6)
    results = run_tune(make_counts(shares), policies=STACKS, redundant=(0, 16))
    rows = {row["name"]: row["gain"] for row in results["tune"]["candidates"] if row["gain"] is not None}
    best = max((name for name in rows if name != "contiguous r0"), key=lambda name: rows[name]["mean"])
    assert rows[best]["mean"] > 0.005
    assert rows[best]["low"] < 0
    text = {line["about"]: line["text"] for line in results["tune"]["words"]}
    shown = f"{best} changes throughput by {Interval(**rows[best])}"
    assert "no clear difference" in text["SGLang"]
    assert shown in text["gain"].replace(", changes", " changes")
    assert "no clear difference" in text["gain"]
    assert "still does not clearly pay" in text["does not pay"]
    assert "warning" not in text


def test_tokens_of_conditions_are_those_of_the_steps_they_are_scored_on(
    make_counts: MakeCounts, run_tune: RunTune
) -> None:
    """A step of 4 million tokens among those used for choosing does not count for the held-out ones."""
    trace = make_counts(STATIONARY[:12], tokens=4096)
    block = next(iter(trace.blocks()))
    assert isinstance(block, CountsBlock)
    block.counts[5] *= 1000
    path = trace.path.with_name("long.parquet")
    with TraceWriter(path, trace.meta) as writer:
        writer.append(block)
    results = run_tune(StoredTrace(path), policies=EPLB, redundant=(0,))
    assert results["tune"]["conditions"][0]["tokens_per_gpu"] == 4096 / GPUS
