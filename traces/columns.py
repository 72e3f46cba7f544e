"""Converts blocks to Parquet tables and back: the columns of each level."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from epsim.traces.trace import Array, Block, CountsBlock, Ints, RankCountsBlock, TokenBlock, TraceMeta

SCORES = ("scores", "score_ids")


def column(name: str, dtype: Any) -> pa.Field:
    """A column without missing values."""
    return pa.field(name, dtype, nullable=False)


def schema_of(meta: TraceMeta, score_ids: bool, domain: bool, phase: bool = False) -> pa.Schema:
    """The columns of a trace. counts, rank_counts: one row per (step, layer). tokens: one row per token."""

    def fixed(dtype: Any, size: int) -> pa.DataType:
        return pa.list_(column("item", dtype), size)

    if meta.level != "tokens":
        size = meta.num_experts * (meta.num_source_ranks if meta.level == "rank_counts" else 1)
        return pa.schema(
            [column("step", pa.int64()), column("layer", pa.int32()), column("counts", fixed(pa.int64(), size))]
        )
    columns = [
        column("step", pa.int64()),
        column("source_rank", pa.int32()),
        column("expert_ids", fixed(pa.int16(), meta.num_layers * meta.top_k)),
    ]
    if meta.num_scores:
        columns.append(column("scores", fixed(pa.float16(), meta.num_layers * meta.num_scores)))
    if score_ids:
        columns.append(column("score_ids", fixed(pa.int16(), meta.num_layers * meta.num_scores)))
    if domain:
        columns.append(column("domain", pa.dictionary(pa.int32(), pa.string())))
    if phase:
        columns.append(column("phase", pa.dictionary(pa.int32(), pa.string())))
    return pa.schema(columns)


def to_table(block: Block, meta: TraceMeta, schema: pa.Schema) -> pa.Table:
    if not isinstance(block, TokenBlock):
        step = np.repeat(block.steps.astype(np.int64), meta.num_layers)
        layer = np.tile(np.array(meta.layers, dtype=np.int32), len(block.steps))
        return pa.table([step, layer, fixed_lists(block.counts, np.int64, schema.field("counts").type)], schema=schema)
    columns = [
        block.steps.astype(np.int64)[block.token_step],
        block.source_rank.astype(np.int32),
        fixed_lists(block.expert_ids, np.int16, schema.field("expert_ids").type),
    ]
    for name, dtype in (("scores", np.float16), ("score_ids", np.int16)):
        if name in schema.names:
            column_type, values = schema.field(name).type, getattr(block, name)
            # Steps without scores hold zeros, which compress to nothing; the index says which steps these are.
            zeros = np.zeros((len(block.token_step), column_type.list_size), dtype=dtype)
            columns.append(fixed_lists(zeros if values is None else values, dtype, column_type))
    if block.domain is not None:
        columns.append(pa.array(block.domain, type=pa.string()).dictionary_encode())
    if block.phase is not None:
        columns.append(pa.array(block.phase[block.token_step], type=pa.string()).dictionary_encode())
    return pa.table(columns, schema=schema)


def to_block(table: pa.Table, meta: TraceMeta, steps: Ints, scored: bool = True) -> Block:
    """The inverse of `to_table`. steps [S]: the steps of the table's rows; scored: whether they keep scores."""
    if meta.level != "tokens":
        wanted = np.tile(np.array(meta.layers, dtype=np.int32), len(steps))
        if not np.array_equal(table["layer"].to_numpy(), wanted):
            raise ValueError("its rows do not list every layer of every step in order")
        counts: Ints = _values(table, "counts").astype(np.int64, copy=False)
        if meta.level == "counts":
            return CountsBlock(steps, counts.reshape(len(steps), meta.num_layers, meta.num_experts))
        return RankCountsBlock(
            steps, counts.reshape(len(steps), meta.num_layers, meta.num_source_ranks, meta.num_experts)
        )
    token_step = np.searchsorted(steps, table["step"].to_numpy())
    shape = (table.num_rows, meta.num_layers)
    names = set(table.column_names)
    scored = scored and meta.num_scores > 0
    phase = None
    if "phase" in names:
        phase = np.full(len(steps), "unknown", dtype=object)
        phase[token_step] = _labels(table, "phase")
    return TokenBlock(
        steps,
        token_step.astype(np.int64),
        table["source_rank"].to_numpy().astype(np.int64),
        _values(table, "expert_ids").reshape(*shape, meta.top_k),
        _values(table, "scores").reshape(*shape, meta.num_scores) if scored else None,
        _values(table, "score_ids").reshape(*shape, meta.num_scores) if scored and "score_ids" in names else None,
        _labels(table, "domain") if "domain" in names else None,
        phase,
    )


def fixed_lists(array: Any, dtype: type[np.generic] | None, kind: pa.DataType) -> pa.Array:
    """The rows of an array as lists of a fixed size. dtype: None keeps that of the array."""
    flat = np.ascontiguousarray(array, dtype=dtype).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, type=kind.value_type), type=kind)


def _labels(table: pa.Table, name: str) -> npt.NDArray[np.object_]:
    column = table[name].combine_chunks()
    labels: npt.NDArray[np.object_] = np.array(column.dictionary.to_pylist(), dtype=object)[column.indices.to_numpy()]
    return labels


def _values(table: pa.Table, name: str) -> Array:
    # A copy, because Arrow's memory is read-only and PyTorch needs writable memory.
    values = table[name].combine_chunks().flatten()
    if values.null_count:
        raise ValueError(f"column {name} has missing values")
    flat: Array = np.array(values.to_numpy(zero_copy_only=False))
    return flat
