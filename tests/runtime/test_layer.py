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


def stacks(placements: list[str], splits: list[Any], shared: list[Any]) -> list[str]:
    default = parse_stack("contiguous")
    made = []
    for name, split, dispatch in itertools.product(placements, splits, shared):
        if dispatch.name == "waterfill-joint" and split.name != "lplb":
            continue  # Refused by PolicyStack.
        made.append(str(PolicyStack(KINDS["placement"][name], default.router, split, dispatch, default.reader)))
    return made


def all_stacks(size: int) -> list[str]:
    """On 2 processes all of the registry; on more, where a layer takes long, every policy with some of the others."""
    splits = [v for policy in KINDS["split"].values() for v in variants(policy)]
    shared = [v for policy in KINDS["shared"].values() for v in variants(policy)]
    placements = list(KINDS["placement"])
    if size <= 2:
        return stacks(placements, splits, shared)
    gathered = [parse_stack("lplb(counts=gathered)").split]
    waterfill = [parse_stack("waterfill").shared, parse_stack("waterfill(candidates=all,counts=local)").shared]
    found = stacks(["eplb"], splits, waterfill[:1] if size > 4 else shared)
    found += stacks(["eplb-global"], gathered, shared)
    found += stacks(placements, [*gathered, parse_stack("random").split], waterfill[1:])
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


@pytest.mark.parametrize(
    ("size", "nodes", "dtype"),
    [
        pytest.param(2, 1, "float32", marks=pytest.mark.slow),
        (2, 2, "bfloat16"),
        (4, 2, "float32"),
        pytest.param(16, 2, "float32", marks=pytest.mark.slow),
    ],
)
def test_every_stack(size: int, nodes: int, dtype: str) -> None:
    texts = all_stacks(size if dtype == "float32" else 4)
    known = {name: placed(name, size, nodes) for name in KINDS["placement"]}
    tables = [known[parse_stack(text).placement.name] for text in texts]
    given = [(text, placement.physical_to_logical.numpy()) for text, placement in zip(texts, tables)]
    ran = launch(size, programs.run_stacks, size, nodes, given, dtype)
    for place, (text, placement) in enumerate(zip(texts, tables)):
        by_rank = [rank[place] for rank in ran]
        assert max(one.error for one in by_rank) < TOLERANCE[dtype], text
        load = expected(text, placement, block_of(programs.STEPS, [one.ids for one in by_rank]))
        routed = np.stack([np.stack(one.received).sum(1) for one in by_rank], axis=1)
        assert np.array_equal(routed, load.routed[:, 0].numpy()), text
        shared = np.stack([one.received_shared for one in by_rank], axis=1)
        assert np.array_equal(shared, load.shared_tokens[:, 0].numpy()), text
        active = np.stack([(np.stack(one.received) > 0).sum(1) for one in by_rank], axis=1)
        assert np.array_equal(active, load.active[:, 0].numpy()), text
        calls = {kind: number * len(programs.STEPS) for kind, number in needed(parse_stack(text)).items()}
        assert all(one.calls == calls for one in by_rank), (text, calls, by_rank[0].calls)


def test_scores_that_are_not_numbers_name_rank_and_phase() -> None:
    slots = placed("eplb", 2, 1).physical_to_logical.numpy()
    said = launch(2, programs.not_a_number, 2, slots)
    assert said[1].startswith("(1, 5, 3, 'route') rank 1, step 5, layer 3, phase route: router scores are not finite")
