"""Models that recordings may name: number of experts, top-k, cost of the shared expert, score rule.

Source of each row: the model's published config.json (num_experts or n_routed_experts, num_experts_per_tok,
n_shared_experts, moe_intermediate_size, shared_expert_intermediate_size, scoring_func).
shared_cost = intermediate size of the shared expert / intermediate size of a routed expert; 0 for no shared expert.
"""

import re
from collections.abc import Iterable
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
    """The known model for a name, or None.

    It is the longest known name that the given name begins with (`deepseek-ai/DeepSeek-V3-0324`); otherwise the only
    known name that begins with the given name (`qwen1.5-moe`)."""
    models = {model.name: model for model in KNOWN_MODELS}
    if known := longest_start(name, models):
        return models[known]
    plain = _plain(name.rsplit("/", 1)[-1])
    longer = [model for model in KNOWN_MODELS if plain and _plain(model.name).startswith(plain)]
    return longer[0] if len(longer) == 1 else None


def longest_start(name: str, known: Iterable[str]) -> str | None:
    """The longest of the known names that a name begins with, or None. Ignores case, punctuation and the part up to
    the last /."""
    plain = _plain(name.rsplit("/", 1)[-1])
    return max((candidate for candidate in known if plain.startswith(_plain(candidate))), key=len, default=None)


def unknown_model(name: str | None) -> str:
    """The end of an error message about an unknown --model, which lists the known models. Empty if the model is known
    or None."""
    if name is None or find_model(name) is not None:
        return ""
    return f" ({name!r} is not one of {', '.join(model.name for model in KNOWN_MODELS)})"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
