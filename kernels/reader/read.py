"""Computes a layer's output: exact activations of kept channels, estimates of skipped channels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from epsim.kernels.reader.build import LayerSketch
from epsim.kernels.reader.slots import slot_products

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A layer's routed experts. gate_up [E, 2I, H]: gate rows, then up rows. down [E, H, I] (kernels take it
    transposed, so that a channel's weights are contiguous). activation: of the gate, SiLU or GELU."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: Activation

    def activations(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up of all channels, [T, k, I] in the type of the weights, for x [T, H] and ids [T, k]."""
        gate, up = slot_products(x, ids, self.gate_up).chunk(2, -1)
        return self.activation(gate) * up

    def outputs(self, activations: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum over experts, [T, H] float32 or float64, of activations [T, k, I] with weights [T, k]."""
        wide = torch.promote_types(activations.dtype, torch.float32)
        products = slot_products(activations, ids, self.down).to(wide)
        return (products * _of_experts(weights, ids).to(wide)).sum(1)


def read_output(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    kept: torch.Tensor,
    estimates: torch.Tensor | None = None,
    sketch: LayerSketch | None = None,
) -> torch.Tensor:
    """The output [T, H] float32 for x [T, H], ids and weights [T, k]: the exact sum over kept channels [T, k, I] bool,
    and, with estimates [T, k, I] and a sketch, the restored sum over the others."""
    exact = experts.activations(x, ids)
    output = experts.outputs(torch.where(kept, exact, 0.0), ids, weights)
    if estimates is not None and sketch is not None:
        skipped = torch.where(kept, 0.0, estimates.to(output.dtype)) * _of_experts(weights, ids).to(output.dtype)
        output = output + restored(skipped, ids, sketch)
    return output


def restored(amounts: torch.Tensor, ids: torch.Tensor, sketch: LayerSketch) -> torch.Tensor:
    """What skipped channels would add to the output, [T, H], restored with the low-rank map: U * (sum of w_j p_j b_j).

    amounts [T, k, I]: w_j p_j of skipped channels, 0 for kept channels. The result has their type. It is a sum over
    experts, so each rank of an expert-parallel group can compute the part of its experts.
    """
    coefficients = sketch.coefficients.to(amounts.dtype).transpose(1, 2)
    summed = slot_products(amounts, ids, coefficients).sum(1)
    return summed @ sketch.basis.to(amounts.dtype).T


def _of_experts(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weights as [T, k, 1], with 0 if the id is -1."""
    return weights.masked_fill(ids < 0, 0.0)[..., None]
