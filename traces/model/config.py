"""Shapes of the small model and its dense twin. They use the class of Qwen2-MoE, which has a shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from epsim.options import About, Options


@dataclass(frozen=True, kw_only=True)
class ModelShape(Options):
    """Every layer has `num_experts` routed experts and one shared expert of the same size, so that shared_cost is 1."""

    vocabulary: int = 8192
    num_layers: Annotated[int, About("Layers of the model.", flag="--layers", least=1)] = 4
    hidden: int = 512
    num_heads: int = 8
    num_experts: int = 64
    top_k: int = 8
    intermediate: int = 256
    max_positions: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top-k {self.top_k} is outside 1..{self.num_experts}, the number of experts")
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden size {self.hidden} does not divide among {self.num_heads} heads")

    def config(self, dense: bool = False) -> Any:
        """The transformers config. dense: one MLP as wide as the experts that a token uses replaces the experts."""
        from transformers import Qwen2MoeConfig

        return Qwen2MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            intermediate_size=(self.top_k + 1) * self.intermediate,
            moe_intermediate_size=self.intermediate,
            shared_expert_intermediate_size=self.intermediate,
            num_experts=self.num_experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            mlp_only_layers=list(range(self.num_layers)) if dense else [],
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=True,
            use_cache=False,
        )


def build_model(shape: ModelShape, dense: bool = False) -> Any:
    """A model of this shape with fresh weights in float32, drawn from torch's current seed."""
    from transformers import Qwen2MoeForCausalLM

    config = shape.config(dense)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    return Qwen2MoeForCausalLM(config)


def count_parameters(model: Any) -> dict[str, int]:
    """The number of parameters in total, and active for one token (top_k of num_experts routed experts)."""
    routed = sum(p.numel() for name, p in model.named_parameters() if ".mlp.experts." in name)
    total = sum(p.numel() for p in model.parameters())
    share = model.config.num_experts_per_tok / model.config.num_experts
    return {"total": total, "active": total - routed + round(routed * share)}
