"""The split for memory-bound decode: minimises the largest a * tokens + b * active experts of a rank."""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from epsim.kernels.split import SplitStructure, solve_gathered

FEW_COPIES = 16
"""Problems with at most this many copies of replicated experts with tokens are always solved to optimality."""
MOST_NODES = 200
TARGET_NODES = 30
"""The most search nodes of a larger problem, and of one target in it."""
LARGEST = 1 << 30
"""a and b are converted to integers of at most this value, with their exact ratio if possible."""
MOST_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class TimedSolution:
    """The solutions of problems [...].

    split [..., P] int64: the tokens of each slot, 0 for an empty slot. cost [...] float64: the largest
    a * tokens + b * active of a rank. bound [...] float64: a lower bound on the cost of any split into whole tokens.
    proven [...] bool: whether the split is proven optimal. nodes [...] int64: the number of search nodes.
    """

    split: torch.Tensor
    cost: torch.Tensor
    bound: torch.Tensor
    proven: torch.Tensor
    nodes: torch.Tensor


def solve_timed(
    structure: SplitStructure,
    counts: torch.Tensor,
    a: float,
    b: float,
    *,
    few_copies: int = FEW_COPIES,
    most_nodes: int = MOST_NODES,
    target_nodes: int = TARGET_NODES,
) -> TimedSolution:
    """Splits each expert's tokens over its copies so that the largest a * tokens + b * active of a rank is lowest.

    counts [..., L, E] int64 >= 0. a, b: the costs of a token and of an active expert, in any one unit; finite, >= 0,
    not both 0. If a rank has several slots of an expert, only the first one serves tokens. The cost is never above that
    of `solve_gathered`. Solved on the CPU.
    Raises ValueError for other costs, for negative counts, and for more than 2^31 assignments in one layer.
    """
    check_costs(a, b)
    begin = solve_gathered(structure, counts)  # also checks the counts
    largest = int(counts.sum(-1, dtype=torch.float64).max()) if counts.numel() else 0
    if largest > MOST_TOKENS:
        raise ValueError(f"{largest} assignments in one layer are more than 2^31: scale the counts down")
    from epsim.kernels.timed.search import solve_range

    price, opening = whole_costs(a, b)
    flat = counts.reshape(-1, structure.num_experts).to("cpu", torch.int64).contiguous()
    start = begin.split.reshape(-1, structure.num_physical).cpu().contiguous()
    num_layers = structure.num_layers
    layer = torch.arange(num_layers).repeat(len(flat) // num_layers)
    split = torch.empty_like(start)
    cost, bound, nodes = torch.empty(3, len(flat), dtype=torch.int64)
    solve_range(
        flat.numpy(),
        layer.numpy(),
        structure.tables,
        start.numpy(),
        price,
        opening,
        few_copies,
        most_nodes,
        target_nodes,
        split.numpy(),
        cost.numpy(),
        bound.numpy(),
        nodes.numpy(),
    )
    lead, device = counts.shape[:-1], counts.device
    unit = a / price if price >= opening else b / opening
    return TimedSolution(
        split=split.reshape(*lead, structure.num_physical).to(device),
        cost=(cost.double() * unit).reshape(lead).to(device),
        bound=(bound.double() * unit).reshape(lead).to(device),
        proven=(cost == bound).reshape(lead).to(device),
        nodes=nodes.reshape(lead).to(device),
    )


def check_costs(a: float, b: float) -> None:
    """Raises ValueError if a and b are not valid costs of a token and an active expert."""
    for name, value in (("a", a), ("b", b)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value} is not a valid cost: give a finite number >= 0")
    if a == b == 0:
        raise ValueError("a=0 and b=0 leave nothing to minimise: give at least one above 0")


def whole_costs(a: float, b: float) -> tuple[int, int]:
    """Integers of at most 2^30 in the ratio of the decimal values of a and b.

    The ratio is exact if such integers exist. Otherwise each value is rounded to 2^-30 of the larger one, and to at
    least 1 if it is above 0.
    """
    exact = [Fraction(repr(float(value))) for value in (a, b)]
    scale = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * scale) for value in exact]
    common = math.gcd(*whole)
    whole = [value // common for value in whole]
    if max(whole) > LARGEST:
        scaled = [Fraction(value * LARGEST, max(whole)) for value in whole]
        whole = [max(round(value), 1) if value else 0 for value in scaled]
    return whole[0], whole[1]
