"""The fused reader on a GPU: channels and outputs of the plain code, equal bits in every run, and a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from epsim.kernels.reader.layer import Gate, ReaderLayer, from_words
from tests.kernels.reader.test_reader_source import far, in_float64, inputs, layer_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPES = [
    # experts, hidden, intermediate, top-k, gate: small, the project's own, and those of three models
    (6, 256, 96, 4, "silu"),
    (16, 512, 256, 8, "silu"),
    (16, 2048, 768, 8, "silu"),
    (12, 2816, 704, 8, "gelu"),
    (16, 2048, 512, 8, "silu"),
]


def on_gpu(experts: int, hidden: int, inter: int, top_k: int, gate: Gate, budget: float) -> ReaderLayer:
    layer = layer_of(experts, hidden, inter, top_k, budget, gate)
    moved = (layer.gate_up.cuda(), layer.down.cuda(), layer.kept_of.cuda())
    return ReaderLayer(layer.sketch.to("cuda"), *moved, gate)


@pytest.mark.parametrize(("experts", "hidden", "inter", "top_k", "gate"), SHAPES)
def test_channels_and_outputs(experts: int, hidden: int, inter: int, top_k: int, gate: Gate) -> None:
    layer = on_gpu(experts, hidden, inter, top_k, gate, 0.3 if hidden > 256 else 0.6)
    words = layer.sizes(top_k).words
    for tokens in (1, 3, 16, 140):
        x, ids, weights = (tensor.cuda() for tensor in inputs(layer, tokens, top_k))
        ids[tokens // 2, 1:3] = -1
        kept = torch.full((tokens, words), -1, dtype=torch.int32, device="cuda")
        found = layer.read(x, ids, weights, kept)
        taken = from_words(kept, top_k, inter)
        assert torch.equal(taken.sum((1, 2)), layer.kept_of[(ids >= 0).sum(1)].long())
        assert not taken[ids < 0].any()
        other = torch.empty_like(kept)
        layer._plain(x, ids, weights, other)
        # Sums in another order: of near ties either may be kept.
        assert float((from_words(other, top_k, inter) != taken).float().mean()) < 2e-3
        assert far(found, in_float64(layer, (x, ids, weights), kept)) < 4e-3
        for _ in range(3):
            again = torch.empty_like(kept)
            assert torch.equal(layer.read(x, ids, weights, again), found)
            assert torch.equal(again, kept)


def test_in_a_graph() -> None:
    layer = on_gpu(16, 512, 256, 8, "silu", 0.3)
    x, ids, weights = (tensor.cuda() for tensor in inputs(layer, 4, 8))
    wanted = []
    for step in range(3):
        wanted.append(layer.read(x * (step + 1), ids, weights))
    place = torch.empty_like(x)
    layer.read(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.read(place, ids, weights)
    for step in range(3):
        place.copy_(x * (step + 1))
        graph.replay()
        assert torch.equal(found, wanted[step])
