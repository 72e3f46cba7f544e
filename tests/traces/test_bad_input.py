"""Hostile and broken files: one line that names the file and the place, or a right answer; never anything else."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epsim.traces.importing import import_trace, open_trace
from epsim.traces.options import ImportOptions

Write = Callable[[str], tuple[list[Path], dict[str, Any]]]
OPTIONS = ImportOptions(top_k=2, num_experts=4)


class Payload:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def refused(content: bytes | str | dict[str, Any] | list[Any], folder: Path, name: str = "source.file") -> str:
    """The one line with which a file of this content is refused; nothing is left behind."""
    path = folder / name
    if isinstance(content, dict | list):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return refused_path(path, OPTIONS)


def refused_path(path: Any, options: ImportOptions = OPTIONS) -> str:
    target = Path(path).parent / "target.parquet"
    before = sorted(Path(path).parent.iterdir())
    with pytest.raises((ValueError, OSError)) as caught:
        import_trace(path, target, options)
    assert sorted(Path(path).parent.iterdir()) == before
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def pt(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_missing_empty_and_unknown(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.json: no such file"):
        open_trace(tmp_path / "none.json")
    with pytest.raises(ValueError, match="no source given"):
        open_trace([])
    assert "the file is empty" in refused(b"", tmp_path)
    assert "no text" in refused(b" \n \n", tmp_path)
    assert "binary content of an unknown type" in refused(bytes(range(256)) * 8, tmp_path)
    assert "a Git LFS pointer" in refused("version https://git-lfs.github.com/spec/v1\noid sha256:00\n", tmp_path)
    assert "a text file: none of the known" in refused("hello", tmp_path)
    assert "a json file with a, b: none of" in refused({"a": 1, "b": 2}, tmp_path)
    assert "a csv file with x, y" in refused("x,y\n1,2\n", tmp_path)
    assert "neither NumPy's npz nor" in refused(b"PK\x03\x04" + b"PK\x05\x06" + bytes(18), tmp_path)


def test_folders(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "no readable recording in this folder: it has no files" in refused_path(folder)
    torch.save({"foo": torch.ones(2)}, folder / "x.pt")
    assert "(" + str(folder / "x.pt") + ": a pt file with foo: none of the known" in refused_path(folder)
    (folder / "LICENSE").write_text("licence")
    (folder / "junk.bin").write_bytes(b"\0" * 100)
    assert "no readable recording in this folder" in refused_path(folder)
    (folder / "a.json").write_text(json.dumps({"logical_count": [[1, 1, 1, 1]]}))
    assert open_trace(folder, OPTIONS).num_steps == 1
    (folder / "b.csv").write_text("layer_id,expert_id,count\n0,0,1\n")
    with pytest.raises(ValueError, match="import one format at a time"):
        open_trace(folder, OPTIONS)


def test_foreign_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x")
    with pytest.raises(ValueError, match="x: a Parquet file, but not a trace"):
        open_trace(tmp_path / "x")
    assert "not a trace" in refused_path(tmp_path / "x")
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-9])
    with pytest.raises(ValueError, match="x: truncated, damaged"):
        open_trace(tmp_path / "x")


@pytest.mark.parametrize("how", ["pickle", "torch", "legacy", "npy"])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, how: str) -> None:
    trap = Payload(tmp_path / "ran")
    file = io.BytesIO()
    if how == "npy":
        np.save(file, np.array([trap], dtype=object), allow_pickle=True)
    elif how == "pickle":
        pickle.dump({"logical_count": trap}, file)
    else:
        torch.save({"logical_count": trap}, file, _use_new_zipfile_serialization=how == "torch")
    message = refused(file.getvalue(), tmp_path)
    assert ("not executed" in message) or ("never loaded" in message)
    assert not (tmp_path / "ran").exists()


BAD_COUNTS = [
    ([[1, float("nan"), 1, 1]], "the count at step 0, layer 0, expert 1 is not a finite number (nan)"),
    ([[1, 1, 1, 1], [1, 1, float("inf"), 1]], "the count at step 0, layer 1, expert 2 is not a finite number"),
    ([[1, 1, 1, -3]], "layer 0, expert 3 is negative (-3)"),
    ([[1, 1.5, 1, 1]], "layer 0, expert 1 is not a whole number (1.5)"),
    ([[1, 1, 1, 1], [1, 1, 1]], "ragged: the list at [1] has 3 entries, the first of its depth has 4"),
    ([[1, 1, 1, 10**30]], "beyond 64 bits"),
    ([[1, 1, 1, 2**60]], "larger than 2^40"),
    ([["a", 1, 1, 1]], "expected numbers"),
    ([[None, 1, 1, 1]], "expected numbers"),
    ([[True, False, True, True]], "expected numbers"),
    ([], "shape [0]"),
    ([[]], "shape [1, 0]"),
    (5, "shape []"),
    ({"a": 1}, "expected numbers"),
    ([[0, 0, 0, 0]], "no tokens in any layer"),
]


@pytest.mark.parametrize(("counts", "message"), BAD_COUNTS)
def test_bad_counts(tmp_path: Path, counts: Any, message: str) -> None:
    assert message in refused({"logical_count": counts}, tmp_path)


def test_the_step_is_named(tmp_path: Path) -> None:
    counts = np.ones((600, 1, 4))
    counts[555, 0, 2] = 0.5
    assert "the count at step 555, layer 0, expert 2" in refused(pt({"logical_count": torch.tensor(counts)}), tmp_path)


def test_placements_are_told_from_loads(tmp_path: Path) -> None:
    message = refused({"physical_to_logical_map": [[0, 1]]}, tmp_path)
    assert "a placement (physical_to_logical_map), not a load" in message
    message = refused("num_slots: 4\ninitial_global_assignments:\n  3: [0, 1]\nlayer_updates_per_iter: 0\n", tmp_path)
    assert "a placement (initial_global_assignments), not a load" in message


def log(*lines: Any) -> str:
    return "\n".join(map(json.dumps, lines))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (log({"layer": 0, "topk_ids": [0, 4]}), "expert id 4 is outside 0..3"),
        (log({"layer": 0, "topk_ids": [0, -1]}), "line 1: expert ids [0, -1]"),
        (log({"layer": 0, "topk_ids": [1, 1]}), "line 1: expert ids [1, 1] name an expert twice"),
        (log({"layer": 0, "topk_ids": [0, 1]}, {"layer": 0, "topk_ids": ["a"]}), "line 2"),
        (log({"layer": -1, "topk_ids": [0, 1]}), "layer '-1' is not a whole number"),
        (log({"layer": 0, "topk_ids": [0, 1], "topk_weights": [1.0]}), "need 2 finite weights"),
        (log({"layer": 0, "topk_ids": [0, 1], "topk_weights": [1.0, float("nan")]}), "need 2 finite weights"),
        (log({"layer": 0, "topk_ids": [0, 1, 2]}), "--top-k 2, but the file has 3"),
        (log({"layer": 0, "topk_ids": [0, 1]}, {"note": 0}) + "\n{not json", "line 3 is not JSON"),
        (log({"layer": 0, "topk_ids": [0, 1]}, {"layer": 0}), "line 2 has a layer, but no expert ids"),
        (log(*[{"layer": 0, "topk_ids": [0, 1]}] * 64), "holds warm-up rows only"),
        ("layer_id,expert_id,count\n0,0,-1\n", "line 2, column 3: '-1' is not a whole number"),
        ("layer_id,expert_id,count\n0,0,nan\n", "line 2, column 3: 'nan'"),
        ("layer_id,expert_id,count\n0,9,1\n", "expert id 9 is outside 0..3"),
        ("layer_id,expert_id,count\n0,0\n", "line 2, column 3: ''"),
        ("layer_id,expert_id,count\n", "no counts"),
        ("dataset,iteration,layer_idx,0,1\na,0,0,1\n", "ragged: line 2 has 4 columns"),
        ("dataset,iteration,layer_idx,0,1\na,0,0,1,1\na,0,1,1,1\na,1,0,1,1\n", "ragged: 'a' iteration 1 has 1 of 2"),
        ("0:[[1, 2], [3]]\n", "line 1: ragged"),
        ("0:[[1, 2, 3, 4]]\n1:[[1, 2]]\n", "ragged: line 2"),
        ("0:[[1, 2, 3, 4]]\n1:[[1, 2, 3, -4]]\n", "line 2: the count at micro-batch 0, expert 3 is negative"),
        ("0:[[1, 2, 3, 4]]\nhello\n", "line 2 is not"),
        ("[" * 100_000, "malformed JSON"),
        ('{"logical_count": [[1, 2', "truncated or malformed JSON"),
        (json.dumps({"load_history": [{"other": 1}]}), "load_history[0] has no logical_expert_load"),
        (json.dumps({"load_history": []}), "load_history is empty"),
        (json.dumps({"num_experts": 4, "num_experts_per_token": 2}), "meta_info.json has no counts: give the rank"),
    ],
)
def test_bad_text(tmp_path: Path, content: str, message: str) -> None:
    assert message in refused(content, tmp_path)


IDS = np.array([[[0, 1]], [[2, 3]]], dtype=np.int16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npz(routed_experts=IDS + 3), "expert id 6 is outside 0..3"),
        (npz(routed_experts=IDS * 0), "token 0 chooses expert 0 twice in layer 0"),
        (npz(routed_experts=IDS[:0]), "not [tokens, 1, 2]"),
        (npz(expert_ids=IDS[None], lengths=np.array([3])), "a length is 3, but expert_ids has 2 tokens"),
        (npz(expert_ids=IDS[None], lengths=np.array([-1])), "the count at sequence 0 is negative"),
        (npz(expert_ids=IDS[None], lengths=np.array([0])), "no tokens"),
        (npz(expert_ids=IDS, lengths=np.array([1])), "are not whole numbers [sequences, tokens"),
        (npz(counts=np.ones((2, 1, 4)) * 0.5), "the count at step 0, layer 0, expert 0 is not a whole number"),
        (npz(counts=np.ones((2, 1, 4)), iterations=np.array([5, 5])), "iterations must be 2 ascending"),
        (npz(a=np.full((3, 4), np.nan)), "the logit of token 0, layer 0, expert 0 is not a finite number"),
        (npz(a=np.ones((3, 4)), b=np.ones((2, 4))), "ragged: layers have shapes"),
        (pt({"records": []}), "no last_physical_to_logical_map"),
        (pt({"records": [], "last_physical_to_logical_map": torch.zeros(1, 4)}), "no records"),
        (pt({"records": [1], "last_physical_to_logical_map": torch.zeros(1, 4)}), "records are not all dictionaries"),
        (pt(torch.ones(3)), "a pt file: none of"),
        (gzip.compress(b'{"logical_count": [[1,1,1,1]]}', mtime=0)[:-6], "truncated or damaged gzip"),
        (npz(counts=np.ones((2, 1, 4)))[:200], "truncated or damaged"),
        (pt({"logical_count": torch.ones(1, 4)})[:300], "truncated or damaged"),
    ],
)
def test_bad_arrays(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refused(content, tmp_path)


def test_physical_ids_out_of_range(write_format: Write) -> None:
    paths, _ = write_format("sglang_per_token")
    content = torch.load(paths[0], weights_only=True)
    content["records"][1]["topk_ids_of_layer"][1, 0, 0] = 8
    torch.save(content, paths[0])
    with pytest.raises(ValueError, match=r"token_0.pt: physical id 8 of token 0 in layer 1 is outside 0..7"):
        open_trace(paths)


def test_options_that_contradict_themselves() -> None:
    for options, message in [
        ({"top_k": 9, "num_experts": 8}, "--top-k 9 is larger than --experts 8"),
        ({"batch": 0}, "--batch 0: give at least 1"),
        ({"batch": 4, "step_tokens": 4}, "give one of them"),
        ({"score_rule": "x"}, "--score-rule x: choose softmax"),
        ({"shared_cost": float("nan")}, "--shared-cost nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            ImportOptions(**options)  # type: ignore[arg-type]


def test_top_k_larger_than_the_experts(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(json.dumps({"logical_count": [[1, 1, 1, 1]]}))
    message = refused_path(tmp_path / "l.json", ImportOptions(top_k=5))
    assert "--top-k 5 is larger than the 4 experts of a layer" in message


def test_targets(tmp_path: Path) -> None:
    source = tmp_path / "l.json"
    source.write_text(json.dumps({"logical_count": [[1, 1, 1, 1]]}))
    with pytest.raises(ValueError, match="is also a source"):
        import_trace(source, source, OPTIONS)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        import_trace(source, tmp_path / "no" / "t.parquet", OPTIONS)
    with pytest.raises(ValueError, match="is a folder"):
        import_trace(source, tmp_path, OPTIONS)


def survives(path: Path, options: ImportOptions) -> None:
    """Either a trace that reads, or one line that names the file."""
    try:
        trace = open_trace(path, options)
        steps = sum(len(block.steps) for block in trace.blocks())
    except (ValueError, OSError) as error:
        message = str(error)
    else:
        assert steps == trace.num_steps
        message = str(path)
    assert str(path) in message or str(path.parent) in message, message
    assert "\n" not in message


FUZZ = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MAGIC = [b"", b"PK\x03\x04", b"\x93NUMPY\x01\0", b"\x1f\x8b\x08", b"\x80\x02", b"PAR1", b"{", b"[", b"0:[[", b"a,b\n"]


@settings(FUZZ, max_examples=150)
@given(magic=st.sampled_from(MAGIC), body=st.binary(max_size=200))
def test_random_bytes(tmp_path: Path, magic: bytes, body: bytes) -> None:
    path = tmp_path / "random"
    path.write_bytes(magic + body)
    survives(path, OPTIONS)


@FUZZ
@given(data=st.data())
def test_mutated_files(write_format: Write, format_name: str, data: st.DataObject) -> None:
    """A few bytes of one file changed, put in, taken out, or the end cut off."""
    paths, options = write_format(format_name)
    path = data.draw(st.sampled_from(paths))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        how = data.draw(st.sampled_from(["change", "insert", "delete", "cut", "digit"]))
        if how == "change" and content:
            content[place] = data.draw(st.integers(0, 255))
        elif how == "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif how == "delete":
            del content[place : place + data.draw(st.integers(1, 20))]
        elif how == "digit":
            content[place:place] = data.draw(st.sampled_from([b"9", b"-", b".5", b"e9", b"[", b"}", b"null", b"NaN"]))
        else:
            del content[place:]
    path.write_bytes(bytes(content))
    survives_together(paths, ImportOptions(**options))


def survives_together(paths: list[Path], options: ImportOptions) -> None:
    try:
        trace = open_trace(paths, options)
        steps = sum(len(block.steps) for block in trace.blocks())
    except (ValueError, OSError) as error:
        message = str(error)
    else:
        assert steps == trace.num_steps
        message = str(paths[0])
    assert str(paths[0].parent) in message, message
    assert "\n" not in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**25) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["logical_count", "load_history", "layer", "topk_ids", "experts", "router_data", "think_expert_analytics", "rank",
     "num_experts_per_token", "step", "top_indices", "sample_count", "num_think_tokens", "topk_weights", "token_idx"]
)  # fmt: skip


@settings(FUZZ, max_examples=200)
@given(content=st.lists(st.dictionaries(KEYS, JSON, min_size=1, max_size=5), min_size=1, max_size=3))
def test_json_of_the_right_keys_and_wrong_values(tmp_path: Path, content: list[dict[str, Any]]) -> None:
    path = tmp_path / "wrong"
    path.write_text("\n".join(map(json.dumps, content)))
    survives(path, OPTIONS)


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 4).to_sparse_csr(), "does not hold plain numbers"),
        (torch.ones(2, 4, device="meta"), "does not hold plain numbers"),
        (torch.ones(1).expand(1 << 12, 1 << 8, 1 << 12), "the same few values many times over"),
        (endless(), "the same few values many times over"),
        ([[True, 2]], "true or false"),
    ],
    ids=["sparse", "meta", "expanded", "endless", "bool"],
)
def test_tensors_and_lists_that_hold_no_counts(tmp_path: Path, value: Any, message: str) -> None:
    assert message in refused(pt({"logical_count": value}), tmp_path)


def test_few_lines_that_claim_a_huge_table(tmp_path: Path) -> None:
    lines = [{"layer": i, "experts": [0, 1], "token_idx": i} for i in range(5000)]
    assert "do not belong together" in refused(log(*lines), tmp_path)
    message = refused("layer_id,expert_id,count\n0,100000000,1\n", tmp_path)
    assert "100000000" in message


def test_packed_files_are_unpacked_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("readers.document.MAX_JSON", "readers.document.MAX_LINE", "limits.MAX_NUMBERS"):
        monkeypatch.setattr(f"epsim.traces.{name}", 1000)
    monkeypatch.setattr("epsim.traces.limits.NUMBERS_PER_BYTE", 1)
    bomb = gzip.compress(b'{"logical_count": [[1,' + b" " * 5000 + b"1]]}")
    assert "save it as lines of JSON" in refused(bomb, tmp_path)
    long = gzip.compress(b'{"layer": 0, "experts": [0, 1]}\n{"layer": 0, "experts": [0, 1' + b" " * 5000)
    assert "line 2 is longer" in refused(long, tmp_path)
    # A trace that could not be read again is not left behind.
    assert ": one row group: too large in memory" in refused(npz(counts=np.ones((999, 2, 4))), tmp_path)
