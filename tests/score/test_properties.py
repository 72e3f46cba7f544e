"""What holds of a layer's time for any load: drawn loads, under the roofline, a table's cells and a fit by tiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.cost.calibrated import Calibration, ExchangeTable
from epsim.cost.exchange_time import busiest_rows, exchange_us
from epsim.cost.experts_time import ExpertsTime, ExpertTable
from epsim.cost.layer_time import LayerTiming
from epsim.cost.tiled import TiledFit
from epsim.machines.hardware import load_hardware
from epsim.models.spec import load_model
from epsim.policies.load import Load
from epsim.policies.stack import parse_stack
from tests.cost.test_layer_time import load

H200, V3 = load_hardware("h200"), load_model("deepseek-v3-bf16")
CELLS = ExpertTable(
    "GPU", "by hand", "bf16", 7168, 2048, (1.0, 64.0, 512.0), (1.0, 8.0, 16.0),
    ((60.0, 200.0, 390.0), (55.0, 210.0, 380.0), (170.0, 800.0, 1500.0)),
)  # fmt: skip
FIT = TiledFit(256, 256, 66, (50.0, 0.1, 3.0, 10.0, 20.0, 12.0, 5.0, 6.0))
# At few tokens small tiles take longer than large ones, as two fits of measured times may.
FORMS = dataclasses.replace(
    CELLS,
    fit=TiledFit(256, 256, 66, (20.0, 0.02, 3.0, 8.0, 20.0, 12.0, 0.0, 0.0, 0.05)),
    small=TiledFit(64, 128, 132, (70.0, 0.0, 20.0, 3.0, 8.0, 9.0, 5.0, 0.0, 0.01)),
)
DECODE = dataclasses.replace(CELLS, implementation="decode")
EXCHANGE = ExchangeTable(
    "GPU", "by hand", "deep_ep", "bf16", 8, 2, (1e6, 1e7, 1e8), (30.0, 28.0, 300.0), (1e6, 1e8), (20.0, 260.0)
)
ROOFLINE = LayerTiming(ExpertsTime(H200, V3), 2)
TIMINGS = {
    "roofline": ROOFLINE,
    "low-latency": dataclasses.replace(ROOFLINE, kernels="low-latency"),
    "cells": LayerTiming(ExpertsTime(H200, V3, CELLS), 2),
    "fit": LayerTiming(
        ExpertsTime(dataclasses.replace(H200, shared_grouped=True), V3, dataclasses.replace(CELLS, fit=FIT)),
        2,
        measured=Calibration(H200, exchange=(EXCHANGE,)),
    ),
    "forms": LayerTiming(ExpertsTime(dataclasses.replace(H200, shared_grouped=True), V3, FORMS), 2),
    "decode kernel": LayerTiming(ExpertsTime(H200, V3, FORMS, DECODE), 2),
}
STACKS = tuple(map(parse_stack, ("contiguous", "eplb+lplb", "eplb+lplb+waterfill")))


def drawn(rng: np.random.Generator, scale: float) -> Load:
    """8 ranks of 2 nodes, at most 16 experts each."""
    routed = np.floor(rng.exponential(scale, size=8)) + (rng.random(8) < 0.5)
    active = np.minimum(np.ceil(rng.integers(1, 17, size=8)), routed).astype(int)
    routed[0], active[0] = max(routed[0], 1), max(active[0], 1)
    tokens = float(routed.sum() / V3.top_k)
    shared = np.floor(rng.dirichlet(np.ones(8)) * tokens)
    return load(routed.tolist(), active.tolist(), tokens, shared.tolist())


@pytest.mark.parametrize("name", TIMINGS)
@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 30.0, 1000.0, 30000.0]))
def test_more_load_on_a_rank_never_takes_less_time(name: str, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    timing, before = TIMINGS[name], drawn(rng, scale)
    rank, more = int(rng.integers(8)), float(np.ceil(rng.exponential(scale)))
    for grown in ("routed", "shared_tokens"):
        work = getattr(before, grown).clone()
        work[..., rank] += more
        active = before.active.clone()
        if grown == "routed":
            active[..., rank] = active[..., rank].clamp(min=1)
        after = dataclasses.replace(before, active=active, **{grown: work})
        for stack in STACKS:
            least, most = (timing.phases(one, stack, True) for one in (before, after))
            for phase in ("policy", "dispatch", "experts", "combine"):
                assert float(getattr(most, phase)) >= float(getattr(least, phase)) * (1 - 1e-12), phase


@pytest.mark.parametrize("name", TIMINGS)
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_ranks_of_a_node_can_change_names(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, timing = drawn(rng, 500.0), TIMINGS[name]
    order = torch.from_numpy(np.concatenate([rng.permutation(4), 4 + rng.permutation(4)]))
    parts = {
        key: getattr(one, key)[..., order] for key in ("routed", "routed_real", "active", "shared", "shared_tokens")
    }
    other = dataclasses.replace(one, **parts)
    for stack in STACKS:
        found = [float(timing.layer_us(either, stack, True)) for either in (one, other)]
        assert found[0] == pytest.approx(found[1], rel=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(8, 2), (6, 3), (4, 1)]))
def test_places_of_all_nodes_can_change_names(seed: int, shape: tuple[int, int]) -> None:
    """Rows of tokens go by the rank of their source's place: the same places of every node change with one another."""
    num_ranks, num_nodes = shape
    rng, places = np.random.default_rng(seed), num_ranks // num_nodes
    by_rank = torch.from_numpy(rng.integers(0, 9, size=(1, 1, num_ranks, num_ranks))).double()
    by_node = torch.from_numpy(rng.integers(0, 9, size=(1, 1, num_ranks, num_nodes))).double()
    order = torch.from_numpy(rng.permutation(places))
    order = (torch.arange(num_nodes)[:, None] * places + order).flatten()
    rows, other = (
        busiest_rows(by_rank, by_node),
        busiest_rows(by_rank[..., order, :][..., order], by_node[..., order, :]),
    )
    assert (float(rows.nvlink), float(rows.rdma)) == (float(other.nvlink), float(other.rdma))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(1.0, 1e5))
def test_an_exchange_takes_at_least_its_bytes_over_the_fastest_rate(seed: int, scale: float) -> None:
    one = drawn(np.random.default_rng(seed), scale)
    rows = ROOFLINE._rows(one, one.routed, True)
    for time, width, near, far in zip(
        exchange_us(rows, H200, V3, 2, "normal"),
        (V3.dispatch_row_bytes, V3.combine_row_bytes),
        (H200.normal.forward_dispatch, H200.normal.forward_combine),
        (H200.normal.rdma_dispatch, H200.normal.rdma_combine),
        strict=True,
    ):
        assert near is not None
        for part, link in ((rows.nvlink, near), (rows.rdma, far)):
            assert float(time) >= float(part) * width * 1e-3 / max(link.gb_per_s)


@pytest.mark.parametrize("name", TIMINGS)
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 30.0, 1000.0, 30000.0]))
def test_overlapping_halves_hide_no_computation_and_win_at_most_the_exchange(
    name: str, seed: int, scale: float
) -> None:
    one, timing = drawn(np.random.default_rng(seed), scale), TIMINGS[name]
    halves = dataclasses.replace(timing, overlap=True)
    for stack in STACKS:
        phases = timing.phases(one, stack, True)
        rest = float(timing.rest_us(one.tokens / 8))
        computing = float(phases.policy + phases.experts) + rest
        moving = float(phases.dispatch + phases.combine)
        together = float(halves.layer_us(one, stack, True)) + rest
        assert together >= computing * (1 - 1e-12)
        if name in ("roofline", "low-latency"):  # a measured exchange may take less than half for half
            assert together >= moving * (1 - 1e-12)
