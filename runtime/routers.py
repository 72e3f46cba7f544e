"""Routers of the models behind the layer shapes: they choose each token's experts and weights."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from epsim.models.shapes import LayerShape
from epsim.runtime.seeds import generator


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """ids [T, k] int64: logical experts, -1 for none; weights [T, k] float32, 0 where the id is -1.

    shared_weight [T] float32: the weight of the shared expert's output. scores [T, E] float32: the values by which the
    router chooses. weight_basis [T, E] float32, >= 0: the weights of chosen experts are proportional to it.
    total [] float32: the sum of weight_basis, which is finite exactly if all its values are.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    shared_weight: torch.Tensor
    total: torch.Tensor
    scores: torch.Tensor
    weight_basis: torch.Tensor


class Router(torch.nn.Module):
    """Scores the logits of a linear layer, and chooses and weights the k best. Subclasses define `score` and `choose`.

    weight [E, H]. bias [E] float32: added to the scores for the choice only. gate [H]: of the shared expert, or None.
    """

    def __init__(self, shape: LayerShape, weight: torch.Tensor, gate: torch.Tensor | None = None) -> None:
        super().__init__()
        if tuple(weight.shape) != (shape.num_experts, shape.hidden):
            raise ValueError(f"router weight is {list(weight.shape)}, not [{shape.num_experts}, {shape.hidden}]")
        self.shape = shape
        self.weight: torch.Tensor
        self.gate: torch.Tensor | None
        self.register_buffer("weight", weight)
        self.register_buffer("gate", gate)
        self._one: torch.Tensor
        self.register_buffer("_one", weight.new_ones(1, dtype=torch.float32), persistent=False)

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores [T, E] float32 >= 0 of logits [T, E] float32. Weights are proportional to the scores."""
        raise NotImplementedError

    def chosen_by(self, scores: torch.Tensor) -> torch.Tensor:
        """The values [T, E] by which experts are compared, from the scores [T, E]."""
        return scores

    def choose(self, scores: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """The chosen experts [T, k] int64, from the result of `chosen_by` [T, E] and token_ids [T] int64."""
        return scores.topk(self.shape.top_k, dim=-1).indices

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        forced_ids: torch.Tensor | None = None,
        forced_scores: torch.Tensor | None = None,
    ) -> Routing:
        """The routing of hidden [T, H]. forced_ids [T, k] replace the choice; their weights come from the scores.
        forced_scores [T, E] float32 (-inf if unknown) replace the scores."""
        if forced_scores is None:
            scores = self.score(F.linear(hidden, self.weight).float())
            compared = self.chosen_by(scores)
        else:
            scores, compared = forced_scores.clamp(min=0), forced_scores
        # As few operations as possible: with small batches the GPU waits for the host to launch them.
        if forced_ids is None:
            ids = self.choose(compared, token_ids)
            weights = scores.gather(1, ids)
        else:
            ids = forced_ids
            weights = scores.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
        if self.shape.renormalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        if self.shape.scaling != 1:
            weights = weights * self.shape.scaling
        if self.gate is None:
            shared = self._one.expand(len(hidden))
        else:
            shared = F.linear(hidden, self.gate[None]).float().sigmoid()[:, 0]
        return Routing(ids, weights, shared, scores.sum(), compared, scores)


class SoftmaxTopK(Router):
    """The k largest softmax probabilities (Qwen, OLMoE, Mixtral)."""

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)


class SigmoidGroups(Router):
    """DeepSeek-V3 (modeling_deepseek.py, MoEGate "noaux_tc"): chosen by sigmoid plus bias, weighted by the sigmoid.

    Experts are in `groups` groups. Only those of the `top_groups` groups with the largest sum of their two best biased
    scores can be chosen.
    """

    def __init__(
        self, shape: LayerShape, weight: torch.Tensor, bias: torch.Tensor, gate: torch.Tensor | None = None
    ) -> None:
        super().__init__(shape, weight, gate)
        if tuple(bias.shape) != (shape.num_experts,):
            raise ValueError(f"router bias is {list(bias.shape)}, not [{shape.num_experts}]")
        self.bias: torch.Tensor
        self.register_buffer("bias", bias.float())

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid()

    def chosen_by(self, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.bias

    def choose(self, scores: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        biased = scores
        if self.shape.top_groups < self.shape.groups:
            grouped = biased.reshape(len(biased), self.shape.groups, self.shape.num_experts // self.shape.groups)
            best_two = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best_two, dtype=torch.bool)
            kept.scatter_(1, best_two.topk(self.shape.top_groups, dim=-1).indices, True)
            biased = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        return super().choose(biased, token_ids)


class TokenHash(Router):
    """DeepSeek-V4's first layers: a table gives the experts of each token id. Scores sqrt(softplus) give the weights.
    table [vocabulary, k] int64."""

    def __init__(
        self, shape: LayerShape, weight: torch.Tensor, table: torch.Tensor, gate: torch.Tensor | None = None
    ) -> None:
        super().__init__(shape, weight, gate)
        if table.ndim != 2 or table.shape[1] != shape.top_k or not len(table):
            raise ValueError(f"the hash router's table is {list(table.shape)}, not [vocabulary, {shape.top_k}]")
        self.table: torch.Tensor
        self.register_buffer("table", table)

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        return F.softplus(logits).sqrt()

    def choose(self, scores: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        if token_ids is None:
            raise ValueError("a router that hashes the token's id needs token_ids [T]")
        if token_ids.shape[0] != scores.shape[0]:
            raise ValueError(f"{token_ids.shape[0]} token ids given for {scores.shape[0]} tokens")
        if not token_ids.is_cuda:  # On a GPU the check would wait for the device. There, indexing checks the ids.
            outside = token_ids[(token_ids < 0) | (token_ids >= len(self.table))].tolist()
            if outside:
                raise ValueError(f"token id {outside[0]} is outside 0..{len(self.table) - 1}, the hash router's table")
        return self.table[token_ids]


def hash_table(vocabulary: int, shape: LayerShape, seed: int, layer: int) -> torch.Tensor:
    """k distinct experts for every token id, drawn uniformly: [vocabulary, k] int64."""
    source = generator(torch.device("cpu"), "hash table", seed, layer)
    parts = [
        torch.rand(size, shape.num_experts, generator=source).topk(shape.top_k, dim=1).indices
        for size in (min(4096, vocabulary - first) for first in range(0, vocabulary, 4096))
    ]
    return torch.cat(parts)


def make_router(
    shape: LayerShape, layer: int, seed: int, device: torch.device, dtype: torch.dtype, vocabulary: int = 4096
) -> Router:
    """The router of a shape, with weights drawn from (seed, layer), equal on every rank."""
    source = generator(torch.device("cpu"), "router", seed, layer)
    weight = torch.randn(shape.num_experts, shape.hidden, generator=source) / shape.hidden**0.5
    weight = weight.to(device, dtype)
    gate = torch.randn(shape.hidden, generator=source) / shape.hidden**0.5
    shared_gate = gate.to(device, dtype) if shape.shared_gate else None
    if shape.router == "sigmoid-groups":
        bias = torch.randn(shape.num_experts, generator=source) * 0.01
        return SigmoidGroups(shape, weight, bias.to(device), shared_gate)
    if shape.router == "hash":
        return TokenHash(shape, weight, hash_table(vocabulary, shape, seed, layer).to(device), shared_gate)
    return SoftmaxTopK(shape, weight, shared_gate)
