"""Policies give the same integers on the GPU as on the CPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from epsim.placement.base import Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.hashing import draw, slot_key, token_key
from epsim.policies.load import Load
from epsim.policies.stack import parse_stack
from epsim.traces.trace import TokenBlock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
EXACT = (
    "even",
    "static",
    "random",
    "random+waterfill",
    "even+waterfill(candidates=all,load=routed+local,counts=local)",
)


def problem() -> tuple[torch.Tensor, TokenBlock]:
    rng = np.random.default_rng(0)
    slots = np.concatenate([np.tile(np.arange(64), (3, 1)), rng.integers(0, 64, (3, 16))], axis=1)
    keys = 2 * rng.gumbel(size=(3, 64)) + rng.gumbel(size=(4000, 3, 64))
    ids = np.where(rng.random((4000, 3, 4)) < 0.05, -1, np.argsort(-keys, axis=2)[:, :, :4])
    token_step, source = np.repeat(np.arange(2), 2000), np.tile(np.repeat(np.arange(8), 250), 2)
    return torch.from_numpy(rng.permuted(slots, axis=1)), TokenBlock(np.array([3, 8]), token_step, source, ids)


def load(text: str, device: str) -> Load:
    slots, block = problem()
    placement = Placement(slots.to(device), 64, 8, 2)
    return bind(parse_stack(text), placement, Setting(5, 1.0, 4, (1, 2, 3))).load(block)


@pytest.mark.parametrize("text", EXACT)
def test_loads_are_the_same_integer_for_integer(text: str) -> None:
    on_cpu, on_gpu = load(text, "cpu"), load(text, "cuda")
    assert on_gpu.routed.is_cuda
    for field in dataclasses.fields(Load):
        a, b = getattr(on_cpu, field.name), getattr(on_gpu, field.name)
        if field.name == "routed_real":
            assert torch.allclose(a, b.cpu())
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, b.cpu()), field.name


def test_the_interior_point_method_stays_close() -> None:
    # fp32 on different devices: fractions differ in their last digits.
    on_cpu, on_gpu = load("lplb-ipm", "cpu"), load("lplb-ipm", "cuda")
    assert torch.equal(on_gpu.routed.sum(-1).cpu(), on_cpu.assignments)
    assert torch.allclose(on_gpu.routed_real.cpu(), on_cpu.routed_real, rtol=0.02, atol=1)


def test_draws_are_the_same_bits() -> None:
    drawn = []
    for device in ("cpu", "cuda"):
        step, rank, layer, slot = torch.tensor([7, 2, 60, 8], device=device)
        tokens = token_key(-3, step, rank, torch.arange(10_000, device=device))
        drawn.append(draw(tokens, slot_key(layer, slot), 63).cpu())
    assert torch.equal(*drawn)
