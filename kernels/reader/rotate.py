"""A random-sign Hadamard rotation in blocks of 128 coordinates: it spreads what is large over its block."""

from __future__ import annotations

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
    """[128, 128] of 1 and -1: Sylvester's, symmetric; over sqrt(128) it is its own inverse."""
    return _hadamard().to(device, dtype)


def random_signs(hidden: int, seed: int) -> torch.Tensor:
    """[H] int8 of -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (hidden,), generator=generator).to(torch.int8) * 2 - 1


def rotated(values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """values [..., H], signs [H] -> R values, in the type of values: block b is hadamard @ (signs * values) of block b,
    over sqrt(128), which comes last, so that sums which are equal are so whoever adds up.

    R is orthogonal: inner products stay.
    """
    blocks = in_blocks(values * signs.to(values.dtype))
    turned: torch.Tensor = blocks @ hadamard(values.dtype, values.device) * BLOCK**-0.5
    return turned.flatten(-2)
