"""Computes a layer in one process, expert by expert. The layer's output must equal this under every policy."""

import torch

from epsim.models.shapes import LayerShape
from epsim.runtime.experts import mlp
from epsim.runtime.weights import WeightSource


def reference_output(
    shape: LayerShape,
    weights: WeightSource,
    layer: int,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    expert_weights: torch.Tensor,
    shared_weight: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The output [T, H] in `dtype`. hidden [T, H], ids [T, k] (-1 for none), expert_weights [T, k], shared_weight [T].
    A token without any routed expert is padding: its output is zeros, even if the layer has a shared expert."""
    hidden = hidden.to(dtype)
    total = torch.zeros_like(hidden)
    for expert in sorted(set(ids[ids >= 0].tolist())):
        row, column = (ids == expert).nonzero(as_tuple=True)
        gate_up, down = (part.to(hidden.device, dtype) for part in weights.routed(layer, expert))
        total.index_add_(0, row, mlp(hidden[row], gate_up, down) * expert_weights[row, column, None].to(dtype))
    if shape.has_shared:
        row = (ids >= 0).any(-1).nonzero()[:, 0]
        gate_up, down = (part.to(hidden.device, dtype) for part in weights.shared(layer))
        total.index_add_(0, row, mlp(hidden[row], gate_up, down) * shared_weight[row, None].to(dtype))
    return total
