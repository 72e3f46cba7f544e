"""Time of a grouped GEMM by what it does: whole tiles of each expert's rows, so many at once, in waves.

The two products of a layer's experts (gate and up together, down) are cut into tiles of `rows` x `columns`; the device
works on `at_once` of them, and the last wave takes as long as a full one. Found on an H200 with PyTorch's grouped
product: 256 x 256, 66 at once (pairs of its 132 multiprocessors); a sixth active expert of gpt-oss-20b costs 40% more
there, since its 72 tiles of the second product no longer fit one wave.

PyTorch has two such products, and takes that of small tiles where the rows it is given are at most SMALL a group
(aten/src/ATen/native/cuda/GroupMM.cu: 64 x 128, else 128 x 256 in pairs). The runtime gives it a row for each column of
every row received, taken or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from epsim.models.spec import ModelSpec

TERMS = 9
SMALL = 128
"""Rows a group, up to which the product of small tiles is taken."""


def is_small(rows: torch.Tensor, columns: int, groups: torch.Tensor) -> torch.Tensor:
    """rows received [...] of so many columns, groups [...] (a rank's slots) -> bool [...]."""
    return rows * columns < (SMALL + 1) * groups


def most_small(columns: int, groups: torch.Tensor) -> torch.Tensor:
    """groups [...] -> rows [...] from which on `is_small` is false."""
    return (SMALL + 1) * groups / columns


@dataclass(frozen=True, slots=True)
class TiledFit:
    """coefficients: microseconds of [a call, an assignment, an active expert, a tile of rows, a wave of the first
    product, of the second, the whole of the first product's first wave, of the second's, a row received]: a wave that
    is not full takes less, as its tiles share the memory's rate; a row is read and its sum written once, however many
    of the rank's experts it goes to. Fitted by `epsim calibrate` on its cells alone. Fits without the last have all
    rows of as many slots, and hold for such rows."""

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

    def us(
        self, tokens: torch.Tensor, active: torch.Tensor, tiles: torch.Tensor, rows: torch.Tensor, model: ModelSpec
    ) -> torch.Tensor:
        """tokens: assignments, active: experts that have any, tiles: of `self.rows` rows, rows: that the rank received;
        [...] float64 -> microseconds [...]; more of any never takes less."""
        time = torch.zeros_like(tokens)
        for part, cost in zip(self.terms(tokens, active, tiles, rows, model), self.coefficients, strict=False):
            if cost:
                time.add_(part, alpha=cost)
        return time

    def terms(
        self, tokens: torch.Tensor, active: torch.Tensor, tiles: torch.Tensor, rows: torch.Tensor, model: ModelSpec
    ) -> tuple[torch.Tensor, ...]:
        """What the coefficients weigh."""
        found = [torch.ones_like(tokens), tokens, active, tiles]
        products = [
            tiles * -(-width // self.columns) / self.at_once for width in (2 * model.intermediate, model.hidden)
        ]
        return (*found, *(waves.ceil() for waves in products), *(waves.clamp(max=1.0) for waves in products), rows)

    def expected_tiles(self, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Where the experts' own tokens are not known: half a tile more than the mean fills, at least one each."""
        return torch.maximum(active, tokens / self.rows + 0.5 * active)
