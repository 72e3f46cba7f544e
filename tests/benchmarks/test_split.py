"""The split benchmark's baselines: each gives what its description says, and the judge lets nothing through."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.kernels.split import prepare, solve
from epsim.kernels.split.problems import chain
from epsim.kernels.split.reference import solve_reference
from epsim.placement.base import Placement
from epsim.placement.eplb import rebalance_experts
from epsim.policies.copies import Copies
from tests.benchmarks.scripts import SCRIPTS, script

ROOT = Path(__file__).resolve().parents[2]
baselines: Any = script("split_baselines")
problems: Any = script("split_problems")


def planned(num_ranks: int, redundant: int, num_problems: int) -> tuple[torch.Tensor, torch.Tensor]:
    """slots [P] of 64 experts, loads [B, 64] that have drifted from what they were planned on."""
    rng = np.random.default_rng(num_ranks)
    popular = rng.gamma(0.7, size=64) + 0.01
    slots, _, _ = rebalance_experts(torch.from_numpy(popular)[None], 64 + redundant, 1, 1, num_ranks)
    drifted = popular * np.exp(0.5 * rng.normal(size=(num_problems, 64)))
    return slots[0], torch.from_numpy(np.floor(1000 * drifted).astype(np.int64))


def test_the_judge() -> None:
    # Ranks 0 and 1; expert 0 on both, experts 1 and 2 on one each.
    structure = prepare(torch.tensor([[0, 1, 0, 2]]), 2)
    loads, layer = np.array([[10, 4, 6]]), np.array([0])
    verdicts = {
        (6.0, 4.0, 4.0, 6.0): True,
        (0.0, 4.0, 10.0, 6.0): True,
        (6.0 + 5e-6, 4.0, 4.0, 6.0): True,  # within a millionth of the mean rank load
        (6.0 + 5e-5, 4.0, 4.0, 6.0): False,
        (11.0, 4.0, -1.0, 6.0): False,
        (5.0, 4.0, 5.0, 5.0): False,
        (np.nan, 4.0, 4.0, 6.0): False,
        (np.inf, 4.0, 4.0, 6.0): False,
    }
    for split, good in verdicts.items():
        peak, feasible = baselines.judge(structure, loads, layer, np.array([split]))
        assert feasible[0] == good, split
        if good:
            assert peak[0] == max(split[0] + split[1], split[2] + split[3])


@pytest.mark.skipif(importlib.util.find_spec("highspy") is None, reason="no highspy")
def test_highs_finds_glops_optimum() -> None:
    slots, loads = planned(8, 24, 6)
    loads[0] = 0
    loads[1] = 0
    loads[1, int(slots.bincount().argmax())] = 10**9
    every = slots.repeat(len(loads), 1).numpy()
    # In a process of its own: OR-Tools brings another HiGHS, and the two do not load side by side.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        split, solving, building = process.submit(
            baselines.solve_by, baselines.HighsProgram, every, 8, loads.numpy()
        ).result()
    peak, feasible = baselines.judge(prepare(slots[None], 8), loads.numpy(), np.zeros(len(loads), int), split)
    assert feasible.all()
    for own, found in zip(loads, peak):
        assert found == pytest.approx(solve_reference(slots, 8, own)[0], rel=1e-9)
    assert min(solving, building) > 0


def plain_lplb(slots: list[int], num_ranks: int, loads: list[float], lanes: int | None) -> np.ndarray[Any, Any]:
    """One problem in float64, column by column: its variables after five steps."""
    number = np.bincount(slots)
    scale = max(loads)
    columns, target = [], np.ones(num_ranks + int((number > 1).sum()))
    target[:num_ranks] = 0
    row = {expert: num_ranks + k for k, expert in enumerate(np.flatnonzero(number > 1).tolist())}
    for slot, expert in enumerate(slots):
        rank = slot // (len(slots) // num_ranks)
        if number[expert] == 1:
            target[rank] -= loads[expert] / scale
            continue
        column = np.zeros(len(target))
        column[rank], column[row[expert]] = loads[expert] / scale, 1
        columns.append(column)
    columns += list(np.eye(len(target))[:num_ranks])
    columns.append(np.concatenate((-np.ones(num_ranks), np.zeros(len(row)))))
    columns.append(target - np.sum(columns, axis=0))
    matrix, cost, x = np.array(columns).T, np.zeros(len(columns)), np.ones(len(columns))
    cost[-2:] = 1, 1000
    for _ in range(5):
        dual = np.linalg.solve(matrix * x**2 @ matrix.T, matrix * x**2 @ cost)
        step = x * (cost - dual @ matrix)
        seen = np.zeros(lanes or 1)
        if lanes:
            for j, value in enumerate(step):  # a lane keeps the last that it saw
                seen[j % lanes] = value
        x = x * (1 - 0.999 / (seen.max() if lanes else step.max()) * step)
    return x


@pytest.mark.parametrize("true_maximum", [True, False])
def test_lplb_takes_its_five_steps(true_maximum: bool) -> None:
    # 16 ranks in a ring, an expert for each pair of neighbours: 32 + 16 + 2 variables, more than a warp has lanes.
    slots = chain(16, ring=True)[0]
    loads = torch.from_numpy(np.random.default_rng(3).integers(50, 150, (1, 16)))
    found = baselines.lplb_fractions(slots, 16, loads, true_maximum)[0].numpy()
    plain = plain_lplb(slots.tolist(), 16, loads[0].tolist(), None if true_maximum else 32)[:32]
    for expert in range(16):
        first, last = np.flatnonzero(slots.numpy() == expert)
        assert found[first] == pytest.approx(plain[first], abs=2e-3)
        assert found[last] == 1 - found[first]


def test_lplbs_step_length_is_what_makes_it_infeasible() -> None:
    slots, loads = planned(16, 32, 60)
    structure, layer = prepare(slots[None], 16), np.zeros(60, int)
    optimum = solve(structure, loads, torch.from_numpy(layer)).peak.numpy()
    infeasible = {}
    for true_maximum in (True, False):
        fractions = baselines.lplb_fractions(slots, 16, loads, true_maximum).numpy()
        split = fractions * loads.numpy()[:, slots]
        peak, feasible = baselines.judge(structure, loads.numpy(), layer, split)
        infeasible[true_maximum] = int((~feasible).sum())
        assert (peak[feasible] / optimum[feasible]).min() > 1 - 1e-3
    assert infeasible[True] <= 1
    assert infeasible[False] >= 10


def test_pairs_come_near_the_optimum_and_stay_feasible() -> None:
    rng = np.random.default_rng(0)
    slots = chain(16, ring=True)[0]
    loads = rng.integers(0, 1000, (50, 16))
    loads[0] = 0
    pairs = baselines.pairs_of(slots.numpy(), 16)
    assert len(pairs.expert) == 16
    for colour in range(int(pairs.colours.max()) + 1):
        ranks = pairs.ranks[pairs.colours == colour].ravel()
        assert len(set(ranks)) == len(ranks)
    structure = prepare(slots[None], 16)
    split = baselines.split_pairs(pairs, slots.numpy(), 16, loads)
    peak, feasible = baselines.judge(structure, loads, np.zeros(50, int), split)
    assert feasible.all()
    optimum = solve(structure, torch.from_numpy(loads), torch.zeros(50, dtype=torch.int64)).bound.numpy()
    assert np.median(peak[1:] / optimum[1:]) < 1.001
    assert (peak >= optimum * (1 - 1e-6)).all()
    # Two ranks with one shared expert: half the difference moves, as far as the expert's load goes.
    two = baselines.pairs_of(np.array([0, 1, 0, 2]), 2)
    assert baselines.split_pairs(two, np.array([0, 1, 0, 2]), 2, np.array([[10, 4, 6]]))[0] == pytest.approx(
        [6, 4, 4, 6], abs=1e-4
    )
    assert baselines.split_pairs(two, np.array([0, 1, 0, 2]), 2, np.array([[10, 0, 60]]))[0].tolist() == [10, 0, 0, 60]


def test_pairs_do_not_apply_elsewhere() -> None:
    assert baselines.pairs_of(np.array([0, 1, 0, 2, 0, 3]), 3) is None  # three copies
    assert baselines.pairs_of(np.array([0, 0, 1, 2]), 2) is None  # both on one rank
    assert baselines.pairs_of(chain(33)[0].numpy(), 33) is None
    assert baselines.pairs_of(chain(32)[0].numpy(), 32) is not None


def test_tokens_are_drawn_by_their_fractions() -> None:
    slots = torch.tensor([[0, 1, 2, 0, 0, 1], [2, 2, 0, 1, 1, 1]])
    copies, layer = Copies(Placement(slots, 3, 3)), np.array([0, 1])
    loads = np.array([[100_000, 50_000, 7], [3, 80_000, 90_000]])
    fractions = np.array([[0.2, 0.9, 1, 0.5, 0.3, 0.1], [0.6, 0.4, 1, 0.25, 0.0, 0.75]])
    drawn = baselines.sampled(copies, layer, loads, fractions, np.random.default_rng(0))
    assert baselines.judge(prepare(slots, 3), loads, layer, drawn)[1].all()
    assert (drawn == np.rint(drawn)).all()
    expected = fractions * loads[[[0], [1]], slots.numpy()]
    spread = np.sqrt(np.maximum(expected * (1 - fractions), 0))
    assert (abs(drawn - expected) <= 5 * spread + 1e-9).all()
    assert abs(drawn - expected)[spread > 10].min() > 0


def test_decode_ids_become_counts() -> None:
    ids = np.full((2, 3, 1, 2), 255, dtype=np.uint8)
    ids[0, :2, 0] = [[1, 3], [1, 0]]
    ids[1, 0, 0] = [1, 2]
    counts = problems._decode_counts(ids, 4)
    assert counts.tolist() == [[[0, 2, 1, 1]], [[1, 1, 0, 0]], [[0, 0, 0, 0]]]


def test_copies_of_paired_problems_are_pairs() -> None:
    rng = np.random.default_rng(0)
    planned, later = rng.gamma(0.7, size=(2, 2, 256)) + 0.01
    for one in problems.paired_problems(planned, later, 1, rng):
        num_ranks = one.structure.num_ranks
        for slots in one.structure.physical_to_logical.numpy():
            pairs = baselines.pairs_of(slots, num_ranks)
            assert len(pairs.expert) == 2 * num_ranks
            assert np.bincount(pairs.ranks.ravel()).tolist() == [4] * num_ranks


@pytest.mark.slow
def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "split.json"
    command = [sys.executable, f"{SCRIPTS}/split.py", "--kinds", "pairs", "--problems", "4", "--out", str(out)]
    command += ["--recordings", str(tmp_path), "--solvers", "ours, CPU", "OR-Tools", "LPLB", "pairwise", "even"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written = json.loads(out.read_text())
    assert "lognormal marginals" in written["drawn from"]
    by_solver = {line["solver"]: line for line in written["summary"]}
    assert by_solver["OR-Tools GLOP"]["gap_worst"] == 0
    assert by_solver["ours, CPU"]["problems"] == 12
    assert by_solver["ours, CPU"]["infeasible"] == by_solver["ours, CPU"]["unproven"] == 0
    assert -1e-9 < by_solver["ours, CPU"]["gap_worst"] < 1.01e-4 < by_solver["even"]["gap_mean"]
    assert by_solver["pairwise edges"]["answered"] == 12
    assert by_solver["ours, CPU"]["us_batch"] < by_solver["OR-Tools GLOP"]["us_alone"]
    for name in by_solver:
        assert name in done.stdout
