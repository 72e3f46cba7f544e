"""Every format reads to the values that were written, whatever its file is called; every lack is asked for."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.traces.importing import import_trace, open_trace
from epsim.traces.options import ImportOptions
from epsim.traces.readers.router_logits import choose, scores_of
from epsim.traces.store import StoredTrace
from epsim.traces.trace import RankCountsBlock, TokenBlock

Write = Callable[[str], tuple[list[Path], dict[str, Any]]]


def read(written: tuple[list[Path], dict[str, Any]]) -> StoredTrace:
    paths, options = written
    return open_trace(paths, ImportOptions(**options))


def counts_of(trace: StoredTrace) -> Any:
    return np.concatenate(
        [
            b.to_counts(trace.meta.num_experts).counts
            if isinstance(b, TokenBlock)
            else (b.to_counts().counts if isinstance(b, RankCountsBlock) else b.counts)
            for b in trace.blocks()
        ]
    )


def steps_of(trace: StoredTrace) -> list[int]:
    return [int(s) for b in trace.blocks() for s in b.steps]


def tokens_of(trace: StoredTrace) -> dict[str, Any]:
    blocks = [b for b in trace.blocks() if isinstance(b, TokenBlock)]
    out: dict[str, Any] = {"step": np.concatenate([b.steps[b.token_step] for b in blocks])}
    for name in ("source_rank", "expert_ids", "scores", "domain"):
        parts = [getattr(b, name) for b in blocks]
        out[name] = None if parts[0] is None else np.concatenate(parts)
    return out


@pytest.mark.parametrize("name", ["sglang_stat", "sglang_json", "packed_json", "vllm_dump", "counts_npz", "wide_csv"])
def test_counts(write_format: Write, known: dict[str, Any], name: str) -> None:
    trace = read(write_format(name))
    assert trace.meta.level == "counts"
    assert trace.meta.top_k == 2
    np.testing.assert_array_equal(counts_of(trace), known["counts"])
    assert steps_of(trace) == ([1, 11, 21] if name == "counts_npz" else [0, 1, 2])


def test_dense_layers_and_unfilled_steps_are_dropped_and_said(write_format: Write) -> None:
    meta = read(write_format("sglang_stat")).meta
    assert meta.layers == (1, 2)
    assert "2 unfilled zero steps dropped at the end, 3 kept" in meta.notes
    assert "1 dense layers without tokens dropped: 0" in meta.notes


@pytest.mark.parametrize("name", ["sglang_per_pass", "trtllm", "smartmoe", "rank_counts_npz"])
def test_rank_counts(write_format: Write, known: dict[str, Any], name: str) -> None:
    trace = read(write_format(name))
    assert (trace.meta.level, trace.meta.num_source_ranks, trace.meta.top_k) == ("rank_counts", 2, 2)
    blocks = [b.counts for b in trace.blocks() if isinstance(b, RankCountsBlock)]
    np.testing.assert_array_equal(np.concatenate(blocks), known["rank_counts"].transpose(0, 2, 1, 3))
    steps = {"sglang_per_pass": [10, 11, 12], "trtllm": [100, 101, 102], "smartmoe": [33, 34, 35]}
    assert steps_of(trace) == steps.get(name, [1, 11, 21])
    assert trace.meta.layers == ((3, 4) if name == "trtllm" else (0, 1))


@pytest.mark.parametrize("name", ["sglang_per_token", "megatron"])
def test_tokens_with_steps_and_ranks(write_format: Write, known: dict[str, Any], name: str) -> None:
    """Rank r's step s holds tokens 4r + 2s and 4r + 2s + 1."""
    trace = read(write_format(name))
    tokens = tokens_of(trace)
    first = 5 if name == "megatron" else 0
    assert (tokens["step"] - first).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert tokens["source_rank"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    np.testing.assert_array_equal(tokens["expert_ids"], known["ids"][[0, 1, 4, 5, 2, 3, 6, 7]])
    assert trace.meta.num_source_ranks == 2
    assert trace.meta.phase == ("training" if name == "megatron" else "decode")
    assert trace.meta.origin == "recorded"


@pytest.mark.parametrize("name", ["vllm_npy", "token_log", "logits_npz", "logits_pt"])
def test_token_streams_are_cut(write_format: Write, known: dict[str, Any], name: str) -> None:
    trace = read(write_format(name))
    tokens = tokens_of(trace)
    assert tokens["step"].tolist() == [0] * 4 + [1] * 4 + [2]
    np.testing.assert_array_equal(tokens["expert_ids"], known["ids"])
    assert (trace.meta.num_source_ranks, trace.meta.origin) == (0, "recorded")
    assert any("cut into steps of 4 tokens" in note for note in trace.meta.notes)
    if name == "token_log":
        assert trace.meta.model == "some/model"
        np.testing.assert_array_equal(tokens["scores"], np.broadcast_to([0.75, 0.25], (9, 2, 2)))


@pytest.mark.parametrize("name", ["vllm_npz", "sequences_npz", "examples_json"])
def test_sequences_are_composed(write_format: Write, known: dict[str, Any], name: str) -> None:
    """Sequences of 5 and 4 tokens, two places, ranks 0 and 1; the second arrives a step later."""
    trace = read(write_format(name))
    tokens = tokens_of(trace)
    assert (trace.meta.origin, trace.meta.phase, trace.meta.num_source_ranks) == ("composed", "decode", 2)
    expected = [(0, 0, 0)]
    for step in range(1, 5):
        expected += [(step, 0, step), (step, 1, 4 + step)]
    assert list(zip(tokens["step"].tolist(), tokens["source_rank"].tolist())) == [(s, r) for s, r, _ in expected]
    np.testing.assert_array_equal(tokens["expert_ids"], known["ids"][[t for _, _, t in expected]])
    if name == "sequences_npz":
        assert tokens["domain"].tolist() == ["law" if r == 0 else "math" for _, r, _ in expected]
        assert (tokens["scores"] == 0.5).all()


def test_flame_joins_layers_by_sample_and_position(write_format: Write, known: dict[str, Any]) -> None:
    trace = read(write_format("flame"))
    tokens = tokens_of(trace)
    # Three places, sequences of three tokens that arrive one step after another.
    expected = [(0, 0), (1, 1), (1, 3), (2, 2), (2, 4), (2, 6), (3, 5), (3, 7), (4, 8)]
    assert tokens["step"].tolist() == [step for step, _ in expected]
    np.testing.assert_array_equal(tokens["expert_ids"], known["ids"][[token for _, token in expected]])
    assert trace.meta.num_scores == 2


def test_old_csv_and_summaries(write_format: Write, known: dict[str, Any]) -> None:
    np.testing.assert_array_equal(counts_of(read(write_format("old_csv"))), known["counts"][:1])
    trace = read(write_format("summary_json"))
    assert counts_of(trace).tolist() == [[[100, 100, 50, 50, 50, 40], [180, 160, 20, 20, 10, 10]]]
    assert trace.meta.top_k == 2


@pytest.mark.parametrize("rule", ["softmax", "topk-softmax", "sigmoid"])
def test_router_logits_scores(write_format: Write, known: dict[str, Any], rule: Any) -> None:
    paths, options = write_format("logits_pt")
    tokens = tokens_of(open_trace(paths, ImportOptions(**options, score_rule=rule)))
    logits = torch.tensor(known["logits"]).transpose(0, 1)
    expected = torch.sigmoid(logits) if rule == "sigmoid" else logits.softmax(dim=-1)
    np.testing.assert_allclose(tokens["scores"], expected.numpy(), atol=1e-3)


@pytest.mark.parametrize("value", [1e39, 3e38])
def test_too_large_logits_give_no_warning(tmp_path: Path, value: float) -> None:
    """Beyond float32 they are an error in one line. Within it, a difference that overflows is a score of 0."""
    logits = np.where(np.eye(4) > 0, value, -value)[None].repeat(2, 0)
    np.save(tmp_path / "logits.npy", logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = ImportOptions(top_k=1, num_experts=4, score_rule="softmax")
        if value > 3.5e38:
            with pytest.raises(ValueError, match="the logit of token 0, layer 0, expert 0 is not a finite number"):
                tokens_of(open_trace([tmp_path / "logits.npy"], options))
            return
        tokens = tokens_of(open_trace([tmp_path / "logits.npy"], options))
    np.testing.assert_array_equal(tokens["scores"][:, 0], np.eye(4))


def test_ties_in_logits_go_to_the_lower_id() -> None:
    assert choose(np.array([[[1.0, 2.0, 2.0, 0.0, 2.0]]]), 2).tolist() == [[[1, 2]]]
    assert scores_of(np.array([[[0.0, 0.0]]]), "softmax").tolist() == [[[0.5, 0.5]]]


def test_names_do_not_matter(write_format: Write, format_name: str, tmp_path: Path) -> None:
    """Whatever the files are called, as long as numbers that stand in names alone stay."""
    paths, options = write_format(format_name)
    renamed = []
    for number, path in enumerate(paths):
        # SmartMoE's iteration and TensorRT-LLM's rank stand in the name only.
        keep = format_name in ("smartmoe", "trtllm") and "rank" in path.name
        renamed.append(tmp_path / (f"{path.stem}.weights" if keep else f"thing-{number}.weights"))
        shutil.copy(path, renamed[-1])
    direct, other = open_trace(paths, ImportOptions(**options)), open_trace(renamed, ImportOptions(**options))
    np.testing.assert_array_equal(counts_of(direct), counts_of(other))
    in_folder = open_trace(tmp_path, ImportOptions(**options))
    np.testing.assert_array_equal(counts_of(direct), counts_of(in_folder))


def test_what_is_missing_is_asked_for_by_option(write_format: Write, format_name: str) -> None:
    """Without the options that it needs a file names the one it lacks; batch, ranks and step_tokens have defaults."""
    paths, options = write_format(format_name)
    lacking = {"top_k": "--top-k", "num_experts": "--experts"}.items() & {
        (k, {"top_k": "--top-k", "num_experts": "--experts"}.get(k)) for k in options
    }
    without = {k: v for k, v in options.items() if k not in ("top_k", "num_experts")}
    if not lacking:
        assert read((paths, without)).num_steps > 0
        return
    (_, option) = next(iter(lacking))
    with pytest.raises(ValueError, match=f"give {option}") as caught:
        read((paths, without))
    assert str(paths[0]) in str(caught.value)


def test_models_fill_in(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    path.write_text(json.dumps({"logical_count": np.ones((61, 256)).tolist()}))
    with pytest.raises(ValueError, match=r"--top-k, .*--model deepseek-v3"):
        open_trace(path)
    meta = open_trace(path, ImportOptions(model="deepseek-ai/DeepSeek-V3-0324")).meta
    assert (meta.top_k, meta.shared_cost, meta.model) == (8, 1.0, "deepseek-ai/DeepSeek-V3-0324")
    with pytest.raises(ValueError, match="--model gpt-oss-20b has 32 experts a layer, the file has 256"):
        open_trace(path, ImportOptions(model="gpt-oss-20b"))
    with pytest.raises(ValueError, match="--experts 64, but the file has 256"):
        open_trace(path, ImportOptions(top_k=8, num_experts=64))
    assert open_trace(path, ImportOptions(top_k=8, shared_cost=0.5)).meta.shared_cost == 0.5


def test_same_counts_on_every_rank_count_once(write_format: Write, known: dict[str, Any]) -> None:
    """Tensor parallelism without attention data parallelism: each rank records all tokens."""
    paths, options = write_format("sglang_per_pass")
    content = torch.load(paths[0], weights_only=True)
    for record in content["records"]:
        record["rank"] = 1
    torch.save(content, paths[1])
    trace = read((paths, options))
    assert trace.meta.level == "counts"
    np.testing.assert_array_equal(counts_of(trace), known["rank_counts"][:, 0])
    assert any("same counts: counted once" in note for note in trace.meta.notes)


def test_counts_of_served_tokens_are_summed(write_format: Write) -> None:
    """DeepEP: a rank records what it serves, only its own slots; then source ranks are unknown."""
    paths, options = write_format("sglang_per_pass")
    expected: Any = 0
    for rank, path in enumerate(paths):
        content = torch.load(path, weights_only=True)
        for record in content["records"]:
            counts = torch.zeros(2, 8, dtype=torch.int32)
            counts[:, rank * 4 : rank * 4 + 4] = record["global_physical_count"][:, rank * 4 : rank * 4 + 4]
            record["global_physical_count"] = counts
            expected += int(counts.sum())
        torch.save(content, path)
    trace = read((paths, options))
    assert trace.meta.level == "counts"
    assert counts_of(trace).sum() == expected
    assert any("tokens it served: summed" in note for note in trace.meta.notes)


def test_token_log_warm_up_missing_lines_and_spellings(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"layer_id": layer, "experts": [3, 1], "token": t} for t in range(40) for layer in (4, 7)
    ]
    real = [[0, 1], [2, 3], [1, 3]]
    lines += [
        {"layer_id": layer, "experts": ids, "gating_probs": [0.5, 0.5], "token": 40 + t}
        for t, ids in enumerate(real)
        for layer in (4, 7)
        if (t, layer) != (1, 7)
    ]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    trace = open_trace(tmp_path / "log", ImportOptions(num_experts=4))
    assert tokens_of(trace)["expert_ids"].tolist() == [[[0, 1], [0, 1]], [[2, 3], [-1, -1]], [[1, 3], [1, 3]]]
    assert trace.meta.layers == (4, 7)
    assert "40 warm-up rows of identical expert ids dropped at the start" in trace.meta.notes
    assert "1 of 6 (token, layer) lines are missing: left empty" in trace.meta.notes


def test_a_token_index_that_comes_back_is_a_new_token(tmp_path: Path) -> None:
    lines = [
        {"layer": layer, "topk_ids": [batch, 2 + layer], "token_idx": t}
        for batch in range(2)
        for layer in range(2)
        for t in range(3)
    ]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    ids = tokens_of(open_trace(tmp_path / "log", ImportOptions(num_experts=4)))["expert_ids"]
    assert ids.tolist() == [[[0, 2], [0, 3]]] * 3 + [[[1, 2], [1, 3]]] * 3


def test_token_log_with_steps_ranks_and_domains(tmp_path: Path) -> None:
    lines = [
        {"step": s, "rank": r, "layer": 0, "token_idx": 0, "topk_ids": [s + r], "domain": f"d{r}"}
        for s in range(2)
        for r in (1, 0)
    ]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    tokens = tokens_of(open_trace(tmp_path / "log", ImportOptions(num_experts=4)))
    assert tokens["expert_ids"].reshape(-1).tolist() == [0, 1, 1, 2]
    assert tokens["source_rank"].tolist() == [0, 1, 0, 1]
    assert tokens["domain"].tolist() == ["d0", "d1", "d0", "d1"]


def test_phases_differ_by_step(write_format: Write) -> None:
    """Pass 0: both ranks prefill; pass 1: one decodes, the other is idle and without tokens."""
    paths, _ = write_format("sglang_per_token")
    for rank, path in enumerate(paths):
        content = torch.load(path, weights_only=True)
        content["records"][0]["forward_mode"] = 1
        content["records"][1]["forward_mode"] = 2 if rank == 0 else 4
        if rank == 1:
            content["records"][1]["topk_ids_of_layer"] = torch.full((2, 0, 8), -1, dtype=torch.int32)
        torch.save(content, path)
    trace = open_trace(paths)
    phases = [p for b in trace.blocks() if isinstance(b, TokenBlock) and b.phase is not None for p in b.phase]
    assert phases == ["prefill", "decode"]
    assert (trace.meta.phase, trace.meta.num_source_ranks) == ("mixed", 2)
    assert tokens_of(trace)["source_rank"].tolist() == [0, 0, 1, 1, 0, 0]


def test_megatron_micro_batches_are_steps(write_format: Write, known: dict[str, Any]) -> None:
    paths, options = write_format("megatron")
    for path in paths:
        path.write_text(path.read_text() * 2)
    trace = read((paths, options))
    assert steps_of(trace) == [10, 11, 12, 13]
    counts = counts_of(trace)
    np.testing.assert_array_equal(counts[0], counts[1])


def test_prompts_are_prefill_steps(tmp_path: Path, known: dict[str, Any]) -> None:
    ids = known["ids"].astype(np.int16)
    np.savez(tmp_path / "p.npz", prompt_routed_experts_0=ids[:5], prompt_routed_experts_1=ids[5:])
    trace = open_trace(tmp_path / "p.npz", ImportOptions(num_experts=6, ranks=2))
    tokens = tokens_of(trace)
    assert trace.meta.phase == "prefill"
    assert tokens["step"].tolist() == [0] * 5 + [1] * 4
    assert tokens["source_rank"].tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]


def test_our_own_file_opens_as_it_is(write_format: Write, tmp_path: Path) -> None:
    paths, options = write_format("sglang_json")
    stored = import_trace(paths, tmp_path / "t.bin", ImportOptions(**options))
    assert open_trace(tmp_path / "t.bin").path == stored.path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.bin"]
    stated = open_trace(tmp_path / "t.bin", ImportOptions(top_k=2, shared_cost=2.0, phase="decode", ranks=4)).meta
    assert (stated.shared_cost, stated.phase, stated.model) == (2.0, "decode", "unknown")
    for wrong, message in [
        (ImportOptions(top_k=3), "--top-k 3, but the trace has 2"),
        (ImportOptions(batch=3), "--batch works on imports only"),
        (ImportOptions(model="mixtral"), "--model mixtral has 8 experts, top-2; the trace has 6, top-2"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_trace(tmp_path / "t.bin", wrong)
    with pytest.raises(ValueError, match="an epsim trace already"):
        import_trace(tmp_path / "t.bin", tmp_path / "u.bin")


def test_smartmoe_iterations_and_ranks(write_format: Write, known: dict[str, Any], tmp_path: Path) -> None:
    """Iterations in the order of their numbers, 2 before 11; every iteration needs every rank's file."""
    paths, _ = write_format("smartmoe")
    for rank, path in enumerate(paths):
        shutil.copy(path, tmp_path / f"table_iter11_rank{rank}.log")
        lines = [f"{layer}:{np.full((3, 6), rank + 1).tolist()}" for layer in range(2)]
        (tmp_path / f"table_iter2_rank{rank}.log").write_text("\n".join(lines))
    trace = open_trace(tmp_path, ImportOptions(top_k=2))
    assert steps_of(trace) == [6, 7, 8, 33, 34, 35]
    counts = np.concatenate([b.counts for b in trace.blocks() if isinstance(b, RankCountsBlock)])
    assert (counts[:3, :, 0] == 1).all()
    assert (counts[:3, :, 1] == 2).all()
    np.testing.assert_array_equal(counts[3:], known["rank_counts"].transpose(0, 2, 1, 3))
    (tmp_path / "table_iter2_rank1.log").unlink()
    with pytest.raises(ValueError, match="iteration 2 lacks the file of rank 1"):
        open_trace(tmp_path, ImportOptions(top_k=2))


def test_several_sglang_files_follow_one_another(write_format: Write, known: dict[str, Any]) -> None:
    paths = [write_format("sglang_json")[0][0], write_format("sglang_json")[0][0]]
    trace = open_trace(paths, ImportOptions(top_k=2))
    np.testing.assert_array_equal(counts_of(trace), np.concatenate([known["counts"]] * 2))
    assert steps_of(trace) == list(range(6))
