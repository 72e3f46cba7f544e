"""The real recordings, against figures taken from the files themselves and from what their sources state."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epsim.traces.importing import open_trace
from epsim.traces.options import ImportOptions, SynthesisOptions
from epsim.traces.show import summarize
from epsim.traces.store import StoredTrace
from epsim.traces.synthesize import inclusion, marginals, synthesize
from epsim.traces.trace import RankCountsBlock, TokenBlock

FOLDER = Path(__file__).resolve().parents[2] / "../shared/traces"
pytestmark = [
    pytest.mark.recordings,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs recordings that are not part of the repository"),
]
GPT_OSS = ImportOptions(model="gpt-oss-20b")


def counts_of(trace: StoredTrace) -> Any:
    return np.concatenate([b.counts for b in trace.blocks() if not isinstance(b, TokenBlock)])


def tokens_of(trace: StoredTrace, name: str) -> Any:
    blocks = [b for b in trace.blocks() if isinstance(b, TokenBlock)]
    if name == "step":
        return np.concatenate([b.steps[b.token_step] for b in blocks])
    return np.concatenate([getattr(b, name) for b in blocks])


@pytest.mark.parametrize("path", sorted((FOLDER / "deepseek-v3-sglang").glob("*.json")), ids=lambda p: p.stem)
def test_deepseek(path: Path) -> None:
    with pytest.raises(ValueError, match=r"give --top-k, .*--model deepseek-v3"):
        open_trace(path)
    trace = open_trace(path, ImportOptions(model="deepseek-v3"))
    raw = np.array(json.loads(path.read_text())["logical_count"])
    np.testing.assert_array_equal(counts_of(trace)[0], raw[3:])
    meta = trace.meta
    assert (meta.num_layers, meta.num_experts, meta.top_k, meta.shared_cost) == (58, 256, 8, 1.0)
    assert meta.layers == tuple(range(3, 61))
    assert meta.phase == path.name.split("_")[0]
    sums = raw[3:].sum(axis=1)
    assert sums.max() / sums.min() < 1.001
    assert [skew.assignments for skew in summarize(trace).skew] == sums.tolist()


def test_deepseek_folder() -> None:
    trace = open_trace(FOLDER / "deepseek-v3-sglang", ImportOptions(model="deepseek-v3"))
    assert trace.num_steps == 8
    assert trace.meta.phase == "unknown"


@pytest.mark.parametrize(("name", "sequences"), [("ids_256seq", 256), ("ids_probs_48seq", 48)])
def test_gpt_oss_sequences_conserve_every_token(name: str, sequences: int) -> None:
    path = FOLDER / "gpt-oss-20b" / f"gptoss20b_decode_{name}.npz"
    with pytest.raises(ValueError, match=r"largest id is 31\): give --experts"):
        open_trace(path)
    trace = open_trace(path, GPT_OSS)
    with np.load(path) as arrays:
        raw, lengths = arrays["expert_ids"], arrays["lengths"]
        probs = arrays.get("topk_probs")
    inside = np.arange(raw.shape[1]) < lengths[:, None]
    ids = tokens_of(trace, "expert_ids").reshape(-1, 96)
    expected = raw[inside].reshape(-1, 96).astype(np.int16)
    assert len(ids) == lengths.sum()
    order, other = np.lexsort(ids.T), np.lexsort(expected.T)
    np.testing.assert_array_equal(ids[order], expected[other])
    step = tokens_of(trace, "step")
    assert np.bincount(step).max() == min(sequences, 64)
    assert (trace.meta.origin, trace.meta.phase, trace.meta.num_source_ranks) == ("composed", "decode", 16)
    assert trace.meta.num_scores == (0 if probs is None else 4)
    if probs is not None:
        # Probabilities stay beside their ids: the summed mass of each expert is conserved.
        mass = np.bincount(raw[inside].ravel(), probs[inside].ravel().astype(np.float64), minlength=32)
        scores = tokens_of(trace, "scores").ravel().astype(np.float64)
        np.testing.assert_allclose(np.bincount(ids.ravel(), scores, minlength=32), mass)


def test_gpt_oss_summaries() -> None:
    paths = sorted((FOLDER / "gpt-oss-20b").glob("*.json"))
    trace = open_trace(paths)
    assert (trace.num_steps, trace.meta.num_experts, trace.meta.top_k) == (14, 32, 4)
    raw = json.loads(paths[1].read_text())
    assert "num_answer_tokens" not in raw
    tokens = raw["sample_count"] * raw["num_think_tokens"]
    shares = raw["think_expert_analytics"]["layer_7"]
    expected = [round(shares[str(e)]["count_frequency"] * tokens) if str(e) in shares else 0 for e in range(32)]
    assert counts_of(trace)[1, 7].tolist() == expected


def test_olmoe_log() -> None:
    trace = open_trace(FOLDER / "olmoe-vllm-log" / "moe_routes.jsonl")
    ids = tokens_of(trace, "expert_ids")
    assert len(ids) == 4471
    assert ids[0, 0].tolist() == [45, 57, 46, 17, 42, 22, 29, 47]
    assert ids[-1, 0].tolist() == [61, 55, 33, 40, 44, 5, 10, 60]
    assert tokens_of(trace, "scores")[0, 0, 0] == np.float16(0.2505)
    meta = trace.meta
    assert (meta.num_experts, meta.top_k, meta.layers, meta.shared_cost) == (64, 8, (0,), 0.0)
    assert meta.model == "allenai/OLMoE-1B-7B-0924"
    assert any(note.startswith("2048 warm-up rows") for note in meta.notes)
    assert any("cut into steps of 1024" in note for note in meta.notes)


def test_smartmoe() -> None:
    folder = FOLDER / "smartmoe-gpt"
    options = ImportOptions(top_k=2)
    logs = open_trace(sorted(folder.glob("*.log")), options)
    assert (logs.num_steps, logs.meta.num_source_ranks, logs.meta.phase) == (4, 2, "training")
    by_rank = counts_of(logs)
    assert (by_rank.sum(axis=3) == 4096).all()
    first = (folder / "table_iter1001_rank1.log").read_text().splitlines()[5]
    assert by_rank[2, 5, 1].tolist() == json.loads(re.sub(r"^5:", "", first))[2]
    whole = open_trace(folder / "smartmoe_gpt_24L32E_global_counts_501iters.npz", options)
    ranks = open_trace(folder / "smartmoe_gpt_24L32E_perrank_counts_501iters.npz", options)
    assert (whole.num_steps, ranks.num_steps, ranks.meta.num_source_ranks) == (501, 501, 16)
    assert [int(s) for b in whole.blocks() for s in b.steps] == list(range(1, 5002, 10))
    summed = [b.to_counts().counts for b in ranks.blocks() if isinstance(b, RankCountsBlock)]
    np.testing.assert_array_equal(np.concatenate(summed), counts_of(whole))
    # Iteration 1001 is entry 100; its rank files hold four micro-batches each.
    entry = next(b.counts for b in ranks.blocks(100, 101))  # type: ignore[union-attr]
    np.testing.assert_array_equal(entry[0][:, :2], by_rank.sum(axis=0))


def test_qwen_csv() -> None:
    trace = open_trace(FOLDER / "qwen1.5-moe", ImportOptions(model="Qwen1.5-MoE-A2.7B"))
    counts = counts_of(trace)
    assert counts.shape == (80, 12, 60)
    assert (counts.sum(axis=2) == 98304).all()
    assert counts[0, 0, :5].tolist() == [555, 2248, 1219, 4864, 4060]
    assert counts[1, 0, :5].tolist() == [359, 2403, 1815, 5490, 3680]
    assert trace.meta.shared_cost == 4.0
    assert "steps 0-19 bookcorpus, 20-39 random, 40-59 wikitext, 60-79 wmt19" in trace.meta.notes


def test_deepseek_topics_drawn(tmp_path: Path) -> None:
    """Inclusion frequencies of drawn DeepSeek-V3 tokens against the recorded marginals, all 58 x 256 of them."""
    path = FOLDER / "deepseek-v3-sglang" / "decode_in1000out1000.json"
    source = open_trace(path, ImportOptions(model="deepseek-v3"))
    options = SynthesisOptions(num_steps=4, tokens_per_step=2048, seed=1)
    trace = synthesize([source], tmp_path / "t.parquet", options)
    p, _ = inclusion(marginals(source), 8)
    z = (marginals(trace) - 8192 * p) / np.sqrt(8192 * p * (1 - p))
    assert np.abs(z).max() < 5.5
    assert z.std() == pytest.approx(1.0, abs=0.03)
