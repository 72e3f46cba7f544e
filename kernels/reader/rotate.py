"""A random-sign Hadamard rotation in blocks of 128 coordinates, which spreads large values over their block."""

from functools import cache

import torch

from epsim.kernels.reader.codes import BLOCK, in_blocks


@cache
def _hadamard() -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@cache
def hadamard(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix [128, 128] of 1 and -1: symmetric, and its own inverse when divided by sqrt(128)."""
    return _hadamard().to(device, dtype)


def random_signs(hidden: int, seed: int) -> torch.Tensor:
    """Random signs, [H] int8 of -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (hidden,), generator=generator).to(torch.int8) * 2 - 1


def rotated(values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """R values for values [..., H] and signs [H], in the type of values. R is orthogonal: it keeps inner products.

    Block b is hadamard @ (signs * values) of block b, divided by sqrt(128). The division comes last, so that equal sums
    stay equal in every implementation.
    """
    blocks = in_blocks(values * signs.to(values.dtype))
    turned: torch.Tensor = blocks @ hadamard(values.dtype, values.device) * BLOCK**-0.5
    return turned.flatten(-2)
