"""Detail of stacks over stretches of steps: against sums over the whole, however it is cut into blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from epsim.placement.base import Placement
from epsim.score.detail import MOST_CELLS, MOST_LAYER_CELLS, MOST_STRETCHES, StackDetail, step_weights
from epsim.score.metrics import Values
from epsim.score.steps import ScoredSteps, add_copies, seen_steps


def gathered(total: torch.Tensor, tokens: torch.Tensor, cut: int) -> tuple[StackDetail, torch.Tensor]:
    detail = StackDetail(len(total))
    ratio = total.amax(-1) / total.mean(-1)
    for part in torch.arange(len(total)).tensor_split(cut):
        metrics: dict[str, Values] = {
            "max_over_mean": ratio[part],
            "balancedness_vllm": ratio[part].nanmean(-1),
            "kept_mass": "no router",
        }
        detail.add(metrics, total[part], tokens[part])
    return detail, ratio


@pytest.mark.parametrize(("num_steps", "cut"), [(7, 1), (7, 3), (1000, 9)])
def test_detail_is_that_of_the_whole(num_steps: int, cut: int) -> None:
    rng = np.random.default_rng(0)
    total = torch.from_numpy(rng.gamma(2.0, 50.0, (num_steps, 3, 4)))
    total[1, 2] = 0
    tokens = torch.from_numpy(rng.integers(1, 900, (num_steps, 1))).expand(-1, 3).double()
    detail, ratio = gathered(total, tokens, cut)
    values = ratio[~ratio.isnan()].numpy().astype(np.float32)
    entry = detail.entry(values)
    stretches = min(num_steps, MOST_STRETCHES)
    place = torch.arange(num_steps) * stretches // num_steps
    over = total / total.mean(-1, keepdim=True)
    for stretch in (0, stretches // 2, stretches - 1):
        part = place == stretch
        wanted = over[part].nan_to_num().sum((0, 1)) / (~ratio[part].isnan()).sum()
        assert entry["load_over_mean_by_step"][stretch] == pytest.approx(wanted.tolist(), abs=6e-4)
        assert entry["by_step"]["max_over_mean"][stretch] == pytest.approx(float(ratio[part].nanmean()), rel=1e-6)
    assert set(entry["by_step"]) == {"max_over_mean", "balancedness_vllm"}
    by_layer = entry["load_over_mean_by_layer"]
    coarse = len(by_layer[0])
    first = torch.arange(num_steps) * coarse // num_steps == 0
    assert by_layer[1][0] == pytest.approx(over[first, 1].mean(0).tolist(), abs=6e-4)
    assert entry["max_over_mean_quantiles"][::50] == pytest.approx(
        np.quantile(values, [0, 0.25, 0.5, 0.75, 1]), abs=1e-5
    )
    sizes = entry["max_over_mean_by_tokens"]
    assert sum(size["steps"] for size in sizes) == num_steps
    for size in sizes:
        inside = (tokens[:, 0] / 4 >= size["low"]) & (tokens[:, 0] / 4 < size["high"])
        assert int(inside.sum()) == size["steps"]
        assert float(ratio[inside].nanmean()) == pytest.approx(size["mean"])


def test_detail_is_bounded() -> None:
    for shape in ((3000, 61, 16), (400, 2, 512), (3, 1, 40_000)):
        total = torch.ones(shape, dtype=torch.float64)
        detail, _ = gathered(total, torch.ones(shape[:2], dtype=torch.float64), 2)
        entry = detail.entry(np.ones(3, np.float32))
        cells = np.array(entry["load_over_mean_by_step"])
        assert len(cells) <= MOST_STRETCHES
        assert cells.size <= max(MOST_CELLS, shape[2])
        assert np.array(entry.get("load_over_mean_by_layer", [])).size <= MOST_LAYER_CELLS
        assert (cells == 1).all()


def test_scored_steps_have_a_key_and_hot_experts() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 9, (10, 2, 8))
    counts[:, 1, 5] += 500
    whole, parts, other = ScoredSteps(), ScoredSteps(), ScoredSteps()
    whole.add(seen_steps(counts, counts.sum(2)))
    for part in np.array_split(counts, 3):
        parts.add(seen_steps(part, part.sum(2)))
    other.add(seen_steps(counts[::-1], counts[::-1].sum(2)))
    entry = whole.entry(4)
    assert entry == parts.entry(4)
    assert entry["key"] != other.entry(4)["key"]
    assert (entry["steps"], entry["busy_layers"]) == ([3, 2, 3, 2], [6, 4, 6, 4])
    hottest = entry["hot_experts"][0]
    total = counts.sum(0)
    assert (hottest["layer"], hottest["expert"]) == (1, 5)
    assert hottest["load_over_mean"] == pytest.approx(total[1, 5] / total[1].mean(), abs=1e-4)
    slots = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [0, 1, 2, 5, 4, 5, 6, 7, 3, 5]])
    stack: dict[str, Any] = {"stack": "x"}
    add_copies([stack], [Placement(slots, 8, 2, 1)], entry)
    assert stack["hot_copies"][0] == [0, 1, 1]
    assert step_weights(np.ones(5), 2) == [3, 2]
