"""Time of the expert computation of a rank, from its assignments and its active experts.

Roofline: reading weights and rows, `b * active + a * tokens`, or computing, whichever takes longer; grouped GEMMs pad
every active expert's tokens to whole tiles (half a tile on average, never less than one). A measured table corrects it:
measured / roofline, interpolated over the logarithms of (tokens per active expert, active experts), holds its nearest
value outside the grid.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from epsim.cost.hardware import Hardware
from epsim.cost.model import ModelSpec
from epsim.cost.spec_files import build
from epsim.traces.files import check_source


@dataclass(frozen=True)
class ExpertTable:
    """Measured times of one expert shape on one device.

    device, command, dtype: what measured it, how, and in which type. hidden, intermediate: of the experts.
    tokens_per_expert [n], active [m]: ascending, above 0. us: n x m microseconds, row by row.
    """

    device: str
    command: str
    dtype: str
    hidden: int
    intermediate: int
    tokens_per_expert: tuple[float, ...]
    active: tuple[float, ...]
    us: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name in ("tokens_per_expert", "active"):
            axis = getattr(self, name)
            if not axis or min(axis) <= 0 or list(axis) != sorted(set(axis)):
                raise ValueError(f"{name} must be ascending and above 0")
        if len(self.us) != len(self.tokens_per_expert) or any(len(row) != len(self.active) for row in self.us):
            raise ValueError(f"us must be {len(self.tokens_per_expert)} x {len(self.active)} numbers")
        if min(min(row) for row in self.us) <= 0:
            raise ValueError("us must be above 0")


def read_expert_table(path: Path) -> ExpertTable:
    """A table as JSON, an object of the fields of `ExpertTable`. Raises ValueError in one line."""
    check_source(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: an object of {', '.join(ExpertTable.__dataclass_fields__)} is expected")
    found = build(ExpertTable, content, str(path))
    assert isinstance(found, ExpertTable)
    return found


@dataclass(frozen=True)
class ExpertsTime:
    """hardware and model; table: measured, or None for the roofline alone. Raises ValueError where the table is of
    other experts."""

    hardware: Hardware
    model: ModelSpec
    table: ExpertTable | None = None

    def __post_init__(self) -> None:
        table, model = self.table, self.model
        if table is not None and (table.hidden, table.intermediate) != (model.hidden, model.intermediate):
            raise ValueError(
                f"the expert table is of {table.hidden} x {table.intermediate}, {model.name} has experts of "
                f"{model.hidden} x {model.intermediate}: give a table of its shape, or none"
            )

    @property
    def a(self) -> float:
        """Microseconds that a token adds where reading is the limit: its rows in and out."""
        return (self.model.dispatch_row_bytes + self.model.combine_row_bytes) * 1e-3 / self.hardware.memory_gb_per_s

    @property
    def b(self) -> float:
        """Microseconds that an active expert adds where reading is the limit: its weights."""
        return self.model.expert_bytes * 1e-3 / self.hardware.memory_gb_per_s

    @property
    def computing(self) -> float:
        """Microseconds an assignment takes where computing is the limit."""
        rate = self.hardware.fp8_tflops if self.model.compute == "fp8" else self.hardware.bf16_tflops
        return self.model.expert_flops * 1e-6 / rate

    def roofline(self, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """tokens, active [...] float64 -> microseconds [...], 0 where there is nothing to do."""
        half, tile = (self.hardware.tile - 1) / 2, self.hardware.tile
        padded = torch.maximum(tokens + half * active, tile * active)
        time = torch.maximum(self.b * active + self.a * tokens, self.computing * padded)
        return (time + self.hardware.kernel_us) * (active > 0)

    def us(self, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """tokens: assignments of a rank, active: its experts that have any; [...] float64 -> microseconds [...]."""
        time = self.roofline(tokens, active)
        if self.table is None:
            return time
        per_expert = (tokens / active.clamp(min=1)).clamp(min=1e-9)
        return time * self._correction(per_expert.log(), active.clamp(min=1).log())

    def dense_us(self, tokens: torch.Tensor) -> torch.Tensor:
        """A shared expert computed by itself on tokens [...] -> microseconds [...]."""
        times = self.model.shared_cost
        time = torch.maximum(times * (self.b + 0 * tokens), times * self.computing * tokens)
        return (time + self.hardware.kernel_us) * (tokens > 0)

    @cached_property
    def _grid(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.table is not None
        per_expert = torch.tensor(self.table.tokens_per_expert, dtype=torch.float64)
        active = torch.tensor(self.table.active, dtype=torch.float64)
        measured = torch.tensor(self.table.us, dtype=torch.float64)
        wide = active.expand_as(measured)
        return per_expert.log(), active.log(), measured / self.roofline(per_expert[:, None] * wide, wide)

    def _correction(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x_axis, y_axis, ratio = self._grid
        i, u = _place(x_axis, x)
        j, v = _place(y_axis, y)
        after_i, after_j = (i + 1).clamp(max=len(x_axis) - 1), (j + 1).clamp(max=len(y_axis) - 1)
        low = torch.lerp(ratio[i, j], ratio[i, after_j], v)
        return torch.lerp(low, torch.lerp(ratio[after_i, j], ratio[after_i, after_j], v), u)


def _place(axis: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Interval of each value on an ascending axis, and where in it, 0 to 1."""
    if len(axis) == 1:
        return torch.zeros_like(at, dtype=torch.int64), torch.zeros_like(at)
    left = (torch.searchsorted(axis, at) - 1).clamp(0, len(axis) - 2)
    return left, ((at - axis[left]) / (axis[left + 1] - axis[left])).clamp(0, 1)
