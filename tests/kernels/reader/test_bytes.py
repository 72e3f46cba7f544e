"""Byte counts, compared with the sectors of 32 bytes that the addresses of all rows touch."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.reader import ReadBytes, build_layer, token_bytes, union_bytes
from epsim.policies.reader import Dense, TopkChannels

EXPERTS = 4


def touched(sizes: ReadBytes, ids: torch.Tensor, kept: torch.Tensor, read: torch.Tensor) -> int:
    """Bytes of all sectors that the reads of these tokens touch. Each tensor begins at a multiple of 256."""
    hidden, inter, rank = sizes.hidden, sizes.intermediate, sizes.rank
    width = int(sizes.weight_bytes)
    codes = -(-2 * -(-inter // 5) // 32) * 32
    sectors: set[tuple[str, int]] = set()

    def touch(tensor: str, row: int, length: int) -> None:
        if length:
            sectors.update((tensor, s) for s in range(row * length // 32, (row * length + length - 1) // 32 + 1))

    for token, experts in enumerate(ids.tolist()):
        if max(experts) >= 0:
            touch("signs", 0, hidden)
            touch("basis", 0, hidden * rank * 2)
        for slot, e in enumerate(experts):
            if e < 0:
                continue
            touch("norms", e, 2 * inter)
            touch("scales", e, hidden // 128 * 2 * inter * 2)
            for c in read[token].nonzero().flatten().tolist():
                touch("codes", e * hidden + c, codes)
            for j in range(inter):
                if kept[token, slot, j]:
                    touch("gate_up", e * 2 * inter + j, hidden * width)
                    touch("gate_up", (e * 2 + 1) * inter + j, hidden * width)
                    touch("down", e * inter + j, hidden * width)
                else:
                    touch("coefficients", e * inter + j, rank * 2)
    return 32 * len(sectors)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([128, 256, 384]),
    st.sampled_from([1, 5, 12, 16, 28, 40, 48]),
    st.sampled_from([0, 4, 28, 32, 33]),
    st.sampled_from([1, 2]),
)
def test_no_more_sectors_are_touched_than_counted(seed: int, hidden: int, inter: int, rank: int, width: int) -> None:
    sizes = ReadBytes(hidden, inter, width, 80, rank)
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(3, EXPERTS, generator=g).topk(2).indices
    ids[1, 1] = -1
    kept = (torch.rand(3, 2, inter, generator=g) < torch.rand(3, 1, 1, generator=g)) & (ids >= 0)[..., None]
    kept[:, 0, 0] = False  # no token keeps all, which would read no screen
    read = torch.zeros(3, hidden, dtype=torch.bool)
    read.view(3, -1, 128).scatter_(2, torch.rand(3, hidden // 128, 128, generator=g).topk(80).indices, True)
    counted = token_bytes(sizes, ids, kept).tolist()
    for t, count in enumerate(counted):
        one = slice(t, t + 1)
        assert touched(sizes, ids[one], kept[one], read[one]) <= count
        assert union_bytes(sizes, ids[one], kept[one], read[one], EXPERTS) == count
    together = touched(sizes, ids, kept, read)
    assert together <= union_bytes(sizes, ids, kept, read, EXPERTS) <= sum(counted)
    # If no part crosses a sector boundary, the count equals the bytes touched.
    if (2 * inter) % 32 == 0 and (2 * rank) % 32 == 0:
        assert together == union_bytes(sizes, ids, kept, read, EXPERTS)


@pytest.mark.parametrize(("hidden", "inter", "rank"), [(256, 24, 32), (128, 5, 4), (384, 160, 1)])
def test_what_is_resident_is_what_a_sketch_holds(hidden: int, inter: int, rank: int) -> None:
    sketch = build_layer(torch.ones(3, 2 * inter, hidden), torch.ones(3, hidden, inter), rank=rank)
    held = sum(tensor.numel() * tensor.element_size() for tensor in sketch.tensors().values())
    assert ReadBytes(hidden, inter, rank=rank).resident(3) == held == sum(sketch.resident_bytes().values())
    assert ReadBytes(hidden, inter, rank=0, source="cats").resident(3) == 3 * 2 * inter
    # An int4 copy: 64 bytes of codes and 2 of scale a block.
    int4 = ReadBytes(hidden, inter, rank=0, source="int4-gate").resident(3)
    assert int4 == 3 * (inter * hidden // 128 * 66 + 2 * inter)
    assert TopkChannels(0.5).resident_bytes(3, hidden, inter) == ReadBytes(hidden, inter).resident(3)
    assert TopkChannels(1.0).resident_bytes(3, hidden, inter) == Dense().resident_bytes(3, hidden, inter) == 0


def test_parts_that_straddle_sectors_by_hand() -> None:
    """56 bytes at multiples of 56: those from byte 56 on lie in sectors 1, 2 and 3, and 48 at multiples of 48 in 2."""
    assert ReadBytes(128, 1, rank=28).skipped_channel == 96
    assert ReadBytes(128, 1, rank=24).skipped_channel == 64
    assert ReadBytes(128, 28, rank=0).beside_codes == 96 + 128
    assert ReadBytes(128, 28, rank=0, sector=1).beside_codes == 56 + 112
    assert ReadBytes(128, 16, rank=28).once == 128 + 128 * 56


def least_budget(count: int, whole: int) -> float:
    """The least float that pays for count of whole bytes."""
    near = count / whole
    return near if Fraction(near) * whole >= count else math.nextafter(near, 1)


def test_budgets_to_the_byte() -> None:
    sizes = ReadBytes(2048, 768)
    more = sizes.kept_channel - sizes.skipped_channel
    for experts in (1, 3, 8):
        dense, screen = experts * sizes.expert, sizes.token(experts, 0)
        for channels in (0, 7, 500):
            budget = least_budget(screen + channels * more, dense)
            assert sizes.kept(budget, experts) == channels
            if channels:
                assert sizes.kept(math.nextafter(budget, 0), experts) == channels - 1
                assert sizes.kept(least_budget(screen + channels * more - 1, dense), experts) == channels - 1
        with pytest.raises(ValueError, match="is too small"):
            sizes.kept(math.nextafter(least_budget(screen, dense), 0), experts)
    assert sizes.kept(1.0, 8) == sizes.kept(1.5, 8) == sizes.kept(float("inf"), 8) == 8 * 768
    for budget in (1 - 2**-53, 0.9999):
        kept = sizes.kept(budget, 8)
        assert sizes.token(8, kept) <= budget * 8 * sizes.expert < sizes.token(8, kept) + sizes.kept_channel
    with pytest.raises(ValueError, match=r"choosing channels alone reads 14\.\d+; give 1, which reads whole experts"):
        ReadBytes(128, 1).kept(0.99, 1)
    with pytest.raises(ValueError, match="a budget of nan: give a share"):
        sizes.kept(float("nan"), 8)
    for budget in (0.0, -1.0, float("-inf")):
        with pytest.raises(ValueError, match=f"a budget of {budget:g} is too small"):
            sizes.kept(budget, 8)


@pytest.mark.parametrize("source", ["sketch", "int4-gate"])
def test_a_hidden_size_that_is_no_multiple_of_a_block(source: str) -> None:
    with pytest.raises(ValueError, match=f"by {source} with a hidden size of 2880: give a multiple of 128"):
        ReadBytes(2880, 2880, source=source)  # type: ignore[arg-type]
    assert ReadBytes(2880, 2880, rank=0, source="cats").weight_row == 5760
