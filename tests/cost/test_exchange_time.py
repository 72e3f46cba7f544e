"""Rows and bytes of an exchange, against counts made by hand and by walking over tokens one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epsim.cost.exchange_time import busiest_rows, bytes_us, exchange_us, expected_rows, low_latency_rows
from epsim.machines.hardware import Link, load_hardware
from epsim.models.spec import load_model
from epsim.policies.base import Batch, local_index
from epsim.policies.rows import expected_rows as expected_by_source
from epsim.policies.rows import token_rows


def walked(source: list[int], ranks: list[list[int]], num_ranks: int, places: int) -> tuple[int, int]:
    """Most rows on NVLink and on RDMA of a rank, token by token as DeepEP's normal kernels send them."""
    sent, received = np.zeros((2, num_ranks), dtype=int), np.zeros((2, num_ranks), dtype=int)
    for own, chosen in zip(source, ranks, strict=True):
        for node in {rank // places for rank in chosen if rank >= 0}:
            proxy = node * places + own % places
            if node != own // places:
                sent[1, own] += 1
                received[1, proxy] += 1
            for rank in {r for r in chosen if r >= 0 and r // places == node}:
                sent[0, proxy] += 1
                received[0, rank] += 1
    most = np.maximum(sent, received).max(1)
    return int(most[0]), int(most[1])


@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 1), (4, 2), (6, 3), (4, 4)]))
def test_rows_are_those_of_tokens_walked_one_by_one(seed: int, shape: tuple[int, int]) -> None:
    num_ranks, num_nodes = shape
    rng = np.random.default_rng(seed)
    source = np.sort(rng.integers(num_ranks, size=23))
    ranks = rng.integers(-1, num_ranks, size=(23, 1, 3))
    step = torch.zeros(23, dtype=torch.int64)
    own = torch.from_numpy(source)
    batch = Batch(torch.arange(1), torch.arange(1), step, own, torch.from_numpy(ranks), local_index(step, own))
    nodes = torch.arange(num_ranks) // (num_ranks // num_nodes)
    by_rank, by_node = token_rows(batch, torch.from_numpy(ranks), None, nodes)
    rows = busiest_rows(by_rank, by_node)
    expected = walked(source.tolist(), ranks[:, 0].tolist(), num_ranks, num_ranks // num_nodes)
    assert (int(rows.nvlink), int(rows.rdma)) == expected


def test_expectation_meets_counts_of_many_uniform_tokens() -> None:
    rng = np.random.default_rng(0)
    num_tokens, top_k = 16 * 4000, 4
    source = torch.arange(16).repeat_interleave(4000)
    ranks = torch.from_numpy(rng.integers(16, size=(num_tokens, 1, top_k)))
    step = torch.zeros(num_tokens, dtype=torch.int64)
    batch = Batch(torch.arange(1), torch.arange(1), step, source, ranks, local_index(step, source))
    nodes = torch.arange(16) // 8
    counted, counted_nodes = token_rows(batch, ranks, None, nodes)
    by_source = torch.zeros(1, 1, 16, 16, dtype=torch.int64)
    by_source[0, 0].index_put_((source.repeat_interleave(top_k), ranks.flatten()), torch.tensor(1), accumulate=True)
    tokens = torch.full((1, 1, 16), 4000)
    expected, expected_nodes = expected_by_source(by_source, tokens, top_k, None, nodes)
    torch.testing.assert_close(expected, counted, rtol=0.1, atol=0)
    torch.testing.assert_close(expected_nodes, counted_nodes, rtol=0.01, atol=0)
    coarse = expected_rows(by_source.sum(2).double(), tokens.sum(-1).double(), top_k, 2)
    fine = busiest_rows(counted, counted_nodes)
    torch.testing.assert_close(coarse.nvlink, fine.nvlink, rtol=0.02, atol=0)
    torch.testing.assert_close(coarse.rdma, fine.rdma, rtol=0.02, atol=0)
    # Four draws miss one of 16 ranks with (15/16)^4, one of two nodes with 1/16.
    assert float(coarse.nvlink) == pytest.approx(16 * 4000 * (1 - (15 / 16) ** 4), rel=0.02)
    assert float(coarse.rdma) == pytest.approx(4000 * 15 / 16, rel=0.01)


def test_a_rate_between_sizes_is_by_the_logarithm() -> None:
    link = Link((100.0, 200.0), (1e6, 1e8))
    sizes = torch.tensor([1e3, 1e6, 1e7, 1e8, 1e10], dtype=torch.float64)
    expected = [1e3 / 100, 1e6 / 100, 1e7 / 150, 1e8 / 200, 1e10 / 200]
    assert bytes_us(sizes, link).tolist() == pytest.approx([value * 1e-3 for value in expected])


def test_the_slower_level_counts() -> None:
    hardware, model = load_hardware("h800"), load_model("deepseek-v3")
    rates = hardware.normal
    load = torch.full((1, 1, 16), 8192.0, dtype=torch.float64)
    tokens = torch.full((1, 1), 16384.0, dtype=torch.float64)
    rows = expected_rows(load, tokens, 8, 2)
    dispatch, combine = exchange_us(rows, hardware, model, 2, "normal")
    nvlink = float(rows.nvlink) * model.dispatch_row_bytes * 1e-3 / 157.0
    assert nvlink > float(rows.rdma) * model.dispatch_row_bytes * 1e-3 / 46.0
    assert float(dispatch) == pytest.approx(nvlink + rates.dispatch_alpha_us + rates.nodes_alpha_us)
    assert float(combine) > float(dispatch)
    # On one node there is no RDMA, and nothing to add for it.
    alone, _ = exchange_us(expected_rows(load, tokens, 8, 1), hardware, model, 1, "normal")
    assert float(alone) == pytest.approx(nvlink + rates.dispatch_alpha_us)


def test_low_latency_kernels_send_every_assignment() -> None:
    rows = low_latency_rows(torch.tensor([[[100.0, 300.0]]]), torch.tensor([[50.0]]), 8, 2)
    assert (float(rows.nvlink), float(rows.rdma)) == (150.0, 150.0)
    even = low_latency_rows(torch.tensor([[[100.0, 100.0]]]), torch.tensor([[50.0]]), 8, 1)
    assert (float(even.nvlink), float(even.rdma)) == (200.0, 0.0)
