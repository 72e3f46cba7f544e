"""An expert-parallel mixture-of-experts layer under a policy stack."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from epsim.kernels.dispatch import Assigned
from epsim.models.shapes import LayerShape
from epsim.placement.base import Placement
from epsim.policies.apply import Setting
from epsim.policies.base import RouterWork, alone, checked_route
from epsim.policies.one_copy import held_by_rank
from epsim.policies.stack import PolicyStack
from epsim.runtime.balance import Balancer
from epsim.runtime.balance_cuda import make_balancer
from epsim.runtime.collective import Collective
from epsim.runtime.exchange.base import Exchange
from epsim.runtime.exchange.choose import choose_exchange
from epsim.runtime.experts import Experts
from epsim.runtime.peer import choose_collective
from epsim.runtime.phases import PhaseClock
from epsim.runtime.routers import Router, Routing, make_router
from epsim.runtime.weights import RandomWeights, WeightSource

ROWS = 8
"""The most rows of E + 1 numbers in one collective. A router policy sums one row for each k0 of its schedule."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecord:
    """What one call of a layer did on this rank. All tensors are on the layer's device.

    layer: the model's layer number. placement_version: the `Placement.version` in use.
    chosen [T, k] int64: the experts that the model or the trace chose. ids [T, k] int64: the experts after the stack's
    router policy, -1 for none. weights [T, k] float32: the weights of ids. shared_weight [T] float32: the weight of the
    shared expert. scores [T, E] float32: the router's scores.
    physical [T, k] int64: the slot of each assignment, as numbered by the placement, -1 for none.
    shared_rank [T] int64: the rank that serves each token's shared expert, -1 for none; None if the layer has none.
    On a GPU, the layer's next call overwrites physical and shared_rank: copy them to keep them.
    received [slots_per_rank] int64: the number of rows from all ranks that each routed slot of this rank served.
    received_shared [] int64: the same for the slot of the shared expert.
    """

    step: int
    layer: int
    placement_version: str
    chosen: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared_weight: torch.Tensor
    scores: torch.Tensor
    physical: torch.Tensor
    shared_rank: torch.Tensor | None
    received: torch.Tensor
    received_shared: torch.Tensor


class ExpertParallelMoE(torch.nn.Module):
    """One layer: route -> balance -> dispatch -> experts -> combine.

    record: that of the last call, None before the first call. observers: functions that are called with each record.
    moving: whether a relocation is in progress (runtime/relocation.py).
    """

    def __init__(
        self,
        shape: LayerShape,
        layer: int,
        router: Router,
        balancer: Balancer,
        exchange: Exchange,
        experts: Experts,
        clock: PhaseClock,
    ) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.router, self.balancer, self.exchange, self.experts, self.clock = router, balancer, exchange, experts, clock
        self.record: LayerRecord | None = None
        self.moving = False
        self.observers: list[Callable[[LayerRecord], None]] = []
        self.scores_total: torch.Tensor
        self.register_buffer("scores_total", torch.zeros((), device=clock.device))

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        step: int,
        token_ids: torch.Tensor | None = None,
        forced_ids: torch.Tensor | None = None,
        forced_scores: torch.Tensor | None = None,
        decode: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [T, H] of this rank -> output [T, H]. Collective. T may be 0.

        forced_ids [T, k] int64: experts of a trace that replace the router's choice, -1 for none. The router still
        computes their weights. forced_scores [T, E] float32: scores of a trace that replace the router's, -inf if
        unknown. token_ids [T] int64: for a router that hashes token ids. decode [T] bool: the tokens that a router
        policy such as oea may reroute; None for all. Other tokens keep the model's choice.
        Raises PhaseError for inputs of the wrong shape or type and, on CPUs, for scores that are not finite. On a GPU
        call `raise_if_bad` to check the scores, because the check waits for the device.
        """
        clock = self.clock
        clock.enter("route", step, self.layer)
        chosen = self._route(hidden, token_ids, forced_ids, forced_scores)
        routing = self._rerouted(chosen, decode)
        clock.enter("balance")
        try:
            assignment = self.balancer.assign(routing.ids, step)
        except ValueError as error:
            raise clock.error(str(error)) from error
        clock.enter("dispatch")
        weights = routing.weights
        if self.shape.has_shared:
            weights = torch.cat([weights, routing.shared_weight[:, None]], dim=1)
        received = self.exchange.dispatch(hidden, assignment.slots, weights)
        clock.enter("experts")
        outputs, counts = self.experts(received)
        clock.enter("combine")
        output = self.exchange.combine(outputs, received)
        clock.enter("idle")
        self._keep(step, chosen.ids, routing, assignment, counts)
        return output

    def raise_if_bad(self) -> None:
        """Raises PhaseError if a score since the last check was not finite. Waits for the device."""
        if not bool(self.scores_total.isfinite()):
            self.scores_total.zero_()
            self.clock.enter("route", layer=self.layer)
            raise self._bad_scores()

    def _route(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor | None,
        forced_ids: torch.Tensor | None,
        forced_scores: torch.Tensor | None,
    ) -> Routing:
        shape = self.shape
        if hidden.ndim != 2 or hidden.shape[1] != shape.hidden:
            raise self.clock.error(f"hidden states are {list(hidden.shape)}, not [tokens, {shape.hidden}]")
        if forced_ids is not None:
            self._check_forced(forced_ids, len(hidden))
        try:
            routing: Routing = self.router(hidden, token_ids, forced_ids, forced_scores)
        except ValueError as error:
            raise self.clock.error(str(error)) from error
        if hidden.is_cuda:
            self.scores_total += routing.total
        elif not bool(routing.total.isfinite()):
            raise self._bad_scores()
        return routing

    def _rerouted(self, routing: Routing, decode: torch.Tensor | None) -> Routing:
        """Applies the stack's router policy. Collective if the policy looks at the tokens of all ranks."""
        bound, collective = self.balancer.bound, self.balancer.collective
        policy = bound.stack.router
        if not policy.acts:
            return routing
        work = RouterWork(
            scores=routing.scores,
            weight_basis=routing.weight_basis,
            expert_ids=routing.ids,
            weights=routing.weights,
            decode=torch.ones_like(routing.ids[:, 0], dtype=torch.bool) if decode is None else decode,
            holds=bound.copies.once(held_by_rank)[0],
            total=collective.all_reduce if policy.whole_batch else alone,
        )
        try:
            routed = checked_route(policy, work)
        except ValueError as error:
            raise self.clock.error(str(error)) from error
        return dataclasses.replace(routing, ids=routed.expert_ids, weights=routed.weights)

    def _check_forced(self, forced_ids: torch.Tensor, num_tokens: int) -> None:
        if tuple(forced_ids.shape) != (num_tokens, self.shape.top_k) or forced_ids.dtype != torch.int64:
            raise self.clock.error(
                f"forced ids are {list(forced_ids.shape)} {forced_ids.dtype}, "
                f"not [{num_tokens}, {self.shape.top_k}] int64"
            )
        if forced_ids.is_cuda:  # a check would wait for the device; the job checks the ids of a trace on the host
            return
        if not bool(((forced_ids >= -1) & (forced_ids < self.shape.num_experts)).all()):
            raise self.clock.error(f"a forced id is outside 0..{self.shape.num_experts - 1} (or -1 for none)")

    def _bad_scores(self) -> Exception:
        return self.clock.error("router scores are not finite: check the hidden states and the router's weights")

    def _keep(
        self, step: int, chosen: torch.Tensor, routing: Routing, assignment: Assigned, counts: torch.Tensor
    ) -> None:
        num_slots = self.experts.num_slots
        self.record = LayerRecord(
            step=step,
            layer=self.layer,
            placement_version=self.balancer.version,
            chosen=chosen,
            ids=routing.ids,
            weights=routing.weights,
            shared_weight=routing.shared_weight,
            scores=routing.scores,
            physical=assignment.physical,
            shared_rank=assignment.shared_rank,
            received=counts[:num_slots],
            received_shared=counts[num_slots:].sum(),
        )
        for observer in self.observers:
            observer(self.record)


def build_layer(
    shape: LayerShape,
    stack: PolicyStack,
    placement: Placement,
    *,
    layer: int,
    seed: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
    exchange: str | Exchange = "auto",
    max_tokens: int = 4096,
    weights: WeightSource | None = None,
    router: Router | None = None,
    spare_slots: int = 0,
    clock: PhaseClock | None = None,
    collective: str | Collective = "auto",
) -> ExpertParallelMoE:
    """Builds a layer with all its parts. Collective.

    placement: of this layer only, [1, P]. exchange: `auto`, `deep_ep`, `torch`, or an object that layers share.
    collective: `auto`, `peer`, `torch`, or an object that layers share. max_tokens: the most tokens of a rank in a
    step. weights, router: by default random, drawn from the seed. spare_slots: rows per rank for relocations.
    Raises ValueError if shape, placement, stack and exchange do not match.
    """
    if placement.num_experts != shape.num_experts:
        raise ValueError(f"the placement is for {placement.num_experts} experts, {shape.name} has {shape.num_experts}")
    if isinstance(collective, str):
        collective, _ = choose_collective(collective, group, device, ROWS * (shape.num_experts + 1))
    clock = clock or PhaseClock(collective.rank, device)
    setting = Setting(seed=seed, shared_cost=shape.shared_cost, top_k=shape.top_k, layers=(layer,))
    on_device = dataclasses.replace(placement, physical_to_logical=placement.physical_to_logical.to(device))
    balancer = make_balancer(stack, on_device, setting, collective, max_tokens)
    if isinstance(exchange, str):
        exchange = choose_exchange(
            exchange,
            group=group,
            device=device,
            dtype=dtype,
            hidden=shape.hidden,
            slots_per_rank=balancer.slots_per_rank,
            columns=shape.top_k + shape.has_shared,
            max_tokens=max_tokens,
        )
    first = collective.rank * placement.slots_per_rank
    local = placement.physical_to_logical[0, first : first + placement.slots_per_rank].tolist()
    weights = weights or RandomWeights(shape, seed, device, dtype)
    experts = Experts(shape, layer, local, weights, device, dtype, spare_slots)
    router = router or make_router(shape, layer, seed, device, dtype)
    return ExpertParallelMoE(shape, layer, router, balancer, exchange, experts, clock)
