"""Part `experts`: times a rank's grouped expert computation over (tokens per expert, active experts).

It runs the runtime's experts. Real loads are uneven, so each cell is the mean of draws whose tokens per expert are
lognormal around the cell's mean, with a spread as under a planned placement (`SPREAD`). A received row of the grid has
SLOTS_A_ROW slots on average, as with top-8 on 16 ranks. With fewer ranks, rows have more slots. Therefore extra cells
have as many slots per row as with two ranks. They let the fit separate the cost of a row from the cost of its slots.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from epsim.calibrate.fit import fit_tiles, num_rows
from epsim.calibrate.machine import DTYPE, Machine
from epsim.cost.experts_time import MOST_DECODED, SLOTS_A_ROW, ExpertCell, ExpertTable
from epsim.kernels.experts import decode
from epsim.models.shapes import LayerShape
from epsim.models.spec import ModelSpec
from epsim.runtime.exchange.base import Received
from epsim.runtime.experts import Experts
from epsim.runtime.seeds import generator
from epsim.runtime.weights import RandomWeights

Compute: TypeAlias = Callable[[Experts, Received], object]

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
ACTIVE = (1, 2, 4, 8, 12, 16, 20, 24, 32, 64, 128)
MOST_ASSIGNMENTS = 131_072
"""The most assignments of a cell; larger loads follow the roofline."""
FEW_RANKS_SIZES, FEW_RANKS_ACTIVE = (4, 16, 64, 128, 192, 256, 384, 512, 1024, 2048), (8, 16, 24, 40, 64, 128)
"""Tokens per expert, and active experts, of the extra cells."""
FEW_CELLS = len(FEW_RANKS_SIZES)
"""If a table has fewer extra cells than this, they are measured."""
CPU_SIZES, CPU_ACTIVE, CPU_ASSIGNMENTS = (1, 4, 16, 64), (1, 2, 8, 32), 256
"""The grid without a GPU: just large enough to test that measuring works."""
SPREAD = 0.5
DRAWS = 3
CACHE = 200e6
"""Calls cycle through at least this many bytes of weights, so that no weights are still in the cache."""


def implementations(machine: Machine) -> dict[str, Compute]:
    """The ways in which the runtime computes experts, by their names in tables: grouped products, and on a GPU also the
    kernel for small batches."""
    return {"grouped": Experts.__call__, "decode": _decode} if machine.on_gpu else {"grouped": Experts.__call__}


def _decode(experts: Experts, received: Received) -> object:
    weights = (experts.gate_up, experts.down, experts.row_of_slot)
    return decode(received.hidden, received.slots, received.weights, *weights)


def expert_table(
    machine: Machine, model: ModelSpec, implementation: str, progress: Callable[[str], None]
) -> ExpertTable:
    """Measures a table on this device only. Raises ValueError if no expert of the model fits in memory."""
    grid = (SIZES, ACTIVE, MOST_ASSIGNMENTS) if machine.on_gpu else (CPU_SIZES, CPU_ACTIVE, CPU_ASSIGNMENTS)
    # The rows that the decode kernel reads stay in the cache, so only slots count.
    slots_a_row = SLOTS_A_ROW if implementation == "grouped" else of_two_ranks(model)
    columns = dict(_columns(machine, model, implementation, grid, slots_a_row, implementation, progress))
    if not columns:
        size = shape_for(model).expert_bytes
        raise ValueError(f"{model.name}: one expert of {size:,} bytes does not fit in memory: omit this --model")
    columns = {number: column for number, column in columns.items() if any(time is not None for time in column)}
    rows = list(zip(*columns.values(), strict=True))
    measured = [index for index, row in enumerate(rows) if any(time is not None for time in row)]
    table = ExpertTable(
        **machine.described(),
        dtype="bf16",
        hidden=model.hidden,
        intermediate=model.intermediate,
        tokens_per_expert=tuple(float(grid[0][index]) for index in measured),
        active=tuple(map(float, columns)),
        us=tuple(rows[index] for index in measured),
        implementation=implementation,
        spread=SPREAD,
        columns=model.top_k + (model.shared_intermediate > 0),
    )
    return table if implementation == "decode" else with_cells(machine, table, model, progress)


def _columns(
    machine: Machine,
    model: ModelSpec,
    implementation: str,
    grid: tuple[tuple[int, ...], tuple[int, ...], int],
    slots_a_row: float,
    what: str,
    progress: Callable[[str], None],
) -> Iterator[tuple[int, list[float | None]]]:
    """Yields each number of active experts that fits in memory, with its microseconds at each size; None for a load
    that is too large. grid: the sizes, the numbers of active experts, and the most assignments."""
    compute, shape, room = implementations(machine)[implementation], shape_for(model), 0.4 * machine.free_bytes
    sizes, active, most = grid
    for number in active:
        if number > model.num_experts or number * shape.expert_bytes > room:
            continue
        copies = math.ceil(CACHE / (number * shape.expert_bytes)) if machine.on_gpu else 1
        held = [rank_experts(machine, shape, number, copy) for copy in range(copies)]
        column = []
        for size in sizes:
            fits = size * number <= most and _working_bytes(model, size * number) <= room / 2
            if implementation == "decode":
                fits = fits and size <= MOST_DECODED and _most_rows(number, size, model, slots_a_row) <= MOST_DECODED
            column.append(_cell(machine, compute, held, size, model, slots_a_row) if fits else None)
        progress(f"{model.name}, {what}: {number} active experts")
        del held
        if machine.on_gpu:
            torch.cuda.empty_cache()
        yield number, column


def of_two_ranks(model: ModelSpec) -> float:
    """The mean number of slots per row if two ranks share a token's experts."""
    return model.top_k / 2 + 0.5 * (model.shared_intermediate > 0)


def with_cells(machine: Machine, table: ExpertTable, model: ModelSpec, progress: Callable[[str], None]) -> ExpertTable:
    """Adds extra cells and fits to the table of grouped products. On a CPU the table stays as it is."""
    if not machine.on_gpu:
        return table
    grid, slots_a_row = (FEW_RANKS_SIZES, FEW_RANKS_ACTIVE, MOST_ASSIGNMENTS), of_two_ranks(model)
    cells = tuple(
        ExpertCell(size, number, slots_a_row, us)
        for number, column in _columns(machine, model, "grouped", grid, slots_a_row, "rows as with two ranks", progress)
        for size, us in zip(FEW_RANKS_SIZES, column, strict=True)
        if us is not None
    )
    return with_fit(dataclasses.replace(table, cells=cells), model, machine.multiprocessors)


def with_fit(table: ExpertTable, model: ModelSpec, multiprocessors: int) -> ExpertTable:
    """Adds the fits of tiles to a table. They use the same drawn loads as the measured cells."""

    def draws(active: int, size: float) -> list[torch.Tensor]:
        return [drawn_counts(active, size, table.spread, draw) for draw in range(DRAWS)]

    fit, small = fit_tiles(table, model, draws, multiprocessors)
    return dataclasses.replace(table, fit=fit, small=small)


def shape_for(model: ModelSpec) -> LayerShape:
    return LayerShape(
        model.name, model.hidden, model.intermediate, model.num_experts, model.top_k, num_layers=model.moe_layers
    )


def rank_experts(machine: Machine, shape: LayerShape, slots: int, copy: int = 0) -> Experts:
    """The experts of a rank with `slots` slots, which hold different experts."""
    weights = RandomWeights(shape, copy, machine.device, DTYPE)
    made = Experts(shape, 0, list(range(slots)), weights, machine.device, DTYPE)
    made.decode_up_to = 0  # always grouped products, even for few rows
    return made


def received_of(
    machine: Machine, counts: torch.Tensor, columns: int, hidden: int, seed: int, slots_a_row: float = SLOTS_A_ROW
) -> Received:
    """Received rows of a rank whose slot s has counts[s] assignments, with random values and weights. A row has
    slots_a_row different slots on average."""
    total, rows = int(counts.sum()), num_rows(counts, columns, slots_a_row)
    by_slot = torch.repeat_interleave(torch.arange(len(counts)), counts)
    slots = torch.full((columns * rows,), -1, dtype=torch.int64)
    slots[:total] = by_slot  # consecutive entries are in different rows, and a slot has at most `rows` of them
    order = torch.randperm(rows, generator=generator(torch.device("cpu"), "rows", seed))
    slots = slots.view(columns, rows).T[order].contiguous().to(machine.device)
    source = generator(machine.device, "hidden", seed)
    values = torch.randn(rows, hidden, generator=source, device=machine.device, dtype=torch.float32)
    weights = torch.rand(tuple(slots.shape), generator=source, device=machine.device)
    return Received(values.to(DTYPE), None, slots, weights, None)


def drawn_counts(slots: int, mean: float, spread: float, seed: int) -> torch.Tensor:
    """Lognormal counts [slots] int64 around `mean`: each is at least 1, and their sum is slots * mean. spread: standard
    deviation of the logarithm."""
    total = max(round(slots * mean), slots)
    noise = torch.randn(slots, generator=generator(torch.device("cpu"), "counts", slots, seed), dtype=torch.float64)
    parts = (spread * noise).exp()
    exact = 1 + (total - slots) * parts / parts.sum()
    counts = exact.floor().to(torch.int64)
    missing = total - int(counts.sum())
    counts[(exact - counts).argsort(descending=True)[:missing]] += 1
    return counts


def _most_rows(slots: int, size: float, model: ModelSpec, slots_a_row: float) -> int:
    """The largest number of rows among a cell's draws."""
    columns = model.top_k + (model.shared_intermediate > 0)
    return max(num_rows(drawn_counts(slots, size, SPREAD, draw), columns, slots_a_row) for draw in range(DRAWS))


def _working_bytes(model: ModelSpec, assignments: float) -> float:
    """Bytes of the buffers of one call, which have room for top-k slots in every row."""
    return assignments / SLOTS_A_ROW * model.top_k * (2 * model.hidden + 3 * model.intermediate) * DTYPE.itemsize


def _cell(
    machine: Machine, compute: Compute, held: list[Experts], size: float, model: ModelSpec, slots_a_row: float
) -> float:
    slots, columns = held[0].num_slots, model.top_k + (model.shared_intermediate > 0)

    def calls() -> Iterator[Callable[[], object]]:
        batches = []
        for draw in range(DRAWS if machine.on_gpu else 1):
            counts = drawn_counts(slots, size, SPREAD, draw)
            batches.append(received_of(machine, counts, columns, model.hidden, draw, slots_a_row))
        for call in range(max(len(batches), len(held))):
            received, experts = batches[call % len(batches)], held[call % len(held)]
            yield lambda experts=experts, received=received: compute(experts, received)  # type: ignore[misc]

    return machine.alone_us(list(calls()))
