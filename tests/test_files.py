"""What is read and written: plain files only, whole or not at all, and nothing a terminal would obey."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epsim.files import check_source, check_target, message_line, printable, whole_file
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import CountsBlock, TraceMeta

META = TraceMeta("counts", 2, 4, 2)
BLOCK = CountsBlock(np.arange(3), np.arange(24).reshape(3, 2, 4))


def test_a_pipe_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="a pipe or device, not a plain file"):
        check_source(pipe)
    with pytest.raises(ValueError, match="a pipe or device"):
        StoredTrace(pipe)
    for write in (lambda: TraceWriter(pipe, META), lambda: whole_file(pipe).__enter__()):
        with pytest.raises(ValueError, match="a device or pipe, which would be lost"):
            write()
    assert pipe.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_devices_are_not_targets() -> None:
    with pytest.raises(ValueError, match="a device or pipe"):
        check_target(os.devnull)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "file")
    with whole_file(tmp_path / "link") as temporary:
        temporary.write_text("text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep" / "file").read_text() == "text"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="a link to itself"):
        check_target(tmp_path / "loop")
    with pytest.raises(ValueError, match="loop"):
        check_source(tmp_path / "loop")


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    for name in ("", "a\0b", "x" * 300):
        with pytest.raises(ValueError, match="name"):
            check_target(f"{tmp_path}/{name}" if len(name) > 9 else name)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with (
        pytest.raises(OSError, match=r"t: cannot be written: no space left"),
        TraceWriter(tmp_path / "t", META) as writer,
    ):
        writer.append(BLOCK)
    assert not list(tmp_path.iterdir())


def test_printable() -> None:
    assert printable("a\n b\t\x1b[31mred\x00\u202e") == r"a b \x1b[31mred\x00\u202e"
    assert printable("\udcff \u540d") == "\\udcff \u540d"
    line = message_line("x" * 5000 + " end")
    assert len(line) < 700
    assert line.endswith("end")


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("step", [0, 0, 2, 2, 1, 1]),
        ("step", [-1, -1, 1, 1, 2, 2]),
        ("step", [0, None, 1, 1, 2, 2]),
        ("layer", [1, 0, 1, 0, 1, 0]),
        ("layer", [9, 9, 9, 9, 9, 9]),
        ("counts", [[1, None, 1, 1]] * 6),
        ("counts", [[1, -1, 1, 1]] * 6),
        ("counts", [[2**62, 1, 1, 1]] * 6),
    ],
)
def test_altered_columns_are_damage(tmp_path: Path, column: str, values: list[object]) -> None:
    path = tmp_path / "t.parquet"
    with TraceWriter(path, META) as writer:
        writer.append(BLOCK)
    with pq.ParquetFile(path) as file:
        table, footer = file.read(), file.metadata.metadata
    place = table.schema.get_field_index(column)
    kind = pa.list_(pa.int64(), 4) if column == "counts" else table.schema.field(column).type
    table = table.set_column(place, pa.field(column, kind), pa.array(values, type=kind))
    with pq.ParquetWriter(path, table.schema) as rewritten:
        rewritten.write_table(table)
        rewritten.add_key_value_metadata({k: v for k, v in footer.items() if k.startswith(b"epsim.")})
    with pytest.raises(ValueError, match=r"t.parquet: row group 0 is damaged"):
        list(StoredTrace(path).blocks())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 2.0), ("num_experts", "4"), ("num_experts", 2**15), ("top_k", True), ("num_source_ranks", None),
        ("num_source_ranks", -1), ("num_source_ranks", 10**9), ("shared_cost", "x"), ("shared_cost", 1e308),
        ("layers", ("a", "b")), ("layers", (0, 0)), ("layers", (0, -1)), ("model", 5), ("phase", "z"), ("notes", (1,)),
    ],
)  # fmt: skip
def test_descriptions_of_the_wrong_kind(name: str, value: object) -> None:
    fields = {"level": "counts", "num_layers": 2, "num_experts": 4, "top_k": 2} | {name: value}
    with pytest.raises(ValueError, match=r"."):
        TraceMeta(**fields)  # type: ignore[arg-type]
