"""The split whose largest `a * tokens + b * active experts` of a rank is least: decode, where reading weights counts.

`reference.solve_reference` is the slow and sure integer program.
"""

from epsim.kernels.timed.solver import FEW_COPIES, MOST_NODES, TimedSolution, check_costs, solve_timed

__all__ = ["FEW_COPIES", "MOST_NODES", "TimedSolution", "check_costs", "solve_timed"]
