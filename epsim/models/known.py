"""Known models that recordings may name: experts, top-k, the shared expert's cost, the score rule.

Source of every row: the model's config.json, as published with its weights (num_experts or n_routed_experts,
num_experts_per_tok, n_shared_experts, moe_intermediate_size, shared_expert_intermediate_size, scoring_func).
shared_cost = intermediate size of the shared expert / that of a routed one, 0 for none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

ScoreRule: TypeAlias = Literal["softmax", "topk-softmax", "sigmoid"]
SCORE_RULES: tuple[ScoreRule, ...] = ("softmax", "topk-softmax", "sigmoid")


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    num_experts: int
    top_k: int
    shared_cost: float
    score_rule: ScoreRule = "softmax"


KNOWN_MODELS = (
    KnownModel("DeepSeek-V3", 256, 8, 1, "sigmoid"),
    KnownModel("DeepSeek-R1", 256, 8, 1, "sigmoid"),
    KnownModel("DeepSeek-V2-Lite", 64, 6, 2),
    KnownModel("DeepSeek-V2", 160, 6, 2),
    KnownModel("DeepSeek-MoE-16B", 64, 6, 2),
    KnownModel("Kimi-K2", 384, 8, 1, "sigmoid"),
    KnownModel("GLM-4.5-Air", 128, 8, 1, "sigmoid"),
    KnownModel("GLM-4.5", 160, 8, 1, "sigmoid"),
    KnownModel("Qwen1.5-MoE-A2.7B", 60, 4, 4),
    KnownModel("Qwen2-57B-A14B", 64, 8, 8),
    KnownModel("Qwen3-30B-A3B", 128, 8, 0),
    KnownModel("Qwen3-235B-A22B", 128, 8, 0),
    KnownModel("Qwen3-Next-80B-A3B", 512, 10, 1),
    KnownModel("OLMoE", 64, 8, 0),
    KnownModel("gpt-oss-20b", 32, 4, 0, "topk-softmax"),
    KnownModel("gpt-oss-120b", 128, 4, 0, "topk-softmax"),
    KnownModel("Mixtral", 8, 2, 0, "topk-softmax"),
    KnownModel("switch-base-128", 128, 1, 0),
)


def find_model(name: str) -> KnownModel | None:
    """The known model for a name, or None: the longest known name that it begins with (`deepseek-ai/DeepSeek-V3-0324`),
    else the only known name that begins with it (`qwen1.5-moe`)."""
    plain = _plain(name.rsplit("/", 1)[-1])
    fits = [model for model in KNOWN_MODELS if plain.startswith(_plain(model.name))]
    if not fits and plain:
        longer = [model for model in KNOWN_MODELS if _plain(model.name).startswith(plain)]
        fits = longer if len(longer) == 1 else []
    return max(fits, key=lambda model: len(model.name), default=None)


def unknown_model(name: str | None) -> str:
    """The end of a message if --model is unknown: it lists the known models. Empty if the model is known or None."""
    if name is None or find_model(name) is not None:
        return ""
    return f" ({name!r} is not one of {', '.join(model.name for model in KNOWN_MODELS)})"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
