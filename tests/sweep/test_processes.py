"""Sweeps in processes of their own: killed, resumed, on Ray, and the documented example."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from epsim.results import read_results
from epsim.traces.store import StoredTrace
from tests.conftest import Epsim
from tests.launch.processes import EPSIM, LIMIT, environment, run
from tests.sweep.conftest import Here

pytestmark = pytest.mark.slow
TraceMaker = Callable[..., StoredTrace]
DOCS = Path(__file__).resolve().parents[2] / "docs"
MARK = "EPSIM_SWEEP_TEST"
GRID = 'policies = ["eplb+lplb"]\nranks = [2, 64]\nredundant = "fill"\nseed = [0, 1, 2, 3, 4, 5]\n'
GRID += '[[trace]]\npath = "trace.parquet"\n'


@pytest.fixture
def grid(make_trace: TraceMaker, tmp_path: Path) -> Path:
    """Six quick cells, and six that take longer."""
    make_trace(steps=24, layers=4, experts=32, tokens=256)
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path / "grid.toml"


def workers(mark: Path, pattern: str) -> list[int]:
    """Processes of the sweep that bears the mark, by their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if re.search(pattern, words):
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def start(grid: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [*EPSIM, "sweep", str(grid), "--out", str(out), *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(**{MARK: str(out)}), stdout=pipe, stderr=pipe, text=True)


def await_cells(process: subprocess.Popen[str], out: Path, number: int) -> None:
    deadline = time.monotonic() + LIMIT / 2
    while len(list((out / "cells").glob("*.json"))) < number:
        assert time.monotonic() < deadline, "no cell was finished"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in [*(out / "cells").glob("*.json"), *out.glob("results.*")]}


def stamps(out: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (out / "cells").glob("*.json")}


@pytest.mark.long
def test_a_killed_sweep_and_a_killed_worker(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = start(grid, out, "--workers", "1")
    await_cells(first, out, 3)
    first.kill()
    first.communicate()
    deadline = time.monotonic() + 20
    while workers(out, ".") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers(out, "."), "workers go with their sweep"
    before = stamps(out)
    assert 3 <= len(before) < 12

    second = start(grid, out, "--workers", "1")
    pattern = r"spawn_main.*multiprocessing-fork"
    deadline = time.monotonic() + LIMIT / 2
    while not workers(out, pattern) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    os.kill(workers(out, pattern)[0], signal.SIGKILL)
    printed, err = second.communicate(timeout=LIMIT)
    assert second.returncode == 0, err
    lines = [line for line in err.splitlines() if line.startswith("epsim: ")]
    assert len(lines) == 1
    assert re.fullmatch(
        r"epsim: cell \w{16} \(trace trace, ranks \d+, .*\): its worker was ended by SIGKILL, .*; retry 1 of 2",
        lines[0],
    )
    assert f"12 cells: {12 - len(before)} computed, {len(before)} kept from before" in printed
    assert "retries after a worker died: 1" in printed
    after = stamps(out)
    assert len(after) == 12
    assert {name: after[name] for name in before} == before


def test_the_documented_example(epsim: Epsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "sweep.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"^\d+ cells: .*?^```", text, re.MULTILINE | re.DOTALL)
    assert example is not None
    assert shown is not None
    (tmp_path / "grid.toml").write_text(example[1])
    monkeypatch.setattr("epsim.sweep.pools.Processes", lambda workers, threads: Here())
    code, printed, err = epsim("sweep", tmp_path / "grid.toml", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    results = read_results(tmp_path / "out" / "results.json")
    assert results["verdict"] in printed
    assert shown[0].removesuffix("```") in printed
    assert len(results["sweep"]["cells"]) == int(shown[0].split()[0])


@pytest.mark.long
def test_a_killed_worker_on_ray_and_the_same_results_without(
    epsim: Epsim, grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    there = tmp_path / "ray"
    on_ray = start(grid, there, "--ray", "local", "--workers", "1")
    await_cells(on_ray, there, 1)
    os.kill(workers(there, r"ray::SweepActor")[0], signal.SIGKILL)
    printed, err = on_ray.communicate(timeout=LIMIT)
    assert on_ray.returncode == 0, err
    lines = [line for line in err.splitlines() if line.startswith("epsim: ")]
    assert len(lines) == 1
    assert re.search(r"its Ray worker is gone \(\w+\): out of memory, a machine failed, .*; retry 1 of 2$", lines[0])
    assert "raylet" not in printed + err
    assert "12 cells: 12 computed, 0 kept from before\nretries after a worker died: 1" in printed
    monkeypatch.setattr("epsim.sweep.pools.Processes", lambda workers, threads: Here())
    here = tmp_path / "here"
    assert epsim("sweep", grid, "--out", here)[0] == 0
    assert contents(here) == contents(there)
    assert len(contents(here)) == 12 + 2


def test_a_cluster_that_is_not_there(grid: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    done = run([*EPSIM, "sweep", grid, "--out", tmp_path / "out", "--ray", "auto"])
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert done.lines[0].startswith("epsim: --ray auto: ")


def test_an_empty_address(epsim: Epsim, grid: Path, tmp_path: Path) -> None:
    code, _, err = epsim("sweep", grid, "--out", tmp_path / "out", "--ray", " ")
    assert (code, err) == (2, "epsim: --ray is empty: give a cluster's address, auto or local\n")
