"""The time of a rank's expert computation, from its assignments and its active experts.

The roofline is the longer of two times: reading weights and rows (`b * active + a * tokens`), and computing. Grouped
GEMMs pad each active expert's tokens to whole tiles: half a tile more on average, and at least one tile. A measured
table replaces the roofline. If the table has a fit, tiles and waves give the time (`epsim.cost.tiled`), also outside
the grid. Without a fit, the cells are interpolated: over tokens per active expert the ratio measured / roofline, by the
logarithm of the tokens; over active experts the time, linearly. Outside the grid the nearest ratio holds. A cell that
is faster than one with fewer tokens is noise, and both take their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from epsim.cost.curve import check_axis, check_times, rising
from epsim.cost.tiled import TiledFit, is_small, most_small
from epsim.machines.hardware import Hardware
from epsim.models.spec import ModelSpec

STEPS = 16
"""Interpolation points between two sizes of a table."""
SLOTS_A_ROW = 1.25
"""Mean number of slots per received row, if unknown: that of top-8 on 16 ranks."""
MOST_DECODED = 64
"""The most rows that the runtime's kernel for small batches takes."""


@dataclass(frozen=True, slots=True)
class ExpertCell:
    """A measurement outside a table's grid, with rows of `slots_a_row` slots."""

    tokens_per_expert: float
    active: float
    slots_a_row: float
    us: float

    def __post_init__(self) -> None:
        check_times("cells", (self.tokens_per_expert, self.active, self.slots_a_row, self.us))


@dataclass(frozen=True)
class ExpertTable:
    """Measured times of one expert shape on one device.

    device, command, dtype: where, how and in which type it was measured. hidden, intermediate: widths of the experts.
    tokens_per_expert [n], active [m]: ascending, above 0. us: n x m microseconds, row by row. A cell that was not
    measured is None (null) and takes the ratio of the nearest size in its column; each column needs at least one time.
    implementation: what computed the experts. versions, date: of the measurement. spread: standard deviation of the
    logarithm of tokens per expert; 0 if all experts had equally many.
    columns: expert entries per received row, used or not; 0 for the model's top-k. Rows of the grid have SLOTS_A_ROW
    slots. cells: extra measurements, which only the fits use.
    fit: a fit of grid and cells; None to interpolate the grid. small: a separate fit of the calls that use small tiles
    (`epsim.cost.tiled`); None if `fit` covers all calls.
    """

    device: str
    command: str
    dtype: str
    hidden: int
    intermediate: int
    tokens_per_expert: tuple[float, ...]
    active: tuple[float, ...]
    us: tuple[tuple[float | None, ...], ...]
    kind: Literal["experts"] = "experts"
    implementation: str = ""
    versions: str = ""
    date: str = ""
    spread: float = 0.0
    fit: TiledFit | None = None
    cells: tuple[ExpertCell, ...] = ()
    columns: int = 0
    small: TiledFit | None = None

    def __post_init__(self) -> None:
        for name in ("tokens_per_expert", "active"):
            check_axis(name, getattr(self, name))
        if len(self.us) != len(self.tokens_per_expert) or any(len(row) != len(self.active) for row in self.us):
            raise ValueError(f"us must be {len(self.tokens_per_expert)} x {len(self.active)} numbers")
        if self.columns < 0 or not (math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"columns {self.columns} and spread {self.spread} must be 0 or more")
        if self.small is not None and self.fit is None:
            raise ValueError("small is a fit of small tiles and needs one of large tiles: give fit too")
        for experts, column in zip(self.active, zip(*self.us, strict=True), strict=True):
            times = [time for time in column if time is not None]
            check_times("us", times)
            if not times:
                raise ValueError(f"us has no time for {experts:g} active experts: remove them from active")

    @property
    def covers(self) -> str:
        """A description of the grid."""
        tokens, active = self.tokens_per_expert, self.active
        return f"{tokens[0]:g} to {tokens[-1]:g} tokens per expert, {active[0]:g} to {active[-1]:g} active experts"


@dataclass(frozen=True)
class ExpertsTime:
    """Predicts expert times of a model on some hardware. table: measured times; None for the roofline. decode: measured
    times of the kernel for at most MOST_DECODED received rows, or None. Raises ValueError if a table is for experts of
    another shape or type."""

    hardware: Hardware
    model: ModelSpec
    table: ExpertTable | None = None
    decode: ExpertTable | None = None

    def __post_init__(self) -> None:
        model = self.model
        for table in filter(None, (self.table, self.decode)):
            if (table.hidden, table.intermediate) != (model.hidden, model.intermediate):
                raise ValueError(
                    f"the expert table is for {table.hidden} x {table.intermediate}, but {model.name} has experts of "
                    f"{model.hidden} x {model.intermediate}: give a table of that shape, or none"
                )
            if table.dtype != model.compute:
                raise ValueError(
                    f"the expert table is in {table.dtype}, but {model.name} computes in {model.compute}: give a table "
                    "of that type, or a --model that computes in the table's type"
                )

    @property
    def a(self) -> float:
        """Microseconds that a token adds if reading is the limit: its rows in and out."""
        return (self.model.dispatch_row_bytes + self.model.combine_row_bytes) * 1e-3 / self.hardware.memory_gb_per_s

    @property
    def b(self) -> float:
        """Microseconds that an active expert adds if reading is the limit: its weights."""
        return self.model.expert_bytes * 1e-3 / self.hardware.memory_gb_per_s

    @property
    def computing(self) -> float:
        """Microseconds that an assignment takes if computing is the limit."""
        rate = self.hardware.fp8_tflops if self.model.compute == "fp8" else self.hardware.bf16_tflops
        return self.model.expert_flops * 1e-6 / rate

    def roofline(
        self, tokens: Tensor, active: Tensor, unread: Tensor | None = None, tiles: Tensor | None = None
    ) -> Tensor:
        """The roofline's microseconds [...] for tokens, active [...] float64; 0 without tokens. unread: bytes of the
        active experts that a channel reader skips; its kernel needs no tiles. tiles: the whole tiles that the experts
        fill; None if each expert's tokens are unknown. Then each expert counts half a tile more than its tokens."""
        half, tile = (self.hardware.tile - 1) / 2, self.hardware.tile
        padded = torch.maximum(tokens + half * active, tile * active) if tiles is None else tile * tiles
        reading = self.b * active + self.a * tokens
        if unread is not None:
            reading, padded = reading - unread * 1e-3 / self.hardware.memory_gb_per_s, tokens
        time = torch.maximum(reading, self.computing * padded)
        return (time + self.hardware.kernel_us) * (active > 0)

    @property
    def tile(self) -> int:
        """The tile size, in rows, for which loads should count tiles (`Setting.tile`); 0 if times need no tiles."""
        return 0 if self.table is None or self.table.fit is None else self.table.fit.rows

    def us(self, tokens: Tensor, active: Tensor, tiles: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """Microseconds [...] of a rank's experts. tokens: assignments; active: experts with tokens; tiles: whole tiles
        of `self.tile` rows that the experts fill, None if unknown; rows: received by the rank, None if unknown; [...]
        float64 each."""
        if self.table is None:
            return self.roofline(tokens, active)
        rows = tokens / SLOTS_A_ROW if rows is None else rows
        fit = self.table.fit
        if fit is not None:
            tiles = fit.expected_tiles(tokens, active) if tiles is None else tiles
            time = fit.us(tokens, active, tiles, rows, self.model)
            if self.table.small is not None:
                time = self._with_small(self.table.small, time, tokens, active, rows)
        else:
            time = self._by_cells(tokens, active)
        if self.decode is not None:
            few = (rows <= MOST_DECODED) & (active > 0)
            if few.any():  # outside decode steps most ranks have many rows
                small = self._small.us(tokens[few], active[few])
                # Never above the grouped products' time, so that one more row than the kernel takes never costs less.
                time[few] = torch.minimum(small, time[few])
        return time * (active > 0)

    def _with_small(self, fit: TiledFit, time: Tensor, tokens: Tensor, active: Tensor, rows: Tensor) -> Tensor:
        """`time`, with the small tiles' fit in place of it where ranks use small tiles. Large tiles take at least as
        long as small tiles at their largest number of rows; otherwise time could drop where one fit replaces the other.
        Slots without tokens are groups too, but their number is unknown here."""
        columns = self.model.top_k + (self.model.shared_intermediate > 0)
        part = (most_small(columns, active) / rows.clamp(min=1e-300)).clamp(max=1)
        fewer = tokens * part
        few = fit.us(fewer, active, fit.expected_tiles(fewer, active), rows * part, self.model)
        return torch.where(is_small(rows, columns, active), few, torch.maximum(few, time))

    def dense_us(self, tokens: Tensor) -> Tensor:
        """Microseconds [...] of a shared expert that is computed on tokens [...] by a product of its own."""
        times = self.model.shared_cost
        time = torch.maximum(times * (self.b + 0 * tokens), times * self.computing * tokens)
        return (time + self.hardware.kernel_us) * (tokens > 0)

    @cached_property
    def _small(self) -> ExpertsTime:
        return ExpertsTime(self.hardware, self.model, self.decode)

    @cached_property
    def _grid(self) -> tuple[Tensor, Tensor, Tensor]:
        """The table refined to STEPS points between sizes: sizes [N], active [m] and times [N, m]. The ratio to the
        roofline is interpolated. Times of a column never fall."""
        assert self.table is not None
        known = torch.tensor(self.table.tokens_per_expert, dtype=torch.float64)
        active = torch.tensor(self.table.active, dtype=torch.float64)
        measured = [[math.nan if time is None else time for time in row] for row in self.table.us]
        roofline = self.roofline(known[:, None] * active, active)
        ratio = torch.tensor(measured, dtype=torch.float64) / roofline
        for index, column in enumerate(ratio.unbind(1)):
            filled = _filled(known.log().tolist(), column) * roofline[:, index]
            column.copy_(rising(filled) / roofline[:, index])
        if len(known) == 1:
            return known, active, ratio * roofline
        part = torch.arange((len(known) - 1) * STEPS + 1, dtype=torch.float64) / STEPS
        left = part.long().clamp(max=len(known) - 2)
        weight = part - left
        sizes = torch.lerp(known.log()[left], known.log()[left + 1], weight).exp()
        sizes[::STEPS] = known
        between = torch.lerp(ratio[left], ratio[left + 1], weight[:, None])
        return sizes, active, (between * self.roofline(sizes[:, None] * active, active)).cummax(0).values

    def _by_cells(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """Microseconds [...], interpolated from cells. tokens [...]: assignments; experts [...]: those with tokens."""
        sizes, active, times = self._grid
        y = experts.clamp(min=1)
        x = (tokens / y).clamp(min=1e-9)
        inside, most = x.clamp(sizes[0], sizes[-1]), y.clamp(max=active[-1])
        i, u = _interval(sizes, inside)
        j, v = _interval(active, most)
        after_i, after_j = (i + 1).clamp(max=len(sizes) - 1), (j + 1).clamp(max=len(active) - 1)
        outside = not torch.equal(x, inside)  # the grid covers most loads; they need no ratio

        def column(at: Tensor) -> Tensor:
            time = torch.lerp(times[i, at], times[after_i, at], u)
            if outside:
                time *= self.roofline(x * active[at], active[at]) / self.roofline(inside * active[at], active[at])
            return time

        time = torch.lerp(column(j), column(after_j), v)
        # With fewer experts than in the first column, the time without the fixed cost is proportional to their number.
        time = time - (time - self.hardware.kernel_us).clamp(min=0) * (1 - most / active[0]).clamp(min=0)
        return time if torch.equal(most, y) else time * (self.roofline(x * y, y) / self.roofline(x * most, most))


def _filled(axis: Sequence[float], values: Tensor) -> Tensor:
    """values [n] with each NaN replaced by the value of the nearest known point on the axis."""
    known = [index for index, value in enumerate(values.tolist()) if not math.isnan(value)]
    near = [min(known, key=lambda other: abs(axis[other] - at)) for at in axis]
    return values[near].clone()


def _interval(axis: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of each value on an ascending axis, and its position in the interval, 0 to 1."""
    if len(axis) == 1:
        return torch.zeros_like(at, dtype=torch.int64), torch.zeros_like(at)
    left = (torch.searchsorted(axis, at) - 1).clamp(0, len(axis) - 2)
    return left, ((at - axis[left]) / (axis[left + 1] - axis[left])).clamp(0, 1)
