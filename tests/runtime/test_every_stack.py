"""What each rank of a run computes for every stack of the registry is its part of a replay."""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from epsim.models.shapes import LayerShape
from epsim.placement.base import Cluster, Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.base import Needs, Routed, RouterWork
from epsim.policies.routing.topk import TopK
from epsim.policies.splits import Lplb
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.policies.waterfill import Waterfill
from epsim.runtime.balance import Balancer
from epsim.runtime.collective import Collective
from epsim.runtime.job import Place, tokens_of
from epsim.runtime.layer import ExpertParallelMoE, build_layer
from epsim.runtime.phases import PhaseClock, PhaseError
from epsim.runtime.routers import make_router
from epsim.traces.trace import TokenBlock
from tests.policies.conftest import random_placement
from tests.test_replay_blocks import EXPERTS, TOP_K, Sizes, draw_trace, every_stack, few_stacks

RANKS, NODES, LAYERS = 4, 2, (3, 8)
SIZES = (70, 300, 1, 0, 9, 64)
"""Tokens of each step; step 0 and 3 are prefill steps. With one token, three ranks have none."""
SHAPE = LayerShape("test", 16, 8, EXPERTS, TOP_K, 8)


class Meeting(Collective):
    """The collectives of ranks that are threads."""

    def __init__(self, rank: int, barrier: Barrier, sent: list[torch.Tensor]) -> None:
        self.rank, self.size, self.calls = rank, RANKS, Counter()
        self._barrier, self._sent = barrier, sent

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return self.all_gather(values).sum(0)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        self._sent[self.rank] = values
        self._barrier.wait(60)
        gathered = torch.stack(self._sent)
        self._barrier.wait(60)
        return gathered


def served(stack: PolicyStack, placement: Placement, block: TokenBlock, collective: Collective) -> torch.Tensor:
    """[S, L, 2, R] int64: routed assignments and shared-expert tokens of this rank that each rank serves."""
    job: Any = SimpleNamespace(shape=SHAPE, phase="mixed")
    place = Place(collective.rank, RANKS, None, torch.device("cpu"), torch.float32)
    result = torch.zeros(len(SIZES), len(LAYERS), 2, RANKS, dtype=torch.int64)
    for number, layer in enumerate(LAYERS):
        slots = placement.physical_to_logical[number : number + 1]
        own = dataclasses.replace(placement, physical_to_logical=slots)
        balancer = Balancer(stack, own, Setting(7, 1.0, TOP_K, (layer,), num_scores=EXPERTS), collective)
        router = make_router(SHAPE, layer, 0, place.device, place.dtype)
        part: Any = SimpleNamespace(balancer=balancer, clock=PhaseClock(0, place.device))
        for step in range(len(SIZES)):
            tokens = tokens_of(block, step, job, place)
            scores = None if tokens.scores is None or not stack.router.acts else tokens.scores[:, number]
            routing = router(torch.zeros(len(tokens.ids), SHAPE.hidden), None, tokens.ids[:, number], scores)
            ids = ExpertParallelMoE._rerouted(part, routing, tokens.decode).ids
            assigned = balancer.assign(ids, int(block.steps[step]))
            assert assigned.shared_rank is not None
            ranks = torch.div(assigned.physical, own.slots_per_rank, rounding_mode="floor")
            for kind, each in enumerate((ranks, assigned.shared_rank)):
                result[step, number, kind] = torch.bincount(each.flatten() + 1, minlength=RANKS + 1)[1:]
    return result


def differing(stacks: list[PolicyStack], folder: Path) -> list[PolicyStack]:
    """The stacks whose ranks do not serve what a replay says."""
    trace = draw_trace(folder, "tokens", Sizes(SIZES, len(LAYERS), Cluster(RANKS, NODES, 8)), 3)
    [block] = trace.blocks()
    assert isinstance(block, TokenBlock)
    placement = random_placement(np.random.default_rng(5), len(LAYERS), EXPERTS, 8, RANKS, NODES)
    barrier, sent = Barrier(RANKS), [torch.empty(0)] * RANKS

    def run_rank(rank: int) -> list[torch.Tensor]:
        try:
            return [served(stack, placement, block, Meeting(rank, barrier, sent)) for stack in stacks]
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        by_rank = list(pool.map(run_rank, range(RANKS)))
    found = []
    for stack, parts in zip(stacks, zip(*by_rank, strict=True), strict=True):
        setting = Setting(7, 1.0, TOP_K, LAYERS, phase="mixed", num_scores=EXPERTS)
        load = bind(stack, placement, setting).load(block)
        assert load.routed.sum() > 0
        if not torch.equal(torch.stack(parts).sum(0), torch.stack((load.routed, load.shared_tokens), 2)):
            found.append(stack)
    return found


def without_readers(stacks: list[PolicyStack]) -> list[PolicyStack]:
    """The stacks that the runtime can run, on the placement of the test."""
    placement = parse_stack("eplb").placement
    able = [stack for stack in stacks if not stack.reader.acts]
    return list(dict.fromkeys(dataclasses.replace(stack, placement=placement) for stack in able))


def test_ranks_serve_what_the_replay_says(tmp_path: Path) -> None:
    stacks = without_readers(few_stacks())
    assert len(stacks) > 40
    assert differing(stacks, tmp_path) == []


@pytest.mark.long
def test_ranks_serve_what_the_replay_says_for_every_stack(tmp_path: Path) -> None:
    stacks = without_readers(every_stack())
    assert len(stacks) > 200
    assert differing(stacks, tmp_path) == []


@dataclass(frozen=True, slots=True)
class QuietLplb(Lplb):
    """Reads the counts of all ranks, but does not declare it."""

    name: ClassVar[str] = "quiet-lplb"
    needs: ClassVar[Needs] = "none"


@dataclass(frozen=True, slots=True)
class QuietWaterfill(Waterfill):
    """Reads the loads of all ranks, but does not declare it."""

    name: ClassVar[str] = "quiet-waterfill"
    needs: ClassVar[Needs] = "none"


@dataclass(frozen=True, slots=True)
class Wide(TopK):
    """Gives more experts than it declares."""

    name: ClassVar[str] = "wide"
    acts: ClassVar[bool] = True

    def route(self, work: RouterWork) -> Routed:
        ids, weights = (torch.nn.functional.pad(values, (0, 2)) for values in (work.expert_ids, work.weights))
        return Routed(ids, weights)


@pytest.mark.parametrize("policy", [QuietLplb(), QuietWaterfill()])
def test_a_policy_that_reads_what_it_did_not_declare_is_found(policy: Any, tmp_path: Path) -> None:
    stack = dataclasses.replace(parse_stack("eplb+static"), **{policy.kind: policy})
    assert differing([stack], tmp_path) == [stack]


def test_a_router_that_gives_more_experts_than_it_declares_is_refused(tmp_path: Path) -> None:
    stack = dataclasses.replace(parse_stack("eplb"), router=Wide())
    trace = draw_trace(tmp_path, "tokens", Sizes(SIZES, len(LAYERS), Cluster(RANKS, NODES, 8)), 3)
    placement = Placement(torch.arange(EXPERTS)[None].repeat(2, 1), EXPERTS, RANKS)
    wrong = r"router wide gives a token up to 10 experts, but its most_experts\(\) returns 8"
    with pytest.raises(ValueError, match=wrong):
        bind(stack, placement, Setting(7, 1.0, TOP_K, LAYERS)).load(next(trace.blocks()))
    one_rank = Placement(torch.arange(EXPERTS)[None], EXPERTS, 1)
    layer = build_layer(
        SHAPE, stack, one_rank, layer=0, seed=0, group=None, device=torch.device("cpu"), dtype=torch.float32
    )
    with pytest.raises(PhaseError, match=wrong):
        layer(torch.zeros(2, SHAPE.hidden), step=0)
