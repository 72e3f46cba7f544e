"""Telemetry of a run: one row per step, stack, layer and rank. It is on disk as soon as a step has ended.

While the job runs, each rank appends finished steps to an Arrow stream. If the process dies, the stream is readable up
to the last complete step. At the end it is converted to a Parquet file of the same name.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from epsim.files import CannotWriteError, whole_file
from epsim.runtime.phases import LAYER_PHASES
from epsim.traces.columns import column, fixed_lists
from epsim.traces.store import one_line

FORMAT = "1"

COUNTS = {
    "tokens": "tokens of this source rank",
    "assignments": "routed assignments of its tokens",
    "routed": "assignments that this rank served",
    "shared_tokens": "tokens whose shared expert this rank served",
    "active": "physical routed experts of this rank that have tokens",
    "left_rank": "assignments of its tokens served on another rank",
    "left_node": "assignments of its tokens served on another node",
    "shared_left_rank": "its tokens whose shared expert was served on another rank",
    "shared_left_node": "its tokens whose shared expert was served on another node",
}
"""The integer columns of each row, and what they count."""


def schema_of(num_ranks: int) -> pa.Schema:
    """rows_to: rows of hidden states sent to each rank (a token is sent to a rank once). PHASE_us: in microseconds."""
    return pa.schema(
        [
            column("step", pa.int64()),
            column("stack", pa.int16()),
            column("layer", pa.int32()),
            column("rank", pa.int32()),
            *(column(name, pa.int64()) for name in COUNTS),
            column("rows_to", pa.list_(column("item", pa.int32()), num_ranks)),
            *(column(f"{phase}_us", pa.float64()) for phase in LAYER_PHASES),
        ]
    )


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.parquet"


class TelemetryWriter:
    """Writes one rank's telemetry. description: of the job, for the file's metadata. first_step: rows of an earlier
    attempt are kept before this step and dropped from it on. Raises CannotWriteError."""

    def __init__(
        self, folder: Path, rank: int, num_ranks: int, description: Mapping[str, Any], first_step: int | None = None
    ) -> None:
        self.path = rank_file(folder, rank)
        self._stream = self.path.with_suffix(".arrows")
        metadata = {"epsim.telemetry": FORMAT, "epsim.job": json.dumps(dict(description))}
        self._schema = schema_of(num_ranks).with_metadata(metadata)
        kept: list[pa.RecordBatch] = []
        if first_step is not None and (self.path.exists() or self._stream.exists()):
            kept = read_rank(folder, rank).filter(pc.field("step") < first_step).to_batches()
        # The new file has all kept rows before the old one is removed: the disk may be full, the process may end.
        begun = self._stream.with_suffix(".begun")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._write(self._schema.serialize())
            for batch in kept:
                self._write(batch.cast(self._schema).serialize())
            begun.replace(self._stream)
            self.path.unlink(missing_ok=True)
        except CannotWriteError:
            raise
        except OSError as error:
            raise CannotWriteError(self._stream, error) from None
        finally:
            begun.unlink(missing_ok=True)

    def append(self, columns: Mapping[str, Sequence[Any] | np.ndarray[Any, Any]]) -> None:
        """Appends the rows of one finished step."""
        arrays = [_array(columns[field.name], field.type) for field in self._schema]
        self._write(pa.record_batch(arrays, schema=self._schema).serialize())

    def close(self) -> None:
        """Converts the stream to the Parquet file."""
        os.close(self._file)
        table = read_stream(self._stream)
        with whole_file(self.path) as temporary:
            pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
        self._stream.unlink()

    def _write(self, buffer: pa.Buffer) -> None:
        view = memoryview(buffer)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise CannotWriteError(self._stream, error, "earlier finished steps are kept") from None


def read_stream(path: Path) -> pa.Table:
    """The rows of a rank that did not finish, up to its last complete step."""
    batches = []
    with pa.memory_map(os.fspath(path)) as source, pa.ipc.open_stream(source) as stream:
        schema = stream.schema
        while True:
            try:
                batches.append(stream.read_next_batch())
            except (StopIteration, pa.ArrowInvalid, OSError):
                break  # an incomplete write
    return pa.Table.from_batches(batches, schema=schema).combine_chunks()


def read_rank(folder: Path, rank: int) -> pa.Table:
    """The rows of a rank. Raises FileNotFoundError or ValueError."""
    path = rank_file(folder, rank)
    try:
        if path.exists():
            return pq.read_table(path, page_checksum_verification=True)
        return read_stream(path.with_suffix(".arrows"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: no telemetry of rank {rank}") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not telemetry, or damaged: {one_line(error)}") from None


def read_telemetry(folder: str | os.PathLike[str]) -> pa.Table:
    """All ranks' rows of a complete or interrupted run, sorted by step, stack, layer and rank. An interrupted run has
    only the steps that every rank finished. Raises FileNotFoundError or ValueError."""
    paths = sorted(Path(folder).glob("rank-*.*"))
    ranks = sorted({int(path.stem.split("-")[1]) for path in paths if path.suffix in (".parquet", ".arrows")})
    if not ranks:
        raise FileNotFoundError(f"{folder}: no telemetry (rank-*.parquet)")
    return joined([read_rank(Path(folder), rank) for rank in ranks])


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of the tables of all ranks, for the steps that all tables have."""
    steps = set(tables[0]["step"].to_pylist())
    for table in tables[1:]:
        steps &= set(table["step"].to_pylist())
    table = pa.concat_tables(tables)
    table = table.filter(pc.is_in(table["step"], pa.array(sorted(steps), type=pa.int64())))
    return table.sort_by([(name, "ascending") for name in ("step", "stack", "layer", "rank")])


def described(table: pa.Table) -> dict[str, Any]:
    """The job's description in the file's metadata."""
    description: dict[str, Any] = json.loads(table.schema.metadata[b"epsim.job"])
    return description


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return fixed_lists(values, None, kind)
    return pa.array(values, type=kind)
