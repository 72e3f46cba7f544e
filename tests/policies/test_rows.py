"""Rows counted by quotas against those of tokens whose slots are known, for every split that fixes quotas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.placement.base import Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.base import Batch, local_index
from epsim.policies.rounding import fixed_point
from epsim.policies.rows import quota_rows, token_rows
from epsim.policies.stack import parse_stack
from epsim.traces.trace import TokenBlock

DrawProblem = Callable[..., tuple[Placement, TokenBlock]]


@pytest.mark.parametrize("split", ["even", "lplb", "lplb(counts=gathered)", "static", "lplb(objective=time,a=1,b=9)"])
@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 2), st.integers(1, 3), st.integers(0, 2))
def test_rows_by_quotas_are_those_of_the_tokens(
    draw_problem: DrawProblem, split: str, seed: int, nodes: int, places: int, more: int
) -> None:
    ranks = nodes * places
    placement, block = draw_problem(seed, experts=12, ranks=ranks, nodes=nodes, redundant=more * ranks, tokens=50)
    setting = Setting(0, 0.0, block.expert_ids.shape[2], tuple(range(placement.num_layers)))
    bound = bind(parse_stack(f"eplb+{split}"), placement, setting)
    step, source = torch.from_numpy(block.token_step), torch.from_numpy(block.source_rank)
    ids = torch.from_numpy(block.expert_ids).to(torch.int64)
    layers = torch.arange(placement.num_layers)
    batch = Batch(torch.from_numpy(block.steps), layers, step, source, ids, local_index(step, source))
    counts = torch.from_numpy(block.to_rank_counts(ranks, placement.num_experts).counts)
    copies, policy = bound.copies, bound.split
    fixed = counts.new_empty(0)
    if policy.by_fractions:
        fixed = fixed_point(policy.fractions(counts.sum(2), copies), copies)
    physical = policy.physical_ids(batch, counts, fixed, copies, 0)
    served = torch.where(physical >= 0, physical // placement.slots_per_rank, -1)
    expected = token_rows(batch, served, None, copies.node_of_rank)
    found = quota_rows(batch, policy.quotas(counts, fixed, copies), copies)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_rows_need_nodes_of_equally_many_ranks(draw_problem: DrawProblem) -> None:
    placement, _ = draw_problem(0, experts=12, ranks=5, nodes=2, redundant=3)
    setting = Setting(0, 0.0, 2, tuple(range(placement.num_layers)), rows=True)
    with pytest.raises(ValueError, match="5 ranks on 2 nodes: rows need nodes of equally many ranks: give a"):
        bind(parse_stack("eplb+lplb"), placement, setting)
    bind(parse_stack("eplb+lplb"), placement, dataclasses.replace(setting, rows=False))
