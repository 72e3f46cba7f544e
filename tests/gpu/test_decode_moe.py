"""Experts of small batches on a GPU, compared with float32; the same bits in every run; padding reads no expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epsim.kernels.experts import decode, plain
from epsim.kernels.experts.tiles import tiled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
QWEN, DEEPSEEK, OSS, OURS, TINY = (
    (128, 8, 2048, 768),
    (40, 8, 7168, 2048),
    (32, 4, 2880, 2880),
    (64, 8, 512, 256),
    (16, 2, 64, 32),
)


def drawn(tokens: int, shape: tuple[int, int, int, int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    experts, columns, hidden, inter = shape
    source = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        values = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        return values.normal_(0, size[-1] ** -0.5, generator=source)

    ids = torch.rand(tokens, experts, device="cuda", generator=source).topk(columns, dim=1).indices
    ids[torch.rand(ids.shape, device="cuda", generator=source) < 0.15] = -1
    weights = torch.rand(tokens, columns, device="cuda", generator=source)
    hidden_states = normal(tokens, hidden) * hidden**0.5
    return hidden_states, ids, weights, normal(experts, 2 * inter, hidden), normal(experts, hidden, inter)


def far(found: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> float:
    wanted = plain(tensors[0].float(), *tensors[1:])
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("form", "tokens"), [(decode, 1), (decode, 16), (decode, 29), (decode, 64), (tiled, 7), (tiled, 64)]
)
@pytest.mark.parametrize("shape", [QWEN, DEEPSEEK, OSS, OURS, TINY], ids=str)
def test_equals_float32_arithmetic(form: Any, shape: tuple[int, int, int, int], tokens: int) -> None:
    tensors = drawn(tokens, shape, tokens)
    counts = torch.full((shape[0],), -1, device="cuda")
    found = form(*tensors, counts=counts)
    assert far(found, tensors) < 5e-3
    ids = tensors[1]
    assert torch.equal(counts, torch.bincount(ids[ids >= 0], minlength=shape[0]))
    assert torch.equal(found, form(*tensors))


def test_all_tokens_on_few_experts() -> None:
    hidden, _, weights, gate_up, down = drawn(64, QWEN)
    ids = torch.arange(5, 13, device="cuda").expand(64, 8).contiguous()
    tensors = (hidden, ids, weights, gate_up, down)
    assert far(decode(*tensors), tensors) < 5e-3


@pytest.mark.parametrize("form", [decode, tiled])
def test_slots_in_rows_and_padding(form: Any) -> None:
    hidden, ids, weights, gate_up, down = drawn(9, OURS)
    ids[-2:] = -1
    rows = torch.randperm(64, device="cuda")
    found = form(hidden, ids, weights, gate_up, down, rows)
    assert far(found, (hidden, torch.where(ids < 0, -1, rows[ids]), weights, gate_up, down)) < 5e-3
    assert not found[-2:].any()
    assert not form(hidden, torch.full_like(ids, -1), weights, gate_up, down).any()


def test_a_graph_follows_its_inputs() -> None:
    tensors = drawn(16, QWEN)
    decode(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode(*tensors)
    for seed in range(1, 6):
        for mine, other in zip(tensors[:3], drawn(16, QWEN, seed)[:3], strict=True):
            mine.copy_(other)
        graph.replay()
        assert far(found, tensors) < 5e-3
        assert torch.equal(found, decode(*tensors))
