"""Router policies in a replay: which steps they act on, with which scores, and what comes out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.placement.base import Cluster
from epsim.policies.apply import Setting, bind
from epsim.policies.routing import block as routing_block
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.traces.importing import import_trace
from epsim.traces.options import ImportOptions
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import TokenBlock, TraceMeta
from tests.policies.conftest import random_placement
from tests.policies.oea_reading import two_phases
from tests.policies.test_oea import draw_scores

SHARED = Path(__file__).resolve().parents[2] / "../shared"
SAMPLE = Path(__file__).resolve().parents[2] / "traces/sample.parquet"


def drawn(
    seed: int, steps: int = 4, tokens: int = 10, layers: int = 2, experts: int = 12, top_k: int = 4, ranks: int = 2
) -> TokenBlock:
    """Decode steps of varying size with the scores of all experts."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, tokens, steps)
    token_step = np.repeat(np.arange(steps), sizes)
    scores = np.stack([draw_scores(seed + layer, len(token_step), experts) for layer in range(layers)], 1)
    ids = np.argsort(-scores, axis=2, kind="stable")[..., :top_k]
    source = np.concatenate([np.sort(rng.integers(0, ranks, size)) for size in sizes])
    return TokenBlock(5 + np.arange(steps), token_step, source, ids, scores.astype(np.float32))


def sets_of(block: TokenBlock, token: int, layer: int) -> list[int]:
    return sorted(e for e in block.expert_ids[token, layer].tolist() if e >= 0)


@pytest.mark.parametrize("union", ["batch", "rank"])
@pytest.mark.parametrize("seed", range(3))
def test_each_step_or_rank_is_a_batch(seed: int, union: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_block, "CELLS", 300)  # Several parts.
    block = drawn(seed)
    placement = random_placement(np.random.default_rng(seed), 2, 12, 2, 2, 1)
    bound = bind(parse_stack(f"contiguous+oea(k0=2,union={union})"), placement, Setting(0, 0.0, 4, (0, 1)))
    routed = bound.rerouted(block)
    assert block.scores is not None
    group = block.token_step * 2 + (block.source_rank if union == "rank" else 0)
    kept, chosen = np.zeros((4, 2)), np.zeros((4, 2))
    for number in np.unique(group):
        tokens = np.flatnonzero(group == number)
        for layer in range(2):
            scores = block.scores[tokens, layer].astype(np.float64)
            experts, _ = two_phases(scores, 2 if len(tokens) > 1 else 4, 4)
            assert [sets_of(routed.block, token, layer) for token in tokens.tolist()] == experts
            step = block.token_step[tokens[0]]
            kept[step, layer] += sum(row[e] for row, own in zip(scores, experts) for e in own)
            chosen[step, layer] += np.sort(scores, 1)[:, -4:].sum()
    np.testing.assert_allclose(routed.kept_mass.numpy(), kept / chosen, rtol=1e-6)
    load = bound.load(block)
    recount = dataclasses.replace(routed.block, scores=None).to_counts(12).counts
    counted = torch.cat([part.counts for part in bound.counted(routed.block)])
    np.testing.assert_array_equal(counted.numpy(), recount)
    np.testing.assert_array_equal(load.routed.sum(-1).numpy(), recount.sum(-1))


def test_union_by_rank_reads_the_same_experts() -> None:
    block = drawn(6, tokens=40)
    placement = random_placement(np.random.default_rng(0), 2, 12, 0, 2, 1)
    setting = Setting(0, 0.0, 4, (0, 1))
    counts, kept = {}, {}
    for union in ("batch", "rank"):
        bound = bind(parse_stack(f"contiguous+oea(k0=1,union={union})"), placement, setting)
        counts[union] = torch.cat([part.counts for part in bound.counted(bound.rerouted(block).block)])
        kept_mass = bound.load(block).kept_mass
        assert kept_mass is not None
        kept[union] = kept_mass
    sizes = np.bincount(block.token_step * 2 + block.source_rank, minlength=8)
    assert (sizes != 1).all(), "a batch of one would take k"
    assert torch.equal(counts["batch"] > 0, counts["rank"] > 0)
    assert (kept["batch"] >= kept["rank"]).all()
    assert (kept["batch"] > kept["rank"]).any()


def test_ids_of_the_best_scores_or_beside_the_choice() -> None:
    block = drawn(1)
    assert block.scores is not None
    order = np.argsort(-block.scores.astype(np.float32), axis=2, kind="stable")
    placement = random_placement(np.random.default_rng(1), 2, 12, 0, 2, 1)
    own = np.take_along_axis(block.scores, block.expert_ids.astype(np.int64), 2)
    best = dataclasses.replace(
        block, scores=np.take_along_axis(block.scores, order[..., :7], 2), score_ids=order[..., :7]
    )
    beside = dataclasses.replace(block, scores=own)
    for other, num_scores, maxp in ((best, 7, 7), (beside, 4, 4)):
        setting = Setting(0, 0.0, 4, (0, 1), num_scores=num_scores)
        found = bind(parse_stack("contiguous+oea(k0=2)"), placement, setting)
        wanted = bind(parse_stack(f"contiguous+oea(k0=2,maxp={maxp})"), placement, setting)
        ids, expected = found.rerouted(other).block.expert_ids, wanted.rerouted(block).block.expert_ids
        np.testing.assert_array_equal(np.sort(ids, -1), np.sort(expected, -1))
        assert any(f"the {num_scores} best scores of a token" in note for note in found.notes)
        assert f"maxp is {num_scores}" in " ".join(found.notes)


def test_prefill_steps_are_left_alone() -> None:
    block = drawn(2)
    phase = np.array(["prefill", "decode", "mixed", "unknown"], dtype=object)
    placement = random_placement(np.random.default_rng(1), 2, 12, 0, 2, 1)
    bound = bind(parse_stack("contiguous+pruned(k0=1)"), placement, Setting(0, 0.0, 4, (0, 1)))
    routed = bound.rerouted(dataclasses.replace(block, phase=phase))
    number = (routed.block.expert_ids.astype(np.int64) >= 0).sum(-1)
    for step, wanted in enumerate([4, 1, 4, 1]):
        assert (number[block.token_step == step] == wanted).all()
    assert (routed.kept_mass[[0, 2]] == 1).all()
    assert (routed.kept_mass[[1, 3]] < 1).all()
    nothing = dataclasses.replace(block, scores=None, phase=np.array(["prefill"] * 4, dtype=object))
    np.testing.assert_array_equal(bound.rerouted(nothing).block.expert_ids, block.expert_ids)


def test_what_a_trace_must_hold() -> None:
    block = dataclasses.replace(drawn(2), scores=None)
    placement = random_placement(np.random.default_rng(1), 2, 12, 0, 2, 1)
    bound = bind(parse_stack("contiguous+oea(k0=1)"), placement, Setting(0, 0.0, 4, (0, 1)))
    with pytest.raises(ValueError, match="router oea needs router scores, but the trace has none for step 5"):
        bound.load(block)
    prefill = bind(parse_stack("contiguous+oea(k0=1)"), placement, Setting(0, 0.0, 4, (0, 1), phase="prefill"))
    with pytest.raises(ValueError, match="acts on decode steps, but the trace is of phase prefill"):
        prefill.load(block)
    with pytest.raises(ValueError, match="works on tokens, but the trace holds only rank counts"):
        bound.load(block.to_rank_counts(2, 12))


def store(path: Path, block: TokenBlock, experts: int, top_k: int, ranks: int) -> StoredTrace:
    assert block.scores is not None
    layers, num_scores = block.expert_ids.shape[1], block.scores.shape[-1]
    meta = TraceMeta("tokens", layers, experts, top_k, ranks, phase="decode", num_scores=num_scores)
    with TraceWriter(path, meta) as writer:
        writer.append(block)
    return StoredTrace(path)


def means(results: dict[str, Any], key: str) -> list[float]:
    return [entry["metrics"][key]["mean"] for entry in results["stacks"]]


def test_every_placement_and_split_with_a_router(tmp_path: Path) -> None:
    trace = store(tmp_path / "t.parquet", drawn(4, steps=12, tokens=40), 12, 4, 2)
    splits = ("even", "random", "static", "one-copy", "lplb", "lplb-sampled", "lplb-ipm")
    stacks = ["eplb"] + [f"{p}+oea(k0=2)+{s}" for p in ("contiguous", "eplb", "searched") for s in splits]
    stacks += ["eplb+oea-ep(k0=2)+one-copy"]
    policies = tuple(("", parse_stack(text)) for text in stacks)
    results = replay(trace, ReplayOptions(Cluster(2, 1, 4), policies))
    kept = [entry["metrics"]["kept_mass"]["mean"] for entry in results["stacks"]]
    assert kept[0] is None
    assert all(value == pytest.approx(kept[1]) for value in kept[1:-1])
    assert kept[1] < kept[-1] <= 1
    assert all(value >= -1e-9 for value in means(results, "optimality_gap"))
    active = dict(zip(stacks, means(results, "active_experts"), strict=True))
    assert active["eplb+oea-ep(k0=2)+one-copy"] == active["eplb+oea(k0=2)+one-copy"] < active["eplb+oea(k0=2)+even"]


@pytest.mark.parametrize("shared", ["local", "waterfill", "waterfill(candidates=all)"])
@pytest.mark.parametrize("router", ["pruned(k0=1)", "oea(k0=2,kmax=7)", "lynx(keep=2)"])
def test_tokens_of_fewer_or_more_than_k_experts_with_a_shared_expert(router: str, shared: str) -> None:
    block = drawn(5, tokens=30)
    placement = random_placement(np.random.default_rng(2), 2, 12, 4, 2, 1)
    bound = bind(parse_stack(f"contiguous+{router}+lplb+{shared}"), placement, Setting(0, 1.0, 4, (0, 1)))
    load = bound.load(block)
    number = np.bincount(block.token_step, minlength=4)
    assert torch.equal(load.routed.sum(-1), load.assignments)
    np.testing.assert_array_equal(load.shared_tokens.sum(-1).numpy(), np.stack([number, number], 1))
    np.testing.assert_array_equal(load.tokens.numpy(), np.stack([number, number], 1))
    if router.startswith("pruned"):
        np.testing.assert_array_equal(load.assignments.numpy(), np.stack([number, number], 1))


def uniform(experts: int, top_k: int, batch: int, steps: int, seed: int) -> TokenBlock:
    rng = np.random.default_rng(seed)
    scores = rng.random((steps * batch, 1, experts))
    ids = np.argsort(-scores, axis=2)[..., :top_k]
    step = np.repeat(np.arange(steps), batch)
    return TokenBlock(np.arange(steps), step, np.zeros_like(step), ids, (scores / scores.sum(-1, keepdims=True)))


def test_uniform_routing_reads_what_the_formula_says(tmp_path: Path) -> None:
    """N (1 - (1 - k0 / N)^B), N = 128, B = 16: 82.4 experts at k = 8, 40.4 at k0 = 3."""
    trace = store(tmp_path / "t.parquet", uniform(128, 8, 16, 300, 0), 128, 8, 1)
    ks = (3, 4, 5, 6, 7, 8)
    policies = tuple(("", parse_stack(f"contiguous+oea(k0={k0})")) for k0 in ks)
    results = replay(trace, ReplayOptions(Cluster(1), policies))
    for k0, entry in zip(ks, results["stacks"], strict=True):
        wanted = 128 * (1 - (1 - k0 / 128) ** 16)
        assert entry["metrics"]["active_experts_total"]["mean"] == pytest.approx(wanted, abs=4 * 3.5 / 300**0.5)
    path = SHARED / "oracles/oea.json"
    if path.exists():
        oracle = json.loads(path.read_text())
        found = means(results, "active_experts_total")
        assert found == pytest.approx(oracle["uniform_T_B16"], abs=4 * 3.5 / 300**0.5)


@pytest.mark.slow
def test_the_sample_under_expert_parallelism() -> None:
    texts = ["contiguous", "contiguous+oea(k0=3)", "contiguous+oea-ep(k0=3)", "contiguous+pruned(k0=3)"]
    policies = tuple(("", parse_stack(text)) for text in texts)
    results = replay(StoredTrace(SAMPLE), ReplayOptions(Cluster(8, 1), policies))
    plain, oea, filled, pruned = means(results, "active_experts")
    assert oea == filled == pruned < plain
    total = means(results, "active_experts_total")
    assert total[0] > total[2] > total[1] == total[3]
    kept = [entry["metrics"]["kept_mass"]["mean"] for entry in results["stacks"]]
    assert kept[3] < kept[1] < kept[2] < 1


@pytest.mark.recordings
def test_recorded_probabilities_of_the_chosen_four(tmp_path: Path) -> None:
    source = SHARED / "traces/gpt-oss-20b/gptoss20b_decode_ids_probs_48seq.npz"
    if not source.exists():
        pytest.skip("needs recordings that are not part of the repository")
    import_trace([source], tmp_path / "g.parquet", ImportOptions(batch=16, model="gpt-oss-20b"))
    trace = StoredTrace(tmp_path / "g.parquet")
    texts = ["contiguous+pruned(k0=2@2)", "contiguous+oea(k0=2)", "contiguous+oea(k0=4)"]
    results = replay(trace, ReplayOptions(Cluster(1), tuple(("", parse_stack(text)) for text in texts)))
    assert any("the 4 best scores" in note for note in results["stacks"][1]["notes"])
    kept = [entry["metrics"]["kept_mass"]["mean"] for entry in results["stacks"]]
    assert kept[0] < kept[1] < kept[2] == 1
    total = means(results, "active_experts_total")
    assert total[0] == total[1] < total[2]
