"""The published split (deepseek-ai/LPLB, SGLang's `lp`): an affine-scaling interior point method with 5 steps.

It serves as a baseline. The linear program of a layer minimises M subject to
    for every rank: sum of loads x of its replicated experts' copies + slack - M = -(load of its other experts)
    for every replicated expert: sum of loads x of its copies = load of the expert
with x, slack, M >= 0. At the start all variables are 1, and one artificial variable of cost BIG_M takes up the
infeasibility. The arithmetic is fp32, with loads in units of the mean rank load. Differences from the published code:
the step length uses the true maximum over all variables, all-zero counts are safe, and fractions are in [0, 1].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epsim.policies.copies import Copies, even_fractions
from epsim.policies.splits import Sampled

STEPS = 5
DAMPING = 0.99
"""How far a step goes towards the point where the first variable becomes 0."""
BIG_M = 1000.0
"""With this and DAMPING, the method comes as near the optimum as published ports of it."""
MOST_INFEASIBLE = 0.05
"""If the artificial variable is not below this at the end, the even split is used."""
PROBLEMS = 2048
"""The most problems that are solved together."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The constraints of L layers, padded to m rows and n columns. Columns: copies, rank slacks, M.

    matrix [L, m, n] float32; unused [L, m] float32: 1 for a padded row. cost [n + 1], the artificial variable last.
    replicated [L, m - R]: the expert of each row after the ranks', padded with 0.
    column [L, P]: the column of each slot, -1 for an expert's only copy.
    """

    matrix: Tensor
    unused: Tensor
    cost: Tensor
    replicated: Tensor
    column: Tensor


def program(copies: Copies) -> Program:
    """The constraints of a placement in which at least one layer has an expert with several copies."""
    placement, device = copies.placement, copies.slot.device
    num_layers, num_ranks = placement.num_layers, placement.num_ranks
    several = copies.number > 1
    row_of = several.cumsum(1) - 1 + num_ranks
    most_rows = int(several.sum(1).max())
    in_play = copies.per_slot(several)
    column = torch.where(in_play, in_play.cumsum(1) - 1, -1)
    most_copies = int(in_play.sum(1).max())
    matrix = torch.zeros(num_layers, num_ranks + most_rows, most_copies + num_ranks + 1, device=device)
    layer, slot = in_play.nonzero(as_tuple=True)
    matrix[layer, copies.rank_of_slot[slot], column[layer, slot]] = 1
    matrix[layer, copies.per_slot(row_of)[layer, slot], column[layer, slot]] = 1
    rank = torch.arange(num_ranks, device=device)
    matrix[:, rank, most_copies + rank] = 1
    matrix[:, :num_ranks, -1] = -1
    cost = torch.zeros(matrix.shape[2] + 1, device=device)
    cost[-2], cost[-1] = 1, BIG_M
    replicated = torch.zeros(num_layers, most_rows, dtype=torch.int64, device=device)
    layer, expert = several.nonzero(as_tuple=True)
    replicated[layer, row_of[layer, expert] - num_ranks] = expert
    unused = torch.zeros(matrix.shape[:2], device=device)
    unused[:, num_ranks:] = (torch.arange(most_rows, device=device) >= several.sum(1)[:, None]).float()
    return Program(matrix, unused, cost, replicated, column)


def interior_point(matrix: Tensor, unused: Tensor, target: Tensor, cost: Tensor) -> Tensor:
    """The variables [B, n + 1], the artificial one last, for matrix [B, m, n], unused [B, m], right sides [B, m] and
    cost [n + 1]. All are float32. They are not finite if the method breaks down.
    """
    artificial = target - matrix.sum(2)
    matrix = torch.cat([matrix, artificial[:, :, None]], dim=2)
    x = torch.ones(matrix.shape[0], matrix.shape[2], device=matrix.device)
    for _ in range(STEPS):
        scaled = matrix * x[:, None, :]
        normal = scaled @ scaled.transpose(1, 2) + torch.diag_embed(unused)
        factor, failed = torch.linalg.cholesky_ex(normal)
        dual = torch.cholesky_solve(scaled @ (x * cost)[:, :, None], factor)
        reduced = x * (cost - (matrix.transpose(1, 2) @ dual)[:, :, 0])
        largest = reduced.max(1, keepdim=True).values
        x = torch.where(largest > 0, x - DAMPING * x * reduced / largest, x)
        x = torch.where(failed[:, None] > 0, torch.nan, x)
    return x


@dataclass(frozen=True, slots=True)
class LplbIpm(Sampled):
    """The published method: 5 interior point steps, then every token draws its copy by the fractions."""

    name: ClassVar[str] = "lplb-ipm"
    other_names: ClassVar[Mapping[str, str]] = {"lp": "SGLang's own solver"}
    work: ClassVar[tuple[str, ...]] = ("published_solve_us", "assign_us")
    works_without_copies: ClassVar[bool] = True
    engines: ClassVar[Mapping[str, str]] = {"sglang": "lp"}

    def fractions(self, counts: Tensor, copies: Copies) -> Tensor:
        even = copies.once(even_fractions)
        if not copies.redundant:
            return even.expand(*counts.shape[:-2], *even.shape)
        flat = counts.reshape(-1, counts.shape[-1]).to(torch.float64)
        layer = torch.arange(counts.shape[-2], device=counts.device).expand(counts.shape[:-1]).reshape(-1)
        parts = zip(torch.split(flat, PROBLEMS), torch.split(layer, PROBLEMS))
        fractions = [_fractions(*part, copies) for part in parts]
        return torch.cat(fractions or [flat]).reshape(*counts.shape[:-1], even.shape[-1])


def _fractions(counts: Tensor, layer: Tensor, copies: Copies) -> Tensor:
    """The fractions [B, P] float64 of counts [B, E] float64 in layers [B]."""
    lp = copies.once(program)
    expert, column = copies.held[layer], lp.column[layer]
    counts, alone = copies.padded(counts), column < 0
    mean = (counts.sum(1, keepdim=True) / copies.placement.num_ranks).clamp(min=1 / copies.placement.num_ranks)
    fixed = copies.per_rank(counts.gather(1, expert) * alone)
    asked = counts.gather(1, lp.replicated[layer]) * (1 - lp.unused[layer, copies.placement.num_ranks :])
    target = (torch.cat([-fixed, asked], dim=1) / mean).float()
    x = interior_point(lp.matrix[layer], lp.unused[layer], target, lp.cost)
    accepted = (counts.sum(1) > 0) & x.isfinite().all(1) & (x[:, -1] < MOST_INFEASIBLE)
    part = x.gather(1, column.clamp(min=0)).double().nan_to_num().clamp(min=0).masked_fill(alone, 1)
    part = part.masked_fill(expert == copies.number.shape[1], 0)  # of an empty slot
    whole = torch.zeros_like(counts).scatter_add_(1, expert, part).gather(1, expert)
    usable = accepted[:, None] & (whole > 0)
    return torch.where(usable, part / whole, copies.once(even_fractions)[layer])
