"""Which expert is in which slot (`Placement`), and the group of ranks that it is made for (`Cluster`)."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Cluster:
    """The expert-parallel group.

    num_redundant: redundant experts per layer. num_groups: expert groups of the model.
    """

    num_ranks: int
    num_nodes: int = 1
    num_redundant: int = 0
    num_groups: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"--ranks {self.num_ranks}: at least one rank is needed")
        if not 1 <= self.num_nodes <= self.num_ranks:
            raise ValueError(f"--nodes {self.num_nodes}: give 1 to {self.num_ranks}, the number of ranks")
        if self.num_redundant < 0:
            raise ValueError(f"--redundant {self.num_redundant}: give 0 or more")
        if self.num_groups < 1:
            raise ValueError(f"--groups {self.num_groups}: give 1 or more")

    def num_physical(self, num_experts: int) -> int:
        """P = E + redundant slots per layer. Raises ValueError if P is not a multiple of the number of ranks."""
        num_physical = num_experts + self.num_redundant
        if num_physical % self.num_ranks:
            less = max(self.num_redundant - num_physical % self.num_ranks, -num_experts % self.num_ranks)
            raise ValueError(
                f"{num_experts} experts + {self.num_redundant} redundant = {num_physical} slots do not divide among "
                f"{self.num_ranks} ranks: give --redundant {less} or {less + self.num_ranks}"
            )
        return num_physical


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of a number next to one that does not divide it: nearest_divisors(16, 3) is "2 or 4"."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    lower, higher = ([d for d in divisors if d < wanted], [d for d in divisors if d > wanted])
    return " or ".join(map(str, [*lower[-1:], *higher[:1]]))


def node_of_rank(num_ranks: int, num_nodes: int) -> torch.Tensor:
    """The node of each rank, [R] int64. Nodes hold consecutive ranks. If the ranks cannot be divided evenly, the first
    nodes hold one more."""
    rank = torch.arange(num_ranks)
    large = -(-num_ranks // num_nodes)
    num_large = num_ranks - (large - 1) * num_nodes
    cut = num_large * large
    return torch.where(rank < cut, rank // large, num_large + (rank - cut) // max(large - 1, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which logical expert each slot holds.

    physical_to_logical [L, P] int64: the expert in each slot, or -1 for an empty slot. Slot p is on rank p // (P // R).
    All ranks have the same number of slots; a rank with fewer experts than the fullest one has empty slots.
    Raises ValueError if a layer has no slot for an expert, if an expert is out of range, or if P is not a multiple of
    R.

        Placement(torch.tensor([[0, 1, 2, 0, -1, -1]]), num_experts=3, num_ranks=2)  # 3 experts on rank 0, 1 on rank 1
    """

    physical_to_logical: torch.Tensor
    num_experts: int
    num_ranks: int
    num_nodes: int = 1
    copies: torch.Tensor = field(init=False)
    """[L, E] int64: how many slots hold each expert."""

    def __post_init__(self) -> None:
        slots = self.physical_to_logical
        if slots.ndim != 2 or slots.dtype != torch.int64:
            raise ValueError(f"physical_to_logical is {list(slots.shape)} {slots.dtype}, not [layers, slots] int64")
        num_layers, num_physical = slots.shape
        if num_physical % self.num_ranks:
            near = nearest_divisors(num_physical, self.num_ranks)
            raise ValueError(f"{num_physical} slots do not divide among {self.num_ranks} ranks: give {near} ranks")
        if num_physical and not bool(((slots >= -1) & (slots < self.num_experts)).all()):
            raise ValueError(f"a slot names an expert outside 0..{self.num_experts - 1} (or -1 for an empty slot)")
        number = torch.zeros(num_layers, self.num_experts + 1, dtype=torch.int64, device=slots.device)
        copies = number.scatter_add_(1, slots + 1, torch.ones_like(slots))[:, 1:].contiguous()  # column 0: empty slots
        if bool((copies == 0).any()):
            layer, expert = (int(i) for i in (copies == 0).nonzero()[0])
            raise ValueError(
                f"layer {layer} has no slot for expert {expert}: {num_physical} slots, {self.num_experts} experts"
            )
        object.__setattr__(self, "copies", copies)

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical.shape[0]

    @property
    def num_physical(self) -> int:
        return self.physical_to_logical.shape[1]

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical // self.num_ranks

    @property
    def filled_slots(self) -> torch.Tensor:
        """[L, R] int64: how many slots of a rank hold an expert."""
        return (self.physical_to_logical >= 0).reshape(self.num_layers, self.num_ranks, -1).sum(-1)

    @property
    def rank_of_slot(self) -> torch.Tensor:
        """The rank of each slot, [P] int64."""
        return torch.arange(self.num_physical, device=self.physical_to_logical.device) // self.slots_per_rank

    @property
    def node_of_rank(self) -> torch.Tensor:
        """The node of each rank, [R] int64."""
        return node_of_rank(self.num_ranks, self.num_nodes).to(self.physical_to_logical.device)

    @property
    def version(self) -> str:
        """A short hash of the placement. The runtime records it with every step."""
        content = self.physical_to_logical.to("cpu", torch.int32).contiguous().numpy().tobytes()
        shape = f"{list(self.physical_to_logical.shape)}/{self.num_experts}/{self.num_ranks}/{self.num_nodes}"
        return hashlib.sha256(shape.encode() + content).hexdigest()[:12]

    def logical_to_physical(self) -> torch.Tensor:
        """[L, E, C] int64: the slots of each expert in ascending order, padded with -1. C: the most copies of an
        expert."""
        layer, slot = (self.physical_to_logical >= 0).nonzero(as_tuple=True)
        row, order = (layer * self.num_experts + self.physical_to_logical[layer, slot]).sort(stable=True)
        number = self.copies.flatten()
        index = torch.arange(len(row), device=row.device) - (number.cumsum(0) - number)[row]
        table = torch.full((len(number), int(number.max())), -1, device=row.device)
        table[row, index] = slot[order]
        return table.view(*self.copies.shape, -1)


Stack: TypeAlias = Any
"""An `epsim.policies.stack.PolicyStack`. This module cannot import it, because policies import this module."""


class Policy:
    """What every policy says about itself. A policy is a frozen dataclass whose fields are its arguments in the stack
    grammar (docs/contract.md section 3). A field without a default is an argument that must be given.

    kind: `placement`, `router`, `split`, `shared` or `reader`. name: unique among all kinds.
    aliases: other names, each with the arguments that it stands for.
    other_names: names that serving engines have for it or for something like it, in lower case with hyphens, each with
    what this policy does. They are not read, but an error names the policy.
    first: the argument that may be given without its key. must_define: methods that a class of the kind has to define.
    examples: items of the grammar that tests use for a policy with required arguments, such as ("oea(k0=2)",).
    complexity: how much a serving system must change to use it; 0 if it does so by default. If several stacks are
    about equally fast, `tune` chooses the one whose policies have the smallest sum.
    """

    __slots__ = ()
    kind: ClassVar[str]
    name: ClassVar[str]
    aliases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}
    first: ClassVar[str] = ""
    must_define: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[str, ...]] = ()
    complexity: ClassVar[int] = 2

    @property
    def engines(self) -> Mapping[str, str]:
        """The policy's name in each engine that can run it, by the engine's name (`epsim.engines`). It is "" if the
        engine does it without an option."""
        return {}


@dataclass(frozen=True, slots=True)
class Target:
    """What a placement is planned for. layers: the model's number of each layer of the history. stack: the stack that
    the placement is part of."""

    cluster: Cluster
    layers: tuple[int, ...]
    stack: Stack


class PlacementPolicy(Policy):
    """Decides where experts live. A subclass defines `plan`, or `plan_for` if it needs layer numbers or the stack.

    trivial: whether it is the placement with which serving systems start. rebalances: whether serving systems can plan
    it anew while they serve. needs_history: whether it uses counts. needs_steps: whether it uses the counts of single
    steps, not only their sum. plans_for_stack: whether it uses `Target.stack`; it is then planned for each stack.
    """

    __slots__ = ()
    kind: ClassVar[str] = "placement"
    must_define: ClassVar[tuple[str, ...]] = ("plan or plan_for",)
    complexity: ClassVar[int] = 1
    trivial: ClassVar[bool] = False
    rebalances: ClassVar[bool] = False
    needs_history: ClassVar[bool] = True
    needs_steps: ClassVar[bool] = False
    plans_for_stack: ClassVar[bool] = False

    def redundant(self, num_experts: int, cluster: Cluster) -> int:
        """Redundant experts per layer: the cluster's, unless the policy fixes the slots. Raises ValueError if the slots
        do not divide among the ranks."""
        return cluster.num_physical(num_experts) - num_experts

    def notes(self, num_experts: int, target: Target) -> tuple[str, ...]:
        """What a reader of results under this policy should know."""
        return ()

    def plan(self, history: torch.Tensor, cluster: Cluster) -> Placement:
        """The placement for a history [S, L, E] int64: the counts of S >= 1 steps. Raises ValueError if there is none
        for the cluster."""
        raise NotImplementedError

    def plan_for(self, history: torch.Tensor, target: Target) -> Placement:
        """As `plan`, for a policy that also needs the layer numbers or the stack."""
        return self.plan(history, target.cluster)
