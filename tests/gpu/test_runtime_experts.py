"""Grouped experts on a GPU, compared with the plain PyTorch code."""

from __future__ import annotations

import pytest
import torch

from epsim.models.shapes import LayerShape
from epsim.runtime.exchange.base import Received
from epsim.runtime.experts import Experts
from epsim.runtime.weights import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LOCAL = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("shared", [128, 0, 192])
@pytest.mark.parametrize("rows", [0, 1, 37, 64, 3000])
def test_rows_become_what_plain_experts_make_of_them(shared: int, rows: int) -> None:
    shape = LayerShape("x", 512, 128, 16, 3, shared)
    weights = RandomWeights(shape, 1, dtype=torch.bfloat16)
    on_cpu, on_gpu = (
        Experts(shape, 0, LOCAL, weights, torch.device(device), torch.bfloat16, spare=2) for device in ("cpu", "cuda")
    )
    for experts in (on_cpu, on_gpu):
        experts._put(5, weights.routed(0, 9))
        experts.switch({1: 5})  # Slot 1 now holds expert 9, in a row that was spare.
    generator = torch.Generator().manual_seed(rows)
    columns = 3 + (shared > 0)
    slots = torch.rand(rows, len(LOCAL), generator=generator).argsort(1)[:, :columns]
    slots[torch.rand(rows, columns, generator=generator) < 0.2] = -1
    if shared:
        slots[:, -1] = torch.where(torch.rand(rows, generator=generator) < 0.5, len(LOCAL), -1)
    hidden = torch.randn(rows, shape.hidden, generator=generator).bfloat16()
    given = torch.rand(rows, columns, generator=generator)
    received = Received(hidden, None, slots, given, None)
    wanted, counts = on_cpu(received)
    found, counts_there = on_gpu(Received(hidden.cuda(), None, slots.cuda(), given.cuda(), None))
    assert torch.equal(counts, counts_there.cpu())
    taken = (slots >= 0).any(1)
    if bool(taken.any()):
        far = (found.cpu()[taken].float() - wanted[taken].float()).norm() / wanted[taken].float().norm()
        assert far < 0.01


def test_float8_keeps_what_its_three_bits_can() -> None:
    from epsim.runtime.grouped import to_float8

    hidden = torch.randn(200, 1024, device="cuda").bfloat16() * torch.logspace(-3, 3, 200, device="cuda")[:, None]
    hidden = hidden.bfloat16()
    values, scales = to_float8(hidden)
    back = values.float().view(200, 8, 128) * scales[:, :, None]
    block = hidden.float().view(200, 8, 128)
    # Rounding to nearest errs by at most 1/16 of a value, or half the least step of a block's scale.
    allowed = torch.maximum(block.abs() / 16, scales[:, :, None] * 2**-10) * 1.001
    assert bool(((back - block).abs() <= allowed).all())
    assert torch.allclose(scales, block.abs().amax(2).clamp(min=1e-4) / 448)
