"""The batch's reader on a GPU: channels of its own scores exactly, of the plain form but for near ties, its outputs,
the same bits again, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from epsim.kernels.reader import batch_cuda
from epsim.kernels.reader.batch import BatchReader
from epsim.kernels.reader.build import build_layer
from epsim.kernels.reader.layer import Gate, ReaderLayer, from_words
from epsim.kernels.reader.select import top_mask
from tests.kernels.reader.test_batch_source import active_of, in_float64, totals
from tests.kernels.reader.test_reader_source import far

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPES: list[tuple[int, int, int, Gate]] = [
    # experts, hidden, intermediate, gate: the project's own, and of three models
    (16, 512, 256, "silu"),
    (24, 2048, 768, "silu"),
    (12, 2816, 704, "gelu"),
    (40, 2048, 512, "silu"),
]
TOP_K = 8


def on_gpu(experts: int, hidden: int, inter: int, gate: Gate, budget: float) -> BatchReader:
    source = torch.Generator("cuda").manual_seed(hidden + inter)
    gate_up = torch.randn(experts, 2 * inter, hidden, device="cuda", generator=source) / hidden**0.5
    down = torch.randn(experts, hidden, inter, device="cuda", generator=source) / inter**0.5
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    return BatchReader.of(ReaderLayer.of(build_layer(gate_up, down), gate_up, down, TOP_K, 1.0, gate), budget)


def drawn(reader: BatchReader, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator("cuda").manual_seed(tokens)
    sketch = reader.layer.sketch
    x = torch.randn(tokens, sketch.hidden, device="cuda", generator=source).bfloat16()
    # Crowded experts and idle ones.
    liked = torch.rand(tokens, sketch.num_experts, device="cuda", generator=source)
    liked -= torch.arange(sketch.num_experts, device="cuda") / sketch.num_experts
    ids = liked.topk(TOP_K).indices
    ids[tokens // 2, 1:3] = -1
    if tokens > 2:
        ids[-1] = -1
    weights = torch.rand(tokens, TOP_K, device="cuda", generator=source) + 0.1
    return x, ids, weights


@pytest.mark.parametrize("budget", [0.3, 1.0])
@pytest.mark.parametrize(("experts", "hidden", "inter", "gate"), SHAPES)
def test_channels_and_outputs(experts: int, hidden: int, inter: int, gate: Gate, budget: float) -> None:
    reader = on_gpu(experts, hidden, inter, gate, budget)
    for tokens in (1, 3, 16, 61, 128):
        given = drawn(reader, tokens)
        x, ids, weights = given
        kept = torch.full((experts, -(-inter // 32)), -1, dtype=torch.int32, device="cuda")
        found = reader.read(*given, kept=kept)
        taken = from_words(kept, 1, inter)[:, 0]
        active = active_of(ids)
        number = int(reader.kept_of[len(active)])
        assert int(taken.sum()) == number
        tensors = {"ids": ids, "weights": weights, "kept_of": reader.kept_of}
        tensors |= {"gate_up": reader.layer.gate_up, "down": reader.layer.down}
        held = batch_cuda.launched(reader.sizes, reader.layer.sketch, x, tensors, None)
        scores = totals(held, inter)
        assert torch.equal(taken[active], top_mask(scores.flatten(), number).view_as(scores))
        other = torch.empty_like(kept)
        reader._plain(*given, other)
        # Sums in another order, and Rx in halves: of near ties either may be kept.
        assert float((from_words(other, 1, inter)[:, 0] != taken).float().mean()) < 4e-3
        assert far(found, in_float64(reader, given, kept)) < 4e-3
        if tokens > 2:
            assert (found[-1] == 0).all()
        for _ in range(3):
            again = torch.empty_like(kept)
            assert torch.equal(reader.read(*given, kept=again), found)
            assert torch.equal(again, kept)


def test_in_a_graph() -> None:
    reader = on_gpu(16, 512, 256, "silu", 0.3)
    x, ids, weights = drawn(reader, 40)
    wanted = [reader.read(x * (step + 1), ids, weights) for step in range(3)]
    place = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = reader.read(place, ids, weights)
    for step in range(3):
        place.copy_(x * (step + 1))
        graph.replay()
        assert torch.equal(found, wanted[step])


def test_equal_scores_go_to_the_lower_channels() -> None:
    reader = on_gpu(16, 512, 256, "silu", 0.3)
    x, ids, weights = drawn(reader, 5)
    kept = torch.empty(16, 8, dtype=torch.int32, device="cuda")
    assert (reader.read(torch.zeros_like(x), ids, weights, kept) == 0).all()
    active = active_of(ids)
    first = from_words(kept, 1, 256)[:, 0][active].flatten()
    number = int(reader.kept_of[len(active)])
    assert first[:number].all()
    assert not first[number:].any()
