"""The read: exact activations of the channels that are kept, estimates of those that are skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from epsim.kernels.reader.build import LayerSketch
from epsim.kernels.reader.restore import restored
from epsim.kernels.reader.slots import slot_products

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A layer's routed experts. gate_up [E, 2I, H]: gate rows, then up rows. down [E, H, I] (a kernel wants it
    transposed, so that a channel's weights lie together). activation: of the gate, SiLU or GELU."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: Activation

    def activations(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids [T, k] -> [T, k, I]: activation(gate) * up of all channels, in the type of the weights."""
        gate, up = slot_products(x, ids, self.gate_up).chunk(2, -1)
        return self.activation(gate) * up

    def outputs(self, activations: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """activations [T, k, I], weights [T, k] -> [T, H] float32 (or float64): the weighted sum over the experts."""
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
    """x [T, H], ids and weights [T, k], kept [T, k, I] bool -> [T, H] float32: the exact sum over kept channels, and,
    with estimates [T, k, I] and a sketch, the restored one over the rest."""
    exact = experts.activations(x, ids)
    output = experts.outputs(torch.where(kept, exact, 0.0), ids, weights)
    if estimates is not None and sketch is not None:
        skipped = torch.where(kept, 0.0, estimates.to(output.dtype)) * _of_experts(weights, ids).to(output.dtype)
        output = output + restored(skipped, ids, sketch)
    return output


def _of_experts(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, k, 1]: 0 in an empty slot, whatever is written there."""
    return weights.masked_fill(ids < 0, 0.0)[..., None]
