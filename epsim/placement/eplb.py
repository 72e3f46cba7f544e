"""DeepSeek's expert-parallelism load balancer (github.com/deepseek-ai/EPLB), hierarchical and global.

The result is the same as EPLB's, slot for slot, if no rank of EPLB's placement holds an expert twice. If one does, this
code avoids it where possible. Ties are sorted stably. In a layer or node without load, copies are spread evenly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from epsim.placement.base import Cluster, Placement, PlacementPolicy, Target, nearest_divisors
from epsim.placement.packing import pack_groups, replicate_and_pack


def hierarchical_obstacle(num_experts: int, num_groups: int, num_nodes: int, num_gpus: int) -> str:
    """Why expert groups cannot be placed on nodes, in words; empty if they can."""
    if num_gpus % num_nodes:
        return f"{num_gpus} ranks cannot be divided evenly among {num_nodes} nodes"
    groups = "1 expert group" if num_groups == 1 else f"{num_groups} expert groups"
    if num_groups % num_nodes:
        return f"{groups} cannot be divided evenly among {num_nodes} nodes"
    if num_experts % num_groups:
        return f"{num_experts} experts cannot be divided evenly into {groups}"
    return ""


def prefers_global(num_experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> bool:
    """Whether to use the global form. This is so if the hierarchical form is impossible, or if only the hierarchical
    form would put an expert twice on a rank."""
    if hierarchical_obstacle(num_experts, num_groups, num_nodes, num_gpus):
        return True
    slots_per_rank = num_replicas // num_gpus
    return num_experts // num_nodes < slots_per_rank <= num_experts


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The function of that name in EPLB. It uses the hierarchical form, or the global form if `prefers_global` says so.

    weight [L, E]: load of each logical expert. num_replicas: physical experts P, a multiple of num_gpus, at least E.
    Returns phy2log [L, P], log2phy [L, E, most copies] (padded with -1; copies in the order they were made) and
    logcnt [L, E], all int64 on the CPU. Raises ValueError if shapes do not fit together or a weight is not valid.
    """
    num_experts = weight.shape[-1]
    if prefers_global(num_experts, num_replicas, num_groups, num_nodes, num_gpus):
        num_groups = num_nodes = 1
    return _rebalance(weight, num_replicas, num_groups, num_nodes, num_gpus)


def _rebalance(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if weight.ndim != 2:
        raise ValueError(f"weight is {list(weight.shape)}, not [layers, experts]")
    weight = weight.float().cpu().contiguous()
    num_layers, num_experts = weight.shape
    if not bool((weight >= 0).all() & weight.isfinite().all()):
        raise ValueError("a weight is negative or not a finite number")
    if num_replicas < num_experts:
        raise ValueError(f"{num_replicas} slots cannot hold {num_experts} experts")
    if num_replicas % num_gpus:
        raise ValueError(f"{num_replicas} slots do not divide among {num_gpus} ranks")

    by_group = weight.view(num_layers, num_groups, num_experts // num_groups)
    order = torch.from_numpy(pack_groups(by_group.sum(-1).numpy(), num_nodes))
    members = torch.arange(num_experts).view(num_groups, -1)
    node_experts = members[order].view(num_layers, num_nodes, -1)

    node_weight = weight.gather(1, node_experts.flatten(1)).view(num_layers * num_nodes, -1)
    local, copy = (
        torch.from_numpy(part).view(num_layers, num_nodes, -1)
        for part in replicate_and_pack(node_weight.numpy(), num_replicas // num_nodes, num_gpus // num_nodes)
    )
    phy2log = node_experts.gather(2, local).flatten(1)

    logcnt = torch.zeros(num_layers, num_experts, dtype=torch.int64)
    logcnt.scatter_add_(1, phy2log, torch.ones_like(phy2log))
    most = int(logcnt.max())
    log2phy = torch.full((num_layers, num_experts * most), -1)
    log2phy.scatter_(1, phy2log * most + copy.flatten(1), torch.arange(num_replicas).expand(num_layers, -1))
    return phy2log, log2phy.view(num_layers, num_experts, most), logcnt


@dataclass(frozen=True, slots=True)
class Eplb(PlacementPolicy):
    """EPLB, applied to the sum of the history's counts over steps.

    form: `global`; `hierarchical`, which raises ValueError if it is impossible; or `auto`, which chooses one of them
    (`prefers_global`).
    """

    form: Literal["auto", "global", "hierarchical"] = "auto"

    name: ClassVar[str] = "eplb"
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "eplb-global": {"form": "global"},
        "eplb-hierarchical": {"form": "hierarchical"},
    }
    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("auto", "default", "deepseek", "deepseek-vec"), "DeepSeek's algorithm"),
        **dict.fromkeys(("deepseek-hierarchical", "deepseek-vec-hierarchical"), "as eplb(form=hierarchical)"),
        **dict.fromkeys(
            ("dynamic-eplb", "elasticity-aware", "flashlb", "flash-lb", "swift-balancer", "swift-balance-eplb"),
            "DeepSeek's algorithm, not this engine's own form of it",
        ),
    }
    rebalances: ClassVar[bool] = True

    @property
    def engines(self) -> Mapping[str, str]:
        algorithms = {"auto": "auto", "global": "deepseek", "hierarchical": "deepseek_hierarchical"}
        return {"sglang": algorithms[self.form], **({"vllm": ""} if self.form == "auto" else {})}

    def notes(self, num_experts: int, target: Target) -> tuple[str, ...]:
        """Which form `auto` uses, and why."""
        if self.form != "auto":
            return ()
        cluster = target.cluster
        groups, nodes, ranks = cluster.num_groups, cluster.num_nodes, cluster.num_ranks
        if nodes == 1:
            return ("eplb uses its global form, because there is one node",)
        if prefers_global(num_experts, cluster.num_physical(num_experts), groups, nodes, ranks):
            why = hierarchical_obstacle(num_experts, groups, nodes, ranks)
            why = why or "the hierarchical form would put an expert twice on a rank"
            return (f"eplb uses its global form, because {why}",)
        return (f"eplb uses its hierarchical form: each of {groups} expert groups stays on one of {nodes} nodes",)

    def plan(self, history: torch.Tensor, cluster: Cluster) -> Placement:
        num_experts = history.shape[-1]
        num_physical = cluster.num_physical(num_experts)
        groups, nodes = cluster.num_groups, cluster.num_nodes
        if self.form == "hierarchical":
            obstacle = hierarchical_obstacle(num_experts, groups, nodes, cluster.num_ranks)
            if obstacle:
                near = nearest_divisors(cluster.num_ranks, nodes)
                nodes_fit = f", or give --nodes {near}" if cluster.num_ranks % nodes else ""
                raise ValueError(f"eplb-hierarchical is impossible here: {obstacle}: use eplb-global{nodes_fit}")
        elif self.form == "global" or prefers_global(num_experts, num_physical, groups, nodes, cluster.num_ranks):
            groups = nodes = 1
        phy2log, _, _ = _rebalance(history.sum(0), num_physical, groups, nodes, cluster.num_ranks)
        return Placement(phy2log.to(history.device), num_experts, cluster.num_ranks, cluster.num_nodes)
