"""Writes small files that would take much time or memory, and reads them in a process of its own.

As a program: `python bombs.py FOLDER BYTES [NAME ...]` writes each file, reads it, and prints what that took. BYTES is
about the size of a file. If it is below 1 MB, the bounds of the readers are made smaller to match.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.numpy import save_file

Write = Callable[[Path, int], None]
BOMBS: dict[str, Write] = {}


def bomb(write: Write) -> Write:
    BOMBS[write.__name__] = write
    return write


def text(path: Path, size: int, lines: Iterable[str], packed: bool) -> None:
    """Writes lines until the file has this size."""
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb") if packed else nullcontext(raw) as file:
        for line in lines:
            file.write(line.encode())
            if raw.tell() > size:
                break


def endless(make: Callable[[int], str], first: str = "") -> Iterable[str]:
    if first:
        yield first
    number = 0
    while True:
        yield make(number)
        number += 1


def token_line(number: int) -> str:
    return f'{{"layer":{number % 2},"token":{number // 2},"indices":[{number % 7}]}}\n'


@bomb
def packed_log_of_equal_lines(path: Path, size: int) -> None:
    line = '{"layer":0,"topk_ids":[1,2]}\n' * 1000
    text(path, size // 10, endless(lambda i: line), packed=True)


@bomb
def packed_log_of_tokens(path: Path, size: int) -> None:
    text(path, size, endless(token_line), packed=True)


@bomb
def log_of_tokens(path: Path, size: int) -> None:
    text(path, size, endless(token_line), packed=False)


@bomb
def log_with_one_wide_line(path: Path, size: int) -> None:
    wide = json.dumps({"layer": 0, "indices": list(range(30000))}) + "\n"
    text(path, size, endless(lambda i: '{"layer":0,"indices":[1]}\n', wide), packed=False)


@bomb
def log_of_steps(path: Path, size: int) -> None:
    text(path, size, endless(lambda i: f'{{"layer":0,"step":{i},"indices":[1]}}\n'), packed=False)


@bomb
def log_of_blank_lines(path: Path, size: int) -> None:
    text(
        path,
        size // 20,
        endless(lambda i: "\n" * 1000, '{"layer":0,"indices":[1]}\n{"layer":1,"indices":[1]}\n'),
        packed=True,
    )


@bomb
def megatron_dense(path: Path, size: int) -> None:
    def line(layer: int, tokens: int) -> str:
        record = {"step": 0, "layer": layer, "rank": 0, "top_indices": [[0]] * tokens}
        return json.dumps(record, separators=(",", ":")) + "\n"

    text(path, size, endless(lambda i: line(i + 1, 1), line(0, size // 8)), packed=False)


@bomb
def megatron_packed(path: Path, size: int) -> None:
    make = '{"step":%d,"layer":0,"rank":0,"top_indices":[[0]]}\n'
    text(path, size, endless(lambda i: make % i), packed=True)


@bomb
def nested_lists(path: Path, size: int) -> None:
    text(path, size // 10, endless(lambda i: "[]," * 1000, '{"logical_count":['), packed=True)


@bomb
def json_of_lists(path: Path, size: int) -> None:
    path.write_text('{"logical_count":[' + "[]," * (size // 3) + "[1]]}")


@bomb
def json_of_records(path: Path, size: int) -> None:
    path.write_text('[{"layer":0,"indices":[1]}' + ',{"":0}' * (size // 7) + "]")


@bomb
def json_of_keys(path: Path, size: int) -> None:
    path.write_text('{"logical_count":{' + ",".join(f'"{i}":{i}' for i in range(size // 16)) + "}}")


@bomb
def json_of_one_key(path: Path, size: int) -> None:
    path.write_text('{"' + "k" * size + '":1}')


@bomb
def json_of_one_number(path: Path, size: int) -> None:
    path.write_text('{"logical_count":[[0.' + "1" * size + "]]}")


@bomb
def json_unpaired(path: Path, size: int) -> None:
    path.write_text("[" * size)


@bomb
def summary_dense(path: Path, size: int) -> None:
    share = {"count_frequency": 0.5}
    layers = {f"layer_{i}": {"32000" if i == 0 else "0": share} for i in range(size // 60)}
    content = {"think_expert_analytics": layers, "sample_count": 1, "num_think_tokens": 10}
    path.write_text(json.dumps(content, separators=(",", ":")))


@bomb
def counts_csv_dense(path: Path, size: int) -> None:
    make: Callable[[int], str] = lambda i: f"{i},{32766 if i == 0 else 0},5\n"  # noqa: E731
    text(path, min(size, 70000), endless(make, "layer_id,expert_id,count\n"), packed=False)


@bomb
def counts_csv_packed(path: Path, size: int) -> None:
    make: Callable[[int], str] = lambda i: f"{i % 60000},{i // 60000},5\n"  # noqa: E731
    text(path, size, endless(make, "layer_id,expert_id,count\n"), packed=True)


@bomb
def wide_csv_datasets(path: Path, size: int) -> None:
    make: Callable[[int], str] = lambda i: f"d{i},0,0,1,2\n"  # noqa: E731
    text(path, size, endless(make, "dataset,iteration,layer_idx,0,1\n"), packed=False)


@bomb
def wide_csv_columns(path: Path, size: int) -> None:
    names = ",".join(map(str, range(size // 8)))
    path.write_text(f"layer_idx,{names}\n" + "0," * (size // 8) + "0\n")


@bomb
def wide_csv_packed(path: Path, size: int) -> None:
    row = ",".join(["300"] * 256)
    header = ",".join(map(str, range(256)))
    text(path, size // 4, endless(lambda i: f"0,{i},{row}\n", f"layer_idx,iteration,{header}\n"), packed=True)


@bomb
def gate_log_packed(path: Path, size: int) -> None:
    row = ",".join(["7"] * 64)
    text(path, size // 4, endless(lambda i: f"{i}:[[{row}],[{row}]]\n"), packed=True)


@bomb
def line_ends(path: Path, size: int) -> None:
    path.write_text("\n" * (min(size, 60000)) + "a,b")


@bomb
def zeros_npz(path: Path, size: int) -> None:
    np.savez_compressed(path, counts=np.zeros((size, 20, 5), dtype=np.int8))


@bomb
def routed_npz(path: Path, size: int) -> None:
    np.savez_compressed(path, routed_experts=np.zeros((size * 13, 1, 1), dtype=np.int8))


@bomb
def many_arrays_npz(path: Path, size: int) -> None:
    ids = np.zeros((1, 1, 1), dtype=np.int8)
    arrays: Any = {f"arr_{i}": ids for i in range(size // 380)}
    np.savez(path, **arrays)


@bomb
def logits_npz(path: Path, size: int) -> None:
    logits = np.tile(np.arange(256, dtype=np.float16)[::-1] * 7 % 256, (size // 512, 1))
    arrays: Any = {f"layer_{i}": logits for i in range(24)}
    np.savez_compressed(path, **arrays)


@bomb
def sequences_npz(path: Path, size: int) -> None:
    np.savez_compressed(path, expert_ids=np.zeros((size // 100, 1300, 1, 1), dtype=np.uint8),
                        lengths=np.full(size // 100, 1300))  # fmt: skip


@bomb
def empty_sequences_npz(path: Path, size: int) -> None:
    np.savez(path, expert_ids=np.zeros((0, size * 1000, 1, 1), dtype=np.uint8), lengths=np.zeros(0, dtype=np.int64))


@bomb
def header_of_npy(path: Path, size: int) -> None:
    with path.open("wb") as file:
        header = {"descr": "<i2", "fortran_order": False, "shape": (10**12, 1, 1)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(min(size, 10**6)))


def shared(path: Path, records: list[Any]) -> None:
    table = torch.zeros(1, 4, dtype=torch.int64)
    torch.save({"records": records, "last_physical_to_logical_map": table}, path)


@bomb
def one_record_many_times(path: Path, size: int) -> None:
    counts = torch.ones(1, 4, dtype=torch.int64)
    shared(path, [{"forward_pass_id": 0, "rank": 0, "global_physical_count": counts}] * (size // 2))


@bomb
def expanded_tensors(path: Path, size: int) -> None:
    counts = torch.ones(1).expand(1 << 10, 1 << 10)
    shared(path, [{"forward_pass_id": i, "rank": 0, "global_physical_count": counts} for i in range(size // 2000)])


@bomb
def lists_of_lists(path: Path, size: int) -> None:
    value: Any = 1
    for _ in range(15):
        value = [value] * 10
    torch.save({"logical_count": value}, path)


@bomb
def list_in_itself(path: Path, size: int) -> None:
    value: list[Any] = []
    value.extend([value] * 10)
    torch.save({"logical_count": value}, path)


@bomb
def pickle_of_lists(path: Path, size: int) -> None:
    values: list[Any] = [0x1950A86A20F9469CFC6C, 1001, {}]
    head = b"".join(pickle.dumps(value, 2) for value in values)
    content = b"\x80\x02}X\x0d\x00\x00\x00logical_count](" + b"]" * size + b"es."
    path.write_bytes(head + content + pickle.dumps([], 2))


@bomb
def pickle_of_bytes(path: Path, size: int) -> None:
    number = pickle.dumps(10**10, 2)[2:-1]
    path.write_bytes(b"\x80\x02cbuiltins\nbytearray\n" + number + b"\x85R.")


@bomb
def packed_pt(path: Path, size: int) -> None:
    torch.save({"logical_count": torch.ones(size // 10, 100)}, path.with_suffix(".whole"))
    with zipfile.ZipFile(path.with_suffix(".whole")) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in whole.namelist():
            file.writestr(name, whole.read(name))
    path.with_suffix(".whole").unlink()


@bomb
def many_keys(path: Path, size: int) -> None:
    save_file({f"{i}_0": np.ones(2, dtype=np.int64) for i in range(size // 90)}, path)


def trace_meta(level: str, layers: int, experts: int) -> str:
    meta = {"level": level, "num_layers": layers, "num_experts": experts, "top_k": 1, "layers": [], "notes": []}
    return json.dumps(meta)


def write_trace(path: Path, meta: str, groups: Iterable[pa.Table], index: list[Any]) -> None:
    writer = None
    for table in groups:
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=max(table.num_rows, 1))
    assert writer is not None
    writer.add_key_value_metadata({"epsim.format": "1", "epsim.meta": meta, "epsim.index": json.dumps(index),
                                   "epsim.num_steps": str(sum(entry[0] for entry in index))})  # fmt: skip
    writer.close()


def counts_table(first: int, steps: int, experts: int) -> pa.Table:
    item = pa.field("item", pa.int64(), nullable=False)
    counts = pa.FixedSizeListArray.from_arrays(np.ones(steps * experts, np.int64), type=pa.list_(item, experts))
    fields = [("step", pa.int64()), ("layer", pa.int32()), ("counts", counts.type)]
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])
    return pa.table([np.arange(first, first + steps), np.zeros(steps, np.int32), counts], schema=schema)


@bomb
def equal_counts_trace(path: Path, size: int) -> None:
    experts, steps = 1000, max(size // 200, 1)
    write_trace(path, trace_meta("counts", 1, experts), [counts_table(0, steps, experts)], [[steps, steps, [], False]])


@bomb
def many_groups_trace(path: Path, size: int) -> None:
    number = size // 700
    groups = (counts_table(i, 1, 2) for i in range(number))
    write_trace(path, trace_meta("counts", 1, 2), groups, [[1, 1, [], False]] * number)


@bomb
def empty_steps_trace(path: Path, size: int) -> None:
    item = pa.field("item", pa.int16(), nullable=False)
    fields = [("step", pa.int64()), ("source_rank", pa.int32()), ("expert_ids", pa.list_(item, 1))]
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])
    number = size // 10
    index = [[number, 0, list(range(number)), False]]
    write_trace(path, trace_meta("tokens", 1, 30000), [schema.empty_table()], index)


def measure(path: Path) -> tuple[str, float]:
    """What `traces show` would answer for a file, and the seconds of CPU time that it took."""
    from epsim.traces.importing import open_trace
    from epsim.traces.options import ImportOptions
    from epsim.traces.show import summarize

    begun = time.process_time()
    answer = ""
    for options in (ImportOptions(), ImportOptions(top_k=1), ImportOptions(num_experts=32766)):
        try:
            answer = f"{summarize(open_trace(path, options)).num_steps} steps"
            break
        except (ValueError, OSError) as error:
            answer = str(error)
            if "give --" not in answer:
                break
    return answer, time.process_time() - begun


def peak_megabytes() -> float:
    """The peak memory of this program. getrusage would include that of the program that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    folder, size, *names = sys.argv[1:]
    if int(size) < 10**6:
        from epsim.traces import limits

        limits.MAX_NUMBERS = limits.MAX_NUMBERS * int(size) // 10**7
    for name in names or BOMBS:
        path = Path(folder, f"{name}.npz") if name.endswith("_npz") else Path(folder, name)
        # In a process of its own, so that its memory is not counted.
        if os.fork() == 0:
            BOMBS[name](path, int(size))
            os._exit(0)
        assert os.wait()[1] == 0
        answer, seconds = measure(path)
        peak = peak_megabytes()
        print(json.dumps([name, path.stat().st_size, seconds, peak, str(path), answer]), flush=True)
