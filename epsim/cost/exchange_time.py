"""Time of dispatch and combine: the busiest rank's rows on each level of the network.

Normal kernels (DeepEP) send a token's row once to each node with one of its experts (RDMA, to the rank with the same
index in that node), and from there once to each rank (NVLink). Both levels stream at the same time, so the slower one
counts: time = alpha + max over levels of bytes / rate(bytes), with the bytes of the rank that sends or receives most.
Low-latency kernels send one row per assignment, directly to the rank that serves it. Combine uses the same paths back.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from epsim.machines.hardware import Hardware, Link
from epsim.models.spec import ModelSpec
from epsim.policies.rows import visits

Kernels: TypeAlias = Literal["normal", "low-latency"]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that the busiest rank moves, per step and layer. nvlink, rdma [S, L] float64: max over ranks of max(sent,
    received). NVLink includes rows that stay on their rank; RDMA counts rows that leave their node."""

    nvlink: Tensor
    rdma: Tensor


def busiest_rows(rank_rows: Tensor, node_rows: Tensor) -> Rows:
    """The rows of the busiest rank. rank_rows [..., R, R]: tokens by source rank and destination rank; node_rows
    [..., R, N]: tokens by source rank and destination node. A token counts once per destination. Each node holds R / N
    consecutive ranks."""
    num_ranks, num_nodes = rank_rows.shape[-1], node_rows.shape[-1]
    lead, node_size = rank_rows.shape[:-2], num_ranks // num_nodes
    received = rank_rows.sum(-2)
    # On NVLink a rank sends its own rows and those received from ranks with the same index in other nodes.
    by_node = rank_rows.reshape(*lead, num_nodes, node_size, num_nodes, node_size)
    sent = by_node.sum((-4, -1)).transpose(-1, -2).reshape(*lead, num_ranks)
    nvlink = torch.maximum(received, sent).amax(-1)
    if num_nodes == 1:
        return Rows(nvlink.double(), torch.zeros_like(nvlink, dtype=torch.float64))
    node = torch.arange(num_nodes, device=node_rows.device)
    leaving = node_rows * (node.repeat_interleave(node_size)[:, None] != node)
    arriving = leaving.reshape(*lead, num_nodes, node_size, num_nodes).sum(-3)
    rdma = torch.maximum(leaving.sum(-1).amax(-1), arriving.flatten(-2).amax(-1))
    return Rows(nvlink.double(), rdma.double())


def expected_rows(load: Tensor, tokens: Tensor, top_k: int, num_nodes: int) -> Rows:
    """The expected rows of the busiest rank, if only loads are known. Tokens are spread evenly over source ranks. Each
    of a token's top_k choices is independent and falls on a rank with probability proportional to the rank's load.

    load [..., R]: routed assignments that a rank serves; tokens [...] of the layer.
    """
    num_ranks = load.shape[-1]
    share = load / (tokens.clamp(min=1e-300) * top_k)[..., None]
    arriving = visits(share, top_k) * tokens[..., None]
    # The ranks of a node forward equal shares of the rows that arrive at the node.
    node_size = num_ranks // num_nodes
    lead = load.shape[:-1]
    forwarded = arriving.reshape(*lead, num_nodes, node_size).mean(-1)
    nvlink = torch.maximum(arriving.amax(-1), forwarded.amax(-1))
    if num_nodes == 1:
        return Rows(nvlink, torch.zeros_like(nvlink))
    per_node = visits(share.reshape(*lead, num_nodes, node_size).sum(-1), top_k) * (tokens / num_ranks)[..., None]
    # A rank sends rows to all other nodes, and receives from the rank with its index in each of them.
    leaving = per_node.sum(-1, keepdim=True) - per_node
    return Rows(nvlink, torch.maximum(leaving, per_node * (num_nodes - 1)).amax(-1))


def exchange_us(rows: Rows, hardware: Hardware, model: ModelSpec, num_nodes: int, kernels: Kernels) -> Tensor:
    """Microseconds of dispatch and of combine, [2, ...]. For low-latency kernels rows are assignments."""
    rates = hardware.normal if kernels == "normal" else hardware.low_latency
    across = num_nodes > 1
    times = []
    for alpha, row_bytes, near, forward, far in (
        (rates.dispatch_alpha_us, model.dispatch_row_bytes, rates.nvlink_dispatch, rates.forward_dispatch,
         rates.rdma_dispatch),
        (rates.combine_alpha_us, model.combine_row_bytes, rates.nvlink_combine, rates.forward_combine,
         rates.rdma_combine),
    ):  # fmt: skip
        time = bytes_us(rows.nvlink * row_bytes, forward if across and forward is not None else near)
        if across:
            time = torch.maximum(time, bytes_us(rows.rdma * row_bytes, far))
        times.append(time + alpha + across * rates.nodes_alpha_us)
    return torch.stack(times)


def bytes_us(size: Tensor, link: Link) -> Tensor:
    """Microseconds [...] to move `size` bytes [...] over a link, whose rate depends on the size."""
    if len(link.gb_per_s) == 1:
        return size * (1e-3 / link.gb_per_s[0])
    rates = torch.tensor(link.gb_per_s, dtype=torch.float64, device=size.device)
    at = torch.tensor(link.at_bytes, dtype=torch.float64, device=size.device).log()
    log_size = size.clamp(min=1.0).log()
    right = torch.searchsorted(at, log_size).clamp(1, len(at) - 1)
    weight = ((log_size - at[right - 1]) / (at[right] - at[right - 1])).clamp(0, 1)
    return size * 1e-3 / torch.lerp(rates[right - 1], rates[right], weight)


def low_latency_rows(load: Tensor, tokens: Tensor, top_k: int, num_nodes: int) -> Rows:
    """The rows of low-latency kernels: one per assignment, over RDMA if the serving rank is on another node.

    load [..., R]: assignments that a rank serves; tokens [...]: of the layer, spread evenly over all ranks.
    """
    num_ranks = load.shape[-1]
    sent = tokens * (top_k / num_ranks)
    busiest = torch.maximum(load.amax(-1).double(), sent)
    if num_nodes == 1:
        return Rows(busiest, torch.zeros_like(busiest))
    away = (num_nodes - 1) / num_nodes
    return Rows(busiest * (1 - away), busiest * away)
