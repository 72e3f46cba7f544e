"""Experts move while the layer runs: outputs do not change, bytes per step are limited, all ranks switch together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.stack import parse_stack
from epsim.runtime.relocation import Move, Relocation, plan_moves, plan_pieces, plan_waves
from epsim.runtime.weights import RandomWeights
from epsim.traces.trace import TokenBlock
from tests.runtime import programs
from tests.runtime.worlds import launch

SHAPE = programs.SHAPE
EXPERT_BYTES = 3 * SHAPE.hidden * SHAPE.intermediate * 4


def random_slots(seed: int, physical: int, experts: int = SHAPE.num_experts, empty: float = 0.3) -> list[int]:
    """Every expert once. Some of the other slots are empty."""
    rng = np.random.default_rng(seed)
    more = rng.integers(0, experts, physical - experts)
    more[rng.random(len(more)) < empty] = -1
    slots: list[int] = rng.permutation([*range(experts), *more]).tolist()
    return slots


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.sampled_from([1, 2, 4, 8]),
    experts=st.integers(2, 12),
    redundant=st.integers(0, 8),
    spare=st.integers(1, 20),
)
def test_waves_keep_every_expert_and_stay_within_spare_rows(
    seed: int, ranks: int, experts: int, redundant: int, spare: int
) -> None:
    physical = -(-(experts + redundant) // ranks) * ranks
    old, new = random_slots(seed, physical, experts), random_slots(seed + 1, physical, experts)
    per_rank = physical // ranks
    try:
        waves = plan_waves(old, new, ranks, spare)
    except ValueError:
        assert spare < per_rank, "a spare row for every slot always suffices"
        return
    now = list(old)
    for wave in waves:
        assert len(set(wave)) == len(wave)
        assert all(now[slot] != new[slot] for slot in wave)
        arriving = np.array([slot for slot in wave if new[slot] >= 0], dtype=int)
        assert np.bincount(arriving // per_rank, minlength=ranks).max() <= spare
        for slot in wave:
            now[slot] = new[slot]
        assert set(now) - {-1} == set(range(experts))
    assert now == new


def test_a_slot_that_becomes_empty_needs_no_spare_row_and_no_bytes() -> None:
    assert plan_waves([0, 1, 0, 1], [-1, 1, 0, -1], 2, 0) == [[0, 3]]
    assert plan_moves([0, 1, 0, 1], [-1, 1, 0, -1], [0, 3], 2) == []
    # Expert 0 leaves slot 0, its only one, for the empty slot 3: both change together.
    assert plan_waves([0, 1, 1, -1], [-1, 1, 1, 0], 2, 1) == [[0, 3]]
    assert plan_moves([0, 1, 1, -1], [-1, 1, 1, 0], [0, 3], 2) == [Move(0, 3)]


def test_a_layer_changes_over_where_only_empty_slots_arise() -> None:
    full, emptied = [[*range(32), *range(16)]], [[*range(32), *[-1] * 16]]
    layer = programs.build("eplb+lplb", full, SHAPE, 1, 1, torch.float32, RandomWeights(SHAPE, programs.SEED))
    move = Relocation(layer, programs.table(emptied, SHAPE, 1, 1), 1)
    assert (move.num_steps, move.advance(0), move.done) == (1, 0, True)
    assert layer.balancer.placement.physical_to_logical.tolist() == emptied


def test_a_cycle_moves_in_one_wave() -> None:
    # 0 -> 1 -> 2 -> 0, each the only copy: one spare row a rank suffices, as each rank changes one slot.
    assert plan_waves([0, 1, 2], [1, 2, 0], 3, 1) == [[0, 2, 1]]
    with pytest.raises(ValueError, match="1 spare slots per rank are too few"):
        plan_waves([0, 1], [1, 0], 1, 1)


def test_an_expert_comes_from_its_own_rank_or_from_the_one_that_gives_least() -> None:
    # Two slots a rank. Slot 1 takes expert 0, held in slot 0 of its own rank and in slot 2; slots 5 and 7 take it too.
    assert plan_moves([0, 1, 0, 2, 3, 1, 4, 2], [0, 0, 0, 2, 3, 0, 4, 0], [1, 5, 7], 2) == [
        Move(0, 1),
        Move(0, 5),
        Move(2, 7),
    ]


@settings(max_examples=100)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=12),
    num_bytes=st.integers(1, 50),
    most=st.integers(1, 60),
)
def test_pieces_move_every_byte_once_within_the_bound(pairs: list[tuple[int, int]], num_bytes: int, most: int) -> None:
    moves = [Move(source, target) for source, target in pairs]
    moved: dict[int, int] = {}
    for step in plan_pieces(moves, 2, num_bytes, most):
        into, out = np.zeros(4, int), np.zeros(4, int)
        for piece in step:
            assert piece.begin == moved.get(piece.move, 0) < piece.end
            moved[piece.move] = piece.end
            into[moves[piece.move].target // 2] += piece.end - piece.begin
            out[moves[piece.move].source // 2] += piece.end - piece.begin
        assert 0 < into.max() <= most
        assert 0 < out.max() <= most
    assert moved == dict.fromkeys(range(len(moves)), num_bytes)


@pytest.mark.parametrize(("size", "spare", "most"), [(2, 24, 100_000), (4, 4, 3000)])
def test_outputs_stay_while_experts_move(size: int, spare: int, most: int) -> None:
    physical, nodes = 48, 2
    old, new = [random_slots(1, physical)], [random_slots(2, physical)]
    calls: list[tuple[str, tuple[Any, ...]]] = [("run_relocation", (size, nodes, old, new, spare, most))]
    if size == 2:
        calls.append(("disagree", (size, old, new)))
    ran, *said = zip(*launch(size, programs.several, calls))
    for lines in said:
        assert set(lines) == {"rank 1 was given another placement or bytes_per_step than rank 0"}
    first = ran[0]
    assert first["planned"] == len(first["received"])
    assert all(one["versions"] == first["versions"] for one in ran), "every rank changes over at the same step"
    assert first["versions"][0] == Placement(torch.tensor(old), 32, size, nodes).version
    assert first["versions"][-1] == Placement(torch.tensor(new), 32, size, nodes).version
    for one in ran:
        assert max(one["errors"]) < 1e-5
        assert max(one["received"]) <= most
        assert all(one["held"].values()), "every slot holds its new expert's weights, bit for bit"
        assert one["placement"].tolist() == new
    changed = sum(a != b >= 0 for a, b in zip(old[0], new[0]))
    assert -1 in old[0]
    assert -1 in new[0]
    assert sum(sum(one["received"]) for one in ran) == changed * EXPERT_BYTES
    assert len(set(first["versions"])) == (2 if spare == 24 else len(set(first["versions"])))
    # The load at each step is the simulator's under the placement in force: the first and the last are known here.
    setting = Setting(programs.SEED, SHAPE.shared_cost, SHAPE.top_k, (programs.LAYER,))
    for at, slots in ((0, old), (-1, new)):
        bound = bind(parse_stack("eplb+lplb+waterfill"), Placement(torch.tensor(slots), 32, size, nodes), setting)
        ids = [one["loads"][at][0] for one in ran]
        source = np.concatenate([np.full(len(part), rank) for rank, part in enumerate(ids)])
        step = len(first["loads"]) - 1 if at else 0
        block = TokenBlock(np.array([step]), np.zeros_like(source), source, np.concatenate(ids)[:, None])
        load = bound.load(block)
        assert load.routed[0, 0].tolist() == [int(one["loads"][at][1].sum()) for one in ran]
        assert load.shared_tokens[0, 0].tolist() == [one["loads"][at][2] for one in ran]


def test_one_relocation_at_a_time() -> None:
    """A second one would take the spare rows that the first one's experts are arriving in."""
    layer = programs.build(
        "eplb", [random_slots(1, 48)], SHAPE, 1, 1, torch.float32, RandomWeights(SHAPE, programs.SEED), 4
    )
    new, other = (programs.table([random_slots(seed, 48)], SHAPE, 1, 1) for seed in (2, 3))
    move = Relocation(layer, new, EXPERT_BYTES // 2)
    move.advance(0)
    with pytest.raises(ValueError, match="layer 3 has a relocation in progress"):
        Relocation(layer, other, EXPERT_BYTES)
    while not move.done:
        move.advance(1)
    assert layer.balancer.version == new.version
    assert not Relocation(layer, other, EXPERT_BYTES).done
