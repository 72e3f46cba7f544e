"""Stores a trace in one Parquet file, written and read step by step, so that it need not fit in memory.

Row groups hold whole steps and are bounded in bytes (a single larger step is one row group). The footer's key-value
metadata holds `epsim.format` (version), `epsim.meta` (TraceMeta as JSON), `epsim.num_steps` and `epsim.index`: for each
group `[steps, rows, [numbers of steps without a token], whether its scores were kept]`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from epsim.files import CannotWriteError, check_source, check_target, temporary_beside, umask, utf8_name
from epsim.traces.check import check_block
from epsim.traces.columns import SCORES, schema_of, to_block, to_table
from epsim.traces.limits import check_size
from epsim.traces.trace import Block, CountsBlock, Ints, RankCountsBlock, TokenBlock, TraceMeta

FORMAT = "1"
GROUP_BYTES = 32 << 20
BLOCK_BYTES = 64 << 20
# Block size for callers that count tokens: the counts of many small steps are larger than their tokens.
SMALL_BLOCK = 4 << 20


class TraceWriter:
    """Writes a trace; use it as a context manager.

    It writes a temporary file beside `path` and renames it on success, so `path` never holds half a trace. On an
    exception the file is deleted; with keep_on_interrupt the finished steps are kept as a readable trace, with a note.
    score_ids: scores come with the ids of their experts, even if the first blocks have no scores.
    `append` raises ValueError if a block does not fit the meta or steps do not ascend.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: TraceMeta,
        *,
        keep_on_interrupt: bool = False,
        group_bytes: int = GROUP_BYTES,
        score_ids: bool = False,
    ) -> None:
        self.path = Path(path)
        self.meta = meta
        self.num_steps = 0
        self._target = check_target(path)
        self._keep = keep_on_interrupt
        self._group_bytes = group_bytes
        self._score_ids = score_ids
        self._last_step: int | None = None
        self._pending: list[Block] = []
        self._pending_bytes = 0
        self._index: list[tuple[int, int, list[int], bool]] = []
        self._schema: pa.Schema | None = None
        self._writer: pq.ParquetWriter | None = None
        self._temporary = temporary_beside(self._target)

    def append(self, block: Block) -> None:
        check_block(block, self.meta, self._last_step)
        if not len(block.steps):
            return
        if self._schema is None:
            score_ids = isinstance(block, TokenBlock) and (self._score_ids or _has_score_ids(block, self.meta))
            domain = isinstance(block, TokenBlock) and block.domain is not None
            phase = isinstance(block, TokenBlock) and block.phase is not None
            self._schema = schema_of(self.meta, score_ids, domain, phase)
        elif isinstance(block, TokenBlock):
            given = {"domain": block.domain is not None, "phase": block.phase is not None}
            if block.scores is not None:
                given["score_ids"] = block.score_ids is not None
            for name, is_given in given.items():
                if is_given != (name in self._schema.names):
                    raise ValueError(f"{name} must be given in all blocks of a trace or in none")
        if self._pending and _has_scores(block) != _has_scores(self._pending[0]):
            self._flush()
        for part in split_steps(block, self._group_bytes):
            size = block_bytes(part)
            if self._pending and self._pending_bytes + size > self._group_bytes:
                self._flush()
            self._pending.append(part)
            self._pending_bytes += size
        self.num_steps += len(block.steps)
        self._last_step = int(block.steps[-1])

    def add_note(self, note: str) -> None:
        """Adds a note to the trace's meta."""
        self.meta = dataclasses.replace(self.meta, notes=(*self.meta.notes, note))

    def close(self) -> None:
        """Completes the file and renames it to `path`."""
        try:
            self._flush()
            if self._schema is None:
                self._schema = schema_of(self.meta, score_ids=False, domain=False)
            writer = self._open()
            writer.add_key_value_metadata(
                {
                    "epsim.format": FORMAT,
                    "epsim.meta": self.meta.to_json(),
                    "epsim.num_steps": str(self.num_steps),
                    "epsim.index": json.dumps(self._index),
                }
            )
            writer.close()
            self._temporary.chmod(0o666 & ~umask())
            self._temporary.replace(self._target)
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError) and not isinstance(error, CannotWriteError):
                raise CannotWriteError(self.path, error) from None
            raise

    def abort(self) -> None:
        """Deletes the unfinished file."""
        try:
            if self._writer is not None and self._writer.is_open:
                self._writer.close()
        except OSError:
            pass  # The disk is full; the file is deleted anyway.
        finally:
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._keep and self.num_steps:
            self.add_note(f"recording was interrupted ({kind.__name__}): {self.num_steps} finished steps kept")
            self.close()
        else:
            self.abort()

    def _open(self) -> pq.ParquetWriter:
        if self._writer is None:
            assert self._schema is not None
            # Neighbouring counts differ little, so delta packing is both smaller and faster than plain.
            packed = [name for name in ("counts", "expert_ids", "score_ids") if name in self._schema.names]
            with utf8_name(self._temporary) as name:
                self._writer = pq.ParquetWriter(
                    name,
                    self._schema,
                    compression="zstd",
                    use_dictionary=[n for n in ("domain", "phase") if n in self._schema.names] or False,
                    column_encoding={f"{column}.list.element": "DELTA_BINARY_PACKED" for column in packed},
                    write_page_checksum=True,
                )
        return self._writer

    def _flush(self) -> None:
        if not self._pending:
            return
        assert self._schema is not None
        tables = [to_table(block, self.meta, self._schema) for block in self._pending]
        table = pa.concat_tables(tables).unify_dictionaries()
        steps = sum(len(block.steps) for block in self._pending)
        empty = [int(s) for block in self._pending for s in _empty_steps(block)]
        if table.num_rows:
            try:
                self._open().write_table(table, row_group_size=table.num_rows)
            except OSError as error:
                raise CannotWriteError(self.path, error) from None
        self._index.append((steps, table.num_rows, empty, _has_scores(self._pending[0])))
        self._pending, self._pending_bytes = [], 0


class StoredTrace:
    """A trace on disk. Raises FileNotFoundError, or ValueError if the file is not a complete epsim trace."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = self.path.name
        check_source(self.path)
        try:
            with utf8_name(self.path) as name, pq.ParquetFile(name) as file:
                footer = {k.decode(): v.decode() for k, v in (file.metadata.metadata or {}).items()}
                schema, num_groups = file.schema_arrow, file.metadata.num_row_groups
                groups = [file.metadata.row_group(i) for i in range(num_groups)]
                rows, sizes = [group.num_rows for group in groups], [group.total_byte_size for group in groups]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{self.path}: truncated, damaged or no Parquet file: {one_line(error)}") from None
        if "epsim.format" not in footer:
            raise ValueError(f"{self.path}: a Parquet file, but not a trace written by epsim")
        if footer["epsim.format"] != FORMAT:
            raise ValueError(f"{self.path}: trace format {footer['epsim.format']}, this epsim reads format {FORMAT}")
        try:
            self.meta = TraceMeta.from_json(footer["epsim.meta"])
            self.num_steps = int(footer["epsim.num_steps"])
            index = json.loads(footer["epsim.index"])
            self._index = [(int(s), int(r), [int(x) for x in e], bool(scored)) for s, r, e, scored in index]
            if any(group[0] < 0 or group[1] < 0 for group in self._index):
                raise ValueError("a group of fewer than 0 steps or rows")
            names = set(schema.names)
            expected = schema_of(self.meta, "score_ids" in names, "domain" in names, "phase" in names)
            whole = schema.names == expected.names and all(
                _same_kind(schema.field(n).type, expected.field(n).type) for n in expected.names
            )
            whole &= [group[1] for group in self._index if group[1]] == [r for r in rows if r]
            whole &= sum(group[0] for group in self._index) == self.num_steps
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, pa.ArrowException) as error:
            raise ValueError(
                f"{self.path}: the description of the trace in its footer is damaged: {one_line(error)}"
            ) from None
        if not whole:
            raise ValueError(f"{self.path}: its description does not fit its content (damaged)")
        self._check_size(schema, sizes)

    def _check_size(self, schema: pa.Schema, sizes: Sequence[int]) -> None:
        """Raises ValueError if a group or the whole trace would be far larger in memory than in the file.

        The bounds are wider than those of readers, because a trace is read group by group, and because counts by source
        rank are mostly 0 and so take a few bits each in the file. sizes: the bytes of each group, unpacked."""
        width = {field.name: getattr(field.type, "list_size", 1) for field in schema}
        numbers = [r * sum(width[n] for n in self._columns(schema, scored)) for _, r, _, scored in self._index]
        cells = self.num_steps * self.meta.num_layers * self.meta.num_experts
        in_tokens = self.meta.level == "tokens"
        check_size(f"{sum(numbers):,} numbers", sum(numbers) / 4, self.path)
        check_size("one row group", max(numbers, default=0) * (1 if in_tokens else 4), self.path)
        check_size("one row group", max(sizes, default=0) / 4, self.path)
        check_size(f"{self.num_steps:,} steps, and so {cells:,} counts", cells / 16 if in_tokens else 0, self.path)

    @staticmethod
    def _columns(schema: pa.Schema, scored: bool) -> list[str]:
        """The columns to read of a group. A group without scores has columns of zeros for them."""
        return [name for name in schema.names if scored or name not in SCORES]

    def __fspath__(self) -> str:
        return str(self.path)

    def group_starts(self) -> Ints:
        """The index of the first step of each row group, and at the end the number of steps."""
        return np.cumsum([0, *(num_steps for num_steps, *_ in self._index)])

    def blocks(
        self, start: int = 0, stop: int | None = None, max_bytes: int = BLOCK_BYTES, max_steps: int | None = None
    ) -> Iterator[Block]:
        """Blocks of whole steps, each of at most max_steps steps and max_bytes bytes (unless one step is larger).
        max_steps: for callers that turn tokens into counts, where a small step takes as much memory as a large one.
        start, stop: indices of steps (0..num_steps), not step numbers. Row groups outside them are not read.
        """
        stop = self.num_steps if stop is None else min(stop, self.num_steps)
        first, group, last = 0, -1, None
        with utf8_name(self.path) as name, pq.ParquetFile(name, page_checksum_verification=True) as file:
            for num_steps, num_rows, empty, scored in self._index:
                group += num_rows > 0
                low, high = max(start - first, 0), min(stop - first, num_steps)
                if low < high:
                    block = self._read(file, group if num_rows else None, num_steps, empty, scored, last)
                    last = int(block.steps[-1]) if len(block.steps) else last
                    for part in split_steps(slice_steps(block, low, high), max_bytes):
                        size = max_steps or max(len(part.steps), 1)
                        for begin in range(0, max(len(part.steps), 1), size):
                            yield slice_steps(part, begin, min(begin + size, len(part.steps)))
                first += num_steps

    def _read(
        self, file: pq.ParquetFile, group: int | None, num_steps: int, empty: list[int], scored: bool, last: int | None
    ) -> Block:
        try:
            table = file.schema_arrow.empty_table()
            if group is not None:
                table = file.read_row_group(group, self._columns(file.schema_arrow, scored))
            for name in table.column_names:
                if table[name].null_count:
                    raise ValueError(f"column {name} has missing values")
            row_steps: Ints = table["step"].to_numpy()
            if (np.diff(row_steps) < 0).any():
                raise ValueError("its rows are not in order of steps")
            steps: Ints = np.union1d(row_steps, np.array(empty, dtype=np.int64)).astype(np.int64)
            if len(steps) != num_steps:
                raise ValueError(f"{len(steps)} steps, but the index says {num_steps}")
            block = to_block(table, self.meta, steps, scored)
            check_block(block, self.meta, last)
        except (pa.ArrowException, OSError, ValueError, IndexError, OverflowError) as error:
            raise ValueError(f"{self.path}: row group {group} is damaged: {one_line(error)}") from None
        return block


def block_bytes(block: Block) -> int:
    if not isinstance(block, TokenBlock):
        return block.counts.size * 8
    arrays = (block.scores, block.score_ids)
    return block.expert_ids.size * 2 + 24 * len(block.token_step) + sum(a.size * 2 for a in arrays if a is not None)


def slice_steps(block: Block, low: int, high: int) -> Block:
    """The steps of a block with indices low..high-1."""
    if low == 0 and high == len(block.steps):
        return block
    if not isinstance(block, TokenBlock):
        return type(block)(block.steps[low:high], block.counts[low:high])
    begin, end = (int(x) for x in np.searchsorted(block.token_step, (low, high)))
    return block.take(slice(low, high), slice(begin, end), block.token_step[begin:end] - low)


def split_steps(block: Block, max_bytes: int) -> Iterator[Block]:
    """Cuts a block into blocks of whole steps of at most max_bytes each; a larger step is a block by itself."""
    total = block_bytes(block)
    if total <= max_bytes or len(block.steps) <= 1:
        yield block
        return
    if isinstance(block, TokenBlock):
        tokens = np.bincount(block.token_step, minlength=len(block.steps))
        sizes = tokens * (total / max(len(block.token_step), 1))
    else:
        sizes = np.full(len(block.steps), total / len(block.steps))
    low, size = 0, 0.0
    for index, step_size in enumerate(sizes):
        if index > low and size + step_size > max_bytes:
            yield slice_steps(block, low, index)
            low, size = index, 0.0
        size += step_size
    yield slice_steps(block, low, len(block.steps))


def one_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    text = str(error).strip().split("\n", 1)[0]
    return (text[:200] + "...") if len(text) > 200 else text or type(error).__name__


def _has_scores(block: Block) -> bool:
    return isinstance(block, TokenBlock) and block.scores is not None


def _has_score_ids(block: TokenBlock, meta: TraceMeta) -> bool:
    """Whether the trace will hold the expert id of each score, judged by its first block."""
    if block.scores is not None:
        return block.score_ids is not None
    return meta.num_scores not in (0, meta.num_experts, meta.top_k)


def _empty_steps(block: Block) -> Ints:
    if isinstance(block, CountsBlock | RankCountsBlock):
        return np.empty(0, dtype=np.int64)
    return np.delete(block.steps, np.unique(block.token_step))


def _same_kind(a: pa.DataType, b: pa.DataType) -> bool:
    # Parquet does not keep the name of a list's items.
    if pa.types.is_fixed_size_list(a) and pa.types.is_fixed_size_list(b):
        return bool(a.list_size == b.list_size and a.value_type == b.value_type)
    return bool(a == b)
