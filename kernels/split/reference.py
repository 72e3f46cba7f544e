"""The split as a linear program, solved by OR-Tools' GLOP: slow and sure, one problem at a time."""

from __future__ import annotations

import torch


def solve_reference(
    physical_to_logical: torch.Tensor, num_ranks: int, loads: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """physical_to_logical [P] int64, loads [E] >= 0 -> the least peak, and a split [P] float64 that reaches it.

    min M, such that per rank the sum of its slots' loads <= M, and per expert the sum of its slots' loads is its load.
    Raises RuntimeError where GLOP fails. OR-Tools, https://developers.google.com/optimization/lp.
    """
    from ortools.linear_solver import pywraplp

    slots_per_rank = len(physical_to_logical) // num_ranks
    # Scaled to a mean of one: GLOP's tolerances are absolute.
    scale = float(loads.sum()) / num_ranks or 1.0
    solver = pywraplp.Solver.CreateSolver("GLOP")
    peak = solver.NumVar(0, solver.infinity(), "peak")
    solver.Minimize(peak)
    per_rank = [solver.Constraint(-solver.infinity(), 0) for _ in range(num_ranks)]
    per_expert = [solver.Constraint(load / scale, load / scale) for load in loads.tolist()]
    for row in per_rank:
        row.SetCoefficient(peak, -1)
    split = []
    for slot, expert in enumerate(physical_to_logical.tolist()):
        share = solver.NumVar(0, solver.infinity(), "")
        per_rank[slot // slots_per_rank].SetCoefficient(share, 1)
        per_expert[expert].SetCoefficient(share, 1)
        split.append(share)
    if solver.Solve() != solver.OPTIMAL:
        raise RuntimeError("GLOP found no optimum of the split problem")
    return peak.solution_value() * scale, torch.tensor([s.solution_value() * scale for s in split], dtype=torch.float64)
