"""The time of a grouped GEMM from its tiles and waves.

The two products of a layer's experts (gate and up together, down) are cut into tiles of `rows` x `columns`. The device
computes `at_once` tiles at a time, and the last wave takes as long as a full one. On an H200 PyTorch's grouped product
has tiles of 256 x 256, 66 at once (pairs of its 132 multiprocessors). There a sixth active expert of gpt-oss-20b costs
40% more, because the 72 tiles of the second product no longer fit in one wave.

PyTorch has two such products. It uses the one with small tiles if it gets at most SMALL rows per group
(aten/src/ATen/native/cuda/GroupMM.cu: 64 x 128, else 128 x 256 in pairs). The runtime gives it one row for each column
of every received row, used or not.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from epsim.models.spec import ModelSpec

TERMS = 9
SMALL = 128
"""The most rows per group for which small tiles are used."""


def is_small(rows: Tensor, columns: int, groups: Tensor) -> Tensor:
    """Whether small tiles are used, [...] bool. rows: received, with so many columns; groups: slots of a rank."""
    return rows * columns < (SMALL + 1) * groups


def most_small(columns: int, groups: Tensor) -> Tensor:
    """The rows [...] from which `is_small` is false, for groups [...]."""
    return (SMALL + 1) * groups / columns


@dataclass(frozen=True, slots=True)
class TiledFit:
    """coefficients: microseconds of [a call, an assignment, an active expert, a tile of rows, a wave of the first
    product, a wave of the second, the filled share of the first product's first wave, of the second's, a received row].

    A first wave that is not full takes less, because its tiles share the memory bandwidth. A row is read and its sum
    written once, for any number of the rank's experts. `epsim calibrate` fits this to its cells. A fit without the last
    coefficient comes from rows with equally many slots, and holds for such rows only."""

    rows: int
    columns: int
    at_once: int
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.at_once) < 1:
            raise ValueError("rows, columns and at_once must be at least 1")
        good = len(self.coefficients) in (TERMS - 1, TERMS) and all(
            math.isfinite(c) and c >= 0 for c in self.coefficients
        )
        if not good or not any(self.coefficients):
            raise ValueError(f"coefficients must be {TERMS} (or {TERMS - 1}) numbers of 0 or more, not all 0")

    def us(self, tokens: Tensor, active: Tensor, tiles: Tensor, rows: Tensor, model: ModelSpec) -> Tensor:
        """Microseconds [...], which never fall. tokens: assignments, active: experts with tokens, tiles: of `self.rows`
        rows, rows: received by the rank; [...] float64."""
        time = torch.zeros_like(tokens)
        for part, cost in zip(self.terms(tokens, active, tiles, rows, model), self.coefficients, strict=False):
            if cost:
                time.add_(part, alpha=cost)
        return time

    def terms(
        self, tokens: Tensor, active: Tensor, tiles: Tensor, rows: Tensor, model: ModelSpec
    ) -> tuple[Tensor, ...]:
        """The terms that the coefficients multiply."""
        terms = [torch.ones_like(tokens), tokens, active, tiles]
        products = [
            tiles * -(-width // self.columns) / self.at_once for width in (2 * model.intermediate, model.hidden)
        ]
        return (*terms, *(waves.ceil() for waves in products), *(waves.clamp(max=1.0) for waves in products), rows)

    def expected_tiles(self, tokens: Tensor, active: Tensor) -> Tensor:
        """Expected tiles if each expert's tokens are unknown: half a tile more than the mean fills, at least one."""
        return torch.maximum(active, tokens / self.rows + 0.5 * active)
