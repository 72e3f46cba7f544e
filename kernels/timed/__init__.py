"""The split that minimises the largest `a * tokens + b * active experts` of a rank.

It models decode, where reading the weights of active experts takes time.
"""

from epsim.kernels.timed.solver import FEW_COPIES, MOST_NODES, TimedSolution, check_costs, solve_timed

__all__ = ["FEW_COPIES", "MOST_NODES", "TimedSolution", "check_costs", "solve_timed"]
