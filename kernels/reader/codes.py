"""Ternary codes of blocks of 128 weights, packed five to a byte."""

from typing import NamedTuple

import torch

BLOCK = 128
CODES_A_BYTE = 5
SECTOR = 32
"""A GPU reads memory in aligned units of this many bytes."""
LARGEST = 65504.0
"""The largest float16, which is also the largest allowed length of a block of weights."""


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Reshapes [..., H] to [..., H / 128, 128]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)


class Ternary(NamedTuple):
    """codes [..., 128] int8: -1, 0 or 1. scale [...] float16. error [...] float16: the length of w - scale * codes,
    rounded up, so that |w.x - scale codes.x| <= error |x|. w: a block of weights."""

    codes: torch.Tensor
    scale: torch.Tensor
    error: torch.Tensor


def ternary(blocks: torch.Tensor) -> Ternary:
    """The codes and scale with the least squared error for blocks [..., 128] float64 of float32 weights.

    The length of a block may be at most `LARGEST`. If the m largest absolute values get a code other than 0, the best
    scale is their mean, and the squared error is |w|^2 - S_m^2 / m, where S_m is their sum. The m that maximises
    S_m^2 / m is found after sorting.
    """
    sizes, order = blocks.abs().sort(dim=-1, descending=True, stable=True)
    number = torch.arange(1, blocks.shape[-1] + 1, device=blocks.device, dtype=blocks.dtype)
    sums = sizes.cumsum(-1)
    # Sums are divided by the total, so that the squares of tiny weights do not underflow.
    gain = (sums / sums[..., -1:].clamp(min=torch.finfo(blocks.dtype).tiny)).square() / number
    last = gain.argmax(-1, keepdim=True)
    scale = (sums.gather(-1, last) / (last + 1)).to(torch.float16)
    coded = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, order, number - 1 <= last)
    codes = torch.where(coded, blocks.sign(), 0.0)
    error = (blocks - codes * scale.to(blocks.dtype)).norm(dim=-1)
    return Ternary(codes.to(torch.int8), scale[..., 0], rounded_up(error))


def rounded_up(values: torch.Tensor) -> torch.Tensor:
    """Rounds values [...] float64 >= 0 up to float16, with a margin for rounding errors in the values."""
    wide = values * (1 + 2.0**-40)
    near = wide.to(torch.float16)
    next_one = (near.view(torch.int16) + 1).view(torch.float16)
    return torch.where(near.to(values.dtype) < wide, next_one, near)


POWERS = (1, 3, 9, 27, 81)
NEGATIVE = 128


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes [..., n], which are -1, 0 or 1, into [..., ceil(n / 5)] uint8, padded with code 0.

    A byte has five codes: the absolute value (at most 121) of the sum of code_i 3^i, plus 128 if the sum is negative.
    A float16 with the lower 7 bits as mantissa and bit 7 as sign has the value sum * (smallest float16)."""
    short = -codes.shape[-1] % CODES_A_BYTE
    digits = torch.nn.functional.pad(codes.to(torch.int16), (0, short))
    powers = torch.tensor(POWERS, dtype=torch.int16, device=codes.device)
    sums = (digits.reshape(*digits.shape[:-1], -1, CODES_A_BYTE) * powers).sum(-1)
    return torch.where(sums < 0, NEGATIVE - sums, sums).to(torch.uint8)


def unpacked(packed_codes: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `packed`: [..., count] int8 from [..., m] uint8."""
    wide = packed_codes.to(torch.int16)
    sums = torch.where(wide < NEGATIVE, wide, NEGATIVE - wide)
    digits = (sums + sum(POWERS))[..., None] // torch.tensor(POWERS, dtype=torch.int16, device=wide.device) % 3
    return (digits.flatten(-2)[..., :count] - 1).to(torch.int8)


def row_bytes(intermediate: int, sector: int = SECTOR) -> int:
    """Bytes of a row: the codes of one coordinate for all gate and up channels of an expert, in whole sectors."""
    return -(-2 * -(-intermediate // CODES_A_BYTE) // sector) * sector


def code_rows(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Packs the codes of one coordinate, gate and up [..., I], into a row [..., row_bytes(I)] uint8.

    Byte 2m has the gate codes of channels 5m to 5m + 4, byte 2m + 1 their up codes, so that one 16-bit word has both.
    Zeros fill the last sector.
    """
    words = torch.stack([packed(gate), packed(up)], -1).flatten(-2)
    short = row_bytes(gate.shape[-1]) - words.shape[-1]
    return torch.nn.functional.pad(words, (0, short))


def codes_of_rows(rows: torch.Tensor, intermediate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `code_rows`: gate and up [..., I] int8 from [..., row_bytes(I)] uint8."""
    return unpacked(rows[..., 0::2], intermediate), unpacked(rows[..., 1::2], intermediate)
