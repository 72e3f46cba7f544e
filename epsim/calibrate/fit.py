"""Tiles and waves of a grouped GEMM, found from a measured grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from epsim.cost.experts_time import SLOTS_A_ROW, ExpertTable
from epsim.cost.model import ModelSpec
from epsim.cost.tiled import TERMS, TiledFit

Floats = npt.NDArray[np.float64]
Draws = Callable[[int, float], list[torch.Tensor]]
"""Active experts and tokens per expert of a cell -> the loads [active] of its draws."""

ROWS, COLUMNS = (64, 128, 256), (64, 128, 256)
LEAST_CELLS = 3 * TERMS


def fit_tiles(table: ExpertTable, model: ModelSpec, draws: Draws, sms: int) -> TiledFit | None:
    """The tiling with the least relative squares, its coefficients none negative; None for a grid of few cells.

    sms: multiprocessors; all or half of them (in pairs), or two tiles on each, work at once.
    """
    cells = [
        (draws(int(active), size), SLOTS_A_ROW, time)
        for size, row in zip(table.tokens_per_expert, table.us, strict=True)
        for active, time in zip(table.active, row, strict=True)
        if time is not None
    ]
    cells += [(draws(int(one.active), one.tokens_per_expert), one.slots_a_row, one.us) for one in table.cells]
    if len(cells) < LEAST_CELLS:
        return None
    times = np.array([time for _, _, time in cells])
    # Where all rows have as many slots, a row's time is its slots'.
    last = TERMS if table.cells else TERMS - 1
    found: list[tuple[float, TiledFit]] = []
    # The largest first: of tilings that fit alike, those are the fewest tiles.
    for rows, columns, at_once in itertools.product(ROWS[::-1], COLUMNS[::-1], (sms // 2, sms, 2 * sms)):
        shape = TiledFit(rows, columns, at_once, (1.0,) * TERMS)
        terms = np.array([_mean_terms(shape, loads, slots, model) for loads, slots, _ in cells])[:, :last]
        coefficients = non_negative(terms / times[:, None], np.ones(len(times)))
        error = float(np.square(terms @ coefficients / times - 1).sum())
        found.append((error, TiledFit(rows, columns, at_once, tuple(float(f"{c:.6g}") for c in coefficients))))
    return min(found, key=lambda one: one[0])[1]


def num_rows(counts: torch.Tensor, columns: int, slots_a_row: float) -> int:
    """Rows of a rank whose slot s has counts[s] assignments: no slot twice in one of `columns`."""
    total = int(counts.sum())
    return max(math.ceil(total / slots_a_row), int(counts.max()), math.ceil(total / columns))


def _mean_terms(shape: TiledFit, loads: list[torch.Tensor], slots_a_row: float, model: ModelSpec) -> Floats:
    columns = model.top_k + (model.shared_intermediate > 0)
    rows = torch.tensor([num_rows(one, columns, slots_a_row) for one in loads], dtype=torch.float64)
    counts = torch.stack(loads).double()  # of one cell, as many active experts in each draw
    tiles = (counts / shape.rows).ceil().sum(1)
    terms = shape.terms(counts.sum(1), torch.full_like(tiles, counts.shape[1]), tiles, rows, model)
    means: Floats = torch.stack(terms).mean(1).numpy()
    return means


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares over coefficients of 0 or more (Lawson and Hanson 1974, "Solving least squares problems", ch. 23).

    matrix [n, m], target [n] -> [m].
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled, count = matrix / scale, matrix.shape[1]
    found, taken = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = scaled.T @ (target - scaled @ found)
        gradient[taken] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-9 * len(target):
            break
        taken[best] = True
        while True:
            free = np.zeros(count)
            free[taken] = np.linalg.lstsq(scaled[:, taken], target, rcond=None)[0]
            negative = taken & (free <= 0)
            if not negative.any():
                found = free
                break
            step = np.min(found[negative] / (found[negative] - free[negative]))
            found = np.maximum(found + step * (free - found), 0.0)
            taken &= found > 1e-12
    answer: Floats = found / scale
    return answer
