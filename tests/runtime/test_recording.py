"""The recorded routing of a run, written to a file and replayed, gives the load of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from epsim.placement.base import Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.stack import parse_stack
from epsim.runtime.recording import RankRecording, joined
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import TokenBlock, TraceMeta
from tests.runtime import programs
from tests.runtime.worlds import launch

STACKS = ["eplb+lplb+waterfill", "eplb+lplb(counts=gathered)", "eplb+random+waterfill"]


def test_a_recorded_run_replays_to_its_load(tmp_path: Path) -> None:
    size, nodes, shape = 4, 2, programs.SHAPE
    rng = np.random.default_rng(1)
    slots = np.stack([rng.permutation([*range(32), *rng.integers(0, 32, 16)]) for _ in range(2)])
    runs = launch(size, programs.several, [("recorded", (size, nodes, text, slots)) for text in STACKS])
    meta = TraceMeta("tokens", 2, 32, 4, size, shape.shared_cost, layers=(3, 7))
    for number, text in enumerate(STACKS):
        ran = [rank[number] for rank in runs]
        block = ran[0][0]
        assert [one[0] for one in ran[1:]] == [None] * 3
        path = tmp_path / f"run-{number}.parquet"
        with TraceWriter(path, meta) as writer:
            writer.append(block)
        trace = StoredTrace(path)
        setting = Setting(programs.SEED, shape.shared_cost, shape.top_k, trace.meta.layers)
        bound = bind(parse_stack(text), Placement(torch.from_numpy(slots), 32, size, nodes), setting)
        loads = [bound.load(part) for part in trace.blocks()]
        routed, shared = (torch.cat([getattr(load, name) for load in loads]) for name in ("routed", "shared_tokens"))
        served = torch.tensor([one[1] for one in ran])  # [R, S, L, 2]
        assert torch.equal(routed, served[..., 0].permute(1, 2, 0)), text
        assert torch.equal(shared, served[..., 1].permute(1, 2, 0)), text


def kept(ids: dict[int, np.ndarray]) -> dict[int, RankRecording]:
    return {step: (of_step, None) for step, of_step in ids.items()}


def test_ranks_are_put_in_order() -> None:
    ids = {step: np.full((tokens, 2, 1), step) for step, tokens in ((4, 2), (9, 0))}
    other = {step: np.full((tokens, 2, 1), 10 + step) for step, tokens in ((4, 1), (9, 3))}
    block = joined([kept(ids), kept(other)])
    assert isinstance(block, TokenBlock)
    assert block.steps.tolist() == [4, 9]
    assert block.token_step.tolist() == [0, 0, 0, 1, 1, 1]
    assert block.source_rank.tolist() == [0, 0, 1, 1, 1, 1]
    assert block.expert_ids[:, 1, 0].tolist() == [4, 4, 14, 19, 19, 19]
    with pytest.raises(ValueError, match="rank 1 recorded 1 steps, rank 0 2"):
        joined([kept(ids), kept({4: ids[4]})])
    with pytest.raises(ValueError, match="nothing recorded"):
        joined([{}, {}])


def test_scores_and_phases_go_along() -> None:
    ids = np.zeros((2, 1, 1), dtype=np.int64)
    scores = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    block = joined([{4: (ids, scores)}, {4: (ids[:1], 10 + scores[:1])}], {4: "decode", 5: "prefill"})
    assert block.scores is not None
    assert block.scores[:, 0, 1].tolist() == [1, 5, 11]
    assert block.phase is not None
    assert block.phase.tolist() == ["decode"]
