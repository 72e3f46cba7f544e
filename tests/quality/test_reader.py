"""A channel reader on a live model with random weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from epsim.cli.main import main
from epsim.policies.reader import ThresholdChannels, TopkChannels
from epsim.policies.stack import parse_stack
from epsim.quality.hook import reroute_of, rerouted
from epsim.quality.layers import build_sketches, layers_of
from epsim.quality.reader import Reading, SparseInputs, calibrated
from tests.quality.reader_models import random_model
from tests.quality.test_evaluate import save_cache


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(seed=0, std=0.12, hidden=128, max_positions=128)


@pytest.fixture(scope="module")
def layers(model: Any) -> Any:
    return layers_of(model, build_sketches(model), int4=True)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(1, 64, (6, 20), generator=torch.Generator().manual_seed(3))


def logits(model: Any, text: torch.Tensor, reading: Reading | None = None) -> torch.Tensor:
    with torch.no_grad():
        if reading is None:
            found: torch.Tensor = model(input_ids=text).logits
            return found
        with reading.on(model, whole_sequences=True):
            read: torch.Tensor = model(input_ids=text).logits
            return read


def kl(model: Any, text: torch.Tensor, reading: Reading) -> float:
    p, q = (each.double().log_softmax(-1) for each in (logits(model, text), logits(model, text, reading)))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_full_budget_is_the_plain_model(model: Any, layers: Any, text: torch.Tensor) -> None:
    plain = logits(model, text)
    reading = Reading(layers, TopkChannels(1.0))
    torch.testing.assert_close(logits(model, text, reading), plain, rtol=0, atol=2e-5)
    assert reading.kept_channels() == 3 * 40
    torch.testing.assert_close(
        logits(model, text, Reading(layers, SparseInputs("teal", 1.0))), plain, rtol=0, atol=2e-5
    )
    assert torch.equal(logits(model, text), plain)  # nothing is left behind


def test_more_is_closer(model: Any, layers: Any, text: torch.Tensor) -> None:
    budgets = (0.4, 0.6, 0.9)
    for change in ({}, {"restore": "off"}, {"screen": "full"}, {"score": "int4-gate"}):
        found = [kl(model, text, Reading(layers, TopkChannels(b, **change))) for b in budgets]  # type: ignore[arg-type]
        assert found[0] > found[1] > found[2] > 0, change


def test_every_token_keeps_its_k(model: Any, layers: Any, text: torch.Tensor) -> None:
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    reader = TopkChannels(0.5)
    reading = Reading(layers, reader, record=lambda number, x, ids, kept: seen.append((number, ids, kept)))
    logits(model, text, reading)
    k = reader.sizes(128, 40).kept(0.5, 3)
    assert [number for number, _, _ in seen] == [0, 1]
    for _, ids, kept in seen:
        assert ids.shape == (120, 3)
        assert kept.sum((1, 2)).tolist() == [k] * 120
        assert float(kept.sum(2).double().std()) > 0.5  # an expert may get many or few
    assert reading.kept_channels() == k


def test_a_reader_after_a_router(model: Any, layers: Any, text: torch.Tensor) -> None:
    """Tokens of fewer experts keep fewer channels; fillers of no weight read nothing."""
    seen: list[torch.Tensor] = []
    reader = TopkChannels(0.5)
    reading = Reading(layers, reader, record=lambda number, x, ids, kept: seen.append(kept))
    with rerouted(model, reroute_of(parse_stack("pruned(k0=2)").router), whole_sequences=True):
        logits(model, text, reading)
    k = reader.sizes(128, 40).kept(0.5, 2)
    assert {tuple(kept.sum((1, 2)).tolist()) for kept in seen} == {(k,) * 120}


def test_a_budget_that_does_not_pay_is_refused(model: Any, layers: Any, text: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"budget of 0.1 is too small: with 3 experts of 128 x 40 choosing channels alone reads 0.2653"
    ):
        logits(model, text, Reading(layers, TopkChannels(0.1)))


def test_prefill_reads_all(model: Any, layers: Any, text: torch.Tensor) -> None:
    reading = Reading(layers, TopkChannels(0.4))
    with torch.no_grad(), reading.on(model, whole_sequences=False):
        assert torch.equal(model(input_ids=text).logits, logits(model, text))
        assert float(reading.counts.sum()) == 0
        model(input_ids=text[:, :1])
    assert reading.counts[:, 0].tolist() == [6, 6]


def test_calibration_meets_its_budget_on_its_own_text(model: Any, layers: Any, text: torch.Tensor) -> None:
    reader = ThresholdChannels(0.5)
    found = calibrated(model, layers, reader, text, (0.5, 0.7))
    k = reader.sizes(128, 40).kept(0.5, 3)
    # In the first layer tokens are the plain model's, so that the mean is met exactly.
    reading = Reading(layers, reader, found[0.5])
    logits(model, text, reading)
    assert float(reading.counts[0, 1]) == 120 * k
    assert found[0.7][0] < found[0.5][0]
    with pytest.raises(ValueError, match="threshold-channels needs thresholds"):
        Reading(layers, reader)


def test_a_threshold_of_the_whole_keeps_all(model: Any, layers: Any, text: torch.Tensor) -> None:
    reader = ThresholdChannels(1.0)
    found = calibrated(model, layers, reader, text, (0.5, 1.0))
    assert found[1.0] == [-1.0, -1.0]
    assert min(found[0.5]) > 0
    plain = logits(model, text)
    torch.testing.assert_close(logits(model, text, Reading(layers, reader, found[1.0])), plain, rtol=0, atol=2e-5)
    # The threshold itself keeps all, were it asked.
    reading = Reading(layers, ThresholdChannels(0.99), found[1.0])
    torch.testing.assert_close(logits(model, text, reading), plain, rtol=0, atol=2e-5)
    assert reading.kept_channels() == 3 * 40


@pytest.mark.parametrize("restore", ["on", "off"])
@pytest.mark.parametrize("quota", ["token", "experts", "weights"])
def test_a_token_of_no_numbers_shows_it_and_leaves_others_alone(
    model: Any, layers: Any, restore: Any, quota: Any
) -> None:
    """Weights that are no numbers are no empty slots."""
    seen: list[torch.Tensor] = []
    reader = TopkChannels(0.8, restore=restore, quota=quota)
    record = lambda number, x, ids, kept: seen.append(kept)  # noqa: E731
    reading = Reading(layers, reader, num_ranks=4, record=record)
    g = torch.Generator().manual_seed(0)
    x, ids = torch.randn(3, 128, generator=g), torch.tensor([[0, 1, 6], [2, 3, 4], [5, 0, 7]])
    weights = torch.tensor([[0.5, 0.3, 0.2]]).repeat(3, 1)
    plain = reading._output(0, x, ids, weights, 1)
    weights[1] = float("nan")
    x[2, 5] = float("nan")
    found = reading._output(0, x, ids, weights, 1)
    assert torch.equal(found[0], plain[0])
    assert bool(found[1:].isnan().all())
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0].sum((1, 2)).tolist() == seen[1].sum((1, 2)).tolist()


def test_quotas_of_ranks(model: Any, layers: Any, text: torch.Tensor) -> None:
    """One rank is the whole; more ranks keep as many channels, others of them."""
    plain = logits(model, text, Reading(layers, TopkChannels(0.5)))
    for by in ("experts", "weights"):
        reader = TopkChannels(0.5, quota=by)
        assert torch.equal(logits(model, text, Reading(layers, reader)), plain)
        reading = Reading(layers, reader, num_ranks=4)
        assert not torch.allclose(logits(model, text, reading), plain)
        assert reading.kept_channels() <= reader.sizes(128, 40).kept(0.5, 3)
    with pytest.raises(ValueError, match="--ranks 3 do not divide the model's 8 experts"):
        Reading(layers, TopkChannels(0.5), num_ranks=3)


@pytest.mark.parametrize("quota", ["token", "experts", "weights", "batch"])
def test_all_ranks_of_a_token_together_keep_its_budget(model: Any, layers: Any, text: torch.Tensor, quota: Any) -> None:
    """Each of them reads signs and U."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    reader = TopkChannels(0.8, quota=quota)
    record = lambda number, x, ids, kept: seen.append((ids, kept))  # noqa: E731
    reading = Reading(layers, reader, num_ranks=4, record=record, batch_size=1)
    logits(model, text, reading)
    sizes, shares = reader.sizes(128, 40), []
    for ids, kept in seen:
        for experts, number in zip(ids.tolist(), kept.sum((1, 2)).tolist(), strict=True):
            ranks = len({expert // 2 for expert in experts})
            shares.append((sizes.token(3, number) + (ranks - 1) * sizes.once) / (3 * sizes.expert))
    assert 0.75 < max(shares) <= 0.8
    assert reading.described()["share_read"] == pytest.approx(sum(shares) / len(shares))
    with pytest.raises(ValueError, match=r"with 3 experts of 128 x 40 on 3 ranks choosing channels alone reads 0.\d+"):
        logits(model, text, Reading(layers, TopkChannels(0.4, quota=quota), num_ranks=4, batch_size=1))


def test_one_set_for_a_batch(model: Any, layers: Any, text: torch.Tensor) -> None:
    """Tokens of a batch share channels; a batch of one token is that token."""
    own = logits(model, text, Reading(layers, TopkChannels(0.5)))
    reader = TopkChannels(0.5, quota="batch")
    torch.testing.assert_close(logits(model, text, Reading(layers, reader, batch_size=1)), own)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    reading = Reading(layers, reader, batch_size=3, record=lambda number, x, ids, kept: seen.append((ids, kept)))
    logits(model, text, reading)
    for ids, kept in seen:
        for first, t in ((0, 0), (0, 19), (3, 7)):
            chosen: dict[int, list[bool]] = {}
            for sequence in range(first, first + 3):
                token = sequence * 20 + t
                for e, mask in zip(ids[token].tolist(), kept[token].tolist(), strict=True):
                    assert chosen.setdefault(e, mask) == mask
            allowed = reader.sizes(128, 40).kept(0.5, len(chosen))
            assert sum(map(sum, chosen.values())) == allowed


def test_models_without_experts() -> None:
    with pytest.raises(ValueError, match="needs a model whose experts hold gate_up_proj"):
        build_sketches(torch.nn.Linear(2, 2))


def test_build_and_evaluate_by_command(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_cache(model, tmp_path)
    capsys.readouterr()
    sketch, out = tmp_path / "s.safetensors", tmp_path / "e.json"

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["epsim", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        assert stop.value.code == (0 if not printed.err else 2), printed.err
        return printed.out + printed.err

    built = run("reader", "build", str(tmp_path / "model"), "--out", str(sketch), "--dtype", "float32")
    held = [sketch.resident_bytes() for sketch in build_sketches(model).values()]
    assert f"2 layers; sketch {sum(one['sketch'] for one in held) / 2**20:.1f} MiB (" in built

    common = f"model evaluate --cache {tmp_path} --sketch {sketch} --sequences 4 --length 16 --batch-size 4"
    common += f" --device cpu --generations 2 --generated 8 --out {out}"
    shown = run(*common.split(), "--policy", "oea(k0=2)+topk-channels(0.5)")
    result = json.loads(out.read_text())
    assert result["policy"] == "contiguous+oea(k0=2)+topk-channels(budget=0.5)"
    one = result["loss"]["a"]["4"]
    assert one["kl"] > 0
    assert 0.4 < one["share_read"] <= 0.5
    assert f"{one['share_read']:.4f}" in shown
    assert one["share_read"] < one["union_read"] < 1
    assert f"{one['union_read']:.4f}" in shown
    run(*common.split(), "--policy", "topk-channels(0.5,quota=batch)")
    together = json.loads(out.read_text())["loss"]["a"]["4"]
    assert 0.45 < together["union_read"] <= 0.5 < together["share_read"]
    run(*common.split(), "--policy", "topk-channels(1)")
    assert abs(json.loads(out.read_text())["loss"]["a"]["4"]["kl"]) < 1e-8
    assert json.loads(out.read_text())["loss"]["a"]["4"]["share_read"] == 1
    run(*common.split(), "--policy", "threshold-channels(0.5)")
    assert json.loads(out.read_text())["loss"]["a"]["4"]["kl"] > 0
    assert "no reader in 'contiguous' uses it" in run(*common.split())
    other = copy.deepcopy(model)
    torch.nn.init.normal_(next(iter(other.parameters())), std=0.2)
    save_cache(other, tmp_path)
    capsys.readouterr()
    assert "made from another checkpoint" in run(*common.split(), "--policy", "topk-channels(0.5)")
    assert "choose bfloat16" in run("reader", "build", str(tmp_path / "model"), "--out", str(sketch), "--dtype", "fp8")
