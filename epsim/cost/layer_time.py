"""Time of a layer from its load: policy, dispatch, expert computation, combine, each the slowest rank's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epsim.cost.exchange_time import Kernels, Rows, busiest_rows, exchange_us, expected_rows, low_latency_rows
from epsim.cost.experts_time import ExpertsTime, read_expert_table
from epsim.cost.hardware import Hardware, load_hardware
from epsim.cost.model import ModelSpec, load_model
from epsim.policies.ipm import LplbIpm
from epsim.policies.load import Load
from epsim.policies.shared import Local
from epsim.policies.stack import PolicyStack


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """Microseconds of a layer, [S, L] float64 each: what its policies, dispatch, experts and combine take."""

    policy: torch.Tensor
    dispatch: torch.Tensor
    experts: torch.Tensor
    combine: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return self.policy + self.dispatch + self.experts + self.combine


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """experts: of one hardware and model. num_nodes: hosts of the expert-parallel group. kernels: of the exchange.
    overlap: whether the two halves of a batch overlap, one's exchange beside the other's computation."""

    experts: ExpertsTime
    num_nodes: int = 1
    kernels: Kernels = "normal"
    overlap: bool = False

    @property
    def hardware(self) -> Hardware:
        return self.experts.hardware

    @property
    def model(self) -> ModelSpec:
        return self.experts.model

    def check(self, num_experts: int, top_k: int, num_ranks: int, num_nodes: int) -> None:
        """Raises ValueError where a trace's experts or a cluster's ranks and nodes are not what is timed."""
        model = self.model
        if (num_experts, top_k) != (model.num_experts, model.top_k):
            raise ValueError(
                f"the trace has {num_experts} experts, top-{top_k}, and {model.name} {model.num_experts}, "
                f"top-{model.top_k}: give the trace's --model, or a .toml file that describes it"
            )
        if num_nodes != self.num_nodes or num_ranks % num_nodes:
            raise ValueError(f"{num_ranks} ranks on {num_nodes} nodes: times need nodes of equally many ranks")

    def words(self) -> str:
        """What times are of, for reports."""
        table = "roofline" if self.experts.table is None else f"table measured on {self.experts.table.device}"
        halves = ", halves of a batch overlapping" if self.overlap else ""
        return (
            f"{self.model.name} on {self.hardware.name}, {self.kernels} exchange, expert time by {table}{halves}; "
            "predicted, not measured"
        )

    def phases(self, load: Load, stack: PolicyStack, redundant: bool) -> Phases:
        """load [S, L, R] under the stack; redundant: whether any expert has several copies.

        A shared expert that stays local is computed by itself; one that is dispatched is one more expert of the grouped
        computation.
        """
        routed, active = load.routed.double(), load.active.double()
        busy = load.assignments > 0
        if isinstance(stack.shared, Local):
            served = routed
            time = self.experts.us(routed, active).amax(-1)
            if self.model.shared_intermediate:
                time = time + self.experts.dense_us(load.shared_tokens.double()).amax(-1)
        else:
            cost = self.model.shared_cost
            served = routed + load.shared_tokens
            time = self.experts.us(routed + cost * load.shared_tokens, active + cost * (load.shared_tokens > 0))
            time = time.amax(-1)
        dispatch, combine = exchange_us(
            self._rows(load, served), self.hardware, self.model, self.num_nodes, self.kernels
        ).unbind()
        policy = torch.full_like(time, self.policy_us(stack, redundant))
        return Phases(*(torch.where(busy, part, 0.0) for part in (policy, dispatch, time, combine)))

    def layer_us(self, load: Load, stack: PolicyStack, redundant: bool) -> torch.Tensor:
        """[S, L] microseconds that the layer's experts add to the rest of the layer."""
        phases = self.phases(load, stack, redundant)
        if not self.overlap:
            return phases.total
        half = self.phases(_half(load), stack, redundant)
        slower = self.hardware.sms / (self.hardware.sms - self.hardware.exchange_sms)
        per_rank = load.tokens / load.routed.shape[-1]
        computing = (half.policy + half.experts + self.rest_us(per_rank / 2)) * slower
        moving = half.dispatch + half.combine
        both = torch.maximum(2 * torch.maximum(computing, moving), computing + moving)
        return torch.where(load.assignments > 0, both - self.rest_us(per_rank), 0.0)

    def rest_us(self, tokens: torch.Tensor) -> torch.Tensor:
        """Attention, norms and router of a layer, tokens [...] of a rank -> microseconds [...]."""
        return self._dense_us(tokens, self.model.rest_parameters) + self.model.rest_us

    def step_us(self, layer_us: torch.Tensor, tokens: torch.Tensor, num_ranks: int) -> torch.Tensor:
        """A whole step: layer_us, tokens [S, L] -> [S] microseconds. Layers of the model that the trace lacks count as
        the mean of those it holds, layers without experts as their parameters take."""
        per_rank = tokens / num_ranks
        present = (tokens > 0).sum(-1).clamp(min=1)
        layers = ((layer_us + self.rest_us(per_rank)) * (tokens > 0)).sum(-1) / present * self.model.moe_layers
        dense = self._dense_us(per_rank.sum(-1) / present, self.model.dense_parameters + self.model.rest_parameters)
        return layers + self.model.dense_layers * (dense + self.model.rest_us)

    def policy_us(self, stack: PolicyStack, redundant: bool) -> float:
        """What a stack's policies add to a layer. LPLB as published reduces and solves even without redundancy."""
        costs = self.hardware.policy
        solved = isinstance(stack.split, LplbIpm) or (redundant and stack.split.name.startswith("lplb"))
        placed = not isinstance(stack.shared, Local)
        time = 0.0
        if solved or (placed and getattr(stack.shared, "counts", "global") == "global"):
            time += costs.all_reduce_nodes_us if self.num_nodes > 1 else costs.all_reduce_us
        if solved:
            published = isinstance(stack.split, LplbIpm)
            time += (costs.published_solve_us if published else costs.solve_us) + costs.assign_us
        return time + placed * costs.waterfill_us

    def _rows(self, load: Load, served: torch.Tensor) -> Rows:
        if self.kernels == "low-latency":
            return low_latency_rows(served, load.tokens, self.model.top_k, self.num_nodes)
        if load.rank_rows is not None and load.node_rows is not None:
            return busiest_rows(load.rank_rows, load.node_rows)
        return expected_rows(served, load.tokens, self.model.top_k, self.num_nodes)

    def _dense_us(self, tokens: torch.Tensor, parameters: float) -> torch.Tensor:
        rate = self.hardware.fp8_tflops if self.model.compute == "fp8" else self.hardware.bf16_tflops
        width = 1.0 if self.model.compute == "fp8" else 2.0
        reading = parameters * width * 1e-3 / self.hardware.memory_gb_per_s
        return torch.clamp(tokens * (2e-6 * parameters / rate), min=reading) * (tokens > 0)


def _half(load: Load) -> Load:
    """One of the two halves of every batch, by expectation: no more experts active than it has assignments."""
    halves: dict[str, Any] = {
        name: getattr(load, name) / 2 for name in ("routed", "routed_real", "shared", "shared_tokens", "tokens")
    }
    for name in ("rank_rows", "node_rows"):
        rows = getattr(load, name)
        halves[name] = None if rows is None else rows / 2
    return dataclasses.replace(load, active=torch.minimum(load.active.double(), halves["routed"].ceil()), **halves)


def load_timing(
    hardware: str, model: str, num_nodes: int, phase: str, overlap: bool = False, table: Path | None = None
) -> LayerTiming:
    """hardware, model: names or files (`load_hardware`, `load_model`); table: of `read_expert_table`. Decode steps use
    low-latency kernels, all others normal ones. Raises ValueError in one line."""
    experts = ExpertsTime(
        load_hardware(hardware), load_model(model), None if table is None else read_expert_table(table)
    )
    return LayerTiming(experts, num_nodes, "low-latency" if phase == "decode" else "normal", overlap)
