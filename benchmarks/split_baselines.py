"""Other methods to split a batch, each implemented from its publication, and the check of all answers."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from epsim.kernels.split import SplitStructure
from epsim.kernels.split.reference import SplitProgram
from epsim.policies.copies import Copies

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

TOLERANCE = 1e-6
"""The share of the mean rank load by which a feasible answer may be off."""
LANES = 32


def judge(structure: SplitStructure, loads: Ints, layer: Ints, split: Floats) -> tuple[Floats, Flags]:
    """The peak [B] of a solver's split [B, P] for loads [B, E] of layers [B], and whether it is feasible [B].

    A split is infeasible if it is not finite, if a slot is outside 0 to its expert's load, or if an expert's slots do
    not add up to its load, each by more than TOLERANCE of the mean rank load.
    """
    slots = structure.physical_to_logical.numpy()[layer]
    finite = np.isfinite(split).all(1)
    split = np.where(finite[:, None], split, 0)
    allowed = TOLERANCE * loads.sum(1, keepdims=True) / structure.num_ranks
    outside = (split < -allowed) | (split > np.take_along_axis(loads, slots, 1) + allowed)
    sums = np.zeros(loads.shape)
    np.add.at(sums, (np.arange(len(loads))[:, None], slots), split)
    peak: Floats = split.reshape(len(split), structure.num_ranks, -1).sum(2).max(1)
    return peak, finite & ~outside.any(1) & ~(abs(sums - loads) > allowed).any(1)


class HighsProgram:
    """The program of `epsim.kernels.split.reference` for HiGHS; only copies of replicated experts are variables."""

    def __init__(self, physical_to_logical: Ints, num_ranks: int, loads: Ints) -> None:
        """physical_to_logical [P], loads [E]."""
        import highspy

        counts = np.bincount(physical_to_logical, minlength=len(loads))
        rank = np.arange(len(physical_to_logical)) // (len(physical_to_logical) // num_ranks)
        self.replicated = counts[physical_to_logical] > 1
        self.loads = loads[physical_to_logical].astype(np.float64)
        self.scale = float(loads.sum()) / num_ranks or 1.0
        copies, experts = np.flatnonzero(self.replicated), np.flatnonzero(counts > 1)
        row = num_ranks + np.searchsorted(experts, physical_to_logical[copies])
        fixed = np.bincount(rank, self.loads * ~self.replicated, num_ranks) / self.scale
        asked = loads[experts] / self.scale
        num, rows = len(copies) + 1, num_ranks + len(experts)
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = num, rows
        program.col_cost_ = np.append(np.zeros(num - 1), 1.0)
        program.col_lower_, program.col_upper_ = np.zeros(num), np.full(num, highspy.kHighsInf)
        program.row_lower_ = np.concatenate((np.full(num_ranks, -highspy.kHighsInf), asked))
        program.row_upper_ = np.concatenate((-fixed, asked))
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kColwise
        matrix.start_ = np.append(2 * np.arange(num), 2 * (num - 1) + num_ranks)
        matrix.index_ = np.concatenate((np.stack((rank[copies], row), axis=1).ravel(), np.arange(num_ranks)))
        matrix.value_ = np.concatenate((np.ones(2 * len(copies)), np.full(num_ranks, -1.0)))
        self.solver = highspy.Highs()
        self.solver.setOptionValue("output_flag", False)
        self.solver.setOptionValue("threads", 1)
        self.solver.passModel(program)
        self.optimal = highspy.HighsModelStatus.kOptimal

    def solve(self) -> Floats:
        """A split [P] of the lowest peak; NaN if HiGHS finds no optimum."""
        self.solver.run()
        if self.solver.getModelStatus() != self.optimal:
            return np.full(len(self.loads), np.nan)
        split = self.loads.copy()
        split[self.replicated] = np.array(self.solver.getSolution().col_value)[:-1] * self.scale
        return split


class GlopProgram(SplitProgram):
    def __init__(self, physical_to_logical: Ints, num_ranks: int, loads: Ints) -> None:
        super().__init__(torch.from_numpy(physical_to_logical), num_ranks, torch.from_numpy(loads))

    def solve(self) -> Floats:  # type: ignore[override]
        """A split [P] of the lowest peak; NaN if GLOP finds no optimum."""
        try:
            return super().solve()[1].numpy()
        except RuntimeError:
            return np.full(len(self.split), np.nan)


def solve_by(
    program_of: type[GlopProgram | HighsProgram], slots: Ints, num_ranks: int, loads: Ints
) -> tuple[Floats, float, float]:
    """The split [B, P] for slots [B, P] and loads [B, E], the seconds of all solves, and those of building all
    models."""
    splits, solving, building = [], 0.0, 0.0
    for own_slots, own_loads in zip(slots, loads):
        start = time.perf_counter()
        program = program_of(own_slots, num_ranks, own_loads)
        built = time.perf_counter()
        splits.append(program.solve())
        solving += time.perf_counter() - built
        building += built - start
    return np.array(splits), solving, building


def lplb_fractions(
    physical_to_logical: torch.Tensor, num_ranks: int, loads: torch.Tensor, true_maximum: bool
) -> torch.Tensor:
    """LPLB's five interior-point steps: physical_to_logical [P], loads [B, E] int64 -> fractions [B, P] float64.

    Variables, in this order: each replicated slot's fraction, a slack per rank, the peak, and the artificial one of
    cost 1000. Loads are in units of the largest expert's. All variables start at 1. A step goes 0.999 of the way to the
    first variable that would become 0. In the published kernel (deepseek-ai/LPLB, minilp.cu) only the last 32 variables
    limit the step, because each lane keeps its last value, not its largest; `true_maximum` corrects this. The solution
    is used if it passes LPLB's three tests, otherwise the split is even. The last copy of an expert takes the remaining
    fraction. LPLB has two copies per expert; this code allows any number.
    """
    num_problems, num_slots = len(loads), len(physical_to_logical)
    number = torch.bincount(physical_to_logical, minlength=loads.shape[1])
    rank = torch.arange(num_slots) // (num_slots // num_ranks)
    even = number.double().reciprocal()[physical_to_logical].repeat(num_problems, 1)
    copies = (number[physical_to_logical] > 1).nonzero()[:, 0]
    if not len(copies):
        return even
    experts = (number > 1).nonzero()[:, 0]
    expert = physical_to_logical[copies]
    row = torch.searchsorted(experts, expert)
    num, rows, place = len(copies), num_ranks + len(experts), torch.arange(len(copies))
    scaled = (loads.double() / loads.amax(1, keepdim=True).clamp(min=1)).float()

    matrix = torch.zeros(num_problems, rows, num + num_ranks + 2)
    matrix[:, rank[copies], place] = scaled[:, expert]
    matrix[:, num_ranks + row, place] = 1
    matrix[:, torch.arange(num_ranks), num + torch.arange(num_ranks)] = 1
    matrix[:, :num_ranks, -2] = -1
    target = torch.ones(num_problems, rows)
    single = (number[physical_to_logical] == 1).float()
    target[:, :num_ranks] = -(scaled[:, physical_to_logical] * single).reshape(num_problems, num_ranks, -1).sum(2)
    matrix[:, :, -1] = target - matrix.sum(2)
    cost = torch.zeros(matrix.shape[2])
    cost[-2:] = torch.tensor([1.0, 1000.0])

    x = torch.ones(num_problems, matrix.shape[2])
    largest = x[:, :1]
    for _ in range(5):
        weighted = matrix * x[:, None]
        factor, failed = torch.linalg.cholesky_ex(weighted @ weighted.mT)
        dual = torch.cholesky_solve(weighted @ (x * cost)[:, :, None], factor)
        step = x * (cost - (matrix.mT @ dual)[:, :, 0])
        largest = (step if true_maximum else step[:, -LANES:]).amax(1, keepdim=True)
        x = torch.where(failed[:, None] > 0, torch.nan, x * (1 - 0.999 / largest * step))
    residual = ((matrix @ x[:, :, None])[:, :, 0] - target).abs().amax(1)
    taken = (largest[:, 0] < 0.1) & (x[:, -1] >= 0) & (x[:, -1] < 1e-4) & (residual < 0.05)

    fraction = x[:, :num].double()
    last = torch.zeros(num, dtype=torch.bool)
    last[torch.zeros(len(experts), dtype=torch.int64).scatter_reduce_(0, row, place, "amax")] = True
    others = torch.zeros(num_problems, len(experts), dtype=torch.float64)
    others.index_add_(1, row[~last], fraction[:, ~last])
    fraction[:, last] = 1 - others[:, row[last]]
    even[:, copies] = torch.where(taken[:, None], fraction, even[:, copies])
    return even


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """One layer whose replicated experts have two slots each, on different ranks: edges in the order of their colours.

    expert, slots [edges, 2], ranks [edges, 2]; colours [edges]: ascending, no two edges of one share a rank.
    """

    expert: Ints
    slots: Ints
    ranks: Ints
    colours: Ints


def pairs_of(physical_to_logical: Ints, num_ranks: int) -> Pairs | None:
    """The pairs of a layer's slots [P]; None if an expert has more than two copies or there are more than 32 ranks."""
    number = np.bincount(physical_to_logical)
    if num_ranks > LANES or number.max() > 2:
        return None
    expert = np.flatnonzero(number == 2)
    order = np.argsort(physical_to_logical, kind="stable")
    first = np.searchsorted(physical_to_logical[order], expert)
    slots = np.stack((order[first], order[first + 1]), axis=1)
    ranks = slots // (len(physical_to_logical) // num_ranks)
    if (ranks[:, 0] == ranks[:, 1]).any():
        return None
    colours = np.zeros(len(expert), np.int64)
    taken: list[set[int]] = [set() for _ in range(num_ranks)]
    for edge, (u, v) in enumerate(ranks.tolist()):
        colour = next(c for c in range(len(expert) + 1) if c not in taken[u] and c not in taken[v])
        taken[u].add(colour)
        taken[v].add(colour)
        colours[edge] = colour
    by_colour = np.argsort(colours, kind="stable")
    return Pairs(expert[by_colour], slots[by_colour], ranks[by_colour], colours[by_colour])


@njit(cache=True, nogil=True)
def balance_pairs(base: Singles, weight: Singles, ranks: Ints, sweeps: int, tolerance: float) -> Singles:
    """base [B, R], weight [B, edges] -> flow [B, edges]: what moves from each edge's first rank to its second.

    B. Lyu, A Graph-Native CUDA Solver for MoE Load Balancing (2026). Each flow starts at half of its weight. A sweep
    goes over the edges: each moves half the difference of the loads of its two ranks, within 0 .. weight. It ends when
    no edge of a sweep moves more than the tolerance, or after the last sweep. In float32; loads are in units of the
    largest expert's. Edges of one colour share no rank, so they are processed at the same time.
    """
    num_problems, num_edges = weight.shape
    flow = np.empty((num_problems, num_edges), np.float32)
    for b in range(num_problems):
        load = base[b].copy()
        for e in range(num_edges):
            flow[b, e] = np.float32(0.5) * weight[b, e]
            load[ranks[e, 0]] += weight[b, e] - flow[b, e]
            load[ranks[e, 1]] += flow[b, e]
        for _ in range(sweeps):
            most = np.float32(0)
            for e in range(num_edges):
                u, v = ranks[e, 0], ranks[e, 1]
                move = np.float32(0.5) * (load[u] - load[v])
                move = max(-flow[b, e], min(move, weight[b, e] - flow[b, e]))
                flow[b, e] += move
                load[u] -= move
                load[v] += move
                most = max(most, abs(move))
            if most <= tolerance:
                break
    return flow


def split_pairs(pairs: Pairs, physical_to_logical: Ints, num_ranks: int, loads: Ints) -> Floats:
    """The split [B, P] of loads [B, E] by `balance_pairs`, with the published 64 sweeps and tolerance 1e-5."""
    scale = np.maximum(loads.max(1, keepdims=True), 1).astype(np.float64)
    split = loads[:, physical_to_logical].astype(np.float64)
    split[:, pairs.slots.ravel()] = 0
    base = (split.reshape(len(loads), num_ranks, -1).sum(2) / scale).astype(np.float32)
    whole = loads[:, pairs.expert]
    weight = (whole / scale).astype(np.float32)
    flow = balance_pairs(base, weight, pairs.ranks, 64, 1e-5)
    share = np.divide(flow, weight, out=np.full(flow.shape, 0.5, np.float32), where=weight > 0).astype(np.float64)
    split[:, pairs.slots[:, 0]] = whole * (1 - share)
    split[:, pairs.slots[:, 1]] = whole * share
    return split


def sampled(copies: Copies, layer: Ints, loads: Ints, fractions: Floats, rng: np.random.Generator) -> Floats:
    """The split [B, P], in whole tokens, if each token of loads [B, E] draws its copy with probabilities [B, P]."""
    slot = copies.slot.numpy()[layer]
    number, first = copies.number.numpy()[layer], copies.first.numpy()[layer]
    part = np.take_along_axis(fractions, slot, 1)
    drawn = np.zeros(part.shape)
    left, chance = loads.copy(), np.ones(loads.shape)
    rows = np.arange(len(loads))[:, None]
    for k in range(int(number.max())):
        here = number > k
        at = np.where(here, first + k, 0)
        own = np.where(here, part[rows, at], 0)
        last = number == k + 1
        share = np.clip(np.divide(own, chance, out=np.ones(own.shape), where=(chance > 0) & ~last), 0, 1)
        taken = np.where(here, rng.binomial(left, share), 0)
        left, chance = left - taken, chance - own
        drawn[np.nonzero(here)[0], at[here]] = taken[here]
    split = np.empty(drawn.shape)
    np.put_along_axis(split, slot, drawn, 1)
    return split
