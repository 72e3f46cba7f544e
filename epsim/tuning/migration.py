"""The cost of a rebalance: experts move layer by layer while the batch waits.

A rank receives an expert's weights by NVLink if a rank of its node holds the expert, and by RDMA otherwise. The ranks
that hold an expert share the sending. The time of a layer is that of the rank that sends or receives most, on the
slower of the two networks, at the hardware's rate for that size. A fixed time of host work is added.
"""

from dataclasses import dataclass

import torch

from epsim.cost.exchange_time import bytes_us
from epsim.machines.hardware import Hardware
from epsim.models.spec import ModelSpec
from epsim.placement.balance import even_shares
from epsim.placement.base import Placement

LAYER_MS = 10.0
"""Host work of a rebalance per layer. vLLM's pull request 28369 reports 260 ms of GPU time for the 26 layers of
DeepSeek-V2-Lite on 8 H100s, most of it not explained by bytes. SGLang's issue 7879 reports about 1 s, or 20 ms per
layer."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The cost of one rebalance. us: the time that the batch waits. bytes_moved: the bytes that the GPU with the most
    arriving experts receives, in all layers."""

    us: float
    bytes_moved: float


def migration(old: Placement, new: Placement, hardware: Hardware, model: ModelSpec, layer_ms: float) -> Migration:
    """The cost of changing from one placement to another. The placements may have fewer layers than the model: the
    other layers cost as much as the mean of these."""
    before, after = held(old), held(new)
    arriving = (after & ~before).double()
    on_node = _by_node(before.double(), old.node_of_rank, old.num_nodes)
    near_source = on_node[:, old.node_of_rank] > 0
    near, far = arriving * near_source, arriving * ~near_source
    received = torch.stack((near.sum(-1), far.sum(-1)))
    sent = torch.stack((_sent(near, before, old), _sent_far(far, before)))
    busiest = torch.maximum(received, sent).amax(-1) * model.expert_bytes
    rates = hardware.normal
    waiting = torch.maximum(bytes_us(busiest[0], rates.nvlink_dispatch), bytes_us(busiest[1], rates.rdma_dispatch))
    changed = arriving.flatten(1).any(-1)
    us = float((waiting + changed * layer_ms * 1e3).mean()) * model.moe_layers
    moved = float(arriving.sum(-1).mean(0).max()) * model.moe_layers * model.expert_bytes
    return Migration(us, moved)


def held(placement: Placement) -> torch.Tensor:
    """[L, R, E] bool: whether the rank holds a copy of the expert in the layer."""
    return (even_shares(placement) > 0).transpose(1, 2)


def _by_node(per_rank: torch.Tensor, node_of_rank: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """[L, R, E] -> [L, N, E]: the sum over a node's ranks."""
    shape = (per_rank.shape[0], num_nodes, per_rank.shape[2])
    return torch.zeros(shape, dtype=per_rank.dtype).index_add_(1, node_of_rank, per_rank)


def _sent(near: torch.Tensor, before: torch.Tensor, placement: Placement) -> torch.Tensor:
    """[L, R]: experts that a rank sends within its node. The ranks that hold an expert send equal shares."""
    nodes, count = placement.node_of_rank, placement.num_nodes
    wanted, holders = _by_node(near, nodes, count), _by_node(before.double(), nodes, count)
    return ((wanted / holders.clamp(min=1))[:, nodes] * before).sum(-1)


def _sent_far(far: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """[L, R]: experts that a rank sends to other nodes. The ranks that hold an expert send equal shares."""
    share = far.sum(1, keepdim=True) / before.double().sum(1, keepdim=True).clamp(min=1)
    return (share * before).sum(-1)
