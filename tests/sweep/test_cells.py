"""Cells: what they are, that they are what `epsim replay` gives, and what their keys depend on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epsim.policies.stack import named_stack
from epsim.sweep import cells
from epsim.sweep.cells import Cell, Plan, plan_cells
from epsim.sweep.grid import read_grid
from epsim.sweep.work import Done, Failed, perform
from epsim.traces.store import StoredTrace
from tests.conftest import Epsim

TraceMaker = Callable[..., StoredTrace]
WriteGrid = Callable[..., Path]


def planned(path: Path, out: Path | None = None) -> Plan:
    return plan_cells(read_grid(path, named_stack), out or path.parent / "out")


def places(plan: Plan, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(cell.axes.get(key) for key in keys) for cell in plan.cells.values()]


def done(cell: Cell) -> dict[str, Any]:
    outcome = perform(cell)
    assert isinstance(outcome, Done), outcome
    assert outcome.results is not None
    return outcome.results


def test_clusters_that_cannot_be_are_skipped_with_the_reason(write_grid: WriteGrid, make_trace: TraceMaker) -> None:
    make_trace(experts=8)
    text = 'policies = "eplb"\nranks = [2, 3, 4, 16]\n{}\n[[trace]]\npath = "trace.parquet"\n'
    plan = planned(write_grid(text.format('redundant = [0, 4, "fill"]')))
    assert places(plan, "ranks", "redundant") == [(2, 0), (2, 4), (3, 4), (3, 1), (4, 0), (4, 4), (16, 8)]
    assert [(place["ranks"], place["redundant"], reason) for place, reason in plan.skipped] == [
        (2, 0, "the same cell as another: redundant equals 0"),
        (3, 0, "8 experts + 0 redundant = 8 slots do not divide among 3 ranks: give redundant 1 or 4"),
        (4, 0, "the same cell as another: redundant equals 0"),
        (16, 0, "8 experts + 0 redundant = 8 slots do not divide among 16 ranks: give redundant 8 or 24"),
        (16, 4, "8 experts + 4 redundant = 12 slots do not divide among 16 ranks: give redundant 8 or 24"),
    ]
    plan = planned(write_grid(text.format("slots_per_rank = [1, 3]\nranks_per_node = 4")))
    assert places(plan, "ranks", "nodes", "slots_per_rank", "redundant") == [
        (3, 1, 3, 1),
        (4, 1, 3, 4),
        (16, 4, 1, 8),
        (16, 4, 3, 40),
    ]
    reasons = [reason for _, reason in plan.skipped]
    assert reasons[0] == "2 slots on 2 ranks for 8 experts: give slots_per_rank 4 or more"
    assert len(reasons) == 4
    plan = planned(write_grid(text.format("ranks_per_node = 2\nredundant = 'fill'")))
    assert [reason for _, reason in plan.skipped] == ["3 ranks do not fill nodes of 2"]
    plan = planned(write_grid(text.format("nodes = 3\nredundant = 'fill'")))
    assert [reason for _, reason in plan.skipped] == ["nodes 3: give 1 to 2, the number of ranks"]


def test_a_thousand_ranks_need_an_expert_a_rank(write_grid: WriteGrid, make_trace: TraceMaker) -> None:
    make_trace("counts", experts=256, top_k=8, tokens=512, steps=4)
    grid = 'policies = "eplb+lplb"\nranks = [16, 64, 256, 1024]\nranks_per_node = 8\nredundant = "fill"\n'
    plan = planned(write_grid(grid + '[[trace]]\npath = "trace.parquet"'))
    assert places(plan, "ranks", "nodes", "redundant") == [(16, 2, 0), (64, 8, 0), (256, 32, 0), (1024, 128, 768)]
    results = [done(cell) for cell in plan.cells.values()]
    peaks = [found["stacks"][0]["metrics"]["peak"]["mean"] for found in results]
    means = [found["stacks"][0]["metrics"]["mean_load"]["mean"] for found in results]
    assert means == pytest.approx([512 * 8 / ranks for ranks in (16, 64, 256, 1024)], rel=1e-12)
    assert all(one > other for one, other in pairwise(peaks))
    # One slot a rank and 768 copies: the placement alone decides, and no split is better than its bound.
    assert results[3]["stacks"][0]["metrics"]["optimality_gap"]["mean"] >= 0


def test_rules_leave_out_cells_or_single_stacks(write_grid: WriteGrid, make_trace: TraceMaker) -> None:
    make_trace()
    text = (
        'policies = ["contiguous", "x=eplb", "eplb+lplb"]\nranks = [2, 4]\nredundant = [0, "fill", 4]\nseed = [0, 1]\n'
    )
    text += '[[trace]]\npath = "trace.parquet"\n'
    plan = planned(write_grid(text + "[[except]]\nranks = 2\nredundant = 0\n[[except]]\nseed = 1\nranks = [4, 5]"))
    assert places(plan, "ranks", "redundant", "seed") == [(2, 4, 0), (2, 4, 1), (4, 0, 0), (4, 4, 0)]
    assert plan.excluded == 2 + 2 + 3  # "fill" equals 0 redundant experts, and is left out with them
    plan = planned(write_grid(text + '[[except]]\ntrace = "trace"\nranks = 2\npolicies = ["x", "eplb+lplb"]'))
    stacks = {
        cell.axes["ranks"]: [name or str(stack) for name, stack in cell.options.policies]
        for cell in plan.cells.values()
    }
    assert stacks == {2: ["contiguous"], 4: ["contiguous", "x", "eplb+lplb"]}
    assert plan.excluded == 0


@pytest.mark.parametrize("redundant", [0, 4])
def test_a_cell_is_what_epsim_replay_gives(
    epsim: Epsim, write_grid: WriteGrid, make_trace: TraceMaker, monkeypatch: pytest.MonkeyPatch, redundant: int
) -> None:
    make_trace(steps=8, ranks=8, shared_cost=1.0)
    make_trace(steps=4, seed=3, name="before.parquet")
    monkeypatch.chdir(write_grid("").parent)
    text = 'policies = ["contiguous", "best=eplb+lplb+waterfill", "eplb+random"]\nranks = [2, 4]\nnodes = 2\n'
    text += f"seed = [0, 7]\nredundant = {redundant}\nplan_share = 0.25\n"
    text += '[[trace]]\npath = "trace.parquet"\nmin_tokens = 3\nshared_cost = 0.5\n'
    text += '[[trace]]\nname = "other"\npath = "trace.parquet"\nhistory = "before.parquet"\nphase = "decode"'
    plan = planned(write_grid(text))
    assert len(plan.cells) == 8
    for making in plan.makings.values():
        making.target.parent.mkdir(parents=True, exist_ok=True)
        making.make()
    for cell in list(plan.cells.values())[::3]:
        point = cell.axes
        options = ["trace.parquet", "--ranks", point["ranks"], "--nodes", 2, "--redundant", redundant]
        options += ["--plan-share", 0.25, "--seed", point["seed"]]
        if point["trace"] == "other":
            options += ["--history", "before.parquet", "--phase", "decode"]
        else:
            options += ["--min-tokens", 3, "--shared-cost", 0.5]
        for policy in ("contiguous", "best=eplb+lplb+waterfill", "eplb+random"):
            options += ["--policy", policy]
        code, printed, _ = epsim("replay", *map(str, options), "--json")
        assert code == 0
        expected = json.loads(printed)
        found = done(cell)
        command = found["setting"].pop("command")
        del expected["setting"]["command"]
        assert found == expected
        # And the command that the cell names gives the same.
        assert command.startswith("epsim replay trace.parquet --ranks ")
        code, printed, _ = epsim(*shlex.split(command)[1:], "--json")
        again = json.loads(printed)
        del again["setting"]["command"]
        assert again == expected


def test_a_drawn_cell_is_what_its_command_gives(
    epsim: Epsim, write_grid: WriteGrid, make_trace: TraceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trace(name="a.parquet")
    make_trace(name="b.parquet", seed=5)
    monkeypatch.chdir(write_grid("").parent)
    text = 'policies = ["eplb", "eplb+lplb"]\nranks = 4\nredundant = 4\nseed = [2]\n'
    text += '[[trace]]\ndraw = ["a.parquet", "b.parquet"]\nsteps = 6\nstep_tokens = [16, 64]\ndrift = [0.0, 1.0]'
    plan = planned(write_grid(text))
    assert places(plan, "step_tokens", "drift") == [(16, 0.0), (16, 1.0), (64, 0.0), (64, 1.0)]
    assert len(plan.makings) == 4
    found = []
    for cell in plan.cells.values():
        making = plan.makings[cell.trace.path]
        making.target.parent.mkdir(parents=True, exist_ok=True)
        making.make()
        results = done(cell)
        draw, _, replay = results["setting"]["command"].partition(" && ")
        assert epsim(*shlex.split(draw)[1:])[0] == 0
        expected = json.loads(epsim(*shlex.split(replay)[1:], "--json")[1])
        del results["setting"]["command"], expected["setting"]["command"]
        assert results == expected
        found.append(results["stacks"][0]["metrics"]["max_over_mean"]["mean"])
    assert len(set(found)) == 4


def test_keys_follow_content(
    write_grid: WriteGrid, make_trace: TraceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = make_trace()
    text = 'policies = "eplb"\nranks = 4\n[[trace]]\npath = "trace.parquet"\n'

    def key(content: str = text, folder: str = "out") -> str:
        return next(iter(planned(write_grid(content), tmp_path / folder).cells))

    first = key()
    assert len(first) == 16
    assert key("# a comment\n" + text, "elsewhere") == first
    assert key(text.replace('"eplb"', '["eplb+topk"]')) == first, "the canonical text counts"
    (tmp_path / "below").mkdir()
    moved = write_grid(text.replace("trace.parquet", "../trace.parquet"), "below/grid.toml")
    assert next(iter(planned(moved).cells)) == first, "where the file is does not count, its name and content do"
    others = [
        key(text.replace("= 4", "= 2")),
        key(text.replace('"eplb"', '"x=eplb"')),
        key(text.replace('"eplb"', '"eplb+lplb"')),
        key("seed = 1\n" + text),
        key("groups = 2\n" + text),
        key("plan_share = 0.4\n" + text),
        key("redundant = 4\n" + text),
        key(text + "min_tokens = 2"),
        key(text + 'phase = "decode"'),
        key(text + 'history = "trace.parquet"'),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(cells, "VERSION", "9.9.9")
        others.append(key())
    make_trace(seed=1, name=trace.path.name)
    others.append(key())
    assert len({first, *others}) == len(others) + 1


def test_hardware_times_are_part_of_a_cell(write_grid: WriteGrid) -> None:
    text = 'policies = ["contiguous", "eplb"]\nranks = 4\nhardware = ["h200", "h100"]\n[[trace]]\npath = "sample"\n'
    plan = planned(write_grid(text + 'only = "decode"'))
    for making in plan.makings.values():
        making.target.parent.mkdir(parents=True, exist_ok=True)
        making.make()
    first, second = (done(cell) for cell in plan.cells.values())
    assert "H200" in first["setting"]["timing"].upper()
    times = [found["stacks"][0]["metrics"]["layer_time_us"]["mean"] for found in (first, second)]
    assert times[0] < times[1]


def test_a_cell_that_fails_is_an_outcome_in_one_line(write_grid: WriteGrid, make_trace: TraceMaker) -> None:
    make_trace("counts")
    text = 'policies = "eplb+random"\nranks = 4\nredundant = 4\n[[trace]]\npath = "trace.parquet"\n'
    (cell,) = planned(write_grid(text)).cells.values()
    outcome = perform(cell)
    assert isinstance(outcome, Failed)
    assert outcome.line.startswith("random in 'eplb+random' works on tokens, but the trace holds only counts")


def test_imports_are_kept_and_depend_on_what_is_said_of_them(write_grid: WriteGrid, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "routed.npy", rng.permuted(np.tile(np.arange(8), (64, 2, 1)), axis=2)[..., :2])
    text = 'policies = "eplb"\nranks = [2, 4]\n[[trace]]\npath = "routed.npy"\nexperts = 8\nstep_tokens = [8, 16]'
    plan = planned(write_grid(text))
    kept = sorted((tmp_path / "out/traces").iterdir())
    assert len(kept) == 4, "composed tokens live on the cell's ranks"
    before = [path.stat().st_mtime_ns for path in kept]
    assert list(planned(write_grid(text)).cells) == list(plan.cells)
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "out/traces").iterdir())] == before
    assert [done(cell)["trace"]["steps_scored"] for cell in plan.cells.values()] == [4, 4, 2, 2]
