"""The timed split as an integer program, solved by OR-Tools' CP-SAT, one problem at a time. The reference in tests."""

from __future__ import annotations

from collections import defaultdict

import torch


def solve_reference(
    physical_to_logical: torch.Tensor, num_ranks: int, counts: torch.Tensor, a: int, b: int, seconds: float = 60.0
) -> tuple[int, int, torch.Tensor]:
    """Minimises M subject to a * tokens + b * active <= M on each rank.

    physical_to_logical [P] int64, -1 for an empty slot; counts [E] int64; a, b >= 0. Returns the cost of the best
    split, a lower bound (equal to the cost if optimality is proven in time), and the split [P] int64. OR-Tools:
    https://developers.google.com/optimization/cp/cp_solver. Raises RuntimeError if no split is found.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    slots_per_rank = len(physical_to_logical) // num_ranks
    number = [int(n) for n in counts.tolist()]
    peak = model.new_int_var(0, a * sum(number) + b * slots_per_rank, "")
    per_rank, per_expert, parts = defaultdict(list), defaultdict(list), []
    for slot, expert in enumerate(physical_to_logical.tolist()):
        most = number[expert] if expert >= 0 else 0
        part, active = model.new_int_var(0, most, ""), model.new_bool_var("")
        model.add(part <= most * active)
        per_rank[slot // slots_per_rank].append(a * part + b * active)
        if expert >= 0:
            per_expert[expert].append(part)
        parts.append(part)
    for costs in per_rank.values():
        model.add(sum(costs) <= peak)
    for expert, shares in per_expert.items():
        model.add(sum(shares) == number[expert])
    model.minimize(peak)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError("CP-SAT found no split")
    split = torch.tensor([solver.value(part) for part in parts])
    return round(solver.objective_value), round(solver.best_objective_bound), split
