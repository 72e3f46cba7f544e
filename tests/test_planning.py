"""Planning on a history: which of its steps and layers a placement policy gets to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from epsim import planning
from epsim.placement.base import Cluster, Placement, PlacementPolicy, Stack, Target
from epsim.placement.contiguous import Contiguous
from epsim.planning import plan_placements
from epsim.policies.stack import parse_stack
from epsim.score.steps import step_keys
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import CountsBlock, Ints, TraceMeta

TraceMaker = Callable[..., StoredTrace]


@dataclass(eq=False)
class Watcher(PlacementPolicy):
    """A placement policy that keeps what it is given."""

    needs_steps: bool  # type: ignore[misc]
    plans_for_stack: bool = False  # type: ignore[misc]
    seen: list[torch.Tensor] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    name: ClassVar[str] = "watcher"

    def plan_for(self, history: torch.Tensor, target: Target) -> Placement:
        self.stacks.append(target.stack)
        return self.plan(history, target.cluster)

    def plan(self, history: torch.Tensor, cluster: Cluster) -> Placement:
        self.seen.append(history)
        return Contiguous().plan(history, cluster)


def counts_of(trace: StoredTrace) -> Ints:
    blocks = list(trace.blocks())
    return np.concatenate([block.counts for block in blocks if isinstance(block, CountsBlock)])


def watch(trace: StoredTrace, num_steps: int, meta: TraceMeta) -> tuple[torch.Tensor, torch.Tensor, Ints]:
    """What a policy of single steps sees, what one of sums sees, and the keys."""
    single, whole = Watcher(True), Watcher(False)
    keys: list[Ints] = []
    stacks = [replace(parse_stack("contiguous"), placement=policy) for policy in (single, whole)]
    plan_placements(stacks, trace, num_steps, meta, Cluster(4), lambda steps: None, keys)
    return single.seen[0], whole.seen[0], np.concatenate(keys)


@pytest.mark.parametrize(("room", "stride"), [(100, 1), (23, 1), (12, 2), (8, 3), (1, 23)])
def test_steps_beyond_the_memory_are_left_out_evenly(
    make_trace: TraceMaker, monkeypatch: pytest.MonkeyPatch, room: int, stride: int
) -> None:
    trace = make_trace("counts", steps=30, layers=2, experts=8)
    step_bytes = 2 * 8 * 8
    monkeypatch.setattr(planning, "MAX_HISTORY_BYTES", room * step_bytes)
    monkeypatch.setattr(planning, "BLOCK_BYTES", 5 * step_bytes)
    counts = counts_of(trace)[:23]
    single, whole, keys = watch(trace, 23, trace.meta)
    assert np.array_equal(single.numpy(), counts[::stride])
    assert np.array_equal(whole.numpy(), counts.sum(0, keepdims=True))
    assert np.array_equal(keys, step_keys(counts))


def test_layers_of_the_trace_are_taken_from_the_history_by_their_numbers(tmp_path: Path) -> None:
    numbered = TraceMeta("counts", 3, 8, 2, layers=(3, 4, 9))
    with TraceWriter(tmp_path / "history.parquet", numbered) as writer:
        writer.append(CountsBlock(np.arange(4), np.arange(4 * 3 * 8).reshape(4, 3, 8)))
    history = StoredTrace(tmp_path / "history.parquet")
    asked = replace(numbered, num_layers=2, layers=(4, 9))
    single, whole, _ = watch(history, history.num_steps, asked)
    assert np.array_equal(single.numpy(), counts_of(history)[:, 1:])
    assert np.array_equal(whole.numpy()[0], counts_of(history)[:, 1:].sum(0))
    with pytest.raises(ValueError, match="--history lacks layer 5"):
        watch(history, history.num_steps, replace(asked, layers=(4, 5)))


@dataclass(frozen=True)
class Returns(PlacementPolicy):
    """Returns what it is given as its plan."""

    planned: Any
    name: ClassVar[str] = "mine"

    def plan(self, history: torch.Tensor, cluster: Cluster) -> Placement:
        return self.planned  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("planned", "says"),
    [
        (None, "mine: its plan is of type NoneType: return a Placement"),
        (torch.arange(8)[None], "mine: its plan is of type Tensor: return a Placement"),
        (Placement(torch.arange(8)[None], 8, 4), "mine: its plan has 1 layers: return a Placement of 2 layers"),
        (
            Placement(torch.arange(4).repeat(2, 2), 4, 4),
            "mine: its plan has 4 experts: return a Placement of 8 experts",
        ),
        (Placement(torch.arange(8).repeat(2, 1), 8, 2), "mine: its plan has 2 ranks: return a Placement of 4 ranks"),
        (Placement(torch.arange(8).repeat(2, 1), 8, 4, 2), "mine: its plan has 2 nodes: return a Placement of 1 nodes"),
    ],
)
def test_what_is_no_placement_for_the_trace_is_refused(make_trace: TraceMaker, planned: Any, says: str) -> None:
    trace = make_trace("counts")
    stack = replace(parse_stack("contiguous"), placement=Returns(planned))
    with pytest.raises(ValueError, match=f"^{says}$"):
        plan_placements([stack], trace, 2, trace.meta, Cluster(4), lambda steps: None)


def test_keys_follow_content_and_add_up() -> None:
    counts = np.random.default_rng(0).integers(0, 1000, (50, 3, 16))
    keys = step_keys(counts)
    assert len(set(keys.tolist())) == 50
    assert step_keys(counts.sum(0, keepdims=True))[0] == keys.sum()
    assert step_keys(np.zeros((2, 3, 16), dtype=np.int64)).tolist() == [0, 0]
    moved = counts[:1].copy()
    moved[0, 0, 0] += 1
    moved[0, 2, 5] -= 1
    assert step_keys(moved)[0] != keys[0]


@pytest.mark.parametrize(("plans_for_stack", "number"), [(False, 1), (True, 2)])
def test_a_placement_is_planned_for_each_stack_only_where_it_looks_at_it(
    make_trace: TraceMaker, plans_for_stack: bool, number: int
) -> None:
    trace, watcher = make_trace("counts", steps=3), Watcher(False, plans_for_stack)
    stacks = [replace(parse_stack(text), placement=watcher) for text in ("even", "lplb", "even")]
    planned = plan_placements(stacks, trace, 3, trace.meta, Cluster(4), lambda steps: None)
    assert [str(stack.split) for stack in watcher.stacks] == [str(stack.split) for stack in stacks[:number]]
    assert planned[0] is planned[2]
    assert len({id(placement) for placement in planned}) == number
