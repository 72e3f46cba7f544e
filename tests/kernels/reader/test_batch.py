"""One set of channels per batch, in plain PyTorch: within the budget, with the best scores, dense at a budget of 1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.experts import plain
from epsim.kernels.reader import batch_cuda
from epsim.kernels.reader.batch import BatchReader, of_experts, of_slots
from epsim.kernels.reader.bytes import ReadBytes, union_bytes
from epsim.kernels.reader.layer import as_words, from_words
from epsim.kernels.reader.rotate import rotated
from epsim.kernels.reader.screen import batch_coordinates
from tests.kernels.reader.test_batch_source import active_of, reader_of
from tests.kernels.reader.test_reader_source import far, inputs

EXPERTS, HIDDEN, INTER, TOP_K = 6, 256, 96, 3


@pytest.fixture(scope="module")
def reader() -> BatchReader:
    return reader_of(EXPERTS, HIDDEN, INTER, TOP_K, 0.6)


def kept_by(reader: BatchReader, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """-> output, kept [E, I] bool."""
    x, ids, weights = tensors
    words = torch.full((EXPERTS, INTER // 32), -1, dtype=torch.int32)
    return reader.read(x, ids, weights, words), from_words(words, 1, INTER)[:, 0]


@given(tokens=st.integers(1, 40), seed=st.integers(0, 1000), holes=st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_reads_no_more_than_the_budget_whatever_the_batch(tokens: int, seed: int, holes: float) -> None:
    reader = reader_of(EXPERTS, HIDDEN, INTER, TOP_K, 0.6)
    x, ids, weights = inputs(reader.layer, tokens, TOP_K)
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < holes] = -1
    output, kept = kept_by(reader, (x, ids, weights))
    active = active_of(ids)
    assert int(kept.sum()) == int(reader.kept_of[len(active)])
    assert int(kept[active].sum()) == int(kept.sum())
    taken = of_slots(as_words(kept[:, None]), ids, INTER)
    alone = torch.where((ids >= 0).any(1, keepdim=True), rotated(x.float(), reader.layer.sketch.signs), 0.0)
    seen = batch_coordinates(alone, 80, torch.zeros(tokens, dtype=torch.int64), 1)
    sizes = ReadBytes(HIDDEN, INTER)
    read = union_bytes(sizes, ids, taken, seen, EXPERTS)
    most = 0.6 * len(active) * sizes.expert
    assert read <= most
    # With one more channel it would exceed the budget.
    assert not len(active) or read + sizes.kept_channel - sizes.skipped_channel > most
    assert (output[(ids < 0).all(1)] == 0).all()


def test_a_token_alone_reads_what_it_would_of_its_own(reader: BatchReader) -> None:
    tensors = inputs(reader.layer, 1, TOP_K)
    kept_of = torch.tensor([0, *(int(reader.kept_of[number]) for number in range(1, TOP_K + 1))], dtype=torch.int32)
    own = type(reader.layer)(reader.layer.sketch, reader.layer.gate_up, reader.layer.down, kept_of)
    words = torch.empty(1, own.sizes(TOP_K).words, dtype=torch.int32)
    wanted = own.read(*tensors, words)
    output, kept = kept_by(reader, tensors)
    assert torch.equal(of_slots(as_words(kept[:, None]), tensors[1], INTER), from_words(words, TOP_K, INTER))
    assert torch.equal(output, wanted)


def test_tokens_without_experts_choose_nothing(reader: BatchReader) -> None:
    x, ids, weights = inputs(reader.layer, 5, TOP_K)
    output, kept = kept_by(reader, (x, ids, weights))
    wild = torch.cat([x, x[:2] * 100, x[:1] * torch.nan])
    more = torch.cat([ids, torch.full((3, TOP_K), -1)])
    padded, same = kept_by(reader, (wild, more, torch.cat([weights, weights[:3]])))
    assert torch.equal(kept, same)
    assert torch.equal(padded[:5], output)


def test_a_budget_of_all_is_the_dense_layer() -> None:
    reader = reader_of(EXPERTS, HIDDEN, INTER, TOP_K, 1.0)
    x, ids, weights = inputs(reader.layer, 9, TOP_K)
    ids[3, 1] = -1
    output, kept = kept_by(reader, (x, ids, weights))
    assert kept[active_of(ids)].all()
    wanted = plain(x.float(), ids, weights, reader.layer.gate_up.float(), reader.layer.down.transpose(1, 2).float())
    assert far(output, wanted) < 1e-2


def test_channels_of_experts_and_of_slots() -> None:
    ids = torch.tensor([[0, 2], [2, -1], [-1, 0]])
    marks = torch.rand(4, 37, generator=torch.Generator().manual_seed(0)) < 0.4
    marks[[1, 3]] = False
    taken = marks[ids.clamp(min=0)] & (ids >= 0)[..., None]
    words = of_experts(taken, ids, 4)
    assert torch.equal(from_words(words, 1, 37)[:, 0], marks)
    assert torch.equal(of_slots(words, ids, 37), taken)


def test_what_does_not_fit(reader: BatchReader) -> None:
    x, ids, weights = inputs(reader.layer, 2, TOP_K)
    with pytest.raises(ValueError, match="bfloat16"):
        reader.read(x.float(), ids, weights)
    with pytest.raises(ValueError, match=r"kept is \[2, 3\] torch.int32, not contiguous \[6, 3\] int32"):
        reader.read(x, ids, weights, torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="is too small"):
        BatchReader.of(reader.layer, 0.01)
    assert reader.read(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("shape", "sizes", "says"),
    [
        ((129, 8, 8), (2048, 768, 80, 32), "129 tokens"),
        ((16, 1024, 8), (2048, 768, 80, 32), "of 1024"),
        ((16, 8, 8), (2000, 768, 80, 32), "hidden 2000"),
        ((16, 8, 8), (2048, 70, 80, 32), "intermediate 70"),
        ((16, 8, 8), (2048, 768, 40, 32), "40 coordinates"),
        ((16, 8, 8), (2048, 768, 80, 16), "rank 16"),
        ((16, 8, 8), (65536, 768, 128, 32), "shared memory"),
        *(
            ((128, 256, 8), (*model, 80, rank), None)
            for model in ((2048, 768), (2816, 704), (512, 256))
            for rank in (0, 32)
        ),
    ],
)
def test_shapes_that_are_not_covered(
    shape: tuple[int, int, int], sizes: tuple[int, int, int, int], says: str | None
) -> None:
    found = batch_cuda.uncovered(batch_cuda.Sizes(*sizes, False), *shape)
    assert found is None if says is None else says in (found or "")
