"""Tiny models of every family, and what their experts were given: for the tests of the recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epsim.traces.routers import find_routers
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock, TraceMeta

transformers = pytest.importorskip("transformers")

E, K = 8, 3
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": K,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Moe": ("Qwen3MoeTopKRouter", {"num_experts": E, "mlp_only_layers": [1]}),
    "Qwen2Moe": ("Qwen2MoeTopKRouter", {"num_experts": E, "shared_expert_intermediate_size": 32}),
    "Olmoe": ("OlmoeTopKRouter", {"num_experts": E}),
    "Mixtral": ("MixtralTopKRouter", {"num_local_experts": E}),
    "DeepseekV3": (
        "DeepseekV3TopkRouter",
        {
            "n_routed_experts": E,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "head_dim": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "GptOss": ("GptOssTopKRouter", {"num_local_experts": E, "layer_types": ["full_attention"] * 3}),
    "Gemma4": (
        "Gemma4TextRouter",
        {
            "num_experts": E,
            "top_k_experts": K,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["full_attention"] * 3,
            "num_kv_shared_layers": 0,
            "global_head_dim": 16,
        },
    ),
}


def make_model(family: str, **change: Any) -> Any:
    name = "Gemma4TextConfig" if family == "Gemma4" else f"{family}Config"
    config = getattr(transformers, name)(**{**SMALL, **FAMILIES[family][1], **change})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for router in find_routers(model):
        for parameter in router.module.parameters():
            torch.nn.init.normal_(parameter)
        if hasattr(router.module, "e_score_correction_bias"):
            router.module.e_score_correction_bias.normal_(std=0.1)
    return model


class UsedExperts:
    """What each experts module was given: an independent witness of the routing."""

    def __init__(self, model: Any) -> None:
        self.passes: list[list[torch.Tensor]] = []
        self.width = len(find_routers(model))
        for router in find_routers(model):
            router.experts.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        ids = next(a for a in given if isinstance(a, torch.Tensor) and not a.is_floating_point())
        if not self.passes or len(self.passes[-1]) == self.width:
            self.passes.append([])
        self.passes[-1].append(ids.clone())

    def ids(self, step: int) -> Any:
        """[T, L, k], tokens sequence by sequence, padding included."""
        return torch.stack(self.passes[step], dim=1).numpy()


def watch(model: Any, place: int) -> list[torch.Tensor]:
    """The output at this place of every router, in order of layers, pass by pass."""
    outputs: list[torch.Tensor] = []
    for router in find_routers(model):
        router.module.register_forward_hook(lambda module, inputs, output: outputs.append(output[place]))
    return outputs


def read(path: Path) -> tuple[TraceMeta, list[TokenBlock]]:
    """One block a step."""
    trace = StoredTrace(path)
    blocks = [b for i in range(trace.num_steps) for b in trace.blocks(i, i + 1)]
    return trace.meta, [b for b in blocks if isinstance(b, TokenBlock)]
