"""A model's layers with routed experts: their weights, their sketches, and a forward that can be replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from epsim.kernels.reader import Batches, Experts, LayerSketch, Screen, output_scores
from epsim.kernels.reader.rivals import int4_gate
from epsim.kernels.reader.slots import slot_products
from epsim.kernels.reader.store import build_named
from epsim.policies.reader import Channels
from epsim.quality.hook import before_passes


def expert_modules(model: Any) -> list[Any]:
    """The modules that hold the routed experts of each layer, in order. Raises ValueError if there are none."""
    wanted = ("gate_up_proj", "down_proj", "act_fn")
    candidates = [module for module in model.modules() if all(hasattr(module, name) for name in wanted)]
    candidates = [module for module in candidates if getattr(module.gate_up_proj, "ndim", 0) == 3]
    if not candidates:
        raise ValueError("a channel reader needs a model whose experts hold gate_up_proj [E, 2I, H] and down_proj")
    return candidates


def build_sketches(model: Any, seed: int = 0) -> dict[int, LayerSketch]:
    """Builds the sketches of a model in memory, on the model's device. Keys are indices among layers with experts."""
    modules = expert_modules(model)
    return {i: build_named(i, m.gate_up_proj.data, m.down_proj.data, seed, 32) for i, m in enumerate(modules)}


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's experts and its decoded sketch, on the model's device. int4: a copy of the gate rows in int4, for the
    score `int4-gate`."""

    experts: Experts
    screen: Screen
    int4: torch.Tensor | None = None

    @property
    def norms(self) -> torch.Tensor:
        return self.screen.sketch.norms

    def estimates(
        self, reader: Channels, x: torch.Tensor, ids: torch.Tensor, batches: Batches | None = None
    ) -> torch.Tensor:
        """The estimated activations by which the reader chooses channels, [T, k, I] float32."""
        if reader.score == "sketch":
            gate, up = self.screen.estimates(x, ids, reader.coordinates, batches)
            return self.experts.activation(gate) * up
        if reader.score == "int4-gate":
            assert self.int4 is not None
            return self.experts.activation(slot_products(x.float(), ids, self.int4))
        gate = slot_products(x, ids, self.experts.gate_up[:, : self.norms.shape[1]])
        return self.experts.activation(gate.float())

    def scores(
        self, reader: Channels, ids: torch.Tensor, weights: torch.Tensor, estimates: torch.Tensor
    ) -> torch.Tensor:
        """The scores of channels, [T, k, I] float32; -1 where a token has no expert."""
        if reader.units == "output":
            scores = output_scores(weights, self.norms[ids.clamp(min=0)], estimates)
        else:
            scores = estimates.abs()
        return scores.masked_fill((ids < 0)[..., None], -1.0)


def layers_of(model: Any, sketches: dict[int, LayerSketch], int4: bool = False) -> list[Layer]:
    """The model's layers with experts. int4: whether to make int4 copies of the gate rows."""
    modules = expert_modules(model)
    if len(modules) != len(sketches):
        raise ValueError(f"sketches of {len(sketches)} layers do not fit a model of {len(modules)} layers with experts")
    layers = []
    for module, (_, sketch) in zip(modules, sorted(sketches.items()), strict=True):
        gate_up, down = module.gate_up_proj.data, module.down_proj.data
        copied = int4_gate(gate_up[:, : gate_up.shape[1] // 2]) if int4 else None
        layers.append(Layer(Experts(gate_up, down, module.act_fn), Screen(sketch.to(gate_up.device)), copied))
    return layers


@contextmanager
def replaced(model: Any, whole_sequences: bool, output: Any) -> Iterator[None]:
    """Inside the `with`, the experts' forward is output(layer, x [T, H], ids [T, k], weights [T, k], length of a
    sequence) -> [T, H]. whole_sequences: if False, passes with several tokens per sequence keep their own forward."""
    modules = expert_modules(model)
    length = [1]

    def note_length(ids: torch.Tensor) -> None:
        length[0] = ids.shape[1]

    handle = before_passes(model, "a reader", note_length)
    for number, module in enumerate(modules):
        plain = module.forward

        def forward(
            hidden_states: torch.Tensor,
            top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor,
            number: int = number,
            plain: Any = plain,
        ) -> torch.Tensor:
            if length[0] > 1 and not whole_sequences:
                out: torch.Tensor = plain(hidden_states, top_k_index, top_k_weights)
                return out
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            new: torch.Tensor = output(number, x, top_k_index, top_k_weights, length[0])
            return new.to(hidden_states.dtype).view_as(hidden_states)

        module.forward = forward
    try:
        yield
    finally:
        handle.remove()
        for module in modules:
            del module.forward
