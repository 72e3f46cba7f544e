"""Expert weights by layer and logical expert; they do not depend on the placement."""

from typing import Any, Protocol, TypeAlias

import torch

from epsim.models.shapes import LayerShape, shape_of_config
from epsim.runtime.routers import Router, SoftmaxTopK
from epsim.runtime.seeds import generator
from epsim.traces.routers import find_routers

Weights: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""gate_up [2 I, H]: the gate projection, then the up projection; down [H, I]."""


class WeightSource(Protocol):
    def routed(self, layer: int, expert: int) -> Weights: ...

    def shared(self, layer: int) -> Weights: ...


class RandomWeights:
    """Normal weights, divided by the square root of the input width. They are drawn on `device` and depend on the seed,
    the layer and the expert alone."""

    def __init__(
        self, shape: LayerShape, seed: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.shape, self.seed = shape, seed
        self.device, self.dtype = device or torch.device("cpu"), dtype

    def routed(self, layer: int, expert: int) -> Weights:
        return self._draw(layer, expert, self.shape.intermediate)

    def shared(self, layer: int) -> Weights:
        return self._draw(layer, self.shape.num_experts, self.shape.shared_intermediate)

    def _draw(self, layer: int, number: int, intermediate: int) -> Weights:
        source = generator(self.device, "expert", self.seed, layer, number)

        def draw(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=source, device=self.device, dtype=torch.float32)
            scaled: torch.Tensor = values / columns**0.5
            return scaled.to(self.dtype)

        return draw(2 * intermediate, self.shape.hidden), draw(self.shape.hidden, intermediate)


class ModelWeights:
    """The weights of a transformers model of the Qwen2-MoE architecture, by the model's layer numbers. shape: the shape
    of its layers. router(layer): the model's own router."""

    def __init__(self, model: Any) -> None:
        self.shape = shape_of_config(model.config.to_dict(), type(model).__name__)
        self._blocks: dict[int, dict[str, Any]] = {}
        by_module = {id(router.module): router.layer for router in find_routers(model)}
        for block in model.modules():
            children = dict(block.named_children())
            if id(children.get("gate")) in by_module:
                self._blocks[by_module[id(children["gate"])]] = children
        self.layers = tuple(sorted(self._blocks))

    def routed(self, layer: int, expert: int) -> Weights:
        experts = self._block(layer)["experts"]
        return experts.gate_up_proj[expert].detach(), experts.down_proj[expert].detach()

    def shared(self, layer: int) -> Weights:
        shared = self._block(layer)["shared_expert"]
        gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        return gate_up.detach(), shared.down_proj.weight.detach()

    def router(self, layer: int, device: torch.device, dtype: torch.dtype) -> Router:
        block = self._block(layer)
        gate = block["shared_expert_gate"].weight.detach()[0].to(device, dtype) if self.shape.shared_gate else None
        return SoftmaxTopK(self.shape, block["gate"].weight.detach().to(device, dtype), gate)

    def _block(self, layer: int) -> dict[str, Any]:
        if layer not in self._blocks:
            known = ", ".join(map(str, self.layers))
            raise ValueError(f"the model has no mixture-of-experts layer {layer}, only {known}")
        return self._blocks[layer]
