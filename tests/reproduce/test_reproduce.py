"""Published tables: the exchange's from the model alone, SGLang's from recordings where they are."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from epsim.cost.layer_time import load_timing
from epsim.machines.hardware import load_hardware
from epsim.models.spec import load_model
from epsim.reproduce import waterfill_lplb
from epsim.reproduce.deepep import TOLERANCE, published_exchange, uniform_rows
from epsim.reproduce.waterfill_lplb import published_rows, rank_correlation, reproduce
from epsim.reproduce.workloads import DrawOptions, Topics, Workload, draw, read_topics

RECORDINGS = Path(__file__).resolve().parents[2] / "../shared/traces/deepseek-v3-sglang"


def test_published_exchange_between_nodes_is_met_without_having_been_fitted() -> None:
    figures = published_exchange(load_hardware("h800"), load_model("deepseek-v3"))
    held_out = [one for one in figures if not one.fitted]
    assert [(one.ranks, one.way) for one in held_out] == [(r, w) for r in (16, 32, 64) for w in ("dispatch", "combine")]
    assert max(abs(one.error) for one in held_out) < TOLERANCE
    # The rise from 16 to 32 ranks: at 16 NVLink limits, as a node's rows fan out to more of its ranks.
    predicted = {one.ranks: one.predicted for one in held_out if one.way == "dispatch"}
    assert predicted[16] < predicted[64] < predicted[32]


def test_uniform_rows_against_drawn_tokens() -> None:
    rng = np.random.default_rng(0)
    model = load_model("deepseek-v3")
    scores = rng.random((3000, 256))
    best = np.argsort(scores.reshape(3000, 8, 32).max(-1), axis=1)[:, -4:]
    allowed = np.zeros((3000, 8), dtype=bool)
    np.put_along_axis(allowed, best, True, axis=1)
    ids = np.argsort(np.where(np.repeat(allowed, 32, axis=1), scores, 0), axis=1)[:, -8:]
    nodes = np.mean([len(set(row)) for row in (ids // 32).tolist()])
    ranks = np.mean([len(set(row)) for row in (ids // 4).tolist()])
    rows, logical = uniform_rows(model, 64, 8, "normal")
    assert logical / 4096 == pytest.approx(nodes, rel=0.01)
    assert float(rows.nvlink) / 4096 == pytest.approx(ranks, rel=0.02)


def flat_topics() -> Topics:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(32, 2.0), size=(3, 2))
    return Topics(("decode_a", "prefill_a", "prefill_b"), shares, (0, 1))


def test_requests_vary_as_their_concentration_says() -> None:
    topics = Topics(("decode", "prefill"), np.full((2, 1, 32), 1 / 32), (0,))
    options = DrawOptions(num_steps=1, tokens=400 * 500, top_k=4)
    block, known = draw(topics, Workload((1,), 400), options)
    np.testing.assert_allclose(known, 1 / 32)
    per_request = np.asarray(block.expert_ids)[:, 0].reshape(400, -1)
    shares = np.stack([np.bincount(row, minlength=32)[:8].sum() / row.size for row in per_request])
    # A quarter of all experts: Beta(33 / 4, 33 * 3 / 4), which systematic sampling narrows nothing between requests.
    assert shares.mean() == pytest.approx(0.25, abs=0.01)
    assert shares.std() == pytest.approx(math.sqrt(0.25 * 0.75 / 34), rel=0.15)


def test_a_pool_is_what_placements_know() -> None:
    topics = flat_topics()
    options = DrawOptions(num_steps=2, tokens=40_000, top_k=4)
    block, known = draw(topics, Workload((1, 2), 8, pool=8), options)
    counts = block.to_counts(32).counts.sum(0)
    # Every batch may repeat some requests, but never leaves the pool: shares stay near what is known.
    assert np.abs(counts / counts.sum(-1, keepdims=True) - known).max() < 0.02
    again, _ = draw(topics, Workload((1, 2), 8, pool=8), options)
    assert np.array_equal(np.asarray(block.expert_ids), np.asarray(again.expert_ids))


def test_published_rows_are_those_of_the_table() -> None:
    rows = published_rows("deepseek-v3")
    gains = [row["waterfill"] / row["baseline"] - 1 for row in rows]
    assert len(rows) == 12
    assert (min(gains), max(gains)) == (pytest.approx(0.0148, abs=1e-4), pytest.approx(0.0466, abs=1e-4))
    best = max(row["lplb"] / row["baseline"] - 1 for row in rows if row["lplb"])
    assert best == pytest.approx(0.0734, abs=1e-4)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)


def test_a_folder_without_recordings_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no recordings named prefill_\*.json and decode_\*.json"):
        read_topics(tmp_path, 4)


@pytest.mark.slow
@pytest.mark.recordings
def test_signs_of_the_published_table(monkeypatch: pytest.MonkeyPatch) -> None:
    if not RECORDINGS.exists():
        pytest.skip("needs recordings that are not part of the repository")
    monkeypatch.setattr(waterfill_lplb, "REQUESTS", (64,))
    topics = read_topics(RECORDINGS, 2)
    found = reproduce(topics, load_timing("h200", "deepseek-v3", 2, "prefill"), options=DrawOptions(num_steps=2))
    holds = {claim: held for claim, held, _ in found.scores}
    assert holds["Waterfill gains in all 12 rows"]
    assert holds["LPLB loses at red0"]
    assert holds["LPLB gains at red32"]
    assert holds["LPLB's gain rises and falls with drift"]
    errors = [row.predicted_baseline / row.baseline - 1 for row in found.rows]
    assert max(map(abs, errors)) < 0.06
