"""Small files cost little: reading any of them takes a bounded time and memory, or ends with one line."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.traces.importing import import_trace, open_trace
from epsim.traces.limits import check_size
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import ragged
from epsim.traces.readers.harmoeny import _spans
from epsim.traces.readers.token_log import _rows
from epsim.traces.trace import TokenBlock
from tests.traces.bombs import BOMBS

REFUSED = {
    "packed_log_of_equal_lines": "unpack the file",
    "packed_log_of_tokens": "unpack the file",
    "log_of_blank_lines": "unpack the file",
    "megatron_dense": "layers",
    "megatron_packed": "unpack the file",
    "nested_lists": "unpack the file",
    "summary_dense": "layers x 32,001 experts",
    "wide_csv_packed": "unpack the file",
    "gate_log_packed": "unpack the file",
    "zeros_npz": "numpy.savez instead of savez_compressed",
    "routed_npz": "tokens: too large",
    "sequences_npz": "tokens: too large",
    "empty_sequences_npz": "expert_ids are empty",
    "header_of_npy": "truncated or damaged npy file",
    "one_record_many_times": "save each value once",
    "expanded_tensors": "save each value once",
    "lists_of_lists": "save each value once",
    "list_in_itself": "save each value once",
    "pickle_of_bytes": "that calls builtins.bytearray",
    "packed_pt": "save it again with torch.save",
    "equal_counts_trace": "one row group",
    "empty_steps_trace": "5,000 steps, and so 150,000,000 counts",
}


def read_bombs(folder: Path, size: int, *names: str) -> dict[str, tuple[int, float, float, str]]:
    """(bytes of the file, seconds, peak memory in MiB, answer) of each bomb, from another process."""
    program = [sys.executable, "-m", "tests.traces.bombs", str(folder), str(size), *names]
    lines = subprocess.run(program, capture_output=True, text=True, check=True, timeout=600).stdout.splitlines()
    results = {}
    for name, num_bytes, seconds, peak, path, answer in map(json.loads, lines):
        assert "\n" not in answer
        assert answer.endswith(" steps") or path in answer, answer
        results[name] = (num_bytes, seconds, peak, answer)
    return results


def test_small_files_cost_little(tmp_path: Path) -> None:
    results = read_bombs(tmp_path, 50_000)
    assert list(results) == list(BOMBS)
    for name, (_, seconds, _, answer) in results.items():
        assert REFUSED.get(name, "") in answer, (name, answer)
        assert seconds < 5, name
    assert max(peak for _, _, peak, _ in results.values()) < 700


@pytest.mark.long
@pytest.mark.parametrize("name", list(BOMBS))
def test_ten_megabytes_take_thirty_seconds_and_two_gigabytes(tmp_path: Path, name: str) -> None:
    num_bytes, seconds, peak, _ = read_bombs(tmp_path, 10_000_000, name)[name]
    assert num_bytes < 12e6
    assert seconds < 30
    assert peak < 2000


def test_a_file_that_is_not_packed_may_be_larger(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000_000))
    check_size("numbers", 159_000_000, path)
    with pytest.raises(ValueError, match=r"file: 5 lines: too large in memory for 10.0 MB of files .*: unpack it"):
        check_size("5 lines", 161_000_000, path, hint="unpack it")


LINES = st.lists(
    st.fixed_dictionaries(
        {"layer": st.integers(3, 5), "topk_ids": st.permutations(range(4)).map(lambda ids: ids[:2])},
        optional={
            "token": st.integers(0, 3),
            "rid": st.sampled_from(["a", "b"]),
            "step": st.integers(0, 2),
            "rank": st.integers(0, 1),
            "task": st.sampled_from(["x", "y"]),
        },
    ),
    min_size=1,
    max_size=24,
)


@given(LINES)
def test_rows_of_a_log_are_those_of_a_dictionary(lines: list[dict[str, Any]]) -> None:
    """The n-th line of a layer with a key is in the key's n-th row; rows are in order of first appearance."""
    keys: dict[tuple[Any, ...], int] = {}
    seen: dict[tuple[Any, ...], int] = {}
    rows: dict[tuple[Any, ...], int] = {}
    expected: list[int] = []
    first: list[int] = []
    line_key: list[int] = []
    layer: list[int] = []
    for number, line in enumerate(lines):
        key = tuple(line.get(name) for name in ("rid", "step", "rank", "token"))
        again = seen.get((line["layer"], key), 0)
        seen[line["layer"], key] = again + 1
        expected.append(rows.setdefault((*key, again), len(rows)))
        if expected[-1] == len(first):
            first.append(number)
        line_key.append(keys.setdefault(key, len(keys)))
        layer.append(line["layer"] - 3)
    row, first_line = _rows(np.array(line_key), np.array(layer), 3)
    assert row.tolist() == expected
    assert first_line.tolist() == first


@settings(max_examples=30)
@given(LINES)
def test_every_line_of_a_log_is_kept(tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = open_trace(path, ImportOptions(num_experts=4))
    listed = sorted((line["layer"], *line["topk_ids"]) for line in lines)
    kept = []
    for block in trace.blocks():
        assert isinstance(block, TokenBlock)
        for token in block.expert_ids.tolist():
            kept += [(number, *ids) for number, ids in zip(trace.meta.layers, token) if ids[0] >= 0]
    assert sorted(kept) == listed


def slow_ragged(value: Any) -> str:
    level: list[tuple[tuple[int, ...], Any]] = [((), value)]
    while level and len(level[0][0]) < 16 and all(isinstance(item, list) for _, item in level):
        expected = len(level[0][1])
        for index, item in level:
            if len(item) != expected:
                return f"the list at {list(index)} has {len(item)} entries, the first of its depth has {expected}"
        level = [((*index, i), inner) for index, item in level for i, inner in enumerate(item)]
    return "ragged: lists of unequal depth, or a value that is not a number"


@given(st.recursive(st.just(1), lambda inner: st.lists(inner, max_size=3), max_leaves=20))
def test_the_list_that_is_ragged_is_named(value: Any) -> None:
    assert ragged(value).endswith(slow_ragged(value))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9))
def test_spans_of_datasets(sizes: list[int]) -> None:
    datasets = [f"d{i}" for i, size in enumerate(sizes) for _ in range(size)]
    spans = [f"{datasets.index(n)}-{datasets.index(n) + datasets.count(n) - 1} {n}" for n in dict.fromkeys(datasets)]
    assert _spans(datasets) == "steps " + ", ".join(spans)


@given(
    st.lists(st.sampled_from(["0", " 7 ", "3.0", "-1", "1e3", "x", "", "9007199254740993", "1_0", "nan"]), max_size=4)
)
def test_csv_numbers(cells: list[str]) -> None:
    from epsim.traces.readers.sglang import csv_numbers

    row = next(csv.reader([",".join(cells)]), [])
    expected: list[int] | None = []
    for text in row:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 2**53 or value != int(value):
            expected = None
            break
        assert expected is not None
        expected.append(int(value))
    try:
        assert csv_numbers(row, range(len(row)), 2) == expected
    except ValueError:
        assert expected is None


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    """Libraries that open files themselves refuse such a name; epsim does not."""
    import torch
    from safetensors.numpy import save_file

    folder = Path(os.fsdecode(os.fsencode(tmp_path / "x") + b"\xff"))
    folder.mkdir()
    counts = np.ones((2, 1, 4), dtype=np.int64)
    torch.save({"logical_count": torch.tensor(counts)}, tmp_path / "a.pt")
    save_file({"0_0": counts[0, 0], "1_0": counts[1, 0]}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", counts=counts)
    for name in ("a.pt", "a.safetensors", "a.npz"):
        (tmp_path / name).rename(folder / name)
        trace = import_trace(folder / name, folder / "t.parquet", ImportOptions(top_k=2))
        assert [block.counts.tolist() for block in trace.blocks()] == [counts.tolist()]  # type: ignore[union-attr]
    assert sorted(os.listdir(folder)) == ["a.npz", "a.pt", "a.safetensors", "t.parquet"]


def test_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="it has no files"):
        open_trace(tmp_path)
    for path in (tmp_path / "pipe", tmp_path / "zero", Path("/dev/tty"), Path("/dev/stdin")):
        if path.exists() and not path.is_file():
            with pytest.raises(ValueError, match="a pipe or device, not a plain file"):
                open_trace(path)


@pytest.mark.skipif(not Path("/proc/kmsg").exists(), reason="needs /proc")
def test_files_without_a_size_are_not_opened() -> None:
    """Reading /proc/kmsg waits for the next message of the kernel."""
    with pytest.raises(ValueError, match="/proc/kmsg: the file is empty"):
        open_trace("/proc/kmsg")
