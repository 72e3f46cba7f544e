"""Phases, experts, and the input checks of the layer, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epsim.models.shapes import LayerShape
from epsim.placement.base import Placement
from epsim.policies.stack import parse_stack
from epsim.runtime.exchange.base import Received
from epsim.runtime.experts import Experts, mlp
from epsim.runtime.layer import ExpertParallelMoE, build_layer
from epsim.runtime.peer import choose_collective
from epsim.runtime.phases import LAYER_PHASES, PhaseClock, PhaseError
from epsim.runtime.reference import reference_output
from epsim.runtime.weights import RandomWeights

CPU = torch.device("cpu")
SHAPE = LayerShape("one", 16, 8, 6, 2, 8)


def build(shape: LayerShape = SHAPE, text: str = "contiguous", **more: Any) -> ExpertParallelMoE:
    placement = Placement(torch.arange(shape.num_experts)[None], shape.num_experts, 1)
    weights = RandomWeights(shape, 0)
    given: dict[str, Any] = {"layer": 5, "seed": 0, "group": None, "device": CPU, "dtype": torch.float32}
    return build_layer(shape, parse_stack(text), placement, weights=weights, **(given | more))


def test_one_process_without_a_group_is_the_reference() -> None:
    for shape in (SHAPE, LayerShape("wide", 16, 8, 6, 2, 24), LayerShape("none", 16, 8, 6, 2)):
        layer = build(shape)
        hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
        forced = torch.tensor([[0, 1], [2, -1], [-1, -1], [5, 4], [3, 3 - 1], [0, 5], [1, 2], [4, 0], [5, 1]])
        output = layer(hidden, step=2, forced_ids=forced)
        record = layer.record
        assert record is not None
        wanted = reference_output(
            shape, RandomWeights(shape, 0), 5, hidden, forced, record.weights, record.shared_weight
        )
        assert torch.allclose(output.double(), wanted, rtol=1e-5, atol=1e-6)
        assert output[2].tolist() == [0.0] * 16, "a token without experts is none of the layer's"
        assert record.received.tolist() == torch.bincount(forced.flatten() + 1)[1:].tolist()
        assert int(record.received_shared) == (8 if shape.has_shared else 0)


def test_phases_follow_one_another_and_are_timed() -> None:
    clock = PhaseClock(0, CPU, timed=True)
    layer = build(clock=clock)
    seen: list[str] = []
    enter = clock.enter

    def noted(phase: str, step: int | None = None, layer: int | None = None) -> None:
        enter(phase, step, layer)
        seen.append(clock.phase)

    clock.enter = noted  # type: ignore[method-assign]
    layer(torch.randn(4, 16), step=7)
    layer(torch.randn(4, 16), step=8)
    assert seen == [*LAYER_PHASES, "idle"] * 2
    times = clock.times()
    assert list(times) == [(step, 5, phase) for step in (7, 8) for phase in LAYER_PHASES]
    assert all(value > 0 for value in times.values())
    assert clock.times() == {}


def test_errors_name_rank_step_layer_and_phase() -> None:
    layer = build()
    with pytest.raises(PhaseError, match=r"^rank 0, step 3, layer 5, phase route: hidden states are \[4, 15\], not"):
        layer(torch.randn(4, 15), step=3)
    with pytest.raises(PhaseError, match="phase route: router scores are not finite"):
        layer(torch.full((4, 16), torch.inf), step=3)
    for forced in (torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 2)):
        with pytest.raises(PhaseError, match=r"phase route: forced ids are .*, not \[4, 2\] int64"):
            layer(torch.randn(4, 16), step=3, forced_ids=forced)
    for wrong in (6, -2):
        with pytest.raises(PhaseError, match=r"a forced id is outside 0\.\.5"):
            layer(torch.randn(4, 16), step=3, forced_ids=torch.full((4, 2), wrong))
    hashed = build(LayerShape("h", 16, 8, 6, 2, 8, "hash"))
    with pytest.raises(PhaseError, match="phase route: a router that hashes the token's id needs token_ids"):
        hashed(torch.randn(4, 16), step=3)


def test_what_does_not_fit_together_is_told_when_built() -> None:
    with pytest.raises(ValueError, match="the placement is for 4 experts, one has 6"):
        build_layer(
            SHAPE,
            parse_stack("eplb"),
            Placement(torch.arange(4)[None], 4, 1),
            layer=0,
            seed=0,
            group=None,
            device=CPU,
            dtype=torch.float32,
        )
    with pytest.raises(ValueError, match="the placement is for 2 ranks, the group has 1"):
        build_layer(
            SHAPE,
            parse_stack("eplb"),
            Placement(torch.arange(6)[None], 6, 2),
            layer=0,
            seed=0,
            group=None,
            device=CPU,
            dtype=torch.float32,
        )
    with pytest.raises(ValueError, match="collective peer cannot be used here: it needs GPUs"):
        build(collective="peer")
    assert choose_collective("auto", None, CPU, 7)[1] == "no peer memory: it needs GPUs"


def test_a_switched_slot_computes_with_its_new_row() -> None:
    weights = RandomWeights(SHAPE, 0)
    experts = Experts(SHAPE, 1, [0, 1, 2], weights, CPU, torch.float32, spare=1)
    [row] = experts.spare_rows
    for part, wanted in zip(experts.bytes_of(row=row), weights.routed(1, 5)):
        part.copy_(wanted.contiguous().view(-1).view(torch.uint8))
    hidden = torch.randn(2, 16)
    received = Received(hidden, None, torch.tensor([[1], [3]]), torch.ones(2, 1), None)
    before, _ = experts(received)
    experts.switch({1: row})
    after, counts = experts(received)
    assert torch.allclose(before[0], mlp(hidden[:1], *weights.routed(1, 1))[0])
    assert torch.allclose(after[0], mlp(hidden[:1], *weights.routed(1, 5))[0])
    assert torch.allclose(after[1], mlp(hidden[1:], *weights.shared(1))[0])
    assert counts.tolist() == [0, 1, 0, 1]
    assert (experts.spare_rows, experts.row_of_slot.tolist()) == ([1], [0, 3, 2, 4])
