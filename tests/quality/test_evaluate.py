"""The router hook and the figures, on a small model with random weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models

from epsim.policies.routing.topk import TopK
from epsim.quality import evaluate
from epsim.quality.decoding import generate
from epsim.quality.hook import keep, reroute_of, rerouted
from epsim.quality.options import EvaluateOptions
from epsim.traces.model import tokens, train
from epsim.traces.model.config import ModelShape, build_model
from epsim.traces.record import record
from epsim.traces.routers import find_routers
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock

SHAPE: dict[str, Any] = {
    "vocabulary": 64,
    "num_layers": 2,
    "hidden": 32,
    "num_heads": 2,
    "num_experts": 16,
    "intermediate": 16,
    "max_positions": 256,
}


def make_model(top_k: int = 4) -> Any:
    """The same weights for every top_k."""
    torch.manual_seed(0)
    model = build_model(ModelShape(top_k=top_k, **SHAPE)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(1, 64, (8, 13), generator=torch.Generator().manual_seed(3))


def save_cache(model: Any, cache: Path) -> None:
    """Random text of two domains, and the model."""
    rng = np.random.default_rng(0)
    text = {name: rng.integers(1, 64, 2000).astype(np.uint16) for name in ("a", "b")}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([tokens.END])
    tokens.save(tokens.Corpus(text, text, tokenizer), cache / "corpus")
    model.save_pretrained(train.model_folder(cache))


def first_only(
    scores: torch.Tensor, weight_basis: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token takes its best expert alone."""
    best = scores.topk(1).indices
    return best, torch.ones_like(weights[..., :1])


def like_the_first_token(
    scores: torch.Tensor, weight_basis: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch takes the experts and weights of its first token."""
    return expert_ids[:, :1].expand_as(expert_ids), weights[:, :1].expand_as(weights)


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_topk_is_the_plain_model_bit_for_bit(model: Any, text: torch.Tensor, batch_size: int) -> None:
    for batch in text.view(-1, batch_size, 13):
        plain = model(input_ids=batch).logits
        with rerouted(model, reroute_of(TopK()), whole_sequences=True):
            assert torch.equal(model(input_ids=batch).logits, plain)
    loss = evaluate.loss_in_batches(model, keep, text, batch_size)
    assert loss.cross_entropy == loss.plain
    assert loss.kl == 0


@torch.no_grad()
def test_batches_are_the_tth_tokens(model: Any, text: torch.Tensor) -> None:
    """The policy sees scores [t, sequence, expert]: the softmax of what the router said of that token."""
    seen: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []

    def watch(
        scores: torch.Tensor, weight_basis: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert torch.equal(ids.sort().values, scores.topk(4).indices.sort().values)
        seen.append(scores)
        return ids, weights

    handles = [r.module.register_forward_hook(lambda m, i, o: logits.append(o[0])) for r in find_routers(model)]
    with rerouted(model, watch, whole_sequences=True):
        model(input_ids=text)
    for handle in handles:
        handle.remove()
    assert [s.shape for s in seen] == [(13, 8, 16)] * 2
    for scores, flat in zip(seen, logits, strict=True):
        for sequence, t in ((0, 0), (3, 7), (7, 12)):
            expected = flat[sequence * 13 + t].double().softmax(-1)
            torch.testing.assert_close(scores[t, sequence].double(), expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_policy_changes_what_experts_compute(model: Any, text: torch.Tensor) -> None:
    """Top-1 by policy on the top-4 model is the top-1 model with the same weights."""
    with rerouted(model, first_only, whole_sequences=True):
        by_policy = model(input_ids=text).logits
    torch.testing.assert_close(by_policy, make_model(top_k=1)(input_ids=text).logits)
    assert not torch.allclose(by_policy, model(input_ids=text).logits)
    assert all(not r.module._forward_hooks for r in find_routers(model))


@torch.no_grad()
def test_batch_size_matters_to_a_policy_on_batches(model: Any, text: torch.Tensor) -> None:
    alone = evaluate.loss_in_batches(model, like_the_first_token, text, 1)
    assert alone.kl == 0
    kls = [evaluate.loss_in_batches(model, like_the_first_token, text, size).kl for size in (2, 4, 8)]
    assert 0 < kls[0] < kls[1] < kls[2]


@torch.no_grad()
def test_losses_by_hand(model: Any, text: torch.Tensor) -> None:
    loss = evaluate.loss_in_batches(model, first_only, text, 4)
    plain = model(input_ids=text[:, :-1]).logits.double().numpy()
    own = make_model(top_k=1)(input_ids=text[:, :-1]).logits.double().numpy()
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (plain, own))
    target = text[:, 1:].numpy()[..., None]
    assert loss.plain == pytest.approx(-np.log(np.take_along_axis(p, target, 2)).mean(), rel=1e-5)
    assert loss.cross_entropy == pytest.approx(-np.log(np.take_along_axis(q, target, 2)).mean(), rel=1e-5)
    assert loss.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)


def test_generation_reroutes_decode_steps_alone(model: Any, text: torch.Tensor) -> None:
    shapes: list[tuple[int, ...]] = []

    def watch(
        scores: torch.Tensor, weight_basis: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(tuple(scores.shape))
        return first_only(scores, weight_basis, ids, weights)

    own = generate(model, watch, text, 60, seed=0)
    assert shapes == [(1, 8, 16)] * 2 * 59  # the first of sixty tokens comes from the prefill pass
    plain = generate(model, keep, text, 60, seed=0)
    assert torch.equal(own[:, 0], plain[:, 0])
    assert not torch.equal(own, plain)
    assert torch.equal(plain, generate(model, keep, text, 60, seed=0))


@torch.no_grad()
def test_the_recorder_sees_the_policy(model: Any, text: torch.Tensor, tmp_path: Path) -> None:
    with (
        rerouted(model, like_the_first_token, whole_sequences=True),
        record(model, tmp_path / "t.parquet", num_scores="all"),
    ):
        model(input_ids=text)
    (block,) = StoredTrace(tmp_path / "t.parquet").blocks()
    assert isinstance(block, TokenBlock)
    ids = block.expert_ids.reshape(8, 13, 2, 4)
    assert (ids == ids[:1]).all()


def test_repetition_rate() -> None:
    same, ladder = torch.full((1, 10), 7), torch.arange(10)[None]
    twice = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 4, 9]])  # 7 4-grams, 1234 twice
    assert evaluate.repetition_rate(same) == pytest.approx(1 - 1 / 7)
    assert evaluate.repetition_rate(ladder) == 0
    assert evaluate.repetition_rate(twice) == pytest.approx(1 / 7)
    assert evaluate.repetition_rate(torch.cat([same, ladder, twice])) == pytest.approx((6 / 7 + 1 / 7) / 3)


def test_evaluation_text() -> None:
    heldout = {"a": np.arange(100, dtype=np.uint16), "b": np.arange(200, 280, dtype=np.uint16)}
    text = evaluate.evaluation_text(heldout, ["a", "b"], 4, 9)
    assert text["a"][:, 0].tolist() == [0, 25, 50, 75]
    assert text["a"][1].tolist() == list(range(25, 35))
    assert text["mixed"][:, 0].tolist() == [0, 200, 25, 220]
    with pytest.raises(ValueError, match="held-out text of b holds 80 tokens: too few for 4 x 21"):
        evaluate.evaluation_text(heldout, ["a", "b"], 4, 20)


def test_evaluate_from_the_cache(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from epsim.cli.main import main

    save_cache(model, tmp_path)
    arguments = "model evaluate --policy topk --sequences 4 --length 16 --generated 12 --generations 2 --device cpu"
    arguments += f" --batch-size 1 --batch-size 4 --cache {tmp_path} --out {tmp_path / 'e.json'}"
    monkeypatch.setattr("sys.argv", ["epsim", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "e.json").read_text())
    assert list(result["loss"]) == ["a", "b", "mixed"]
    for name, sizes in result["loss"].items():
        assert list(sizes) == ["1", "4"]
        for one in sizes.values():
            assert one["cross_entropy"] == one["plain"] > math.log(64) / 2
            assert one["kl"] == 0
            assert f"{one['plain']:.4f}" in printed
        assert result["repetition"][name]["policy"] == result["repetition"][name]["plain"]
    assert result["policy"] == "contiguous"


def test_mistakes(model: Any) -> None:
    with pytest.raises(ValueError, match=r"--batch-size \[3\]: give divisors of 64"):
        EvaluateOptions(batch_sizes=(1, 3))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        EvaluateOptions(length=1)
    text = {"a": np.zeros(20_000, dtype=np.uint16)}
    with pytest.raises(ValueError, match="no held-out text of domain 'b': give one of a"):
        evaluate.evaluate_model(model, keep, text, EvaluateOptions(domains=("b",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": 0, "batch_sizes": (1,)}, "--sequences 0: give at least 1"),
        ({"generations": -1}, "--generations -1: give at least 0"),
        ({"generations": 65}, "--generations 65: give at most the 64 sequences"),
        ({"seed": -1}, "--seed -1"),
        ({"out": Path("/nowhere/e.json")}, "no such folder"),
    ],
)
def test_options_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        EvaluateOptions(**change)


def test_no_more_tokens_than_positions(model: Any) -> None:
    text = {"a": np.zeros(20_000, dtype=np.uint16)}
    for change in ({"length": 257, "generations": 0}, {"length": 100, "generated": 193}):
        with pytest.raises(ValueError, match="257 tokens, but the model has 256 positions"):
            evaluate.evaluate_model(model, keep, text, EvaluateOptions(**change))  # type: ignore[arg-type]
