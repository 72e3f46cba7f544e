"""The recorder against what the experts of every family were given, and against hand counts."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.traces import record as recording
from epsim.traces.overhead import measure_overhead
from epsim.traces.record import record
from epsim.traces.routers import SCORE_RULES, find_routers
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import TokenBlock, TraceMeta

transformers = pytest.importorskip("transformers")

E, K = 8, 3
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": K,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Moe": ("Qwen3MoeTopKRouter", {"num_experts": E, "mlp_only_layers": [1]}),
    "Qwen2Moe": ("Qwen2MoeTopKRouter", {"num_experts": E, "shared_expert_intermediate_size": 32}),
    "Olmoe": ("OlmoeTopKRouter", {"num_experts": E}),
    "Mixtral": ("MixtralTopKRouter", {"num_local_experts": E}),
    "DeepseekV3": (
        "DeepseekV3TopkRouter",
        {
            "n_routed_experts": E,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "head_dim": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "GptOss": ("GptOssTopKRouter", {"num_local_experts": E, "layer_types": ["full_attention"] * 3}),
    "Gemma4": (
        "Gemma4TextRouter",
        {
            "num_experts": E,
            "top_k_experts": K,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["full_attention"] * 3,
            "num_kv_shared_layers": 0,
            "global_head_dim": 16,
        },
    ),
}


def make_model(family: str, **change: Any) -> Any:
    name = "Gemma4TextConfig" if family == "Gemma4" else f"{family}Config"
    config = getattr(transformers, name)(**{**SMALL, **FAMILIES[family][1], **change})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for router in find_routers(model):
        for parameter in router.module.parameters():
            torch.nn.init.normal_(parameter)
        if hasattr(router.module, "e_score_correction_bias"):
            router.module.e_score_correction_bias.normal_(std=0.1)
    return model


class UsedExperts:
    """What each experts module was given: an independent witness of the routing."""

    def __init__(self, model: Any) -> None:
        self.passes: list[list[torch.Tensor]] = []
        self.width = len(find_routers(model))
        for router in find_routers(model):
            router.experts.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        ids = next(a for a in given if isinstance(a, torch.Tensor) and not a.is_floating_point())
        if not self.passes or len(self.passes[-1]) == self.width:
            self.passes.append([])
        self.passes[-1].append(ids.clone())

    def ids(self, step: int) -> Any:
        """[T, L, k], tokens sequence by sequence, padding included."""
        return torch.stack(self.passes[step], dim=1).numpy()


def watch(model: Any, place: int) -> list[torch.Tensor]:
    """The output at this place of every router, in order of layers, pass by pass."""
    outputs: list[torch.Tensor] = []
    for router in find_routers(model):
        router.module.register_forward_hook(lambda module, inputs, output: outputs.append(output[place]))
    return outputs


def read(path: Path) -> tuple[TraceMeta, list[TokenBlock]]:
    """One block a step."""
    trace = StoredTrace(path)
    blocks = [b for i in range(trace.num_steps) for b in trace.blocks(i, i + 1)]
    return trace.meta, [b for b in blocks if isinstance(b, TokenBlock)]


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
def test_interruption_keeps_finished_steps(tmp_path: Path) -> None:
    model = make_model("Qwen3Moe")
    used = UsedExperts(model)
    inputs = torch.randint(1, 64, (2, 5))
    halfway = find_routers(model)[-1].experts

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), record(model, tmp_path / "t.parquet"):
        model(input_ids=inputs)
        model(input_ids=inputs + 1)
        halfway.register_forward_hook(interrupt)
        model(input_ids=inputs)
    meta, blocks = read(tmp_path / "t.parquet")
    assert len(blocks) == 2
    np.testing.assert_array_equal(blocks[1].expert_ids, used.ids(1))
    assert "interrupted (KeyboardInterrupt): 2 finished steps kept" in " ".join(meta.notes)
    assert all(not r.module._forward_hooks for r in find_routers(model))
    assert not model._forward_pre_hooks


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


@pytest.mark.usefixtures("no_grad")
def test_mistakes(tmp_path: Path) -> None:
    model = make_model("Olmoe")
    with pytest.raises(ValueError, match="has no router"), record(torch.nn.Linear(2, 2), tmp_path / "t.parquet"):
        pass
    with pytest.raises(ValueError, match="made no forward pass"), record(model, tmp_path / "t.parquet"):
        pass
    with pytest.raises(FileNotFoundError, match="no such folder"), record(model, tmp_path / "nowhere" / "t.parquet"):
        pass
    with pytest.raises(ValueError, match="num_source_ranks 0"), record(model, tmp_path / "t", num_source_ranks=0):
        pass
    with pytest.raises(ValueError, match="3 domains given for a batch of 2"), record(model, tmp_path / "t") as recorder:
        recorder.domains = ["a", "b", "c"]
        model(input_ids=torch.randint(1, 64, (2, 5)))
    assert not (tmp_path / "t").exists()
    find_routers(model)[0].module.__class__ = type("StrangeRouter", (type(find_routers(model)[0].module),), {})
    with pytest.raises(ValueError, match="no score rule is known for StrangeRouter"):  # noqa: SIM117
        with record(model, tmp_path / "t", num_scores="all"):
            model(input_ids=torch.randint(1, 64, (2, 5)))
    with record(model, tmp_path / "t"):
        model(input_ids=torch.randint(1, 64, (2, 5)))
    assert len(read(tmp_path / "t")[1]) == 1


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
        with pytest.raises(ValueError, match=r"attention_mask \[2, 3\] does not tell padding"):
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


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("source_ranks", [0, 2], r"source rank 2 is outside 0..1"),
        ("domains", ["a", 1], "domain 1 is not a text"),
        ("phase", "warmup", "phase 'warmup' is none of"),
        ("step", 0, "step 0 follows step 0"),
    ],
)
@pytest.mark.usefixtures("no_grad")
def test_wrong_settings_are_told_at_once(setting: str, value: Any, message: str, tmp_path: Path) -> None:
    """And cost only the pass they were set for."""
    model, ids = make_model("Olmoe"), torch.randint(1, 64, (2, 4))
    with record(model, tmp_path / "t.parquet", num_source_ranks=2) as recorder:
        model(input_ids=ids)
        before = getattr(recorder, setting)
        setattr(recorder, setting, value)
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids)
        setattr(recorder, setting, before)
        model(input_ids=ids)
    assert len(read(tmp_path / "t.parquet")[1]) == 2


@pytest.mark.usefixtures("no_grad")
def test_paths_are_tried_before_the_first_pass(tmp_path: Path) -> None:
    model = make_model("Olmoe")
    for path in (tmp_path, "/dev/full", "/proc/t.parquet", tmp_path / "nowhere" / "t.parquet"):
        with pytest.raises((ValueError, FileNotFoundError)), record(model, path):
            pytest.fail("entered")
    with pytest.raises(ValueError, match="phase 'x' is none of"), record(model, tmp_path / "t", phase="x"):  # type: ignore[arg-type]
        pytest.fail("entered")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_grad")
def test_routers_of_another_form_are_refused(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(
        **{**SMALL, "num_experts_per_tok": 1}, intermediate_size_mlp=32, num_local_experts=E, moe_layers=[0, 1, 2]
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    with (
        pytest.raises(ValueError, match=r"Llama4Router does not return .* it cannot be recorded"),
        record(model, tmp_path / "t.parquet"),
    ):
        model(input_ids=torch.randint(1, 64, (1, 4)))


@pytest.mark.usefixtures("no_grad")
def test_termination_keeps_finished_steps(tmp_path: Path) -> None:
    model, ids = make_model("Olmoe"), torch.randint(1, 64, (2, 4))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(SystemExit) as stop, record(model, tmp_path / "t.parquet"):
        model(input_ids=ids)
        model(input_ids=ids)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert stop.value.code == 128 + signal.SIGTERM
    assert len(read(tmp_path / "t.parquet")[1]) == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("no_grad")
def test_interruption_while_waiting_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were about to be handed over are finished steps too."""
    monkeypatch.setattr(recording, "FLUSH_BYTES", 1)
    model, ids = make_model("Olmoe"), torch.randint(1, 64, (2, 4))

    class Interrupted:
        def result(self) -> None:
            recorder._writing = before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), record(model, tmp_path / "t.parquet") as recorder:
        model(input_ids=ids)
        before = recorder._writing
        recorder._writing = Interrupted()  # type: ignore[assignment]
        model(input_ids=ids)
    assert len(read(tmp_path / "t.parquet")[1]) == 2


@pytest.mark.usefixtures("no_grad")
def test_many_small_steps_are_handed_over_in_time(tmp_path: Path) -> None:
    """A pass of one token is 18 bytes of ids and some kilobytes of objects: the objects count."""
    model, ids = make_model("Olmoe"), torch.randint(1, 64, (1, 1))
    with record(model, tmp_path / "t.parquet") as recorder:
        model(input_ids=ids)
        assert recorder._finished_bytes >= 4096


@pytest.mark.usefixtures("no_grad")
def test_passes_are_joined_to_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handing over after each pass, or all at once: the same trace; and of many passes few blocks are made."""
    model = make_model("Olmoe")
    used = UsedExperts(model)
    appended: list[TokenBlock] = []
    append = TraceWriter.append

    def watched(self: TraceWriter, block: TokenBlock) -> None:
        appended.append(block)
        append(self, block)

    monkeypatch.setattr(TraceWriter, "append", watched)
    passes = [torch.randint(1, 64, shape) for shape in ((2, 5), (3, 1), (3, 1), (2, 7), (2, 4), (4, 1))]
    for limit in (1, 1 << 30):
        monkeypatch.setattr(recording, "FLUSH_BYTES", limit)
        appended.clear()
        used.passes.clear()
        with record(model, tmp_path / "t.parquet", num_scores="all", num_source_ranks=2) as recorder:
            recorder.scored_phases = ("decode",)
            for ids in passes:
                recorder.domains = [f"{len(ids)}.{b}" for b in range(len(ids))]
                model(input_ids=ids)
        assert [len(b.steps) for b in appended] == ([1] * 6 if limit == 1 else [1, 2, 2, 1])
        _, blocks = read(tmp_path / "t.parquet")
        for step, (block, ids) in enumerate(zip(blocks, passes, strict=True)):
            np.testing.assert_array_equal(block.expert_ids, used.ids(step))
            assert block.domain is not None
            assert block.domain.tolist() == [f"{len(ids)}.{b}" for b in range(len(ids)) for _ in range(ids.shape[1])]
            assert (block.scores is not None) == (ids.shape[1] == 1)


@pytest.mark.usefixtures("no_grad")
def test_full_disk(tmp_path: Path) -> None:
    """Told once, and nothing stays behind."""
    model = make_model("Olmoe")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match="nothing is left") as error, record(model, tmp_path / "t.parquet"):
            model(input_ids=torch.randint(1, 64, (8, 100)))
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(error.value).count("nothing is left") == 1
    assert not list(tmp_path.iterdir())
