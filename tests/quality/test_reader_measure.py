"""Figures by sequence, batches' bytes, pairs and the table of claims."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from epsim.kernels.reader import coordinates, union_bytes
from epsim.kernels.reader.rotate import rotated
from epsim.policies.reader import ThresholdChannels, TopkChannels
from epsim.policies.stack import parse_stack
from epsim.quality.batch_bytes import batch_bytes
from epsim.quality.evaluate import loss_in_batches
from epsim.quality.hook import keep, reroute_of, rerouted
from epsim.quality.layers import build_sketches, layers_of
from epsim.quality.reader import Reading, calibrated
from tests.benchmarks.scripts import script
from tests.quality.reader_models import random_model
from tests.quality.test_evaluate import save_cache

figures_of: Any = script("quality.figures")
claims: Any = script("quality.reader_claims")
Trial = figures_of.Trial


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(seed=1, std=0.2, hidden=256, max_positions=192)


@pytest.fixture(scope="module")
def layers(model: Any) -> Any:
    return layers_of(model, build_sketches(model), int4=True)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(1, 64, (6, 20), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("chunk", [2, 6])
def test_figures_are_those_of_the_evaluation(model: Any, layers: Any, text: torch.Tensor, chunk: int) -> None:
    trials = {"read": Trial(Reading(layers, TopkChannels(0.4))), "plain": Trial(None)}
    found, plain = figures_of.measure(model, text, trials, chunk)
    one = loss_in_batches(model, keep, text, 3, Reading(layers, TopkChannels(0.4)))
    assert found["read"].loss.mean() == pytest.approx(one.cross_entropy - one.plain, abs=1e-5)
    assert found["read"].kl.mean() == pytest.approx(one.kl, rel=2e-3)
    assert plain.loss.mean() == pytest.approx(one.plain, rel=1e-5)
    assert found["read"].kept == TopkChannels(0.4).sizes(256, 40).kept(0.4, 3)
    assert found["plain"].loss.tolist() == [0.0] * 6
    with torch.no_grad():
        likeliest = model(input_ids=text[:, :-1]).logits.argmax(-1)
    assert plain.right.tolist() == pytest.approx((likeliest == text[:, 1:]).double().mean(1).tolist())


def test_kept_by_token(model: Any, layers: Any, text: torch.Tensor) -> None:
    topk = figures_of.kept_by_token(model, Reading(layers, TopkChannels(0.4)), text, 4)
    assert topk.tolist() == [[TopkChannels(0.4).sizes(256, 40).kept(0.4, 3)] * 20] * 6
    reader = ThresholdChannels(0.4)
    reading = Reading(layers, reader, calibrated(model, layers, reader, text, (0.4,))[0.4])
    found = figures_of.kept_by_token(model, reading, text, 4)
    assert found.std() > 1
    assert found.sum() == pytest.approx(float(reading.counts[:, 1].sum()) / 2)
    assert reading.record is None


def test_bytes_of_batches(model: Any, layers: Any, text: torch.Tensor) -> None:
    reading = Reading(layers, TopkChannels(0.4))
    found = batch_bytes(model, reading, text, (1, 4))
    sizes = TopkChannels(0.4).sizes(256, 40)
    share = sizes.token(3, sizes.kept(0.4, 3)) / (3 * sizes.expert)
    assert found[1]["per_token"] == pytest.approx(share)
    assert found[1]["union"] == pytest.approx(share)
    assert found[1]["union_if_independent"] == pytest.approx(share)
    assert found[4]["per_token"] == pytest.approx(share)
    assert share < found[4]["union"] < found[4]["union_if_independent"] * 1.02

    seen: list[tuple[torch.Tensor, ...]] = []
    reading.record = lambda number, x, ids, kept: seen.append(
        (ids, kept, coordinates(rotated(x, layers[number].screen.sketch.signs), 80))
    )
    with torch.no_grad(), reading.on(model, whole_sequences=True):
        model(input_ids=text)
    total, dense = 0.0, 0.0
    for ids, kept, read in seen:
        for t in range(20):
            rows = torch.tensor([sequence * 20 + t for sequence in range(4)])
            total += union_bytes(sizes, ids[rows], kept[rows], read[rows], 8)
            dense += len(set(ids[rows].flatten().tolist())) * sizes.expert
    assert found[4]["union"] == pytest.approx(total / dense)


def test_bytes_of_a_batch_that_chooses_as_one(model: Any, layers: Any, text: torch.Tensor) -> None:
    """Within the budget; and of tokens with fewer experts, each is counted by its own."""
    for size in (1, 2, 6):
        reading = Reading(layers, TopkChannels(0.4, quota="batch"), batch_size=size)
        found = batch_bytes(model, reading, text, (size,))[size]
        assert 0.38 < found["union"] <= 0.4
        assert found["union"] == pytest.approx(found["union_if_independent"], rel=1e-9)
    reading = Reading(layers, TopkChannels(0.7, quota="batch"), batch_size=2, num_ranks=4)
    found = batch_bytes(model, reading, text, (2,))[2]
    # Signs and U of every rank that has an expert of the batch are paid for.
    assert 0.66 < found["union"] <= 0.7
    reading = Reading(layers, TopkChannels(0.7), num_ranks=4)
    found = batch_bytes(model, reading, text, (6,))[6]
    assert found["per_token"] == pytest.approx(reading.described()["share_read"], rel=1e-9)
    reading = Reading(layers, TopkChannels(0.4))
    with rerouted(model, reroute_of(parse_stack("pruned(k0=2)").router), whole_sequences=True):
        found = batch_bytes(model, reading, text, (3,))[3]
    sizes = TopkChannels(0.4).sizes(256, 40)
    assert found["per_token"] == pytest.approx(sizes.token(2, sizes.kept(0.4, 2)) / (2 * sizes.expert))


def figures(*loss: float) -> Any:
    values = np.array(loss)
    return figures_of.Figures(values, values**2, values * 0, 3.0)


def test_pairs_by_the_paired_standard_error() -> None:
    # Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.0577.
    one = claims.pair("a", 0.2, figures(1, 2, 3), figures(1.1, 2.2, 3.3))
    assert one.difference == pytest.approx(0.2)
    assert one.standard_error == pytest.approx(0.1 / 3**0.5)
    assert one.result == "win"
    assert claims.pair("a", 0.2, figures(1.1, 2.2, 3.3), figures(1, 2, 3)).result == "loss"
    assert claims.pair("a", 0.2, figures(1, 2, 3), figures(1.3, 2.0, 3.1)).result == "tie"
    assert claims.pair("a", 0.2, figures(1, 2), figures(2, 3), "kl").difference == pytest.approx(4.0)
    pairs = [claims.Pair("a", 0.1, *each) for each in ((1.0, 0.4), (1.0, 0.6), (-1.0, 0.4), (0.0, 0.0))]
    assert claims.tally(pairs) == {"win": 1, "tie": 2, "loss": 1}


def test_spearman() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert claims.spearman(x, np.exp(x)) == pytest.approx(1)
    assert claims.spearman(x, -(x**3)) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert claims.spearman(np.array([0.0, 5, 5, 9]), x) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


@pytest.mark.slow
def test_the_benchmark_runs_and_every_claim_gets_its_row(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("reader_quality")
    save_cache(model, tmp_path)
    monkeypatch.setattr(module, "BUDGETS", (0.4, 0.6))
    options = {"sequences": 4, "calibration": 2, "length": 12, "generated": 12, "seed": 0, "out": None}
    report = module.Bench(argparse.Namespace(cache=tmp_path, device="cpu", **options)).run()
    assert [(row["domain"], row["budget"]) for row in report["pairs"]] == [
        (domain, budget) for domain in ("a", "b") for budget in (0.4, 0.6)
    ]
    for row in report["pairs"]:
        assert row["topk"]["kept_channels"] == TopkChannels(row["budget"]).sizes(256, 40).kept(row["budget"], 3)
        assert row["topk_of_as_many"]["kept_channels"] == round(row["threshold"]["kept_channels"])
    for counts in report["tallies"].values():
        assert sum(counts.values()) == 4
    trials = report["trials"]
    assert trials["sketch 0.4"]["kl"] > trials["sketch 0.6"]["kl"] > 0
    assert trials["partial on 0.6"]["kl"] < trials["partial off 0.4"]["kl"]
    assert "cats 0.2" in report["not_payable"]
    assert set(report["drift"]) == {"0.4", "0.6"}
    rows = claims.claim_rows(report)
    assert len({row.claim for row in rows}) == len(rows) > 15
    printed = claims.markdown(rows)
    assert printed.count("\n") == len(rows) + 2
    assert "nan" not in printed
