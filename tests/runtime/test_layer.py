"""Every stack on real processes: outputs of a single process, loads of the simulator, and no needless collective."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from epsim.placement.base import Cluster, Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.registry import KINDS
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.traces.trace import TokenBlock
from tests.runtime import programs
from tests.runtime.worlds import launch

SHAPE = programs.SHAPE
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def variants(policy: Any) -> list[Any]:
    """A policy with every combination of its arguments that have a few named values and go together."""
    hints = get_type_hints(type(policy))
    named = {f.name: choices(hints[f.name]) for f in dataclasses.fields(policy) if choices(hints[f.name])}
    found = []
    for values in itertools.product(*named.values()):
        given = dict(zip(named, values))
        if given.get("objective") == "time":
            if given["counts"] == "reduced":
                continue
            given |= {"a": 1.0, "b": 20.0}
        found.append(type(policy)(**given))
    return found


def choices(hint: Any) -> tuple[Any, ...]:
    """The values of a Literal, or of one that may be left out."""
    parts = [hint, *get_args(hint)]
    return next((get_args(part) for part in parts if get_origin(part) is Literal), ())


def all_stacks(size: int) -> list[str]:
    """Every split with every shared policy, placements taking turns; on 16 processes, where a layer takes long, every
    policy with one of the other kind."""
    splits = [v for policy in KINDS["split"].values() for v in variants(policy)]
    shared = [v for policy in KINDS["shared"].values() for v in variants(policy)]
    pairs = list(itertools.product(splits, shared))
    if size > 4:
        gathered, waterfill = (parse_stack(text) for text in ("lplb(counts=gathered)", "waterfill"))
        pairs = [*((split, waterfill.shared) for split in splits), *((gathered.split, one) for one in shared)]
    default, found = parse_stack("contiguous"), []
    placements = itertools.islice(itertools.cycle(KINDS["placement"].values()), size, None)
    for split, dispatch in pairs:
        if dispatch.name == "waterfill-joint" and split.name != "lplb":
            continue  # Refused by PolicyStack.
        found.append(str(PolicyStack(next(placements), default.router, split, dispatch, default.reader)))
    return list(dict.fromkeys(found))


def placed(text: str, size: int, nodes: int) -> Placement:
    history = torch.from_numpy(np.random.default_rng(0).gamma(0.5, 100, (4, 1, SHAPE.num_experts)).astype(np.int64))
    return parse_stack(text).placement.plan(history, Cluster(size, nodes, 16, 4))


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
    """Collectives of one layer's balance, spelled out here independently of the code under test."""
    calls = {"all_reduce": 0, "all_gather": 0}
    if stack.split.name not in ("even", "random", "static"):
        calls["all_gather" if getattr(stack.split, "counts", "") == "gathered" else "all_reduce"] += 1
    if str(stack.shared).startswith("WaterfillJoint(candidates='visited'"):
        calls["all_gather"] += 1
    elif stack.shared.name != "local" and getattr(stack.shared, "counts", "global") == "global":
        calls["all_reduce"] += 1
    return {kind: number for kind, number in calls.items() if number}


WORLDS = {2: [(1, "float32"), (2, "bfloat16")], 4: [(2, "float32")], 16: [(2, "float32")]}
"""By number of processes: nodes and numbers of each run."""


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (4, 16))])
def test_every_stack(size: int) -> None:
    known = {nodes: {name: placed(name, size, nodes) for name in KINDS["placement"]} for nodes, _ in WORLDS[size]}
    texts = all_stacks(size)
    tables = {nodes: [known[nodes][parse_stack(text).placement.name] for text in texts] for nodes in known}
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for nodes, dtype in WORLDS[size]:
        given = [(text, table.physical_to_logical.numpy()) for text, table in zip(texts, tables[nodes])]
        calls.append(("run_stacks", (size, nodes, given, dtype)))
    if size == 2:
        calls.append(("not_a_number", (size, tables[1][0].physical_to_logical.numpy())))
    ran = launch(size, programs.several, calls)
    for number, (nodes, dtype) in enumerate(WORLDS[size]):
        for place, (text, placement) in enumerate(zip(texts, tables[nodes])):
            check_stack(text, placement, [rank[number][place] for rank in ran], TOLERANCE[dtype])
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
    given = [(text, placement.physical_to_logical.numpy()) for text in all_stacks(2)]
    ran = launch(size, programs.run_stacks, size, 1, given, "float32")
    for place, (text, _) in enumerate(given):
        check_stack(text, placement, [rank[place] for rank in ran], TOLERANCE["float32"])


def check_stack(text: str, placement: Placement, by_rank: list[programs.Ran], tolerance: float) -> None:
    assert max(one.error for one in by_rank) < tolerance, text
    load = expected(text, placement, block_of(programs.STEPS, [one.ids for one in by_rank]))
    routed = np.stack([np.stack(one.received).sum(1) for one in by_rank], axis=1)
    assert np.array_equal(routed, load.routed[:, 0].numpy()), text
    shared = np.stack([one.received_shared for one in by_rank], axis=1)
    assert np.array_equal(shared, load.shared_tokens[:, 0].numpy()), text
    active = np.stack([(np.stack(one.received) > 0).sum(1) for one in by_rank], axis=1)
    assert np.array_equal(active, load.active[:, 0].numpy()), text
    calls = {kind: number * len(programs.STEPS) for kind, number in needed(parse_stack(text)).items()}
    assert all(one.calls == calls for one in by_rank), (text, calls, by_rank[0].calls)


def test_every_policy_meets_every_placement() -> None:
    met = {(s.placement.name, s.split) for s in map(parse_stack, all_stacks(2))}
    assert len(met) == len(KINDS["placement"]) * len({split for _, split in met})
    both = [parse_stack(text) for size in (2, 4) for text in all_stacks(size)]
    assert {s.shared for s in both if s.placement.name == "searched"} == {s.shared for s in both}
