"""The split that minimises the largest `a * tokens + b * active experts` of a rank.

It models decode, where reading the weights of active experts takes time. `reference.solve_reference` solves the same
problem as an integer program; it is slow and serves as the reference in tests.
"""

from epsim.kernels.timed.solver import FEW_COPIES, MOST_NODES, TimedSolution, check_costs, solve_timed

__all__ = ["FEW_COPIES", "MOST_NODES", "TimedSolution", "check_costs", "solve_timed"]
