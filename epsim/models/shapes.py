"""Shapes of mixture-of-experts layers by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

RouterRule: TypeAlias = Literal["softmax", "sigmoid-groups", "hash"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: E routed experts of width `intermediate`, and a shared expert of `shared_intermediate` (0 for none).

    router: `softmax` (top-k of probabilities), `sigmoid-groups` (DeepSeek-V3: sigmoid, bias, the best `top_groups` of
    `groups`) or `hash` (first layers of DeepSeek-V4: the token's id determines its experts). renormalise: the weights
    of the chosen experts sum to 1 before they are multiplied by `scaling`. shared_gate: a gate (sigmoid) multiplies the
    shared expert's output, as in Qwen2-MoE. num_layers: mixture-of-experts layers of the whole model.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    shared_intermediate: int = 0
    router: RouterRule = "softmax"
    renormalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared_gate: bool = False
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts", "top_k", "groups", "top_groups", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"layer shape {self.name}: {name} is {getattr(self, name)}, give at least 1")
        if self.shared_intermediate < 0:
            raise ValueError(f"layer shape {self.name}: shared_intermediate is {self.shared_intermediate}, give >= 0")
        if self.num_experts % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"layer shape {self.name}: {self.num_experts} experts, the best {self.top_groups} of {self.groups} "
                "groups: groups must divide experts, and top_groups must be 1 to groups"
            )
        eligible = self.num_experts // self.groups * self.top_groups
        if self.top_k > eligible:
            raise ValueError(f"layer shape {self.name}: top-k {self.top_k} of {eligible} experts that can be chosen")

    @property
    def has_shared(self) -> bool:
        return self.shared_intermediate > 0

    @property
    def shared_cost(self) -> float:
        """The shared expert's work in routed assignments (docs/contract.md section 1)."""
        return self.shared_intermediate / self.intermediate

    @property
    def expert_bytes(self) -> int:
        """Bytes of a routed expert's weights in bf16: gate, up and down projections."""
        return 3 * self.hidden * self.intermediate * 2

    def with_experts(self, num_experts: int) -> LayerShape:
        """The same layer with another number of routed experts, for example to fit a small machine."""
        return dataclasses.replace(self, num_experts=num_experts)


SHAPES: dict[str, LayerShape] = {
    shape.name: shape
    for shape in (
        # deepseek-ai/DeepSeek-V3 config.json: 58 MoE layers, n_group 8, topk_group 4, routed_scaling_factor 2.5.
        LayerShape("deepseek-v3-layer", 7168, 2048, 256, 8, 2048, "sigmoid-groups", True, 2.5, 8, 4, num_layers=58),
        # Qwen/Qwen3-30B-A3B config.json: 48 layers, no shared expert, norm_topk_prob.
        LayerShape("qwen3-30b-a3b-layer", 2048, 768, 128, 8, num_layers=48),
        LayerShape("tiny", 64, 32, 16, 2, 32, num_layers=2),
    )
}


def shape_of(name: str) -> LayerShape:
    """The shape of that name. Raises ValueError, which lists the known names, if there is none."""
    if name not in SHAPES:
        raise ValueError(f"unknown layer shape {name!r}: give one of {', '.join(SHAPES)}, or a trained model's folder")
    return SHAPES[name]


def shape_of_config(config: dict[str, object], name: str = "model") -> LayerShape:
    """The shape in a transformers config like Qwen2-MoE's (`config.json` of a model that `epsim model train` made)."""
    try:
        return LayerShape(
            name,
            hidden=_whole(config, "hidden_size"),
            intermediate=_whole(config, "moe_intermediate_size"),
            num_experts=_whole(config, "num_experts"),
            top_k=_whole(config, "num_experts_per_tok"),
            shared_intermediate=_whole(config, "shared_expert_intermediate_size") if has_shared(config) else 0,
            renormalise=bool(config.get("norm_topk_prob", False)),
            shared_gate=has_shared(config),
            num_layers=_whole(config, "num_hidden_layers"),
        )
    except KeyError as missing:
        raise ValueError(f"the config of {name} has no {missing.args[0]}: only Qwen2-MoE-like models can run") from None


def has_shared(config: dict[str, object]) -> bool:
    return bool(config.get("shared_expert_intermediate_size"))


def _whole(config: dict[str, object], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} of the model's config is {value!r}, not a whole number")
    return value
