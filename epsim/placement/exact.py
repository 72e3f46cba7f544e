"""Improves small placements by constraint programming (OR-Tools' CP-SAT)."""

import numpy as np

from epsim.placement.annealing import Floats, Ints

MAX_TERMS = 4096
"""The largest model that is worth solving, in terms (`num_terms`)."""
SCALE = 10**6
"""CP-SAT works on integers, so loads and weights are multiplied by this and rounded."""


def num_terms(num_experts: int, num_ranks: int, num_slots: int, num_rows: int) -> int:
    """The number of terms of the model that `improve` builds."""
    return num_experts * num_ranks * min(num_ranks, num_slots - num_experts + 1) * num_rows


def improve(rows: Floats, weight: Floats, slots: Ints, effort: float, seconds: float) -> Ints | None:
    """A placement with a lower score than the given one, or None if none was found.

    rows [E, rows], weight [rows]: as for annealing. slots [R, slots per rank]: no rank holds an expert twice.
    effort: limit in CP-SAT's deterministic time (about seconds). seconds: limit in real time. If `effort` is reached
    first, the result does not depend on the speed of the machine.

    The model has a Boolean on[e, r, c]: expert e has c copies, and rank r holds one of them, which serves rows[e] / c.
    It minimises the weighted sum over rows of the peak load.
    """
    from ortools.sat.python import cp_model

    num_experts, num_rows = rows.shape
    num_ranks, slots_per_rank = slots.shape
    most = min(num_ranks, slots.size - num_experts + 1)
    copies = np.bincount(slots.ravel(), minlength=num_experts)
    model = cp_model.CpModel()
    on = {}
    for e in range(num_experts):
        chosen = [model.new_bool_var("") for _ in range(most)]
        model.add_exactly_one(chosen)
        for c, choice in enumerate(chosen, start=1):
            for r in range(num_ranks):
                on[e, r, c] = model.new_bool_var("")
                model.add_hint(on[e, r, c], bool(copies[e] == c and (slots[r] == e).any()))
            model.add(sum(on[e, r, c] for r in range(num_ranks)) == c * choice)
    for r in range(num_ranks):
        model.add(sum(literal for (_, rank, _), literal in on.items() if rank == r) == slots_per_rank)
    objective = []
    for row in range(num_rows):
        peak = model.new_int_var(0, SCALE * (num_ranks + 1), "")
        for r in range(num_ranks):
            served = [round(SCALE * rows[e, row] / c) * literal for (e, rank, c), literal in on.items() if rank == r]
            model.add(sum(served) <= peak)
        objective.append(round(SCALE * weight[row]) * peak)
    model.minimize(sum(objective))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = [
        [e for (e, rank, _), literal in on.items() if rank == r and solver.value(literal)] for r in range(num_ranks)
    ]
    better = np.array(found, dtype=np.int64)
    return better if score(rows, weight, better) < score(rows, weight, slots) else None


def score(rows: Floats, weight: Floats, slots: Ints) -> float:
    """The weighted mean over rows of the peak load. Shapes are those of `improve`."""
    copies = np.bincount(slots.ravel(), minlength=len(rows))
    load = (rows / copies[:, None])[slots].sum(axis=1)
    return float(load.max(axis=0) @ weight)
