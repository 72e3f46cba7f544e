"""A placement found by search. It is scored on single steps of the history instead of on their sum."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import numpy as np
import torch

from epsim.parallel import cores
from epsim.placement.annealing import Floats, Ints, Words, anneal
from epsim.placement.balance import even_balance
from epsim.placement.base import Cluster, Placement, PlacementPolicy, Target
from epsim.placement.eplb import Eplb, prefers_global
from epsim.placement.exact import MAX_TERMS, improve, num_terms

MAX_WINDOWS = 32
TILT = 0.1
# Moves that are proposed per slot in an annealing with up to FULL_ROWS rows. With more rows fewer moves are proposed,
# so that the work stays the same.
MOVES_PER_SLOT = 400
FULL_ROWS = 12
STRETCHES = 10
# First temperatures of the annealings, in units of a slot's mean load, and the factor by which they fall. The first one
# stays near EPLB's placement. The others are better for few slots per rank, but keep less of EPLB's placement, so their
# score must be lower by the share MARGIN.
HEATS = (0.01, 0.1, 0.4)
COOLING = 100
MARGIN = 0.003
EXACT_EFFORT = 1.0


def load_rows(history: torch.Tensor, num_ranks: int) -> tuple[Floats, Floats]:
    """The loads by which a search scores a placement of history [S, L, E]: rows [L, E, rows], scaled to a mean rank
    load of 1, and the weights of the rows [L, rows], which sum to 1 for each layer.

    - There is one row per step, or per window of consecutive steps if there are more than MAX_WINDOWS steps. Windows
      differ partly by chance. So rows are moved towards their mean by the share of their variance that random draws of
      as many assignments would explain (as in James and Stein's estimator).
    - There are two more rows, for routing that becomes more even or more skewed: the mean to the powers 1 - TILT and
      1 + TILT.
    """
    num_steps, num_layers, num_experts = history.shape
    num_windows = min(num_steps, MAX_WINDOWS)
    counts = torch.zeros(num_windows, num_layers, num_experts, dtype=torch.float64)
    for window, steps in enumerate(history.tensor_split(num_windows)):
        counts[window] = steps.sum(0)
    total = counts.sum(-1)
    weight = (total > 0).to(torch.float64)
    share = counts / total.clamp(min=1)[..., None]
    mean = share.sum(0) / weight.sum(0).clamp(min=1)[:, None]
    spread = (((share - mean) ** 2).sum(-1) * weight).sum(0)
    chance = ((share * (1 - share)).sum(-1) / total.clamp(min=1)).sum(0)
    real = torch.where(spread > 0, 1 - chance / spread, 0.0).clamp(min=0)
    share = torch.cat([mean + real[:, None] * (share - mean), torch.stack([mean ** (1 - TILT), mean ** (1 + TILT)])])
    rows = share / share.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny) * num_ranks
    weight = torch.cat([weight, torch.ones(2, num_layers)])
    return rows.permute(1, 2, 0).contiguous().numpy(), (weight / weight.sum(0)).T.contiguous().numpy()


@dataclass(frozen=True, slots=True)
class Searched(PlacementPolicy):
    """Improves EPLB's placement by simulated annealing, layer by layer, and small layers also by CP-SAT.

    The score is peak / mean rank load under an even split, averaged over the history's steps. A layer keeps EPLB's
    placement if that has a better score on the history. If EPLB is hierarchical, experts stay on the nodes that it
    chose.

    seconds: time limit for all layers together. The sizes alone determine the amount of work (58 layers of 320 slots on
    64 ranks: 5 s of one core). So the same history and seed give the same placement on every machine that finishes in
    time; otherwise the annealing is cut short.
    """

    seconds: float = 30.0
    seed: int = 0
    name: ClassVar[str] = "searched"
    complexity: ClassVar[int] = 2
    needs_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"a search of {self.seconds} seconds: give more than 0")
        if self.seed < 0:
            raise ValueError(f"searched: seed={self.seed}: give 0 or more")

    def notes(self, num_experts: int, target: Target) -> tuple[str, ...]:
        return Eplb().notes(num_experts, target)

    def plan(self, history: torch.Tensor, cluster: Cluster) -> Placement:
        start = Eplb().plan(history, cluster)
        sizes = (start.num_experts, start.num_physical, cluster.num_groups, cluster.num_nodes, start.num_ranks)
        span = start.num_ranks if prefers_global(*sizes) else start.num_ranks // start.num_nodes
        rows, weight = load_rows(history, start.num_ranks)
        slots = start.physical_to_logical.view(start.num_layers, start.num_ranks, -1).cpu().numpy()
        # The first call after an installation compiles for some seconds, which do not count.
        anneal(rows[0], weight[0], span, slots[0].copy(), slots[0].copy(), 0.0, np.ones(1, np.uint64), 0, 1.0, 1.0)
        clock = _Clock(self.seconds)
        with ThreadPoolExecutor(cores()) as pool:
            best = _anneal_layers(rows, weight, slots, span, self.seed, clock, pool)
            if span == start.num_ranks:
                best = _improve_layers(rows, weight, best, clock, pool)
        searched = _placed(torch.from_numpy(best).to(history.device).flatten(1), start)
        worse = _mean_balance(history, searched) > _mean_balance(history, start)
        return _placed(torch.where(worse[:, None], start.physical_to_logical, searched.physical_to_logical), start)


class _Clock:
    """Reduces the work if the time is too short for all of it."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.seconds = seconds

    @property
    def left(self) -> float:
        return max(self.end - time.perf_counter(), 0.0)

    def share(self, work_left: float) -> float:
        """The share of the next piece of work for which there is time. work_left: share of all work still to be
        done."""
        return min(1.0, self.left / (self.seconds * work_left))


def _anneal_layers(
    rows: Floats, weight: Floats, start: Ints, span: int, seed: int, clock: _Clock, pool: ThreadPoolExecutor
) -> Ints:
    """The best slots [L, R, slots per rank] of the annealings from `start`, one for each heat."""
    num_layers, _, num_rows = rows.shape
    slots_per_rank = start.shape[2]
    moves = MOVES_PER_SLOT * start[0].size * FULL_ROWS // max(num_rows, FULL_ROWS) // STRETCHES
    random: Words = np.random.default_rng(seed).integers(1, 2**63, (num_layers,), dtype=np.uint64)
    best, best_score = start.copy(), np.full(num_layers, np.inf)
    for attempt, heat in enumerate(HEATS):
        slots, heat_best, heat_score = start.copy(), start.copy(), np.full(num_layers, np.inf)
        for stretch in range(STRETCHES):
            hot, cold = (heat / slots_per_rank * COOLING ** -(part / STRETCHES) for part in (stretch, stretch + 1))
            left = 1 - (attempt * STRETCHES + stretch) / (len(HEATS) * STRETCHES)
            num_moves = int(moves * clock.share(left))
            layers = zip(rows, weight, repeat(span), slots, heat_best, heat_score, random.reshape(-1, 1))
            state = [(*layer, num_moves, hot, cold) for layer in layers]
            heat_score = np.array(list(pool.map(lambda arguments: anneal(*arguments), state)))
        better = heat_score < best_score * (1 - MARGIN)
        best[better], best_score[better] = heat_best[better], heat_score[better]
    return best


def _improve_layers(rows: Floats, weight: Floats, slots: Ints, clock: _Clock, pool: ThreadPoolExecutor) -> Ints:
    """Slots [L, R, slots per rank], improved by CP-SAT if the problem is small enough."""
    num_layers, num_experts, num_rows = rows.shape
    num_ranks, slots_per_rank = slots.shape[1:]
    if num_terms(num_experts, num_ranks, slots[0].size, num_rows) > MAX_TERMS or slots_per_rank > num_experts:
        return slots

    def run(layer: int) -> Ints:
        improved = improve(rows[layer], weight[layer], slots[layer], EXACT_EFFORT / num_layers, clock.left)
        return slots[layer] if improved is None else improved

    return np.stack(list(pool.map(run, range(num_layers))))


def _placed(slots: torch.Tensor, like: Placement) -> Placement:
    return Placement(slots, like.num_experts, like.num_ranks, like.num_nodes)


def _mean_balance(history: torch.Tensor, placement: Placement) -> torch.Tensor:
    """[L]: `even_balance`, averaged over the steps of history [S, L, E] in bounded memory."""
    num_blocks = -(-history.numel() // 2**22)
    blocks = history.tensor_split(num_blocks)
    return torch.stack([even_balance(block, placement).sum(0) for block in blocks]).sum(0) / len(history)
