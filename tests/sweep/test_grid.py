"""Grid files: what is crossed, and one line for everything that is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from epsim.policies.stack import named_stack
from epsim.sweep.grid import read_grid
from epsim.traces.store import StoredTrace
from tests.conftest import Epsim

TraceMaker = Callable[..., StoredTrace]
WriteGrid = Callable[..., Path]
GOOD = 'policies = ["eplb", "best=eplb+lplb"]\nranks = [2, 4]\n{more}\n[[trace]]\npath = "trace.parquet"\n{trace}'


def grid_text(more: str = "", trace: str = "") -> str:
    return GOOD.format(more=more, trace=trace)


def test_lists_are_crossed_and_defaults_are_single_values(write_grid: WriteGrid) -> None:
    grid = read_grid(
        write_grid(
            grid_text("seed = [0, 5]\nnodes = 2", "min_tokens = [1, 9]")
            + '\n[[trace]]\nname = "d"\ndraw = ["a", "b"]\ndrift = [0, 0.5, 1]'
        ),
        named_stack,
    )
    points = list(grid.points())
    assert len(points) == len(grid) == (2 + 3) * 2 * 2
    assert points[0] == {
        "trace": "trace",
        "path": "trace.parquet",
        "min_tokens": 1,
        "ranks": 2,
        "nodes": 2,
        "groups": 1,
        "seed": 0,
        "plan_share": 0.5,
        "overlap": False,
        "redundant": 0,
    }
    drawn = [(p["drift"], p["ranks"], p["seed"]) for p in points if "draw" in p]
    assert drawn == [(drift, ranks, seed) for drift in (0, 0.5, 1) for ranks in (2, 4) for seed in (0, 5)]
    assert (points[-1]["draw"], points[-1]["steps"], points[-1]["step_tokens"]) == (("a", "b"), 100, 1024)
    assert [name for _, (name, _) in grid.policies] == ["", "best"]


WRONG = {
    "rank = 4": "unknown key 'rank': known are policies, trace, ranks, nodes,",
    "ranks = 4": "not TOML: Cannot overwrite a value",
    "seed = []": "seed is an empty list: give at least one value, or omit seed",
    "seed = [1, 1]": "seed 1 is in its list twice: give it once",
    "seed = -1": "seed -1: give a whole number from 0 to 9223372036854775807",
    "seed = 1.0": "seed 1.0: give a whole number from 0",
    "nodes = true": "nodes True: give a whole number from 1 to 65536",
    "nodes = [[1]]": "nodes [1]: give a whole number from 1 to 65536",
    "redundant = -1": 'redundant -1: give a whole number from 0 to 65536 or "fill"',
    'redundant = "full"': "redundant 'full': give a whole number from 0 to 65536 or \"fill\"",
    "redundant = 1\nslots_per_rank = 2": "redundant and slots_per_rank both set the same value: give one of them",
    "nodes = 1\nranks_per_node = 2": "nodes and ranks_per_node both set the same value: give one of them",
    "plan_share = 1": "plan_share 1: give a number from 0 to 1, both excluded",
    "plan_share = nan": "plan_share nan: give a number from 0 to 1, both excluded",
    "overlap = true": "overlap and expert_table need predicted times: give hardware",
    'overlap = "yes"': "overlap 'yes': give true or false",
    "hardware = 5": "hardware 5: give a text",
    "except = 5": "except is not a list of tables: begin each with [[except]]",
    "[[except]]": "[[except]] 1: is empty and would remove every cell: give the values to remove",
    "[[except]]\nrank = 1": "[[except]] 1: unknown key 'rank'",
    '[[except]]\npolicies = "lplb"': "[[except]] 1: policies 'lplb' is not in the grid",
    f"seed = [{', '.join(map(str, range(100_001)))}]": "200,002 combinations, more than 100,000: give fewer values",
}


@pytest.mark.parametrize("more", WRONG)
def test_what_is_wrong_is_said_with_file_and_key(write_grid: WriteGrid, more: str) -> None:
    path = write_grid(grid_text(more))
    with pytest.raises(ValueError) as raised:
        read_grid(path, named_stack)
    assert str(raised.value).startswith(f"{path}: {WRONG[more]}")
    assert "\n" not in str(raised.value)


WRONG_TRACES = {
    'draw = ["a"]': '[[trace]] 1: give path = "FILE" to read a recording, or draw = ["FILE", ...]',
    "drift = 0.5": "[[trace]] 1: unknown key 'drift'",
    'only = "both"': "[[trace]] 1: only 'both': give one of prefill, decode, mixed, training",
    "top_k = 0": "[[trace]] 1: top_k 0: give a whole number from 1",
    'name = "a/b"': "[[trace]] 1: name 'a/b': give up to 60 characters without /",
    'name = ["a", "b"]': "[[trace]] 1: name takes one value, not a list: give a text",
    '[[trace]]\npath = "trace.parquet"': "[[trace]] 2: trace 'trace' is given twice with equal values: give it once",
    '[[trace]]\npath = "other/trace.json"': "[[trace]] 2: two traces are named 'trace': give each a",
    '[[trace]]\npath = ["x/t.json", "y/t.json"]': "[[trace]] 2: two traces are named 't': give each a [[trace]]",
    "[[trace]]\ndraw = []": "[[trace]] 2: draw is an empty list",
    '[[trace]]\ndraw = "a"\ndrift = [0, 1]': "[[trace]] 2: drift changes the mixture of recordings, but draw has",
    '[[trace]]\ndraw = ["a", "b"]\ndrift = 1.5': "[[trace]] 2: drift 1.5: give a number from 0 to 1",
}


@pytest.mark.parametrize("trace", WRONG_TRACES)
def test_what_is_wrong_with_a_trace(write_grid: WriteGrid, trace: str) -> None:
    path = write_grid(grid_text(trace=trace))
    with pytest.raises(ValueError) as raised:
        read_grid(path, named_stack)
    assert str(raised.value).startswith(f"{path}: {WRONG_TRACES[trace]}")


HEADS = {
    'ranks = 4\n[[trace]]\npath = "t"': "key 'policies' is missing: give a list of texts",
    'policies = []\nranks = 4\n[[trace]]\npath = "t"': "policies is an empty list",
    'policies = ["eplb+zzz"]\nranks = 4': "policies: unknown policy 'zzz' in 'eplb+zzz': known are",
    'policies = ["eplb", "x=eplb", "x=contiguous"]\nranks = 4': "policies: 'x' is in the list twice: name each",
    'policies = "eplb"\n[[trace]]\npath = "t"': "key 'ranks' is missing: give numbers of ranks",
    'policies = "eplb"\nranks = 0\n[[trace]]\npath = "t"': "ranks 0: give a whole number from 1 to 65536",
    'policies = "eplb"\nranks = 4': 'no [[trace]]: give at least one, with path = "FILE" or draw',
    'policies = "eplb"\nranks = 4\ntrace = "t"': "trace is not a list of tables: begin each with [[trace]]",
    "policies = ": "not TOML: Invalid value",
}


@pytest.mark.parametrize("content", HEADS)
def test_what_must_be_there(write_grid: WriteGrid, content: str) -> None:
    path = write_grid(content)
    with pytest.raises(ValueError) as raised:
        read_grid(path, named_stack)
    assert str(raised.value).startswith(f"{path}: {HEADS[content]}")


def test_the_command_refuses_in_one_line(
    epsim: Epsim, write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path
) -> None:
    def refused(path: Path, out: Path = tmp_path / "out") -> str:
        code, printed, err = epsim("sweep", path, "--out", out)
        assert (code, printed, err.count("\n")) == (2, "", 1)
        return err.removeprefix("epsim: ").rstrip("\n")

    make_trace()
    assert refused(tmp_path / "none.toml") == f"{tmp_path}/none.toml: no such file"
    assert refused(tmp_path).endswith("is a folder: give a file")
    assert refused(write_grid("\0")).startswith(f"{tmp_path}/grid.toml: not TOML")
    good = write_grid(grid_text())
    missing = write_grid(grid_text(trace='[[trace]]\npath = "gone.parquet"'), "missing.toml")
    assert refused(missing) == f"{missing}: [[trace]] gone: {tmp_path}/gone.parquet: no such file"
    (tmp_path / "noise.json").write_text("{}")
    strange = write_grid(grid_text(trace='[[trace]]\npath = "noise.json"'), "strange.toml")
    assert refused(strange).startswith(f"{strange}: [[trace]] noise: {tmp_path}/noise.json")
    idle = write_grid(grid_text("[[except]]\nranks = 3"), "idle.toml")
    assert refused(idle) == f"{idle}: [[except]] 1: matches no cell of the grid: correct or remove it"
    nothing = write_grid(grid_text("[[except]]\nranks = [2, 4]"), "nothing.toml")
    assert refused(nothing) == f"{nothing}: the grid has no cell that can be replayed: [[except]] removes all cells"
    odd = write_grid(grid_text("redundant = 1"), "odd.toml")
    assert refused(odd).startswith(
        f"{odd}: the grid has no cell that can be replayed: 8 experts + 1 redundant = 9 slots"
    )
    batch = write_grid(grid_text(trace="batch = 4"), "batch.toml")
    assert "batch works on imports only: this trace already has steps" in refused(batch)
    hardware = write_grid(grid_text('hardware = "h300"', 'model = "mine"'), "hardware.toml")
    assert "[[trace]] trace: --hardware h300: give one of" in refused(hardware)
    unknown = write_grid(grid_text('hardware = "h200"'), "unknown.toml")
    assert refused(unknown).endswith("the trace does not name it: add model to this [[trace]]")

    (tmp_path / "file").write_text("")
    assert refused(good, tmp_path / "file") == f"--out {tmp_path}/file: is a file; give a folder"
    assert refused(good, tmp_path / "file/below").endswith("not a directory: give another folder")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "results.json").write_text("{}")
    assert refused(good, taken) == f"--out {taken}: holds the results of another command: give another folder"
    assert list(taken.iterdir()) == [taken / "results.json"]
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        assert refused(good, tmp_path / "locked").endswith("not writable; give another folder")
    assert refused(good, Path("/proc/sweep")).startswith("--out /proc/sweep: ")
