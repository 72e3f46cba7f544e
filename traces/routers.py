"""Finds the routers of a Hugging Face transformers 5 model and computes the scores they choose by.

A router is a child `gate` or `router` of a module that also has a child `experts`. It returns (logits or probabilities
[T, E], weights [T, k], expert ids [T, k]), and the model uses these, so a forward hook can read or replace them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def softmax_scores(router: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(-1)


def sigmoid_scores(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3 chooses by sigmoid plus a correction bias (and within groups), and weights by the sigmoid alone."""
    bias: torch.Tensor = router.e_score_correction_bias
    return logits.float().sigmoid() + bias.to(logits.device)


def unbiased_scores(router: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits.float().sigmoid()


def given_scores(router: Any, probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.float()


SCORE_RULES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "Qwen3MoeTopKRouter": softmax_scores,
    "Qwen2MoeTopKRouter": softmax_scores,
    "OlmoeTopKRouter": softmax_scores,
    "MixtralTopKRouter": softmax_scores,
    "GptOssTopKRouter": softmax_scores,
    "DeepseekV3TopkRouter": sigmoid_scores,
    "Gemma4TextRouter": given_scores,
}
"""From a router's first output to the scores it chooses by, for each router class. GPT-OSS chooses by logits and
weights by the softmax over the chosen experts; the softmax over all has the same order and the same proportions."""

WEIGH_RULES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    **{name: rule for name, rule in SCORE_RULES.items() if rule is softmax_scores},
    "DeepseekV3TopkRouter": unbiased_scores,
}
"""From a router's first output to what its weights are proportional to. Gemma 4 is not here: its weights also have a
factor for each expert."""


@dataclass(frozen=True, slots=True)
class Router:
    """A router, the number that the model gives its layer, and the module that computes the layer's experts."""

    layer: int
    module: Any
    experts: Any

    def choice(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """A router's first output [T, E] and expert ids [T, k]. Raises ValueError if it returns anything else."""
        if isinstance(output, tuple) and len(output) == 3:
            first, _, ids = output
            if first.ndim == ids.ndim == 2 and not ids.is_floating_point():
                return first, ids
        raise ValueError(
            f"{type(self.module).__name__} does not return (logits [T, E], weights [T, k], expert ids [T, k]) as most "
            "routers of transformers 5 do: it cannot be recorded"
        )

    def scores(self, first_output: torch.Tensor) -> torch.Tensor:
        """The scores this router chooses by, [..., E] float32, from its first output [..., E]."""
        name = type(self.module).__name__
        if name not in SCORE_RULES:
            known = ", ".join(SCORE_RULES)
            raise ValueError(f"no score rule is known for {name} (only for {known}): num_scores=0 records ids alone")
        return SCORE_RULES[name](self.module, first_output)

    def weight_basis(self, first_output: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """What this router's weights are proportional to, [..., E] float32: in most models the scores themselves.

        first_output [..., E]; scores: what `scores` returns for it."""
        name = type(self.module).__name__
        if name not in WEIGH_RULES:
            raise ValueError(f"a router policy cannot act on {name}, only on {', '.join(WEIGH_RULES)}")
        rule = WEIGH_RULES[name]
        return scores if rule is SCORE_RULES[name] else rule(self.module, first_output)


def find_routers(model: Any) -> list[Router]:
    """The model's routers in order of layers. Raises ValueError if it has none."""
    routers: list[Router] = []
    for name, block in model.named_modules():
        children = dict(block.named_children())
        router = children.get("gate", children.get("router"))
        if router is None or "experts" not in children:
            continue
        number = re.search(r"\.(\d+)(\.|$)", name)
        routers.append(Router(int(number.group(1)) if number else len(routers), router, children["experts"]))
    if not routers:
        raise ValueError(f"{type(model).__name__} has no router (a `gate` or `router` beside `experts`)")
    return routers


def shared_cost(model: Any) -> float:
    """The shared expert's intermediate size divided by a routed expert's; 0 if there is no shared expert."""
    for block in model.modules():
        children = dict(block.named_children())
        shared = children.get("shared_expert", children.get("shared_experts"))
        if shared is not None and "experts" in children:
            return float(shared.down_proj.weight.shape[1] / children["experts"].down_proj.shape[-1])
    return 0.0
