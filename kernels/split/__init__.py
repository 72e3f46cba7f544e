"""The per-batch split: which copy of a replicated expert serves how much, so that the slowest rank is least slow.

`prepare` once per placement, then `solve` per batch. `reference.solve_reference` is the slow and sure linear program.
"""

from epsim.kernels.split.solver import Backend, Solution, solve, solve_batched, solve_gathered, solve_peak
from epsim.kernels.split.structure import SplitStructure, prepare

__all__ = ["Backend", "Solution", "SplitStructure", "prepare", "solve", "solve_batched", "solve_gathered", "solve_peak"]
