"""Router policies choose the same experts on the GPU as on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from epsim.policies.base import RouterWork
from epsim.policies.routing.oea import Oea, Pruned
from epsim.policies.routing.ranks import OeaEp
from epsim.policies.routing.rivals import Lynx, MaskLowDemand

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def drawn(batches: int, tokens: int, experts: int, top_k: int, copies: int) -> RouterWork:
    generator = torch.Generator().manual_seed(3)
    scores = (2 * torch.randn(batches, tokens, experts, generator=generator)).softmax(-1)
    scores = (scores * 256).ceil() / 256  # Many ties.
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].clone()
    ids[:, -2:] = -1
    weights = scores.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    decode = torch.rand(batches, tokens, generator=generator) < 0.8
    holds = torch.eye(8, dtype=torch.bool).repeat_interleave(experts // 8, 0)
    for copy in range(1, copies):
        holds |= holds.roll(copy, 1) & (torch.arange(experts) % 4 == 0)[:, None]
    return RouterWork(scores, scores, ids, weights, decode, holds)


def on_gpu(work: RouterWork) -> RouterWork:
    moved: dict[str, Any] = {
        field.name: value.cuda()
        for field in dataclasses.fields(RouterWork)
        if isinstance(value := getattr(work, field.name), torch.Tensor)
    }
    return dataclasses.replace(work, **moved)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("experts", [64, 512])
@pytest.mark.parametrize(
    "router", [Pruned("3"), Oea("3"), Oea("6@4/3@16", p=0.6, kmax=9, maxp=20), OeaEp("3"), Lynx(20), MaskLowDemand(3)]
)
def test_the_same_experts_and_weights(router: Any, experts: int, copies: int) -> None:
    work = drawn(9, 20, experts, 8, copies)
    here, there = router.route(work), router.route(on_gpu(work))
    assert there.expert_ids.is_cuda
    assert torch.equal(here.expert_ids, there.expert_ids.cpu())
    torch.testing.assert_close(here.weights, there.weights.cpu())
