"""What is computed, kept, tried again and reported, whatever computes it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from epsim.files import CannotWriteError
from epsim.policies.stack import named_stack
from epsim.results import check_results, read_results
from epsim.sweep.cells import Cell, Plan, plan_cells
from epsim.sweep.collect import collect
from epsim.sweep.drive import Sweep, cell_path, finished_cells, run_sweep, sweep_folder
from epsim.sweep.grid import read_grid
from epsim.sweep.ray_pool import SweepActor, _answers
from epsim.sweep.show import summary
from epsim.sweep.sources import Making
from epsim.sweep.work import Done, Failed, Job, _opened, perform
from epsim.traces.store import StoredTrace
from tests.conftest import Epsim
from tests.sweep.conftest import Here

TraceMaker = Callable[..., StoredTrace]
WriteGrid = Callable[..., Path]
GRID = 'policies = ["contiguous", "eplb"]\nranks = [2, 4, 8]\nseed = [0, 1]\n[[trace]]\npath = "trace.parquet"\n'


def planned(path: Path, out: Path) -> Plan:
    return plan_cells(read_grid(path, named_stack), out.absolute())


def swept(path: Path, out: Path, pool: Here | None = None, retries: int = 2) -> tuple[Sweep, list[str]]:
    pool = pool or Here()
    lines: list[str] = []
    with sweep_folder(out):
        sweep = run_sweep(planned(path, out), out, Here, lambda: pool, retries, lines.append)
        collect(sweep, "epsim sweep grid.toml")
    return sweep, lines


def stamps(out: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (out / "cells").iterdir()}


def test_finished_cells_are_kept_and_a_changed_grid_uses_them(
    write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path
) -> None:
    make_trace(steps=4)
    out = tmp_path / "out"
    path = write_grid(GRID)
    first, _ = swept(path, out)
    assert (first.computed, first.kept, first.foreign) == (6, 0, 0)
    before = stamps(out)
    assert len(before) == 6
    results, table = ((out / name).read_bytes() for name in ("results.json", "results.parquet"))

    pool = Here()
    again, _ = swept(path, out, pool)
    assert (again.computed, again.kept, pool.given, stamps(out)) == (0, 6, 0, before)
    assert ((out / "results.json").read_bytes(), (out / "results.parquet").read_bytes()) == (results, table)

    changed = write_grid(GRID.replace("[2, 4, 8]", "[1, 4, 8]"))
    third, _ = swept(changed, out)
    assert (third.computed, third.kept, third.foreign) == (2, 4, 2)
    assert {name: stamp for name, stamp in stamps(out).items() if name in before} == before
    assert read_results(out / "results.json")["sweep"]["axes"] == {"ranks": [1, 4, 8], "seed": [0, 1]}

    other = write_grid(GRID.replace("[2, 4, 8]", "[1]").replace("[0, 1]", "[9]"))
    with pytest.raises(ValueError, match=r"its 8 finished cells are of another grid, .*: give another folder"):
        swept(other, out)


def test_half_a_cell_does_not_count(write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path) -> None:
    make_trace(steps=4)
    out = tmp_path / "out"
    path = write_grid(GRID)
    sweep, _ = swept(path, out)
    whole = {key: cell_path(out, key).read_bytes() for key in sweep.plan.cells}
    keys = list(whole)
    cell_path(out, keys[0]).write_bytes(whole[keys[0]][:-100])
    cell_path(out, keys[1]).write_bytes(b"")
    cell_path(out, keys[2]).write_bytes(whole[keys[3]])
    (out / "cells" / f".{keys[4]}.json.abc.part").write_bytes(whole[keys[4]])
    assert finished_cells(out) == set(keys[3:])
    again, _ = swept(path, out)
    assert (again.computed, again.kept) == (3, 3)
    assert {key: cell_path(out, key).read_bytes() for key in whole} == whole
    assert len(list((out / "cells").iterdir())) == 6


def test_a_lost_worker_is_made_up_for_and_a_hopeless_cell_is_not(
    write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path
) -> None:
    make_trace(steps=4)
    path = write_grid(GRID)
    plan = planned(path, tmp_path / "out")
    once, hopeless = list(plan.cells)[1:3]
    seen: set[str] = set()

    def dies(job: Job, time: int) -> bool:
        assert isinstance(job, Cell)
        first = job.key not in seen
        seen.add(job.key)
        return job.key == hopeless or (job.key == once and first)

    pool = Here(dies)
    sweep, lines = swept(path, tmp_path / "out", pool, retries=3)
    assert pool.closed
    assert (sweep.computed, sweep.retried) == (5, 1 + 3)
    assert sweep.failed == {hopeless: "its worker is gone (4 times)"}
    assert [pool.order.count(key) for key in plan.cells] == [1, 2, 4, 1, 1, 1]
    assert f"cell {once} (trace trace, ranks 2, redundant 0, seed 1): its worker is gone; retry 1 of 3" in lines
    assert lines[-1] == f"cell {hopeless} (trace trace, ranks 4, redundant 0, seed 0): its worker is gone (4 times)"
    results = read_results(tmp_path / "out/results.json")
    assert [(one["key"], one["reason"]) for one in results["sweep"]["failed"]] == [
        (hopeless, "its worker is gone (4 times)")
    ]
    assert len(results["sweep"]["cells"]) == 5
    # The next run tries it again.
    again, _ = swept(path, tmp_path / "out")
    assert (again.computed, again.kept, again.failed) == (1, 5, {})


def test_a_failing_cell_stops_no_other(
    epsim: Epsim, write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trace("counts")
    make_trace(name="tokens.parquet")
    text = 'policies = ["eplb", "eplb+random"]\nranks = 4\nredundant = 4\n'
    text += '[[trace]]\npath = ["trace.parquet", "tokens.parquet"]'
    monkeypatch.setattr("epsim.sweep.pools.Processes", lambda workers, threads: Here())
    code, printed, err = epsim("sweep", write_grid(text), "--out", tmp_path / "out")
    assert code == 1
    key = read_results(tmp_path / "out/results.json")["sweep"]["failed"][0]["key"]
    reason = (
        "random in 'eplb+random' works on tokens, but the trace holds only counts: draw a trace of tokens "
        "with `epsim traces synthesize`"
    )
    assert err == f"epsim: cell {key} (trace trace, ranks 4, redundant 4, seed 0): {reason}\n"
    assert "2 cells: 1 computed, 0 kept from before, 1 failed" in printed
    assert f"1 cell failed: {reason}" in printed
    left = write_grid(text + '\n[[except]]\ntrace = "trace"\npolicies = "eplb+random"')
    assert epsim("sweep", left, "--out", tmp_path / "out")[0] == 0
    table = pq.read_table(tmp_path / "out/results.parquet")
    assert sorted(set(zip(table["trace"].to_pylist(), table["stack"].to_pylist()))) == [
        ("tokens", "eplb"),
        ("tokens", "eplb+random"),
        ("trace", "eplb"),
    ]


def test_a_trace_that_cannot_be_made_fails_its_cells_alone(
    write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path
) -> None:
    make_trace(steps=4)
    make_trace(name="more.parquet", experts=16)
    text = GRID + '[[trace]]\nname = "bad"\ndraw = ["trace.parquet", "more.parquet"]\nsteps = 2\n'
    sweep, lines = swept(write_grid(text), tmp_path / "out")
    assert (sweep.computed, len(sweep.failed)) == (6, 6)
    assert all("give sources of one model" in line for line in lines)


def test_one_table_and_one_results_file(
    epsim: Epsim, write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path
) -> None:
    make_trace(steps=4, tokens=48, shared_cost=1.0)
    make_trace(steps=4, name="b.parquet", seed=1)
    out = tmp_path / "out"
    text = GRID + '[[trace]]\nname = "d"\ndraw = ["trace.parquet", "b.parquet"]\nsteps = 3\ndrift = [0.0, 0.5]\n'
    sweep, _ = swept(write_grid(text + "step_tokens = 32"), out)
    results = read_results(out / "results.json")
    check_results(results)
    axes = results["sweep"]["axes"]
    assert axes == {"trace": ["trace", "d"], "ranks": [2, 4, 8], "seed": [0, 1], "drift": [0.0, 0.5]}
    assert [cell["key"] for cell in results["sweep"]["cells"]] == list(sweep.plan.cells)
    assert [cell["tokens"] for cell in results["sweep"]["cells"]] == pytest.approx([48] * 6 + [32] * 12)
    labels = [entry["name"] for entry in results["stacks"]]
    assert len(set(labels)) == len(labels) == 18 * 2
    assert labels[0] == "contiguous [trace trace, ranks 2, seed 0]"
    assert labels[-1] == "eplb [trace d, ranks 8, seed 1, drift 0.5]"
    assert results["trace"]["notes"][0].startswith("A sweep of 18 cells. ")

    rows = pq.read_table(out / "results.parquet").to_pylist()
    single = {key: json.loads(cell_path(out, key).read_text()) for key in sweep.plan.cells}
    expected = [
        (key, place, metric, value["mean"], value["p95"], value.get("reason"))
        for key, found in single.items()
        for place, entry in enumerate(found["stacks"])
        for metric, value in entry["metrics"].items()
    ]
    table = [(row["key"], row["place"], row["metric"], row["mean"], row["p95"], row["reason"]) for row in rows]
    assert table == expected
    for row in rows:
        found = single[row["key"]]
        interval = found["stacks"][row["place"]]["versus_first"].get(row["metric"], {})
        assert [row[part] for part in ("difference", "low", "high")] == [
            interval.get(part) for part in ("difference", "low", "high")
        ]
        assert (row["ranks"], row["seed"]) == (found["setting"]["ranks"], found["setting"]["seed"])
    assert {row["drift"] for row in rows} == {None, 0.0, 0.5}
    assert {row["draw"] for row in rows} == {None, "trace.parquet, b.parquet"}

    code, printed, _ = epsim("compare", out, out / "results.json")
    assert code == 0
    assert "eplb [trace d, ranks 8, seed 1, drift 0.5]" in printed
    best = [min(found["stacks"], key=lambda e: e["metrics"]["max_over_mean"]["mean"]) for found in single.values()]
    times = sum(entry["stack"] == "eplb" for entry in best)
    assert results["verdict"].startswith(f"eplb has the lowest peak load in {times} of 18 cells")


def test_a_full_disk_ends_the_sweep_and_leaves_no_half(
    write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trace(steps=4)
    out = tmp_path / "out"
    path = write_grid(GRID)
    calls = itertools.count()
    real = os.fsync

    def fsync(handle: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CannotWriteError, match="cannot be written: no space left on device; nothing is left of it"):
            swept(path, out)
    assert len(list((out / "cells").iterdir())) == 2
    again, _ = swept(path, out)
    assert (again.computed, again.kept) == (4, 2)


def test_a_machine_without_the_files_is_given_them(
    write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = make_trace(steps=4)
    text = 'policies = "eplb"\nranks = [2, 4]\n[[trace]]\npath = "trace.parquet"\nhistory = "trace.parquet"\n'
    cells = list(planned(write_grid(text), tmp_path / "out").cells.values())
    expected = [perform(cell) for cell in cells]
    content = trace.path.read_bytes()
    asked: list[bytes] = []

    def get(sent: bytes) -> bytes:
        asked.append(sent)
        return sent

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))
    monkeypatch.setenv("EPSIM_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _opened.cache_clear()
    trace.path.rename(tmp_path / "elsewhere.parquet")
    actor = SweepActor(1)
    files = [(cells[0].trace.path, content)] * 2
    assert [actor.perform(cell, files) for cell in cells] == expected
    assert len(asked) == 1, "once, for all its cells"


def test_a_worker_in_another_folder_finds_the_map_of_a_relative_path(
    write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trace(steps=4, layers=1)
    monkeypatch.chdir(tmp_path)
    Path("map.json").write_text("[[1, 0, 3, 2, 5, 4, 7, 6]]")
    grid = write_grid('policies = "file(map.json)"\nranks = [2]\n[[trace]]\npath = "trace.parquet"\n')
    (cell,) = planned(grid, tmp_path / "out").cells.values()
    expected = perform(cell)
    assert isinstance(expected, Done)
    monkeypatch.setenv("EPSIM_THREADS", "1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert isinstance(SweepActor(1).perform(cell, [(cell.trace.path, None)]), Failed)
    SweepActor(1, "/no/such/folder")
    assert SweepActor(1, str(tmp_path)).perform(cell, [(cell.trace.path, None)]) == expected


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        sweep_folder(tmp_path / "out"),
        pytest.raises(ValueError, match="another command is writing into it"),
        sweep_folder(tmp_path / "out"),
    ):
        raise AssertionError("the folder is held")
    with sweep_folder(tmp_path / "out"):
        pass


def test_traces_are_made_only_for_cells_that_are_missing(
    write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path
) -> None:
    make_trace(steps=4)
    make_trace(steps=4, seed=1, name="b.parquet")
    out = tmp_path / "out"
    path = write_grid(
        'policies = "eplb"\nranks = [2, 4]\n[[trace]]\ndraw = ["trace.parquet", "b.parquet"]\nsteps = 2\n'
        "drift = [0.0, 0.5]\nstep_tokens = 8\n"
    )
    made: list[Path] = []

    class Makers(Here):
        def give(self, worker: int, job: Job) -> None:
            assert isinstance(job, Making)
            made.append(job.target)
            super().give(worker, job)

    def sweep() -> Sweep:
        with sweep_folder(out):
            return run_sweep(planned(path, out), out, Makers, Here)

    assert sweep().computed == 4
    assert len(made) == 2
    for trace in (out / "traces").iterdir():
        trace.unlink()
    assert (sweep().kept, len(made)) == (4, 2)
    next((out / "cells").iterdir()).unlink()
    assert (sweep().computed, len(made)) == (1, 3)


def test_what_fails_before_anything_was_kept_leaves_no_folder(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    for out in (new, old):
        with pytest.raises(ValueError, match="no cell"), sweep_folder(out):
            raise ValueError("no cell")
    assert not new.exists()
    assert list(old.iterdir()) == []
    with pytest.raises(ValueError, match="a full disk"), sweep_folder(new):
        (new / "cells" / "a.json").write_text("{}")
        raise ValueError("a full disk")
    assert (new / "cells" / "a.json").exists()


def test_nobody_answers_at_an_address() -> None:
    """Ray itself would wait for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _answers(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(ValueError, match=f"^--ray {address}: connection refused: give a cluster's address"):
            _answers(address)
    for told_by_ray in ("auto", "127.0.0.1", "127.0.0.1:high"):
        _answers(told_by_ray)


@pytest.mark.parametrize(
    ("number", "cells", "foreign", "excluded"),
    [
        (0, "0 cells", "", ""),
        (1, "1 cell", "1 finished cell in out is not", "1 combination removed"),
        (2, "2 cells", "2 finished cells in out are not", "2 combinations removed"),
    ],
)
def test_numbers_and_their_words_agree(number: int, cells: str, foreign: str, excluded: str) -> None:
    plan = Plan(cells=dict.fromkeys(map(str, range(number))), excluded=number)  # type: ignore[arg-type]
    lines = list(summary(Sweep(Path("out"), plan, computed=number, foreign=number)))
    wanted = [f"{cells}: {number} computed, 0 kept from before"]
    if number:
        wanted += [f"{foreign} part of this grid: kept, not shown", f"{excluded} by [[except]]"]
    assert lines == wanted
