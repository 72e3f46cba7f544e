"""The GPU assigns the same physical experts as the policies on the CPU, for every rank and in a captured graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from epsim.kernels.dispatch import Dispatcher, available
from epsim.placement.base import Placement
from epsim.placement.eplb import rebalance_experts
from epsim.policies.apply import BoundStack
from epsim.policies.hashing import ordinal
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock
from tests.kernels.dispatch.host import (
    STACKS,
    arguments_of,
    bound_stack,
    check,
    expected,
    found_on,
    ordinals,
    random_ids,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason="needs a GPU (Hopper) and CuPy")]


def dispatchers_of(bound: BoundStack, max_tokens: int) -> list[Dispatcher]:
    found = []
    for rank in range(bound.copies.placement.num_ranks):
        plain, named = arguments_of(bound, rank, max_tokens)
        found.append(Dispatcher(*plain, device=torch.device("cuda"), **named))
    return found


def planned(num_experts: int, redundant: int, ranks: int, nodes: int, layers: int, seed: int) -> Placement:
    weights = torch.from_numpy(np.random.default_rng(seed).lognormal(0, 1, (layers, num_experts)))
    slots, _, _ = rebalance_experts(weights, num_experts + redundant, 1, 1, ranks)
    return Placement(slots, num_experts, ranks, nodes)


def on_device(ids: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.cuda() for part in ids]


@pytest.mark.parametrize("text", STACKS)
@pytest.mark.parametrize(
    ("experts", "redundant", "ranks", "nodes", "top_k", "tokens"),
    [(256, 32, 16, 2, 8, 700), (64, 16, 5, 2, 6, 300), (17, 34, 3, 1, 1, 2000), (128, 0, 8, 1, 8, 100)],
)
def test_random_batches(
    text: str, experts: int, redundant: int, ranks: int, nodes: int, top_k: int, tokens: int
) -> None:
    rng = np.random.default_rng(ranks)
    placement = planned(experts, redundant, ranks, nodes, 2, ranks)
    bound = bound_stack(text, placement, top_k, 1.0, seed=11)
    dispatchers = dispatchers_of(bound, tokens)
    for blanks, step in ((0.0, 5), (0.2, 2**40)):
        sizes = (rng.integers(0, tokens + 1, ranks) * (rng.random(ranks) < 0.8)).tolist()
        check(bound, dispatchers, on_device(random_ids(rng, sizes, 2, experts, top_k, blanks)), step)


@pytest.mark.parametrize("text", STACKS)
def test_hostile_batches(text: str) -> None:
    rng = np.random.default_rng(1)
    # Expert 0 has most of the slots, several of them on a rank.
    slots = rng.permuted(np.concatenate((np.arange(32), np.minimum(rng.geometric(0.3, 32) - 1, 31))))
    bound = bound_stack(text, Placement(torch.from_numpy(slots)[None], 32, 4, 2), 8, 0.7, seed=0)
    dispatchers = dispatchers_of(bound, 4096)
    none, same = torch.empty(0, 1, 8, dtype=torch.int64), torch.zeros(4096, 1, 8, dtype=torch.int64)
    for ids in (
        [none] * 4,
        [same] * 4,
        [none, same, none, none],
        [same - 1] * 4,
        [same, same[:64], same[:63], same - 1],
        random_ids(rng, [4096, 1, 0, 2000], 1, 32, 8, 0.5),
    ):
        check(bound, dispatchers, on_device(ids), step=3)


@pytest.mark.parametrize("text", ["lplb", "lplb(counts=gathered)+waterfill", "lplb+waterfill(candidates=all)"])
def test_many_ranks_and_experts(text: str) -> None:
    rng = np.random.default_rng(2)
    placement = planned(1024, 512, 512, 64, 1, 2)
    bound = bound_stack(text, placement, 8, 1.0, seed=1)
    sizes = (rng.integers(0, 90, 512) * (rng.random(512) < 0.7)).tolist()
    ids = on_device(random_ids(rng, sizes, 1, 1024, 8, 0.1))
    some = (0, 1, 255, 510, 511)
    dispatchers = dispatchers_of(bound, 128)
    check(bound, dispatchers, ids, step=0, ranks=some)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(16384, 8, 256), (16384, 32, 1024), (5000, 9, 3), (1, 1, 1)])
def test_tokens_are_counted_in_order(tokens: int, top_k: int, experts: int) -> None:
    rng = np.random.default_rng(tokens)
    bound = bound_stack("even", Placement(torch.arange(experts)[None], experts, 1), top_k, 0.0, 0)
    (dispatcher,) = dispatchers_of(bound, tokens)
    ids = torch.from_numpy(np.minimum(rng.geometric(3 / (experts + 3), (tokens, top_k)) - 2, experts - 1))
    flat = ids.flatten()
    for _ in range(3):
        counts = dispatcher.count(ids.cuda()).cpu()
        assert torch.equal(counts[:-1], torch.bincount(flat[flat >= 0], minlength=experts))
        assert int(counts[-1]) == int((ids >= 0).any(1).sum())
        assert torch.equal(ordinals(dispatcher, ids), torch.where(flat >= 0, ordinal(flat), -1))


@pytest.mark.parametrize("text", ["lplb", "lplb(counts=gathered)+waterfill", "lplb-sampled"])
def test_a_captured_graph_reads_what_its_buffers_hold(text: str) -> None:
    rng = np.random.default_rng(4)
    bound = bound_stack(text, planned(64, 16, 4, 2, 1, 0), 8, 1.0, seed=3)
    dispatchers = dispatchers_of(bound, 500)
    batches = [random_ids(rng, [500] * 4, 1, 64, 8, blanks) for blanks in (0.0, 0.1, 0.3)]
    mine = dispatchers[1]
    ids = torch.zeros(500, 8, dtype=torch.int64, device="cuda")
    width = (4, 65) if mine.rule.collective == "all_gather" else (65,)
    counts = torch.zeros(width, dtype=torch.int64, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        mine.count(ids)
        assigned = mine.assign(0, counts)
    for step, batch in enumerate(batches):
        rows = torch.stack([other.count(part[:, 0].cuda()).clone() for other, part in zip(dispatchers, batch)])
        ids.copy_(batch[1][:, 0])
        counts.copy_(rows if len(width) == 2 else rows.sum(0))
        mine.step.fill_(step)
        captured.replay()
        physical, shared = expected(bound, batch, step)
        assert torch.equal(assigned.physical.cpu(), physical[1][:, 0])
        assert assigned.shared_rank is not None
        assert torch.equal(assigned.shared_rank.cpu(), shared[1][:, 0])


@pytest.mark.parametrize("text", ["lplb+waterfill", "lplb(counts=gathered)+waterfill(load=routed+local)"])
def test_the_sample_trace(text: str) -> None:
    trace = StoredTrace(Path(__file__).resolve().parents[2] / "traces/sample.parquet")
    block = next(iter(trace.blocks()))
    assert isinstance(block, TokenBlock)
    weights = torch.from_numpy(block.to_counts(64).counts.sum(0)).double()
    slots, _, _ = rebalance_experts(weights, 96, 1, 1, 16)
    bound = bound_stack(text, Placement(slots, 64, 16, 2), 8, 1.0, seed=0)
    in_step = np.asarray(block.token_step) == 0
    ids = torch.as_tensor(np.asarray(block.expert_ids)[in_step].astype(np.int64))
    source = torch.as_tensor(np.asarray(block.source_rank)[in_step].astype(np.int64))
    by_rank = on_device([ids[source == rank] for rank in range(16)])
    dispatchers = dispatchers_of(bound, max(len(part) for part in by_rank))
    check(bound, dispatchers, by_rank, step=int(block.steps[0]))
    found = found_on(dispatchers, [part[:, 0].contiguous() for part in by_rank], 0, int(block.steps[0]), range(16))
    served = torch.cat([physical.flatten() for physical, _, _ in found.values()])
    assert int((served >= 0).sum()) == int((ids[:, 0] >= 0).sum())
