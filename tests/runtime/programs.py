"""The programs that the processes of the runtime's tests run. They return plain Python values and NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from epsim.models.shapes import LayerShape
from epsim.placement.base import Placement
from epsim.policies.stack import parse_stack
from epsim.runtime.balance import Balancer
from epsim.runtime.collective import Collective
from epsim.runtime.exchange.collectives import TorchExchange
from epsim.runtime.layer import ExpertParallelMoE, LayerRecord, build_layer
from epsim.runtime.phases import PhaseError
from epsim.runtime.reference import reference_output
from epsim.runtime.relocation import Relocation
from epsim.runtime.weights import RandomWeights

SHAPE = LayerShape("test", 32, 16, 32, 4, 16, "sigmoid-groups", True, 2.5, 8, 4)
ROUTED = LayerShape("routed", 32, 16, 32, 4, 16)
LAYER, SEED = 3, 11
STEPS = (5, 8, 9, 12)


@dataclass
class Ran:
    """Of one rank. ids, received, shared: by step. error: the largest over steps of |output - reference|, relative."""

    ids: list[Any] = field(default_factory=list)
    received: list[Any] = field(default_factory=list)
    received_shared: list[int] = field(default_factory=list)
    error: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)


def num_tokens(step: int, rank: int, size: int) -> int:
    """Some ranks prefill while others decode; then all decode; then one rank alone has a token; then all prefill."""
    if step == 5:
        return (90, 3, 0, 70)[rank % 4]
    if step == 8:
        return rank % 3
    return int(rank == size - 1) if step == 9 else 66 + rank


def hidden_states(step: int, rank: int, size: int, dtype: torch.dtype, shape: LayerShape = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    common = torch.randn(shape.hidden, generator=torch.Generator().manual_seed(step))
    noise = torch.randn(num_tokens(step, rank, size), shape.hidden, generator=generator)
    return (noise + common).to(dtype)  # so that a few experts are chosen most often


def table(slots: Any, shape: LayerShape, size: int, nodes: int) -> Placement:
    return Placement(torch.as_tensor(slots), shape.num_experts, size, nodes)


class References:
    """Outputs of the single process, by step: policies do not change them."""

    def __init__(self, shape: LayerShape, weights: Any) -> None:
        self.shape, self.weights, self.known = shape, weights, {}  # type: ignore[var-annotated]

    def error(self, hidden: torch.Tensor, output: torch.Tensor, record: LayerRecord) -> float:
        if record.step not in self.known:
            self.known[record.step] = reference_output(
                self.shape, self.weights, LAYER, hidden, record.ids, record.weights, record.shared_weight
            )
        wanted = self.known[record.step]
        assert output.shape == wanted.shape
        if not wanted.numel():
            return 0.0
        return float((output.double() - wanted).norm() / wanted.norm())


def several(rank: int, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Functions of this module one after the other, in one world of processes."""
    return [globals()[name](rank, *args) for name, args in calls]


def run_stacks(
    rank: int, size: int, nodes: int, stacks: list[tuple[str, Any]], dtype_name: str, shape: LayerShape = SHAPE
) -> dict[int, Ran]:
    """stacks: text and physical_to_logical [1, P] each. -> by place in `stacks`."""
    dtype = getattr(torch, dtype_name)
    weights = RandomWeights(shape, SEED, dtype=dtype)
    references = References(shape, weights)
    batches = {step: hidden_states(step, rank, size, dtype, shape) for step in STEPS}
    layers: dict[bytes, ExpertParallelMoE] = {}
    found = {}
    for place, (text, slots) in enumerate(stacks):
        key = np.asarray(slots).tobytes()
        if key in layers:
            made = restacked(layers[key], text)
        else:
            made = layers[key] = build(text, slots, shape, size, nodes, dtype, weights)
        ran = found[place] = Ran()
        for step in STEPS:
            output = made(batches[step], step=step)
            record = made.record
            assert record is not None
            assert record.step == step
            ran.error = max(ran.error, references.error(batches[step], output, record))
            ran.ids.append(record.ids.numpy())
            ran.received.append(record.received.numpy())
            ran.received_shared.append(int(record.received_shared))
        ran.calls = dict(made.balancer.collective.calls)
    return found


def build(
    text: str, slots: Any, shape: LayerShape, size: int, nodes: int, dtype: torch.dtype, weights: Any, spare: int = 0
) -> ExpertParallelMoE:
    layer = build_layer(
        shape,
        parse_stack(text),
        table(slots, shape, size, nodes),
        layer=LAYER,
        seed=SEED,
        group=None,
        device=torch.device("cpu"),
        dtype=dtype,
        exchange="auto",
        weights=weights,
        spare_slots=spare,
    )
    assert isinstance(layer.exchange, TorchExchange)
    return layer


def restacked(like: ExpertParallelMoE, text: str) -> ExpertParallelMoE:
    """The same experts on the same placement under another stack."""
    balancer = Balancer(parse_stack(text), like.balancer.placement, like.balancer.bound.setting, Collective())
    return ExpertParallelMoE(like.shape, LAYER, like.router, balancer, like.exchange, like.experts, like.clock)


def run_relocation(rank: int, size: int, nodes: int, old: Any, new: Any, spare: int, most: int) -> dict[str, Any]:
    """Runs while experts move. Returns the bytes that came in at each step, versions in force, and errors."""
    weights = RandomWeights(SHAPE, SEED)
    layer = build("eplb+lplb+waterfill", old, SHAPE, size, nodes, torch.float32, weights, spare=spare)
    move = Relocation(layer, table(new, SHAPE, size, nodes), most)
    planned, received, versions, errors, loads = move.num_steps, [], [], [], []
    step = 0
    while True:
        hidden = hidden_states(5, rank, size, torch.float32)
        output = layer(hidden, step=step)
        record = layer.record
        assert record is not None
        versions.append(record.placement_version)
        loads.append((record.ids.numpy(), record.received.numpy(), record.received_shared.item()))
        errors.append(References(SHAPE, weights).error(hidden, output, record))
        if move.done:
            break
        received.append(move.advance(step))
        step += 1
    held = {}
    for slot in range(layer.experts.num_slots):
        expert = int(layer.balancer.placement.physical_to_logical[0, rank * layer.experts.num_slots + slot])
        if expert < 0:
            continue
        gate_up, down = layer.experts._weights(slot)
        wanted = weights.routed(LAYER, expert)
        held[slot] = bool(torch.equal(gate_up, wanted[0]) and torch.equal(down, wanted[1]))
    return {
        "planned": planned,
        "received": received,
        "versions": versions,
        "errors": errors,
        "loads": loads,
        "held": held,
        "placement": layer.balancer.placement.physical_to_logical.numpy(),
    }


def rerouted(rank: int, size: int, nodes: int, stacks: list[tuple[str, Any]]) -> dict[int, Any]:
    """Decode steps under router policies: error, the model's choice and scores, what was served, calls; by place."""
    weights = RandomWeights(ROUTED, SEED)
    found = {}
    for place, (text, slots) in enumerate(stacks):
        layer = build(text, slots, ROUTED, size, nodes, torch.float32, weights)
        steps = []
        for step in (8, 9, 10):
            tokens = {8: 3 + rank, 9: int(rank == size - 1), 10: 12}[step]
            hidden = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(100 * step + rank))
            output, record = layer(hidden, step=step), layer.record
            assert record is not None
            wanted = reference_output(ROUTED, weights, LAYER, hidden, record.ids, record.weights, record.shared_weight)
            far = float((output.double() - wanted).norm() / wanted.norm()) if tokens else 0.0
            scores = layer.router(hidden).scores
            steps.append((far, record.chosen.numpy(), scores.numpy(), int(record.received.sum())))
        found[place] = (steps, dict(layer.balancer.collective.calls))
    return found


def disagree(rank: int, size: int, old: Any, new: Any) -> str:
    """Rank 1 gets another placement than the other ranks."""
    layer = build("eplb", old, SHAPE, size, 1, torch.float32, RandomWeights(SHAPE, SEED), spare=2)
    try:
        Relocation(layer, table(new if rank == 1 else old, SHAPE, size, 1), 1 << 20)
    except ValueError as error:
        return str(error)
    return "no error"


def not_a_number(rank: int, size: int, slots: Any) -> str:
    """Rank 1's scores are NaN: it raises before any collective of the layer; the others are not asked to go on."""
    layer = build("eplb+lplb", slots, SHAPE, size, 1, torch.float32, RandomWeights(SHAPE, SEED))
    hidden = hidden_states(5, rank, size, torch.float32)
    if rank == 1:
        hidden[0] = torch.nan
        try:
            layer(hidden, step=5)
        except PhaseError as error:
            return f"{(error.rank, error.step, error.layer, error.phase)} {error}"
        return "no error"
    return ""


def exchanged(rank: int, size: int) -> dict[str, Any]:
    """Every token goes to slots that its number tells; rank 1 has none."""
    slots_per_rank = 3
    exchange = TorchExchange(None, slots_per_rank)
    tokens = 0 if rank == 1 else 5
    number = torch.arange(tokens) + 10 * rank
    hidden = torch.stack([number, -number], dim=1).to(torch.bfloat16)
    # Token t takes slot t and the one after (often of the same rank), and none in its last column.
    slots = torch.stack([number % (size * 3), (number + 1) % (size * 3), torch.full_like(number, -1)], dim=1)
    weights = torch.stack([number + 0.25, number + 0.5, number.float()], dim=1)
    received = exchange.dispatch(hidden, slots, weights)
    # Each row returns as the sum of its weights over all ranks that serve it.
    outputs = (received.weights.sum(1, keepdim=True) * torch.tensor([1.0, 2.0])).to(torch.float32)
    back = exchange.combine(outputs, received)
    return {
        "rows": received.hidden[:, 0].float().tolist(),
        "slots": received.slots.tolist(),
        "weights": received.weights.tolist(),
        "back": back.float().tolist(),
    }


def run_model(rank: int, size: int, layers: list[tuple[Any, Any, Any]]) -> float:
    """layers: weights and router of each, and of each rank hidden states and what the model makes of them: the largest
    distance to that."""
    far = 0.0
    for number, (weights, router, given) in enumerate(layers):
        made = build_layer(
            weights.shape,
            parse_stack("eplb+lplb+waterfill"),
            Placement(torch.tensor([[*range(8), *range(8)]]), 8, size),
            layer=number,
            seed=1,
            group=None,
            device=torch.device("cpu"),
            dtype=torch.float32,
            weights=weights,
            router=router,
        )
        hidden, wanted = given[rank]
        far = max(far, float((made(hidden, step=0) - wanted).norm() / wanted.norm()))
    return far


@dataclass
class Held:
    """Weights of one layer, which processes take over without the library that the model is of."""

    shape: LayerShape
    experts: list[Any]
    common: Any

    def routed(self, layer: int, expert: int) -> Any:
        return self.experts[expert]

    def shared(self, layer: int) -> Any:
        return self.common


def recorded(rank: int, size: int, nodes: int, text: str, slots: Any) -> Any:
    """Two layers, recorded by the recorder: its block, on rank 0, and what each rank served."""
    from epsim.runtime.recording import RoutingRecorder

    weights = RandomWeights(SHAPE, SEED)
    layers = []
    for number, layer in enumerate((3, 7)):
        layers.append(
            build_layer(
                SHAPE,
                parse_stack(text),
                table(slots[number : number + 1], SHAPE, size, nodes),
                layer=layer,
                seed=SEED,
                group=None,
                device=torch.device("cpu"),
                dtype=torch.float32,
                weights=weights,
            )
        )
    recorder = RoutingRecorder(layers)
    served = []
    for step in STEPS:
        hidden = hidden_states(step, rank, size, torch.float32)
        row = []
        for made in layers:
            hidden = hidden + made(hidden, step=step)
            assert made.record is not None
            row.append((int(made.record.received.sum()), int(made.record.received_shared)))
        served.append(row)
    return recorder.block(), served
