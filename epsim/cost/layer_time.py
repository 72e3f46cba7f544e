"""The time of a layer from its load: router, policy, dispatch, experts, combine, each on the slowest rank."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epsim.cost.calibrated import Calibration, ExchangeTable, load_calibration, read_table
from epsim.cost.exchange_time import Kernels, Rows, busiest_rows, exchange_us, expected_rows, low_latency_rows
from epsim.cost.experts_time import ExpertsTime, ExpertTable
from epsim.cost.policy_time import policy_us
from epsim.cost.router_time import RouterTable
from epsim.machines.hardware import Hardware
from epsim.models.spec import ModelSpec, load_model
from epsim.policies.load import Load
from epsim.policies.rows import visits
from epsim.policies.stack import PolicyStack


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """Microseconds of a layer's router, policies, dispatch, experts and combine, [S, L] float64 each. If the router was
    not measured, it is 0 here and part of the rest of the layer."""

    route: Tensor
    policy: Tensor
    dispatch: Tensor
    experts: Tensor
    combine: Tensor

    @property
    def total(self) -> Tensor:
        return self.route + self.policy + self.dispatch + self.experts + self.combine


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """The time model of a layer. experts: the time model of its experts. num_nodes: nodes of the expert-parallel group.
    kernels: of the exchange. overlap: whether the exchange of one half of a batch overlaps the computation of the other
    half. measured: a calibration of this hardware; its tables of exchange, policies and router are used where they
    match. given: whether a trace gives the experts of each token, as in runs; then the router chooses none."""

    experts: ExpertsTime
    num_nodes: int = 1
    kernels: Kernels = "normal"
    overlap: bool = False
    measured: Calibration | None = None
    given: bool = False

    @property
    def hardware(self) -> Hardware:
        return self.experts.hardware

    @property
    def model(self) -> ModelSpec:
        return self.experts.model

    def check(self, num_experts: int, top_k: int, num_ranks: int, num_nodes: int) -> None:
        """Raises ValueError if a trace's experts, or a cluster's ranks and nodes, differ from what is timed."""
        model = self.model
        if (num_experts, top_k) != (model.num_experts, model.top_k):
            raise ValueError(
                f"the trace has {num_experts} experts, top-{top_k}, but {model.name} has {model.num_experts}, "
                f"top-{model.top_k}: give the trace's --model, or a .toml file that describes it"
            )
        if num_nodes != self.num_nodes or num_ranks % num_nodes:
            raise ValueError(f"{num_ranks} ranks on {num_nodes} nodes: times need nodes of equally many ranks")

    def words(self) -> str:
        """A description of how times are predicted, for reports."""
        table, measured = self.experts.table, self.measured
        experts = "roofline"
        if table is not None:
            beyond = "the roofline" if table.fit is None else "its fit of tiles"
            experts = f"table measured on {table.device} ({table.covers}; extrapolated by {beyond})"
        halves = ", halves of a batch overlapping" if self.overlap else ""
        policies = ""
        if measured is not None and measured.policies is not None and measured.policies.costs:
            policies = f", policies as measured with {measured.policies.of}"
        exchange = f"{self.kernels} exchange"
        if measured is not None and measured.exchange and self.kernels == "normal":
            groups = sorted({(table.ranks, table.nodes) for table in measured.exchange})
            tables = [self.measured_exchange(ranks, nodes) for ranks, nodes in groups]
            covers = "; ".join(known.of for known in tables if known is not None)
            exchange += (
                f" (as measured for {covers}; extrapolated linearly; other numbers of ranks by rates)"
                if covers
                else f" (by rates: no table has rows of {self.model.hidden} {self.model.dispatch} values)"
            )
        return (
            f"{self.model.name} on {self.hardware.name}, {exchange}, expert time by {experts}{policies}{halves}; "
            "predicted, not measured"
        )

    def phases(self, load: Load, stack: PolicyStack, redundant: bool) -> Phases:
        """The phases of a load [S, L, R] under the stack. redundant: whether any expert has several copies.

        A dispatched shared expert is one more expert of the grouped computation. A local one is computed separately,
        unless the hardware has `shared_grouped`.
        """
        routed, active = load.routed.double(), load.active.double()
        busy = load.assignments > 0
        local = not stack.shared.dispatches
        if local and not self.hardware.shared_grouped:
            served = routed
            rows = self._received(load, served, local)
            time = self._experts_us(load, stack, routed, active, load.tiles, rows).amax(-1)
            if self.model.shared_intermediate:
                time = time + self.experts.dense_us(load.shared_tokens.double()).amax(-1)
        else:
            cost, shared = self.model.shared_cost, load.shared_tokens.double()
            served = routed if local else routed + shared
            tiles, tile = load.tiles, self.experts.tile
            if tiles is not None and tile:
                tiles = tiles + (cost * (shared / tile).ceil() if cost else 0)
            tokens, together = routed + cost * shared, active + cost * (shared > 0)
            rows = self._received(load, served, local)
            time = self._experts_us(load, stack, tokens, together, tiles, rows).amax(-1)
        dispatch, combine = self._exchange_us(self._rows(load, served, local), routed.shape[-1]).unbind()
        costs, known = self.hardware.policy, None if self.measured is None else self.measured.policies
        num_ranks = routed.shape[-1]
        policy = policy_us(costs, known, stack, redundant, num_ranks, self.num_nodes, load.tokens / num_ranks)
        route = self.router_us(load.tokens / num_ranks)
        return Phases(*(torch.where(busy, part, 0.0) for part in (route, policy, dispatch, time, combine)))

    def routed_bytes(self, load: Load, stack: PolicyStack) -> Tensor:
        """Bytes of routed experts that each rank reads under the stack's reader, [S, L, R] float64."""
        routed, active, model = load.routed.double(), load.active.double(), self.model
        return stack.reader.bytes_read(
            routed, active, model.hidden, model.intermediate, model.weight_bytes, model.top_k
        )

    def _experts_us(
        self, load: Load, stack: PolicyStack, tokens: Tensor, active: Tensor, tiles: Tensor | None, rows: Tensor | None
    ) -> Tensor:
        """`ExpertsTime.us`. Only whole experts were measured, so with a reader the time is multiplied by the ratio of
        the rooflines with and without the reader."""
        time = self.experts.us(tokens, active, tiles, rows)
        if not stack.reader.acts:
            return time
        unread = load.active * self.model.expert_bytes - self.routed_bytes(load, stack)
        whole = self.experts.roofline(tokens, active)
        share = self.experts.roofline(tokens, active, unread) / torch.where(whole > 0, whole, 1.0)
        return time * share.clamp(max=1)

    def layer_us(self, load: Load, stack: PolicyStack, redundant: bool, phases: Phases | None = None) -> Tensor:
        """Microseconds of a layer besides `rest_us`, [S, L]. phases: of the load, if they are already known."""
        phases = self.phases(load, stack, redundant) if phases is None else phases
        if not self.overlap:
            return phases.total
        half = self.phases(_half(load), stack, redundant)
        slower = self.hardware.sms / (self.hardware.sms - self.hardware.exchange_sms)
        per_rank = load.tokens / load.routed.shape[-1]
        computing = (half.route + half.policy + half.experts + self.rest_us(per_rank / 2)) * slower
        moving = half.dispatch + half.combine
        both = torch.maximum(2 * torch.maximum(computing, moving), computing + moving)
        return torch.where(load.assignments > 0, both - self.rest_us(per_rank), 0.0)

    def rest_us(self, tokens: Tensor) -> Tensor:
        """Microseconds [...] of a layer's attention, norms, and router if not measured, for tokens [...] per rank."""
        parameters = self.model.rest_parameters
        if self.router is not None:
            parameters = max(parameters - self.model.hidden * self.model.num_experts, 0.0)
        return self._dense_us(tokens, parameters) + self.model.rest_us

    def router_us(self, tokens: Tensor) -> Tensor:
        """Measured microseconds [...] of the model's router for tokens [...] per rank; 0 if it was not measured."""
        return torch.zeros_like(tokens) if self.router is None else self.router.time(tokens, self.given)

    @property
    def router(self) -> RouterTable | None:
        """The measured table of the model's router, or None."""
        return None if self.measured is None else self.measured.router_for(self.model, self.given)

    def step_us(self, layer_us: Tensor, tokens: Tensor, num_ranks: int) -> Tensor:
        """Microseconds of a whole step, [S], from layer_us and tokens [S, L]. A layer that is not in the trace takes
        the mean time of those that are. The time of a layer without experts follows from its number of parameters."""
        per_rank = tokens / num_ranks
        present = (tokens > 0).sum(-1).clamp(min=1)
        layers = ((layer_us + self.rest_us(per_rank)) * (tokens > 0)).sum(-1) / present * self.model.moe_layers
        dense = self._dense_us(per_rank.sum(-1) / present, self.model.dense_parameters + self.model.rest_parameters)
        return layers + self.model.dense_layers * (dense + self.model.rest_us)

    def policy_us(self, stack: PolicyStack, redundant: bool, num_ranks: int, tokens: float) -> float:
        """Microseconds that a stack's policies add to a layer for `tokens` tokens per rank. What was not measured comes
        from the hardware's specification."""
        known = None if self.measured is None else self.measured.policies
        each = torch.tensor(tokens, dtype=torch.float64)
        return float(policy_us(self.hardware.policy, known, stack, redundant, num_ranks, self.num_nodes, each))

    def measured_exchange(self, num_ranks: int, num_nodes: int) -> ExchangeTable | None:
        """The measured table that gives the exchange's time; None if the hardware's rates give it."""
        if self.measured is None or self.kernels != "normal":
            return None
        return self.measured.exchange_for(self.model, num_ranks, num_nodes)

    def _exchange_us(self, rows: Rows, num_ranks: int) -> Tensor:
        """Microseconds of dispatch and combine, [2, S, L], from a measured table of normal kernels or from rates."""
        table = self.measured_exchange(num_ranks, self.num_nodes)
        if table is not None:
            assert self.measured is not None
            return table.us(torch.maximum(rows.nvlink, rows.rdma), self.model, self.measured.expert_us(table))
        return exchange_us(rows, self.hardware, self.model, self.num_nodes, self.kernels)

    def _rows(self, load: Load, served: Tensor, local: bool) -> Rows:
        if self.kernels == "low-latency":
            return low_latency_rows(served, load.tokens, self.model.top_k, self.num_nodes)
        if load.rank_rows is not None and load.node_rows is not None:
            rows = busiest_rows(load.rank_rows, load.node_rows)
        else:
            rows = expected_rows(served, load.tokens, self.model.top_k, self.num_nodes)
        return Rows(rows.nvlink + self._kept(load), rows.rdma) if local else rows

    def _kept(self, load: Load) -> Tensor:
        """Expected tokens [S, L] that a rank keeps only for its local shared expert, because it has none of their
        routed experts. 0 unless the shared expert is part of the grouped computation."""
        if not (self.hardware.shared_grouped and self.model.shared_intermediate):
            return torch.zeros_like(load.tokens)
        num_ranks = load.routed.shape[-1]
        return load.tokens / num_ranks * (1 - visits(torch.tensor(1 / num_ranks).double(), self.model.top_k))

    def _received(self, load: Load, served: Tensor, local: bool) -> Tensor | None:
        """Rows that each rank receives, [S, L, R]: tokens that visit the rank, counted in traces of tokens, otherwise
        expected. None if times do not depend on rows."""
        if self.experts.table is None:
            return None
        if load.rank_rows is not None:
            rows = load.rank_rows.sum(-2)
        else:
            tokens, top_k = load.tokens[..., None], self.model.top_k
            rows = visits(served / (tokens * top_k).clamp(min=1e-300), top_k) * tokens
        return rows + self._kept(load)[..., None] if local else rows

    def _dense_us(self, tokens: Tensor, parameters: float) -> Tensor:
        rate = self.hardware.fp8_tflops if self.model.compute == "fp8" else self.hardware.bf16_tflops
        width = 1.0 if self.model.compute == "fp8" else 2.0
        reading = parameters * width * 1e-3 / self.hardware.memory_gb_per_s
        return torch.clamp(tokens * (2e-6 * parameters / rate), min=reading) * (tokens > 0)


def _half(load: Load) -> Load:
    """The expected load of half of each batch. A rank has at most as many active experts as assignments."""
    halves: dict[str, Any] = {
        name: getattr(load, name) / 2 for name in ("routed", "routed_real", "shared", "shared_tokens", "tokens")
    }
    for name in ("rank_rows", "node_rows"):
        rows = getattr(load, name)
        halves[name] = None if rows is None else rows / 2
    active = torch.minimum(load.active.double(), halves["routed"].ceil())
    tiles = None if load.tiles is None else torch.maximum(active, (load.tiles / 2).ceil())
    return dataclasses.replace(load, active=active, tiles=tiles, **halves)


def load_timing(
    hardware: str, model: str, num_nodes: int, phase: str, overlap: bool = False, table: Path | None = None
) -> LayerTiming:
    """Loads the time model of a hardware and a model. hardware: see `load_calibration`; model: see `load_model`; table:
    a JSON file of measured expert times, which replaces the calibration's. Decode steps use low-latency kernels, other
    steps normal kernels. Raises ValueError with one line."""
    measured, spec = load_calibration(hardware), load_model(model)
    experts = measured.table_for(spec) if table is None else _expert_table(table)
    kernels: Kernels = "low-latency" if phase == "decode" else "normal"
    decode = measured.decode_for(spec) if table is None else None
    return LayerTiming(ExpertsTime(measured.hardware, spec, experts, decode), num_nodes, kernels, overlap, measured)


def _expert_table(path: Path) -> ExpertTable:
    table = read_table(path)
    if not isinstance(table, ExpertTable):
        raise ValueError(f"{path}: a table of kind {table.kind}, not of experts")
    return table
