"""Extreme weights, scores and slots."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.reader import (
    Experts,
    Screen,
    build_layer,
    keep_above,
    keep_by_rank,
    keep_top,
    output_scores,
    rank_quotas,
    read_output,
)
from epsim.kernels.reader.slots import FEW, slot_products
from tests.kernels.reader.worlds import dense, make_world

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("tokens", [1, FEW])
def test_an_empty_slot_gives_zeros_whatever_expert_0_holds(tokens: int) -> None:
    """A product with it may be beyond the type's numbers."""
    weight = torch.full((2, 3, 4), 60000.0, dtype=torch.float16)
    weight[1] = 1
    values = torch.full((tokens, 4), 10.0, dtype=torch.float16)
    ids = torch.tensor([[1, -1]]).expand(tokens, 2)
    found = slot_products(values, ids, weight)
    assert found[:, 0].tolist() == [[40.0] * 3] * tokens
    assert found[:, 1].tolist() == [[0.0] * 3] * tokens


@pytest.mark.parametrize("filler", [NAN, INF, 7.0])
def test_weights_of_empty_slots_say_nothing(filler: float) -> None:
    world = make_world(tokens=5)
    ids, weights, plain = world.ids.clone(), world.weights.clone(), world.weights.clone()
    ids[2, 1] = -1
    weights[2, 1], plain[2, 1] = filler, 0
    gate, up = Screen(world.sketch, torch.float64).estimates(world.x, ids)
    everything = torch.ones(5, 3, 24, dtype=torch.bool)
    found = read_output(world.x, ids, weights, world.experts, everything, F.silu(gate) * up, world.sketch)
    torch.testing.assert_close(found, dense(world._replace(weights=plain)), rtol=0, atol=1e-12)
    some = everything & (torch.arange(24) < 5)
    other = read_output(world.x, ids, weights, world.experts, some, F.silu(gate) * up, world.sketch)
    again = read_output(world.x, ids, plain, world.experts, some, F.silu(gate) * up, world.sketch)
    assert torch.equal(other, again)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 0.5, -0.5, 1e-44, 1e30, NAN, INF, -INF]), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["experts", "weights"]),
    st.integers(0, 60),
)
def test_quotas_of_any_weights_sum_to_the_number(rows: list[list[float]], by: str, number: int) -> None:
    weights = torch.tensor(rows)
    ids = torch.tensor([[0, 1, 3]]).expand(len(rows), 3)
    quotas = rank_quotas(torch.full((len(rows),), number), ids, weights, torch.tensor([0, 0, 1, 1]), 2, by)  # type: ignore[arg-type]
    for row, (first, second) in zip(weights.tolist(), quotas.tolist(), strict=True):
        told = (
            [abs(w) for w in row] if by == "weights" and all(map(math.isfinite, row)) else [float(w != 0) for w in row]
        )
        whole = sum(told)
        assert first + second == (number if whole else 0)
        if whole:
            assert abs(first - number * (told[0] + told[1]) / whole) <= 0.5 + 1e-9 * number
    kept = keep_by_rank(torch.ones(len(rows), 3, 20), ids, quotas, torch.tensor([0, 0, 1, 1]))
    assert kept[:, :2].sum((1, 2)).tolist() == quotas[:, 0].clamp(max=40).tolist()
    assert kept[:, 2].sum(1).tolist() == quotas[:, 1].clamp(max=20).tolist()


def test_a_threshold_keeps_what_is_no_number() -> None:
    assert keep_above(torch.tensor([1.0, NAN, 3.0, INF, 2.0]), 2.0).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-7, 3e3])
def test_layers_of_one_size_of_weights(size: float) -> None:
    """Zeros, denormals, weights below and near the ends of float16's scales: a read is within the bounds."""
    world = make_world(num_experts=3, top_k=2, intermediate=1, hidden=128, tokens=4)
    gate_up = (world.experts.gate_up.sign() * size).float()
    sketch = build_layer(gate_up, world.experts.down.float() * size)
    assert all(bool(torch.isfinite(t.float()).all()) for t in sketch.tensors().values())
    screen = Screen(sketch, torch.float64)
    true = slot_products(world.x, world.ids, gate_up.double()).chunk(2, -1)
    for number in (1, 80, 128):
        found, bounds = screen.estimates(world.x, world.ids, number), screen.error_bounds(world.x, world.ids, number)
        for want, got, bound in zip(true, found, bounds, strict=True):
            assert bool(((got - want).abs() <= bound * (1 + 1e-12) + 1e-300).all())
    experts = Experts(gate_up.double(), world.experts.down * size, F.silu)
    scores = output_scores(world.weights, sketch.norms[world.ids], true[0])
    kept = keep_top(scores, 1)
    assert kept.sum((1, 2)).tolist() == [1] * 4
    everything = torch.ones(4, 2, 1, dtype=torch.bool)
    read = read_output(world.x, world.ids, world.weights, experts, everything)
    torch.testing.assert_close(read, dense(world._replace(experts=experts)), rtol=1e-12, atol=0)
