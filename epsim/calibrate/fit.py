"""Fits the tiles and waves of a grouped GEMM to a measured grid."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from epsim.cost.experts_time import SLOTS_A_ROW, ExpertTable
from epsim.cost.tiled import TERMS, TiledFit, is_small
from epsim.models.spec import ModelSpec

Floats = npt.NDArray[np.float64]
Draws = Callable[[int, float], list[torch.Tensor]]
"""Takes a cell's active experts and tokens per expert, and returns the loads [active] of each of its draws."""

ROWS, COLUMNS = (64, 128, 256), (64, 128, 256)
LEAST_CELLS = 3 * TERMS


def fit_tiles(table: ExpertTable, model: ModelSpec, draws: Draws, sms: int) -> tuple[TiledFit | None, TiledFit | None]:
    """Fits the cells that use large tiles and those that use small tiles separately (`epsim.cost.tiled.is_small`).
    Returns both fits. If one of the two kinds has few cells, it returns a fit of all cells and None; if there are few
    cells in total, None and None.

    A fit takes the tiling with the least squared relative error. Coefficients are at least 0. All extra cells together
    weigh as much as the grid. sms: multiprocessors of the device; a wave has sms, sms / 2 (pairs) or 2 * sms tiles.
    """
    columns = model.top_k + (model.shared_intermediate > 0)
    grid = [
        _Cell(draws(int(active), size), table.columns or model.top_k, SLOTS_A_ROW, time)
        for size, row in zip(table.tokens_per_expert, table.us, strict=True)
        for active, time in zip(table.active, row, strict=True)
        if time is not None
    ]
    extra = [_Cell(draws(int(c.active), c.tokens_per_expert), columns, c.slots_a_row, c.us) for c in table.cells]
    large, small = (
        ([cell for cell in grid if cell.small == form], [cell for cell in extra if cell.small == form])
        for form in (False, True)
    )
    if min(len(large[0]), len(small[0])) < LEAST_CELLS:
        return _fit(grid, extra, model, sms), None
    return _fit(*large, model, sms), _fit(*small, model, sms)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A measured cell. draws: the loads [active] of each draw; columns, slots_a_row: of its rows; us: microseconds."""

    draws: list[torch.Tensor]
    columns: int
    slots_a_row: float
    us: float

    @property
    def rows(self) -> torch.Tensor:
        """The number of rows of each draw, [draws] float64."""
        numbers = [num_rows(counts, self.columns, self.slots_a_row) for counts in self.draws]
        return torch.tensor(numbers, dtype=torch.float64)

    @property
    def small(self) -> bool:
        """Whether the median draw uses small tiles. Draws differ little."""
        groups = torch.tensor(float(len(self.draws[0])), dtype=torch.float64)
        return bool(is_small(self.rows.median(), self.columns, groups))


def _fit(grid: list[_Cell], extra: list[_Cell], model: ModelSpec, sms: int) -> TiledFit | None:
    if len(grid) < LEAST_CELLS:
        return None
    cells = grid + extra
    times = np.array([cell.us for cell in cells])
    weights = np.ones(len(cells))
    weights[len(grid) :] = np.sqrt(len(grid) / max(len(extra), 1))
    # Without extra cells all rows have equally many slots, so the time of a row cannot be told from that of its slots.
    last = TERMS if extra else TERMS - 1
    fits: list[tuple[float, TiledFit]] = []
    # The largest tiles come first, because `min` takes the first of equally good fits.
    for rows, columns, at_once in itertools.product(ROWS[::-1], COLUMNS[::-1], (sms // 2, sms, 2 * sms)):
        shape = TiledFit(rows, columns, at_once, (1.0,) * TERMS)
        terms = np.array([_mean_terms(shape, cell, model) for cell in cells])[:, :last] / times[:, None]
        coefficients = non_negative(terms * weights[:, None], weights)
        error = float(np.square((terms @ coefficients - 1) * weights).sum())
        fits.append((error, TiledFit(rows, columns, at_once, tuple(float(f"{c:.6g}") for c in coefficients))))
    return min(fits, key=lambda fit: fit[0])[1]


def num_rows(counts: torch.Tensor, columns: int, slots_a_row: float) -> int:
    """The number of rows of a rank whose slot s has counts[s] assignments; a row has up to `columns` distinct slots."""
    total = int(counts.sum())
    return max(math.ceil(total / slots_a_row), int(counts.max()), math.ceil(total / columns))


def _mean_terms(shape: TiledFit, cell: _Cell, model: ModelSpec) -> Floats:
    counts = torch.stack(cell.draws).double()  # every draw has equally many active experts
    tiles = (counts / shape.rows).ceil().sum(1)
    terms = shape.terms(counts.sum(1), torch.full_like(tiles, counts.shape[1]), tiles, cell.rows, model)
    means: Floats = torch.stack(terms).mean(1).numpy()
    return means


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Non-negative least squares (Lawson and Hanson 1974, "Solving least squares problems", ch. 23). matrix [n, m],
    target [n] -> [m]."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled, count = matrix / scale, matrix.shape[1]
    solution, active = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-9 * len(target):
            break
        active[best] = True
        while True:
            free = np.zeros(count)
            free[active] = np.linalg.lstsq(scaled[:, active], target, rcond=None)[0]
            negative = active & (free <= 0)
            if not negative.any():
                solution = free
                break
            step = np.min(solution[negative] / (solution[negative] - free[negative]))
            solution = np.maximum(solution + step * (free - solution), 0.0)
            active &= solution > 1e-12
    answer: Floats = solution / scale
    return answer
