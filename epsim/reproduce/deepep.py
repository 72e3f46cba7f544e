"""Compares DeepEP's published exchange figures with the exchange model under the same conditions.

Scores are uniform random, as in DeepEP's tests. The experts of a node are one group. A token keeps at most MOST_GROUPS
groups, those with the highest best score, and takes its top-k experts from them.
"""

import json
from dataclasses import dataclass
from importlib import resources

import torch

from epsim.cost.exchange_time import Kernels, Rows, exchange_us
from epsim.machines.hardware import Hardware
from epsim.models.spec import ModelSpec

MOST_GROUPS = 4
TOKENS: dict[Kernels, int] = {"normal": 4096, "low-latency": 128}
TOLERANCE = 0.15
DRAWN = 1 << 14


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure and its prediction. unit: GB/s of logical bytes, or us. way: dispatch or combine. fitted:
    whether the hardware's specification took a rate from this figure."""

    kernels: Kernels
    ranks: int
    way: str
    unit: str
    published: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def published_exchange(hardware: Hardware, model: ModelSpec) -> list[Figure]:
    """Predicts each published figure. hardware: `h800`, which DeepEP used; model: DeepSeek-V3's shape."""
    content = json.loads(resources.files("epsim.reproduce").joinpath("published/deepep-h800.json").read_text())
    predictions = []
    for kernels in TOKENS:
        for ranks, *figures in content[kernels.replace("-", "_")]:
            nodes = max(ranks // hardware.ranks_per_node, 1)
            rows, logical = uniform_rows(model, ranks, nodes, kernels)
            times = exchange_us(rows, hardware, model, nodes, kernels).tolist()
            widths = (model.dispatch_row_bytes, model.combine_row_bytes)
            for way, time, width, figure in zip(("dispatch", "combine"), times, widths, figures, strict=True):
                normal = kernels == "normal"
                unit, predicted = ("GB/s", logical * width * 1e-3 / time) if normal else ("us", time)
                predictions.append(Figure(kernels, ranks, way, unit, figure, predicted, not normal or ranks == 8))
    return predictions


def uniform_rows(model: ModelSpec, ranks: int, nodes: int, kernels: Kernels) -> tuple[Rows, float]:
    """The rows of the busiest rank at the published tokens per rank, where all ranks are equal, and the logical rows,
    from which published bandwidths are computed."""
    tokens, away = TOKENS[kernels], (nodes - 1) / nodes
    if kernels == "low-latency":
        logical = float(tokens * model.top_k)
        rows = (logical * (1 - away), logical * away)
    else:
        per_node, per_rank = visited(model, ranks, nodes)
        rows = (tokens * per_rank, tokens * per_node * away)
        logical = rows[0] if nodes == 1 else tokens * per_node
    return Rows(torch.tensor(rows[0]).double(), torch.tensor(rows[1]).double()), logical


def visited(model: ModelSpec, ranks: int, nodes: int) -> tuple[float, float]:
    """The mean number of nodes and of ranks that a token is sent to, over DRAWN tokens with uniform random scores."""
    scores = torch.rand(DRAWN, model.num_experts, generator=torch.Generator().manual_seed(0))
    by_node = scores.view(DRAWN, nodes, -1)
    groups = by_node.amax(-1).topk(min(nodes, MOST_GROUPS)).indices
    allowed = torch.zeros(DRAWN, nodes, dtype=torch.bool).scatter_(1, groups, True)
    ids = (by_node * allowed[:, :, None]).flatten(1).topk(model.top_k).indices
    seen = []
    for parts in (nodes, ranks):
        part = ids // (model.num_experts // parts)
        seen.append(float(torch.zeros(DRAWN, parts).scatter_(1, part, 1.0).sum(1).mean()))
    return seen[0], seen[1]
