"""The split as a linear program, solved by OR-Tools' GLOP, one problem at a time. Slow; the reference in tests."""

import torch


class SplitProgram:
    """Minimises M subject to: the slots of a rank sum to at most M, the slots of an expert sum to its load.

    physical_to_logical [P] int64, -1 for an empty slot; loads [E] >= 0.
    OR-Tools: https://developers.google.com/optimization/lp.
    """

    def __init__(self, physical_to_logical: torch.Tensor, num_ranks: int, loads: torch.Tensor) -> None:
        from ortools.linear_solver import pywraplp

        slots_per_rank = len(physical_to_logical) // num_ranks
        # Loads are scaled to a mean of 1, because GLOP's tolerances are absolute.
        self.scale = float(loads.sum()) / num_ranks or 1.0
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        no_limit = self.solver.infinity()
        self.peak = self.solver.NumVar(0, no_limit, "")
        self.solver.Minimize(self.peak)
        per_rank = [self.solver.Constraint(-no_limit, 0) for _ in range(num_ranks)]
        per_expert = [self.solver.Constraint(load / self.scale, load / self.scale) for load in loads.tolist()]
        for row in per_rank:
            row.SetCoefficient(self.peak, -1)
        self.split = []
        for slot, expert in enumerate(physical_to_logical.tolist()):
            part = self.solver.NumVar(0, no_limit if expert >= 0 else 0, "")
            per_rank[slot // slots_per_rank].SetCoefficient(part, 1)
            if expert >= 0:
                per_expert[expert].SetCoefficient(part, 1)
            self.split.append(part)

    def solve(self) -> tuple[float, torch.Tensor]:
        """The lowest peak and a split [P] float64 that reaches it. Raises RuntimeError if GLOP fails."""
        if self.solver.Solve() != self.solver.OPTIMAL:
            raise RuntimeError("GLOP found no optimum of the split problem")
        split = [part.solution_value() * self.scale for part in self.split]
        return self.peak.solution_value() * self.scale, torch.tensor(split, dtype=torch.float64)


def solve_reference(
    physical_to_logical: torch.Tensor, num_ranks: int, loads: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """physical_to_logical [P] int64, loads [E] >= 0 -> the lowest peak, and a split [P] float64 that reaches it."""
    return SplitProgram(physical_to_logical, num_ranks, loads).solve()
