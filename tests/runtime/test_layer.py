"""Every stack on real processes: outputs as in a single process, loads as simulated, no needless collective."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.placement.base import Cluster, Placement, Target
from epsim.policies.apply import Setting, bind
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.traces.trace import TokenBlock
from tests.policies.registered import every, stack_of, write_example
from tests.runtime import programs
from tests.runtime.worlds import launch

SHAPE = programs.SHAPE
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def all_stacks(size: int) -> list[PolicyStack]:
    """Every split with every shared policy, placements taking turns, and what the turns leave out: each split meets
    each placement, and each shared policy a placement that moves experts. On 16 processes, where a layer takes long,
    every policy meets one of the other kind."""
    splits, shared = every("split"), every("shared")
    pairs = list(itertools.product(splits, shared))
    if size > 4:
        gathered, waterfill = (parse_stack(text) for text in ("lplb(counts=gathered)", "waterfill"))
        pairs = [*((split, waterfill.shared) for split in splits), *((gathered.split, one) for one in shared)]
    placements = itertools.islice(itertools.cycle(every("placement")), size, None)
    stacks = [(split, dispatch) for split, dispatch in pairs if stack_of(split=split, shared=dispatch) is not None]
    found = [stack_of(placement=next(placements), split=split, shared=dispatch) for split, dispatch in stacks]
    if size <= 4:
        met = {(stack.placement, part) for stack in found if stack for part in (stack.split, stack.shared)}
        left = [pair for pair in itertools.product(every("placement"), splits) if pair not in met]
        found += [stack_of(placement=placement, split=split) for placement, split in left]
        searched = parse_stack("searched").placement
        by_shared = {part: split for split, part in reversed(stacks) if (searched, part) not in met}
        found += [stack_of(placement=searched, split=split, shared=part) for part, split in by_shared.items()]
    return list(dict.fromkeys(stack for stack in found if stack is not None))


def placed(stack: PolicyStack, size: int, nodes: int) -> Placement:
    history = torch.from_numpy(np.random.default_rng(0).gamma(0.5, 100, (4, 1, SHAPE.num_experts)).astype(np.int64))
    target = Target(Cluster(size, nodes, 16, 4), (programs.LAYER,), stack)
    return stack.placement.plan_for(history, target)


def expected(text: str, placement: Placement, block: TokenBlock) -> Any:
    setting = Setting(programs.SEED, SHAPE.shared_cost, SHAPE.top_k, (programs.LAYER,))
    return bind(parse_stack(text), placement, setting).load(block)


def block_of(steps: tuple[int, ...], ids: list[list[Any]]) -> TokenBlock:
    """ids: by rank, then step, [T, k]."""
    parts = [(at, rank, ids[rank][at]) for at in range(len(steps)) for rank in range(len(ids))]
    return TokenBlock(
        np.array(steps),
        np.concatenate([np.full(len(part), at) for at, _, part in parts]),
        np.concatenate([np.full(len(part), rank) for _, rank, part in parts]),
        np.concatenate([part for _, _, part in parts])[:, None],
    )


def needed(stack: PolicyStack) -> dict[str, int]:
    """Collectives of one layer's balance, as the policies declare them."""
    calls = {"reduced": "all_reduce", "gathered": "all_gather"}
    return dict(Counter(calls[policy.needs] for policy in (stack.split, stack.shared) if policy.needs != "none"))


WORLDS = {2: [(1, "float32"), (2, "bfloat16")], 4: [(2, "float32")], 16: [(2, "float32")]}
"""By number of processes: nodes and numbers of each run."""


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (4, 16))])
def test_every_stack(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_example(tmp_path, monkeypatch, SHAPE.num_experts, size, (programs.LAYER,))
    stacks = all_stacks(size)
    alone = [replace(stacks[0], placement=placement) for placement in every("placement")]
    plans = {nodes: {stack.placement: placed(stack, size, nodes) for stack in alone} for nodes, _ in WORLDS[size]}
    tables = {nodes: [plans[nodes][stack.placement] for stack in stacks] for nodes in plans}
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for nodes, dtype in WORLDS[size]:
        given = [(str(stack), table.physical_to_logical.numpy()) for stack, table in zip(stacks, tables[nodes])]
        calls.append(("run_stacks", (size, nodes, given, dtype)))
    if size == 2:
        calls.append(("not_a_number", (size, tables[1][0].physical_to_logical.numpy())))
    ran = launch(size, programs.several, calls)
    for number, (nodes, dtype) in enumerate(WORLDS[size]):
        for place, (stack, placement) in enumerate(zip(stacks, tables[nodes])):
            check_stack(stack, placement, [rank[number][place] for rank in ran], TOLERANCE[dtype])
    if size == 2:
        line = "(1, 5, 3, 'route') rank 1, step 5, layer 3, phase route: router scores are not finite"
        assert ran[1][-1].startswith(line)


UNEQUAL = {2: [5, 30], 3: [40, 0, 7]}
"""By number of processes: how many slots of each rank hold an expert."""


@pytest.mark.parametrize("size", UNEQUAL)
def test_ranks_of_unequal_numbers_of_experts(size: int) -> None:
    """Slots are empty where a rank holds fewer experts than the fullest one; a rank may hold none."""
    rng = np.random.default_rng(size)
    most, number = max(UNEQUAL[size]), sum(UNEQUAL[size])
    experts = SHAPE.num_experts
    held = rng.permutation([*range(experts), *rng.integers(0, experts, number - experts)])
    slots = np.full((size, most), -1)
    for rank, part in enumerate(np.split(held, np.cumsum(UNEQUAL[size])[:-1])):
        slots[rank, rng.permutation(most)[: len(part)]] = part
    placement = programs.table(slots.reshape(1, -1), SHAPE, size, 1)
    assert placement.filled_slots.tolist() == [UNEQUAL[size]]
    stacks = all_stacks(2)
    given = [(str(stack), placement.physical_to_logical.numpy()) for stack in stacks]
    ran = launch(size, programs.run_stacks, size, 1, given, "float32")
    for place, stack in enumerate(stacks):
        check_stack(stack, placement, [rank[place] for rank in ran], TOLERANCE["float32"])


def check_stack(stack: PolicyStack, placement: Placement, by_rank: list[programs.Ran], tolerance: float) -> None:
    text = str(stack)
    assert max(one.error for one in by_rank) < tolerance, text
    load = expected(text, placement, block_of(programs.STEPS, [one.ids for one in by_rank]))
    routed = np.stack([np.stack(one.received).sum(1) for one in by_rank], axis=1)
    assert np.array_equal(routed, load.routed[:, 0].numpy()), text
    shared = np.stack([one.received_shared for one in by_rank], axis=1)
    assert np.array_equal(shared, load.shared_tokens[:, 0].numpy()), text
    active = np.stack([(np.stack(one.received) > 0).sum(1) for one in by_rank], axis=1)
    assert np.array_equal(active, load.active[:, 0].numpy()), text
    calls = {kind: number * len(programs.STEPS) for kind, number in needed(stack).items()}
    assert all(one.calls == calls for one in by_rank), (text, calls, by_rank[0].calls)


def test_every_policy_meets_every_placement() -> None:
    searched = parse_stack("searched").placement
    for size in (2, 4):
        stacks = all_stacks(size)
        met = {(stack.placement, stack.split) for stack in stacks}
        assert met == set(itertools.product(every("placement"), every("split")))
        assert {stack.shared for stack in stacks if stack.placement == searched} == set(every("shared"))


def test_collectives_of_the_shipped_policies() -> None:
    """What each policy needs, spelled out here apart from its declaration."""
    splits = {"even": "none", "random": "none", "static": "none", "one-copy": "reduced", "lplb": "reduced"}
    splits |= {"lplb-sampled": "reduced", "lplb-ipm": "reduced", "lplb(counts=gathered)": "gathered"}
    splits |= {"lplb(objective=time,a=1,b=2)": "gathered"}
    assert {text: parse_stack(text).split.needs for text in splits} == splits
    shared = {"local": "none", "waterfill": "reduced", "waterfill(counts=local)": "none"}
    shared |= {"waterfill-joint": "reduced", "waterfill-joint(candidates=visited)": "gathered"}
    assert {text: parse_stack(f"lplb+{text}").shared.needs for text in shared} == shared
