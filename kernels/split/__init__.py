"""The per-batch split: how much each copy of a replicated expert serves, so that the peak load is lowest.

Call `prepare` once per placement, then `solve` once per batch. `reference.solve_reference` solves the same problem as a
linear program; it is slow and serves as the reference in tests.

    structure = prepare(torch.tensor([[0, 1, 0, 2]]), num_ranks=2)  # expert 0 has a copy on both ranks
    solution = solve(structure, torch.tensor([[10, 4, 2]]), layer=torch.tensor([0]))
    solution.peak  # tensor([8.]): ranks serve 4 + 4 and 6 + 2
"""

from epsim.kernels.split.solver import Backend, Solution, solve, solve_batched, solve_gathered, solve_peak
from epsim.kernels.split.structure import SplitStructure, prepare

__all__ = ["Backend", "Solution", "SplitStructure", "prepare", "solve", "solve_batched", "solve_gathered", "solve_peak"]
