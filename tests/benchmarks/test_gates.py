"""Gates on whole layers: what a measurement's file holds predicts what a replay of its tokens would."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from epsim.models.shapes import shape_of
from epsim.placement.base import Cluster
from epsim.policies.apply import bind
from epsim.policies.stack import parse_stack
from epsim.runtime.job import Job, JobStack
from epsim.traces.trace import TokenBlock
from tests.benchmarks.scripts import script

gates: Any = script("gates.gate")
layers: Any = script("gates.layers")
predicted: Any = script("gates.predicted")

SHAPE = dataclasses.replace(shape_of("deepseek-v3-layer"), num_experts=16, top_k=4, groups=1, top_groups=1)
STACKS = ("contiguous", "eplb+lplb", "eplb+random", "eplb+even+waterfill")
TOKENS, BATCHES = 96, 3


@pytest.fixture(scope="module")
def job() -> Job:
    history = torch.from_numpy(np.random.default_rng(1).integers(1, 90, 16))
    cluster = Cluster(2, 1, 4, 1)
    stacks = [parse_stack(text) for text in STACKS]
    held = tuple(JobStack("", stack, stack.placement.plan(history[None, None], cluster)) for stack in stacks)
    return Job(SHAPE, (3,), held, lambda first: iter(()), 0, TOKENS, 5, "torch", 1)


@pytest.fixture(scope="module")
def block() -> TokenBlock:
    number = 2 * TOKENS * BATCHES
    ids = np.random.default_rng(2).random((number, 16)).argsort(1)[:, None, :4].astype(np.int16)
    source = np.tile(np.repeat(np.arange(2), TOKENS), BATCHES)
    return TokenBlock(np.arange(BATCHES), np.repeat(np.arange(BATCHES), 2 * TOKENS), source, ids)


def rows(job: Job, block: TokenBlock, us: list[list[list[float]]]) -> list[dict[str, Any]]:
    stacks = [{"stack": text, "us": us[place], **layers.loads(job, place, block)} for place, text in enumerate(STACKS)]
    row = {"source": "drawn", "what": "drawn", "shape": dataclasses.asdict(SHAPE), "tokens": TOKENS, "stacks": stacks}
    row |= {"parts_of": STACKS[0], "parts": {"exchange": 100.0, "experts": 500.0}}
    # As it comes back from a file.
    return list(json.loads(json.dumps([row])))


def test_a_file_s_loads_are_a_replay_s(job: Job, block: TokenBlock) -> None:
    (row,) = rows(job, block, [[[1.0]] * BATCHES] * len(STACKS))
    timing = predicted.timing_of(row, str(gates.CALIBRATED))
    assert timing.experts.tile == 256
    for place, stack in enumerate(row["stacks"]):
        of_job = job.stacks[place]
        bound = bind(of_job.stack, of_job.placement, dataclasses.replace(job.setting, rows=True, tile=256))
        made = predicted.load_of(row, stack, 256)
        found = timing.phases(made, of_job.stack, stack["copies"])
        # The first batch is step 0 in a replay too; later ones draw as of it, since graphs were captured with it.
        replayed = timing.phases(bound.load(block), of_job.stack, bound.copies.redundant)
        same = slice(0, None if stack["stack"] in ("contiguous", "eplb+lplb") else 1)
        for name in ("route", "policy", "dispatch", "experts", "combine"):
            assert torch.allclose(getattr(found, name)[same], getattr(replayed, name)[same]), (stack["stack"], name)


def test_gates_tell_errors_and_order(job: Job, block: TokenBlock) -> None:
    bare = rows(job, block, [[[1.0]] * BATCHES] * len(STACKS))
    totals = [case.total for case in predicted.cases_of(bare)]
    # Measured as predicted times 1.04, the last stack 10% slower than any, which it is not predicted to be.
    us = [[[1.04 * time, 1.04 * time, 9.0 * time] for time in total.tolist()] for total in totals]
    us[3] = [[2.0 * max(total.max() for total in totals)] * 3] * BATCHES
    found = list(predicted.layer_gates(rows(job, block, us)))
    whole = next(gate for gate in found if gate.what.endswith("all of these"))
    assert whole.cases == len(STACKS) * BATCHES
    assert whole.figures["median"] == pytest.approx(1 - 1 / 1.04)
    assert whole.holds
    ranking = found[-1]
    pairs = right = 0
    measured = [[sorted(passes)[1] for passes in stack] for stack in us]
    for batch in range(BATCHES):
        for a in range(4):
            for b in range(a):
                low, high = sorted((measured[a][batch], measured[b][batch]))
                if high > 1.03 * low:
                    pairs += 1
                    right += (measured[a][batch] < measured[b][batch]) == (totals[a][batch] < totals[b][batch])
    assert (ranking.cases, ranking.figures["ordered"]) == (pairs, right / pairs)
    assert found[0].figures["median"] > 0.05
    assert not found[0].holds
