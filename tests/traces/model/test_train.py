"""Training, its figures and the sample recording, on a two-layer model and a text drawn here."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models

from epsim.policies import registry
from epsim.traces.model import sample, tokens, train
from epsim.traces.model.config import ModelShape, build_model, count_parameters
from epsim.traces.model.options import RecordOptions, TrainOptions
from epsim.traces.record import record
from epsim.traces.routers import shared_cost
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock

SHAPE = ModelShape(
    vocabulary=64, num_layers=2, hidden=32, num_heads=2, num_experts=16, top_k=4, intermediate=16, max_positions=64
)
OPTIONS = TrainOptions(
    steps=100, batch=16, length=24, learning_rate=1e-2, device="cpu", shape=SHAPE, dense=False, balance=0.02
)


def draw_text(seed: int, length: int) -> dict[str, tokens.Tokens]:
    """Two domains, each a Markov chain of its own with three likely successors a token: about log 3 nats a token."""
    rng = np.random.default_rng(seed)
    text: dict[str, tokens.Tokens] = {}
    for number, name in enumerate(("east", "west")):
        follow = np.random.default_rng(number).permuted(np.tile(np.arange(1, 64), (64, 1)), axis=1)[:, :3]
        ids, last = np.empty(length, dtype=np.uint16), 1
        for i in range(length):
            last = ids[i] = follow[last, rng.integers(3)]
        text[name] = ids
    return text


@pytest.fixture(scope="module")
def text() -> tokens.Corpus:
    return tokens.Corpus(draw_text(1, 20_000), draw_text(2, 4_000), Tokenizer(models.BPE()))


@pytest.fixture(scope="module")
def trained(text: tokens.Corpus) -> train.Trained:
    return train.fit(OPTIONS, text.train, "cpu")


def test_it_learns(trained: train.Trained, text: tokens.Corpus) -> None:
    untrained = train.heldout_loss(build_model(SHAPE).eval(), text.heldout, 24)
    learnt = train.heldout_loss(trained.model, text.heldout, 24)
    for name in ("east", "west"):
        assert untrained[name] > 4.0  # log 64 = 4.16
        assert learnt[name] < 2.0
        assert learnt[name] > math.log(3) - 0.05  # no model can do better than the chain's entropy
    assert trained.curve[-1][0] == OPTIONS.steps
    assert trained.curve[-1][1] < trained.curve[0][1]
    assert trained.tokens == 100 * 16 * 24


def test_same_seed_same_weights(text: tokens.Corpus) -> None:
    short = dataclasses.replace(OPTIONS, steps=4)
    one, two = (train.fit(short, text.train, "cpu") for _ in range(2))
    other = train.fit(dataclasses.replace(short, seed=1), text.train, "cpu")
    assert one.curve == two.curve
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert one.curve != other.curve


def test_heldout_loss_in_float64(trained: train.Trained, text: tokens.Corpus) -> None:
    """Against the loss computed window by window in numpy."""
    ids = text.heldout["east"][:200]
    losses: list[float] = []
    for start in range(0, 200 - 25 + 1, 25):
        window = torch.from_numpy(ids[start : start + 25].astype(np.int64))
        with torch.no_grad():
            logits = trained.model(window[None, :-1]).logits[0].double().numpy()
        shifted = logits - logits.max(1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        losses += [-log_p[i, int(window[i + 1])] for i in range(24)]
    assert train.heldout_loss(trained.model, {"east": ids}, 24)["east"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_skew_is_that_of_a_recording(trained: train.Trained, text: tokens.Corpus, tmp_path: Path) -> None:
    heldout = {"west": text.heldout["west"][:1000]}
    with record(trained.model, tmp_path / "t.parquet"), torch.no_grad():
        for batch in train.heldout_batches(heldout["west"], 24, 1000, 16):
            trained.model(batch[:, :-1])
    counts: npt.NDArray[Any] = np.zeros((2, 16))
    for block in StoredTrace(tmp_path / "t.parquet").blocks():
        assert isinstance(block, TokenBlock)
        counts += block.to_counts(16).counts.sum(axis=0)
    assert counts.sum() == 40 * 24 * 2 * 4
    for row, skew in zip(counts, train.routing_skew(trained.model, heldout, 24)["west"], strict=True):
        assert skew["max_over_mean"] == pytest.approx(row.max() / row.mean())
        assert skew["top8_share"] == pytest.approx(np.sort(row)[-8:].sum() / row.sum())
        assert skew["idle_experts"] == (row == 0).sum()


def test_balance_loss_is_layer_by_layer(text: tokens.Corpus) -> None:
    """E * sum of (assignments a token) * (mean probability), by hand for each layer."""
    torch.manual_seed(0)
    model = build_model(SHAPE)
    batch = torch.from_numpy(text.train["east"][:50].astype(np.int64)).view(2, 25)
    _, balance = train.losses(model, batch)
    expected: list[float] = []
    for logits in model.model(batch[:, :-1], output_router_logits=True).router_logits:
        p = logits.double().softmax(-1)
        used = torch.nn.functional.one_hot(p.topk(4).indices, 16).sum(1).double().mean(0)
        expected.append(float(16 * (used * p.detach().mean(0)).sum()))
    assert float(balance.detach()) == pytest.approx(np.mean(expected), rel=1e-5)


def test_sizes() -> None:
    moe, dense = build_model(SHAPE), build_model(SHAPE, dense=True)
    expert = 3 * 32 * 16
    active = {True: count_parameters(dense)["active"], False: count_parameters(moe)["active"]}
    assert count_parameters(moe)["total"] - active[False] == 2 * (16 - 4) * expert
    assert active[False] - active[True] == 2 * (16 * 32 + 32)  # the routers and the shared experts' gates
    assert shared_cost(moe) == 1.0


def test_learning_rate() -> None:
    options = TrainOptions(steps=1000, learning_rate=1.0)
    rates = [train.learning_rate(options, step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == rates[100] == max(rates) == 1.0
    assert rates[550] == pytest.approx(0.1 + 0.45)
    assert rates[999] == pytest.approx(0.1, abs=1e-4)


def test_windows_stay_in_a_domain() -> None:
    domains = {"low": np.arange(100, dtype=np.uint16), "high": np.arange(1000, 1030, dtype=np.uint16)}
    windows = train.Windows(domains, 200, 8, 0, "cpu")
    drawn = windows.draw()
    assert (drawn.diff(dim=1) == 1).all()
    assert 60 < int((drawn[:, 0] < 500).sum()) < 140
    assert not torch.equal(drawn, windows.draw())
    with pytest.raises(ValueError, match="domain high has 30 tokens, fewer than a sequence of 40"):
        train.Windows(domains, 4, 40, 0, "cpu")


def test_train_and_record_from_the_cache(text: tokens.Corpus, tmp_path: Path) -> None:
    text.tokenizer.add_special_tokens([tokens.END])
    tokens.save(text, tmp_path / "corpus")
    with pytest.raises(ValueError, match="run `epsim model train` first"):
        train.load_model(tmp_path)
    options = dataclasses.replace(
        OPTIONS, cache=tmp_path, steps=6, dense=True, report=tmp_path / "results" / "model.json"
    )
    report = train.train(options)
    assert json.loads((tmp_path / "results" / "model.json").read_text())["moe"] == report["moe"]
    loaded = train.load_model(tmp_path, "cpu")
    again = train.heldout_loss(loaded, text.heldout, 24)
    assert {k: round(v, 4) for k, v in again.items()} == report["moe"]["heldout_cross_entropy"]
    done = sample.record_sample(
        RecordOptions(
            tmp_path / "s.parquet",
            cache=tmp_path,
            cycles=4,
            batches=(4, 8),
            prompts=(16, 8),
            continuations=(4, 3),
            num_source_ranks=4,
            device="cpu",
        )
    )
    assert done.num_steps == 4 * (4 + 3 + 1)
    assert done.num_bytes == (tmp_path / "s.parquet").stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "model", "results", "s.parquet"]


def test_the_recording_replays_with_every_split(trained: train.Trained, text: tokens.Corpus, tmp_path: Path) -> None:
    from epsim.cli.main import main

    sample_options = RecordOptions(
        tmp_path / "s.parquet", cycles=6, batches=(4, 8), prompts=(16, 8), continuations=(6, 5), num_source_ranks=4
    )
    sample.record_model(trained.model, text.heldout, sample_options)
    trace = StoredTrace(tmp_path / "s.parquet")
    steps = [b for i in range(trace.num_steps) for b in trace.blocks(i, i + 1)]
    kinds: set[tuple[str, int, int]] = set()
    for block in steps:
        assert isinstance(block, TokenBlock)
        assert block.phase is not None
        assert block.domain is not None
        kinds.add((str(block.phase[0]), len(block.token_step), len(set(block.domain))))
        assert (block.scores is not None) == (block.phase[0] == "decode")
    # Both phases, both batches, mixed and single domains.
    assert kinds == {("prefill", 64, n) for n in (1, 2)} | {("decode", b, n) for b in (4, 8) for n in (1, 2)}
    assert (trace.meta.origin, trace.meta.shared_cost, trace.meta.num_scores) == ("recorded", 1.0, 16)
    assert sample.COMMAND in trace.meta.source
    policies = registry.kinds()
    pairs = [(split, shared) for split in policies["split"] for shared in policies["shared"]]
    stacks = [f"eplb+{a}+{b}" for a, b in pairs if b != "waterfill-joint" or a == "lplb"]
    assert len(stacks) >= 12
    arguments = ["replay", str(trace.path), "--ranks", "4", "--redundant", "4", "--out", str(tmp_path / "out")]
    for stack in ("contiguous", *stacks):
        arguments += ["--policy", stack]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr("sys.argv", ["epsim", *arguments])
        main()
    assert stop.value.code == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["stacks"]) == 1 + len(stacks)


def test_device() -> None:
    assert train.choose_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="--device tpu: give cuda or cpu"):
        train.choose_device("tpu")
    if not torch.cuda.is_available():
        assert train.choose_device(None) == "cpu"
        with pytest.raises(ValueError, match="no GPU here"):
            train.choose_device("cuda:1")


def test_prompts_are_never_given_twice() -> None:
    prompts = sample.Prompts({"a": np.arange(100, dtype=np.uint16)}, 10, 0)
    taken = prompts.take(["a"] * 10, 10)
    assert sorted(taken.flatten().tolist()) == list(range(100))
    with pytest.raises(ValueError, match="lower --cycles"):
        prompts.take(["a"], 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainOptions(steps=0), "--steps 0"),
        (lambda: TrainOptions(length=4096), "--length 4096"),
        (lambda: TrainOptions(seed=-1), "--seed -1"),
        (lambda: TrainOptions(learning_rate=0.0), "--learning-rate 0"),
        (lambda: RecordOptions(Path("x"), seed=-1), "--seed -1"),
        (lambda: ModelShape(num_layers=0), "--layers 0"),
        (lambda: ModelShape(top_k=65), "top-k 65"),
        (lambda: ModelShape(hidden=510), "hidden size 510"),
        (lambda: RecordOptions(Path("x"), cycles=0), "--cycles 0"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_would_fail_after_training_fails_before(text: tokens.Corpus, tmp_path: Path) -> None:
    short = tokens.Corpus(text.train, {"east": text.heldout["east"][:20]}, text.tokenizer)
    for made, report, message in (
        (short, None, "held-out text of east: 20 tokens do not fill one window of 25"),
        (text, Path("/dev/full"), "a device or pipe"),
    ):
        tokens.save(made, tmp_path / "corpus")
        with pytest.raises(ValueError, match=message):
            train.train(dataclasses.replace(OPTIONS, cache=tmp_path, steps=10**9, report=report))


def test_damaged_model(text: tokens.Corpus, trained: train.Trained, tmp_path: Path) -> None:
    trained.model.save_pretrained(train.model_folder(tmp_path))
    weights = train.model_folder(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"the model in .* is damaged .*run `epsim model train` again"):
        train.load_model(tmp_path, "cpu")
    weights.unlink()
    with pytest.raises(ValueError, match="is damaged"):
        train.load_model(tmp_path, "cpu")
