"""Metrics against figures worked out by hand, and the law that the causes multiply to peak over mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epsim.policies.load import Load
from epsim.score.formulas import METRICS
from epsim.score.metrics import Values, layer_metrics


def load_of(
    routed: list[list[list[float]]],
    real: list[list[list[float]]] | None = None,
    shared: list[list[list[float]]] | None = None,
    rounded: bool = True,
) -> Load:
    loads = torch.tensor(routed, dtype=torch.float64)
    shared_loads = torch.zeros_like(loads) if shared is None else torch.tensor(shared, dtype=torch.float64)
    assignments = loads.sum(-1).round().long()
    return Load(
        routed=loads.long() if rounded else loads,
        routed_real=loads if real is None else torch.tensor(real, dtype=torch.float64),
        shared=shared_loads,
        shared_tokens=shared_loads,
        tokens=shared_loads.sum(-1),
        assignments=assignments,
        active=(loads > 0).long() * 3,
        remote_rank=assignments // 2,
        remote_node=assignments // 4,
        shared_remote_rank=torch.ones_like(assignments),
        shared_remote_node=torch.zeros_like(assignments),
        rounded=rounded,
    )


def number(values: dict[str, Values], key: str, step: int = 0, layer: int = 0) -> float:
    value = values[key]
    assert isinstance(value, torch.Tensor), value
    return float(value[step, layer]) if value.ndim == 2 else float(value[step])


def test_by_hand_without_shared_expert() -> None:
    # Two layers of four ranks; the second layer has no tokens and does not count.
    load = load_of([[[12, 6, 4, 2], [0, 0, 0, 0]]], real=[[[11.0, 6.0, 4.0, 3.0], [0, 0, 0, 0]]])
    values = layer_metrics(load, torch.tensor([[8.0, 0.0]], dtype=torch.float64), shared=False)
    assert set(values) == set(METRICS)
    assert number(values, "peak") == 12
    assert number(values, "mean_load") == 6
    assert number(values, "max_over_mean") == 2
    assert number(values, "balancedness") == 0.5
    assert number(values, "balancedness_vllm") == 0.5
    assert number(values, "imbalance_ratio") == 1
    assert number(values, "optimality_gap") == pytest.approx(0.5)
    assert number(values, "gap_placement") == pytest.approx(8 / 6 - 1)
    assert number(values, "gap_split") == pytest.approx(11 / 8 - 1)
    assert number(values, "gap_rounding") == pytest.approx(12 / 11 - 1)
    assert number(values, "active_experts") == 3
    assert number(values, "active_experts_total") == 12
    assert number(values, "remote_rank_share") == 0.5
    assert number(values, "remote_node_share") == 0.25
    assert number(values, "peak", layer=1) != number(values, "peak", layer=1)  # NaN
    assert isinstance(values["gap_shared"], str)


def test_by_hand_with_shared_expert() -> None:
    # Routed 12, 6, 4, 2; one shared token each: total 13, 7, 5, 3, mean 7; all on the last rank: 12, mean 7.
    local = load_of([[[12, 6, 4, 2]]], shared=[[[1, 1, 1, 1]]])
    values = layer_metrics(local, torch.tensor([[6.0]], dtype=torch.float64), shared=True)
    assert number(values, "peak") == 13
    assert number(values, "routed_peak") == 12
    assert number(values, "mean_load") == 7
    assert number(values, "gap_placement") == 0  # optimum_total = max(6, 7)
    assert number(values, "gap_split") == pytest.approx(12 / 7 - 1)
    assert number(values, "gap_shared") == pytest.approx(13 / 12 - 1)
    assert number(values, "active_experts") == 4
    assert number(values, "remote_rank_share") == pytest.approx((12 + 1) / 28)
    filled = load_of([[[12, 6, 4, 2]]], shared=[[[0, 0, 0, 4]]])
    assert number(layer_metrics(filled, torch.tensor([[6.0]], dtype=torch.float64), True), "gap_shared") == 0


def test_vllm_balancedness_weighs_layers_by_their_load() -> None:
    load = load_of([[[3, 1], [10, 10]]])
    values = layer_metrics(load, torch.tensor([[2.0, 10.0]], dtype=torch.float64), shared=False)
    assert number(values, "balancedness_vllm") == pytest.approx((2 + 10) / (3 + 10))


def test_rounding_is_null_where_nothing_is_rounded() -> None:
    load = load_of([[[2.5, 1.5]]], rounded=False)
    values = layer_metrics(load, torch.tensor([[2.0]], dtype=torch.float64), shared=False)
    assert isinstance(values["gap_rounding"], str)


@given(st.data())
def test_causes_are_never_negative_and_multiply_to_peak_over_mean(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    shared = data.draw(st.booleans())
    whole = st.lists(st.integers(0, 50), min_size=ranks, max_size=ranks)
    routed = data.draw(whole)
    # A real-valued split of the same total; by luck the integer peak may lie below its peak.
    real = data.draw(st.permutations([float(value) for value in routed]))
    if ranks > 1 and real[0] > 1:
        real = [real[0] - 0.5, real[1] + 0.5, *real[2:]]
    extra = data.draw(whole) if shared else [0] * ranks
    share = data.draw(st.floats(0, 1))
    mean = sum(routed) / ranks
    optimum = mean + share * (min(max(routed), max(real)) - mean)
    load = load_of([[[float(value) for value in routed]]], [[real]], [[[float(value) for value in extra]]])
    values = layer_metrics(load, torch.tensor([[optimum]], dtype=torch.float64), shared)
    if sum(routed) == 0:
        return
    product = 1.0
    for key in ("gap_placement", "gap_split", "gap_rounding", "gap_shared"):
        if not isinstance(values[key], str):
            assert number(values, key) >= 0
            product *= 1 + number(values, key)
    assert product == pytest.approx(number(values, "max_over_mean"), rel=1e-9)
    assert number(values, "optimality_gap") >= 0
