"""The time of a grouped GEMM from its tiles and waves.

A layer's experts are two products: gate and up together, then down. Each is cut into tiles of `rows` x `columns`. The
device computes `at_once` tiles at a time, called a wave. The last wave takes as long as a full one. On an H200
PyTorch's grouped product has tiles of 256 x 256 and waves of 66 (pairs of the 132 multiprocessors). There a sixth
active expert of gpt-oss-20b costs 40% more, because the 72 tiles of the second product no longer fit in one wave.

PyTorch uses small tiles if a product has at most SMALL rows per group (aten/src/ATen/native/cuda/GroupMM.cu: 64 x 128,
else 128 x 256 in pairs). The runtime gives it one row for each column of every received row, used or not.
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
    """Whether PyTorch uses small tiles, [...] bool. rows [...]: received, each with `columns` expert entries; groups
    [...]: slots of the rank."""
    return rows * columns < (SMALL + 1) * groups


def most_small(columns: int, groups: Tensor) -> Tensor:
    """The number of rows [...] from which `is_small` is false, for groups [...]."""
    return (SMALL + 1) * groups / columns


@dataclass(frozen=True, slots=True)
class TiledFit:
    """A fit to the cells of `epsim calibrate`. coefficients: microseconds per call, assignment, active expert, tile of
    rows, wave of the first product, wave of the second product, filled share (0 to 1) of the first product's first
    wave, the same of the second product, and received row.

    A partly filled first wave is faster, because fewer tiles share the memory bandwidth. A received row is read once
    and written once, for any number of experts. A fit without the last coefficient holds only for rows with as many
    slots as those that it was fitted to."""

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
        """Microseconds [...], which never fall as inputs grow. tokens: assignments; active: experts with tokens; tiles:
        of `self.rows` rows each; rows: received by the rank; [...] float64 each."""
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
        """The expected number of tiles [...] if each expert's tokens are unknown: an expert needs half a tile more than
        its tokens fill on average, and at least one."""
        return torch.maximum(active, tokens / self.rows + 0.5 * active)
