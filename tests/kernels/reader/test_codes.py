"""Codes compared with brute force, packing and unpacking, and the rotation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from epsim.kernels.reader.codes import code_rows, codes_of_rows, packed, rounded_up, row_bytes, ternary, unpacked
from epsim.kernels.reader.rotate import hadamard, random_signs, rotated

TINY = 2.0**-23
WEIGHTS = (
    st.floats(-10000, 10000, width=32) | st.floats(-TINY, TINY, width=32) | st.sampled_from([0.0, 6e4, 1.4e-45, -1e-40])
)


def least_error(block: np.ndarray) -> float:
    """The least squared error over all codes, each with its best scale."""
    best = float(block @ block)
    for code in itertools.product((-1, 0, 1), repeat=len(block)):
        size = sum(c * c for c in code)
        if size:
            best = min(best, float(block @ block) - float(np.dot(code, block)) ** 2 / size)
    return best


@given(npst.arrays(np.float64, st.integers(1, 7), elements=st.floats(-3, 3) | st.just(0.0)))
def test_codes_have_the_least_squared_error(block: np.ndarray) -> None:
    """The error may exceed the least one only by the rounding of the scale to 16 bits."""
    found = ternary(torch.from_numpy(block))
    codes, scale = found.codes.double().numpy(), float(found.scale)
    number = np.abs(codes).sum()
    rounding = max(scale * 2.0**-11, 2.0**-25)
    error = float(((block - scale * codes) ** 2).sum())
    assert error <= least_error(block) + number * rounding**2 + 1e-12
    assert error <= float(found.error) ** 2


@settings(max_examples=50, deadline=None)
@given(npst.arrays(np.float64, (3, 128), elements=WEIGHTS), st.data())
def test_the_stored_error_bounds_every_product(blocks: np.ndarray, data: st.DataObject) -> None:
    blocks = blocks / max(np.linalg.norm(blocks, axis=1).max() / 65504, 1)
    found = ternary(torch.from_numpy(blocks))
    assert bool(torch.isfinite(found.scale).all())
    residual = torch.from_numpy(blocks) - found.codes.double() * found.scale.double()[:, None]
    # The residual itself is the input with the largest error.
    worst = residual / residual.abs().amax(1, keepdim=True).clamp(min=1e-300)
    drawn = data.draw(npst.arrays(np.float32, (3, 128), elements=st.floats(-9, 9, width=32)))
    for x in (worst, torch.from_numpy(drawn).double()):
        off = (residual * x).sum(1).abs()
        assert bool((off <= found.error.double() * x.norm(dim=1) * (1 + 1e-14)).all())


def test_zeros_and_equal_weights() -> None:
    zero = ternary(torch.zeros(128, dtype=torch.float64))
    assert int(zero.codes.abs().sum()) == float(zero.scale) == float(zero.error) == 0
    equal = ternary(torch.full((128,), -0.25, dtype=torch.float64))
    assert equal.codes.tolist() == [-1] * 128
    assert float(equal.scale) == 0.25
    assert float(equal.error) == 0
    one = torch.zeros(128, dtype=torch.float64)
    one[5] = 60000.0
    found = ternary(one)
    assert found.codes.nonzero().flatten().tolist() == [5]
    assert abs(60000 - float(found.scale)) <= float(found.error) <= 60000 * 2.0**-11


@given(st.floats(0, 65504))
def test_rounded_up(value: float) -> None:
    up = rounded_up(torch.tensor([value], dtype=torch.float64))
    assert float(up) >= value
    if value > 0:
        below = (up.view(torch.int16) - 1).view(torch.float16)
        assert float(below) < value * (1 + 2**-39)


@given(npst.arrays(np.int8, st.tuples(st.integers(1, 3), st.integers(1, 23)), elements=st.integers(-1, 1)))
def test_packing_round_trips(codes: np.ndarray) -> None:
    tensor = torch.from_numpy(codes)
    bytes_ = packed(tensor)
    assert bytes_.shape[-1] == -(-codes.shape[1] // 5)
    assert int((bytes_ & 127).max()) <= 121
    assert torch.equal(unpacked(bytes_, codes.shape[1]), tensor)


def test_packing_by_hand() -> None:
    assert packed(torch.tensor([1, 0, -1, 1, 1, -1])).tolist() == [1 - 9 + 27 + 81, 128 + 1]
    assert packed(torch.tensor([0, -1, 0, 1, -1, 0])).tolist() == [128 + 3 - 27 + 81, 0]
    assert [packed(torch.full((5,), code)).tolist() for code in (-1, 0, 1)] == [[128 + 121], [0], [121]]


@pytest.mark.parametrize(("intermediate", "expected"), [(768, 320), (704, 288), (512, 224), (256, 128), (1, 32)])
def test_code_rows_fill_sectors(intermediate: int, expected: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randint(-1, 2, (4, intermediate), generator=generator).to(torch.int8) for _ in range(2))
    rows = code_rows(gate, up)
    assert rows.shape[-1] == row_bytes(intermediate) == expected
    back = codes_of_rows(rows, intermediate)
    assert torch.equal(back[0], gate)
    assert torch.equal(back[1], up)
    # Byte 2m: channels 5m.. of gate; byte 2m + 1: of up.
    assert int(rows[0, 0]) == int(packed(gate[0, :5])[0])
    assert int(rows[0, 1]) == int(packed(up[0, :5])[0])


def test_128_coordinates_take_26_bytes() -> None:
    """Base 3 without the rounding to sectors: 128 codes of a channel, 25.6 bytes; 30 with scale and error."""
    assert 128 * row_bytes(1280, 1) / (2 * 1280) == 25.6


def test_the_rotation_is_orthogonal() -> None:
    matrix = hadamard(torch.float64, torch.device("cpu")) / 128**0.5
    assert float((matrix @ matrix.T - torch.eye(128)).abs().max()) < 1e-15
    signs = random_signs(384, 7)
    assert sorted(set(signs.tolist())) == [-1, 1]
    assert not torch.equal(signs, random_signs(384, 8))
    generator = torch.Generator().manual_seed(1)
    w, x = torch.randn(2, 50, 384, generator=generator, dtype=torch.float64)
    w[:, 3] = 1000.0
    products = (rotated(w, signs) * rotated(x, signs)).sum(1)
    torch.testing.assert_close(products, (w * x).sum(1), rtol=0, atol=1e-9)
    in_float = (rotated(w.float(), signs) * rotated(x.float(), signs)).sum(1)
    rounding = 2.0**-24 * 16 * w.norm(dim=1) * x.norm(dim=1)
    assert bool(((in_float.double() - products).abs() <= rounding).all())
    # Equal sums stay equal to the last bit, so that ties are the same on every device.
    whole = rotated(w[:, :128].sign().float(), signs[:128]).abs()
    assert set(whole.flatten().tolist()) <= {float(torch.tensor(float(n)) * 128**-0.5) for n in range(129)}
    # A large value is spread: one weight of 1000 gives 1000 / sqrt(128) in every coordinate of its block.
    spread = rotated(torch.eye(384, dtype=torch.float64)[3] * 1000, signs)
    torch.testing.assert_close(spread[:128].abs(), torch.full((128,), 1000 / 128**0.5, dtype=torch.float64))
    assert float(spread[128:].abs().max()) == 0
