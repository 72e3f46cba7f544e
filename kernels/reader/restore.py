"""Restores what skipped channels would add, with the low-rank map: U * (sum of w_j p_j b_j)."""

from __future__ import annotations

import torch

from epsim.kernels.reader.build import LayerSketch
from epsim.kernels.reader.slots import slot_products


def restored(amounts: torch.Tensor, ids: torch.Tensor, sketch: LayerSketch) -> torch.Tensor:
    """The restored output [T, H], in the type of amounts [T, k, I]: w_j p_j of skipped channels, 0 for kept ones.

    It is a sum over experts, so each rank of an expert-parallel group can restore the part of its experts.
    """
    coefficients = sketch.coefficients.to(amounts.dtype).transpose(1, 2)
    summed = slot_products(amounts, ids, coefficients).sum(1)
    return summed @ sketch.basis.to(amounts.dtype).T
