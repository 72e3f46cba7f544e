"""Small layers of experts, with ordinary and extreme values."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from epsim.kernels.reader import Experts, LayerSketch, build_layer


class World(NamedTuple):
    experts: Experts
    sketch: LayerSketch
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def make_world(
    num_experts: int = 6,
    intermediate: int = 24,
    hidden: int = 256,
    top_k: int = 3,
    tokens: int = 20,
    seed: int = 0,
    gelu: bool = False,
) -> World:
    g = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(num_experts, 2 * intermediate, hidden, generator=g, dtype=torch.float64) * 0.1
    down = torch.randn(num_experts, hidden, intermediate, generator=g, dtype=torch.float64) * 0.1
    down *= torch.rand(num_experts, 1, intermediate, generator=g, dtype=torch.float64) ** 3
    x = torch.randn(tokens, hidden, generator=g, dtype=torch.float64)
    scores = torch.rand(tokens, num_experts, generator=g, dtype=torch.float64)
    weights, ids = scores.topk(top_k)
    experts = Experts(gate_up, down, F.gelu if gelu else F.silu)
    return World(experts, build_layer(gate_up, down), x, ids, weights / weights.sum(1, keepdim=True))


def dense(world: World) -> torch.Tensor:
    """[T, H] float64: the plain layer, token by token."""
    out = torch.zeros_like(world.x)
    half = world.experts.down.shape[2]
    for t, x in enumerate(world.x):
        for e, w in zip(world.ids[t].tolist(), world.weights[t], strict=True):
            gate, up = world.experts.gate_up[e][:half] @ x, world.experts.gate_up[e][half:] @ x
            out[t] += w * (world.experts.down[e] @ (world.experts.activation(gate) * up))
    return out
