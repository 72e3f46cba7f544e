"""The recorder against what the experts of every family were given, and against hand counts."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from epsim.traces.overhead import measure_overhead
from epsim.traces.record import record
from epsim.traces.routers import SCORE_RULES, find_routers

transformers = pytest.importorskip("transformers")
models = runpy.run_path(str(Path(__file__).with_name("recorded_models.py")))
E, K, FAMILIES = models["E"], models["K"], models["FAMILIES"]
make_model, UsedExperts, watch, read = (models[name] for name in ("make_model", "UsedExperts", "watch", "read"))


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_grad")
def test_ids_are_those_used(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    used = UsedExperts(model)
    assert {type(r.module).__name__ for r in find_routers(model)} == {FAMILIES[family][0]} <= set(SCORE_RULES)
    with record(model, tmp_path / "t.parquet", num_scores="all", num_source_ranks=2) as recorder:
        recorder.domains = ["x", "y"]
        model(input_ids=torch.randint(1, 64, (2, 9)))
        model(torch.randint(1, 64, (2, 4)))
    meta, blocks = read(tmp_path / "t.parquet")
    assert (meta.num_experts, meta.top_k, meta.num_scores, meta.num_source_ranks, meta.origin) == (
        E,
        K,
        E,
        2,
        "recorded",
    )
    assert meta.layers == {"Qwen3Moe": (0, 2), "DeepseekV3": (1, 2)}.get(family, (0, 1, 2))
    assert meta.shared_cost == {"Qwen2Moe": 2.0, "DeepseekV3": 1.0}.get(family, 0.0)
    for step, block in enumerate(blocks):
        np.testing.assert_array_equal(block.expert_ids, used.ids(step))
        assert block.scores is not None
        # The recorded scores choose the recorded experts (DeepSeek-V3: those of the groups it may choose from).
        if family != "DeepseekV3":
            chosen = np.argsort(-block.scores.astype(np.float32), axis=2, kind="stable")[..., :K]
            assert (np.sort(chosen) == np.sort(block.expert_ids)).mean() > 0.98  # float16 makes a few ties
        length = (9, 4)[step]
        assert block.source_rank.tolist() == [0] * length + [1] * length
        assert block.domain is not None
        assert block.domain.tolist() == ["x"] * length + ["y"] * length
    # A hand count of the first step.
    by_hand = np.zeros((len(meta.layers), 2, E), dtype=int)
    for token, layers in enumerate(used.ids(0)):
        for layer, chosen_ids in enumerate(layers):
            for expert in chosen_ids:
                by_hand[layer, token // 9, expert] += 1
    np.testing.assert_array_equal(blocks[0].to_rank_counts(2, E).counts[0], by_hand)


@pytest.mark.usefixtures("no_grad")
def test_scores_give_the_weights_used(tmp_path: Path) -> None:
    """Over the chosen experts, recorded scores are proportional to the weights the model used."""
    for family in ("Qwen3Moe", "Mixtral", "GptOss", "Olmoe"):
        model = make_model(family)
        weights = watch(model, 1)
        with record(model, tmp_path / "t.parquet", num_scores="all"):
            model(input_ids=torch.randint(1, 64, (1, 20)))
        block = read(tmp_path / "t.parquet")[1][0]
        assert block.scores is not None
        scores = np.take_along_axis(block.scores.astype(np.float64), block.expert_ids.astype(np.int64), axis=2)
        expected = torch.stack(weights, dim=1).double()
        expected /= expected.sum(-1, keepdim=True)
        np.testing.assert_allclose(scores / scores.sum(-1, keepdims=True), expected.numpy(), atol=2e-3)


@pytest.mark.usefixtures("no_grad")
def test_deepseek_scores_are_biased_sigmoids(tmp_path: Path) -> None:
    model = make_model("DeepseekV3")
    logits, routers = watch(model, 0), find_routers(model)
    with record(model, tmp_path / "t.parquet", num_scores="all"):
        model(input_ids=torch.randint(1, 64, (1, 20)))
    block = read(tmp_path / "t.parquet")[1][0]
    assert block.scores is not None
    for layer, router in enumerate(routers):
        expected = 1 / (1 + np.exp(-logits[layer].double().numpy())) + router.module.e_score_correction_bias.numpy()
        np.testing.assert_allclose(block.scores[:, layer].astype(np.float64), expected, atol=2e-3)


@pytest.mark.usefixtures("no_grad")
def test_highest_scores_with_their_experts(tmp_path: Path) -> None:
    model = make_model("Olmoe")
    inputs = torch.randint(1, 64, (2, 7))
    for name, kept in (("all", "all"), ("five", 5)):
        with record(model, tmp_path / f"{name}.parquet", num_scores=kept):  # type: ignore[arg-type]
            model(input_ids=inputs)
    every, five = (read(tmp_path / f"{name}.parquet")[1][0] for name in ("all", "five"))
    assert every.scores is not None
    assert five.scores is not None
    assert five.score_ids is not None
    np.testing.assert_array_equal(five.score_ids[..., :K], five.expert_ids)
    np.testing.assert_array_equal(np.take_along_axis(every.scores, five.score_ids.astype(int), axis=2), five.scores)
    assert (np.diff(five.scores, axis=2) <= 0).all()


@pytest.mark.parametrize("family", ["Qwen2Moe", "DeepseekV3", "GptOss", "Gemma4"])
@pytest.mark.usefixtures("no_grad")
def test_generate_with_cache_and_left_padding(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    used = UsedExperts(model)
    lengths, total = [6, 3, 5], 6
    ids = torch.randint(1, 64, (3, total))
    mask = torch.tensor([[0] * (total - n) + [1] * n for n in lengths])
    ids[mask == 0] = 0
    with record(model, tmp_path / "t.parquet", num_source_ranks=3) as recorder:
        recorder.domains = ["a", "b", "c"]
        recorder.source_ranks = [2, 0, 1]
        out = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert out.shape == (3, total + 5)
    _, blocks = read(tmp_path / "t.parquet")
    assert len(blocks) == 5
    assert [str(b.phase[0]) for b in blocks if b.phase is not None] == ["prefill"] + ["decode"] * 4
    assert [b.steps.tolist() for b in blocks] == [[s] for s in range(5)]
    order = [1, 2, 0]  # sequences by source rank
    real = used.ids(0).reshape(3, total, -1, K)
    expected = np.concatenate([real[b, total - lengths[b] :] for b in order])
    np.testing.assert_array_equal(blocks[0].expert_ids, expected)
    assert blocks[0].source_rank.tolist() == [0] * 3 + [1] * 5 + [2] * 6
    assert blocks[0].domain is not None
    assert blocks[0].domain.tolist() == ["b"] * 3 + ["c"] * 5 + ["a"] * 6
    for step in range(1, 5):
        np.testing.assert_array_equal(blocks[step].expert_ids, used.ids(step)[order])
        assert blocks[step].source_rank.tolist() == [0, 1, 2]
    # The same sequences without cache and padding are routed the same: step s of sequence b is its token n + s - 1.
    for b, n in enumerate(lengths):
        used.passes.clear()
        model(input_ids=out[b : b + 1, total - n :])
        alone = np.sort(used.ids(0))
        for step in range(1, 5):
            recorded = np.sort(blocks[step].expert_ids[order.index(b)])
            assert (recorded == alone[n + step - 1]).mean() > 0.9


@pytest.mark.usefixtures("no_grad")
def test_sequences_that_ended_are_left_out(tmp_path: Path) -> None:
    """generate() goes on feeding padding to a sequence after its end, with an attention mask of ones."""
    model = make_model("Olmoe")
    ids = torch.randint(1, 64, (4, 5))
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[:, 5:]
    stop = int(plain[1, 2])
    model.generation_config.eos_token_id = stop
    with record(model, tmp_path / "t.parquet"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    _, blocks = read(tmp_path / "t.parquet")
    ends = [row.tolist().index(stop) if stop in row else 99 for row in plain]
    assert min(ends) <= 2
    # Decode step s (s = 1, 2, ...) feeds token s - 1 of the continuation: sequences whose end it is, or was, are out.
    for step, block in enumerate(blocks[1:], start=1):
        assert len(block.token_step) == sum(end > step - 1 for end in ends)


@pytest.mark.usefixtures("no_grad")
def test_steps_without_scores(tmp_path: Path) -> None:
    model = make_model("Olmoe")
    with record(model, tmp_path / "t.parquet", num_scores="all") as recorder:
        recorder.scored_phases = ("decode",)
        model(input_ids=torch.randint(1, 64, (1, 12)))
        model(input_ids=torch.randint(1, 64, (4, 1)))
    _, blocks = read(tmp_path / "t.parquet")
    assert [b.scores is not None for b in blocks] == [False, True]
    assert [b.phase.tolist() for b in blocks if b.phase is not None] == [["prefill"], ["decode"]]


def test_overhead_is_told(tmp_path: Path) -> None:
    overhead = measure_overhead(make_model("Olmoe"), {"input_ids": torch.randint(1, 64, (4, 64))}, tmp_path / "t")
    assert overhead.plain > 0
    assert overhead.writing > 0
    assert str(overhead).startswith("recording adds ")


@pytest.mark.parametrize("family", ["Olmoe", "GptOss"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.usefixtures("no_grad")
def test_static_cache(family: str, attention: str, tmp_path: Path) -> None:
    """generate() then hands the model a mask of [sequences, 1, tokens, keys], or a dict of these."""
    model = make_model(family)
    if family == "Olmoe":
        model.set_attn_implementation(attention)
    used = UsedExperts(model)
    ids = torch.randint(1, 64, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with record(model, tmp_path / "t.parquet"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation="static")
    _, blocks = read(tmp_path / "t.parquet")
    assert [len(b.token_step) for b in blocks] == [10, 2, 2, 2]
    for step, block in enumerate(blocks):
        real = np.flatnonzero(mask.numpy()) if step == 0 else [0, 1]
        np.testing.assert_array_equal(block.expert_ids, used.ids(step)[real])


@pytest.mark.usefixtures("no_grad")
def test_masks_of_every_form(tmp_path: Path) -> None:
    """Right padding, all padding, a mask that goes beyond the pass, and one that is overwritten after it."""
    model = make_model("Olmoe")
    ids = torch.randint(1, 64, (2, 4))
    right = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    overwritten = right.bool()
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    packed = (right.bool()[:, None, :, None] & right.bool()[:, None, None, :] & causal) | False
    with record(model, tmp_path / "t.parquet") as recorder:
        model(input_ids=ids, attention_mask=right)
        model(input_ids=ids, attention_mask=torch.zeros_like(right))
        model(input_ids=ids, attention_mask=overwritten)
        overwritten.fill_(True)
        model(input_ids=ids, attention_mask=packed)
        first = model(input_ids=ids, attention_mask=right.flip(1), use_cache=True)
        model(ids[:, :1], attention_mask=torch.ones(2, 5), past_key_values=first.past_key_values)
        recorder.begin(model, (ids,), {"attention_mask": torch.tensor([[0, 1, 1, 1, 0, 0]] * 2)})
        assert recorder._valid is not None
        assert recorder._valid.tolist() == [[False, True, True, True]] * 2
        with pytest.raises(ValueError, match=r"attention_mask \[2, 3\] does not say which tokens are padding"):
            recorder.begin(model, (ids,), {"attention_mask": right[:, :3]})
    _, blocks = read(tmp_path / "t.parquet")
    assert [len(b.token_step) for b in blocks] == [6, 0, 6, 6, 6, 2]


@pytest.mark.usefixtures("no_grad")
def test_prompts_of_one_token(tmp_path: Path) -> None:
    """Such a prompt is no continuation of the sequences before it, nor does an end in it end a sequence."""
    model = make_model("Olmoe")
    ids = torch.full((3, 1), 5)
    ends = torch.ones_like(ids)
    second = int(model.generate(ids, attention_mask=ends, max_new_tokens=2, do_sample=False)[0, 2])
    for stop in (5, second):
        model.generation_config.eos_token_id = stop
        with record(model, tmp_path / "t.parquet"):
            for _ in range(2):
                model.generate(ids, attention_mask=ends, min_new_tokens=3, max_new_tokens=3, do_sample=False)
        sizes = [len(b.token_step) for b in read(tmp_path / "t.parquet")[1]]
        assert sizes[0] == 3
        assert sizes == sizes[:3] * 2


def test_routers_between_passes_are_not_recorded(tmp_path: Path) -> None:
    """Gradient checkpointing runs them again in the backward pass; parts of the model may be called alone."""
    model = make_model("Olmoe").train()
    model.gradient_checkpointing_enable()
    used, ids = UsedExperts(model), torch.randint(1, 64, (2, 4))
    with record(model, tmp_path / "t.parquet"):
        (model(input_ids=ids).logits.sum() + model(input_ids=ids + 0).logits.sum()).backward()
        model.model(ids)
        model.model(ids)
        used.passes.clear()
        model(input_ids=ids.flip(0))
    _, blocks = read(tmp_path / "t.parquet")
    assert len(blocks) == 3
    np.testing.assert_array_equal(blocks[2].expert_ids, used.ids(0))


@pytest.mark.usefixtures("no_grad")
def test_the_model_computes_the_same(tmp_path: Path) -> None:
    for family in FAMILIES:
        model, ids = make_model(family).to(torch.bfloat16), torch.randint(1, 64, (2, 6))
        before = model(input_ids=ids).logits
        with record(model, tmp_path / "t.parquet", num_scores=0 if family == "DeepseekV3" else "all"):
            assert torch.equal(model(input_ids=ids).logits, before)
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.usefixtures("no_grad")
def test_as_many_scores_as_experts_chosen_after_steps_without(tmp_path: Path) -> None:
    model = make_model("Olmoe")
    with record(model, tmp_path / "t.parquet", num_scores=K) as recorder:
        recorder.scored_phases = ("decode",)
        model(input_ids=torch.randint(1, 64, (1, 12)))
        model(input_ids=torch.randint(1, 64, (4, 1)))
    first, second = read(tmp_path / "t.parquet")[1]
    assert first.scores is None
    assert second.score_ids is not None
    np.testing.assert_array_equal(second.score_ids, second.expert_ids)
