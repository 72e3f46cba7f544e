"""Expert and layer times against formulas worked out by hand, and what must hold for any load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.cost.calibrated import read_table
from epsim.cost.experts_time import ExpertsTime, ExpertTable
from epsim.cost.layer_time import LayerTiming, load_timing
from epsim.machines.hardware import load_hardware
from epsim.models.spec import load_model
from epsim.policies.load import Load
from epsim.policies.stack import parse_stack
from epsim.score.time_metrics import TOGETHER, timed_metrics

H200, V3 = load_hardware("h200"), load_model("deepseek-v3")


def table(us: tuple[tuple[float, ...], ...] = ((100.0, 400.0), (300.0, 900.0))) -> ExpertTable:
    return ExpertTable("NVIDIA H200", "by hand", "fp8", 7168, 2048, (16.0, 256.0), (2.0, 8.0), us)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def load(routed: list[float], active: list[int], tokens: float, shared: list[float] | None = None) -> Load:
    """One step, one layer, whole-batch counts."""
    work = torch.tensor([[routed]], dtype=torch.float64)
    own = torch.tensor([[shared or [0.0] * len(routed)]], dtype=torch.float64)
    return Load(
        routed=work,
        routed_real=work,
        shared=own,
        shared_tokens=own,
        tokens=torch.tensor([[tokens]], dtype=torch.float64),
        assignments=work.sum(-1).long(),
        active=torch.tensor([[active]]),
        rounded=False,
    )


def test_decode_is_limited_by_reading_weights() -> None:
    experts = ExpertsTime(H200, V3)
    assert experts.b == pytest.approx(44.04e6 / 3.83e12 * 1e6, rel=1e-3)
    # 32 experts of one token each: 32 b + 32 a, though tiles of 128 rows are computed.
    expected = 32 * experts.b + 32 * experts.a + H200.kernel_us
    assert float(experts.us(numbers(32), numbers(32))) == pytest.approx(expected)
    # Measured (aiconfigurator-core, SGLang's masked GEMM, 32 experts of DeepSeek-V3 on H200): 382 us.
    assert expected == pytest.approx(382, rel=0.05)


def test_prefill_is_limited_by_computing_whole_tiles() -> None:
    experts = ExpertsTime(H200, V3)
    time = float(experts.us(numbers(65536), numbers(16)))
    assert time == pytest.approx(experts.computing * (65536 + 16 * 63.5) + H200.kernel_us)
    # Measured there (16 experts, 65,536 assignments, permutation included): 5,486 us.
    assert time == pytest.approx(5486, rel=0.06)


def test_even_loads_fill_the_tiles_that_they_are_known_to_fill() -> None:
    """Two experts of 256 tokens fill two tiles of 128 rows each, not two and a half; of 257 three."""
    experts, two = ExpertsTime(H200, V3), torch.tensor([2.0, 2.0], dtype=torch.float64)
    tokens = torch.tensor([512.0, 514.0], dtype=torch.float64)
    time = experts.roofline(tokens, two, tiles=torch.tensor([4.0, 6.0], dtype=torch.float64))
    assert time.tolist() == pytest.approx([25 + experts.computing * 512, 25 + experts.computing * 768])
    assert float(experts.roofline(tokens, two)[0]) == pytest.approx(25 + experts.computing * (512 + 127))


def test_nothing_to_do_takes_no_time() -> None:
    experts = ExpertsTime(H200, V3, table())
    assert float(experts.us(numbers(0), numbers(0))) == 0
    assert float(experts.dense_us(numbers(0))) == 0


def test_a_table_is_met_on_its_points_and_between() -> None:
    experts = ExpertsTime(H200, V3, table())
    per_expert, active = numbers(16, 16, 256, 256), numbers(2, 8, 2, 8)
    assert experts.us(per_expert * active, active).tolist() == pytest.approx([100, 400, 300, 900])
    # Half-way in the logarithm of tokens each column has the mean of its two corrections, and between two numbers of
    # experts times lie on a line.
    roofline = experts.roofline(per_expert * active, active)
    ratio = (numbers(100, 400, 300, 900) / roofline).view(2, 2).mean(0)
    columns = ratio * experts.roofline(64 * numbers(2, 8), numbers(2, 8))
    middle = float(experts.us(numbers(64 * 4), numbers(4)))
    assert middle == pytest.approx(float(2 / 3 * columns[0] + 1 / 3 * columns[1]))
    # Beyond the grid the nearest correction holds.
    beyond = experts.us(numbers(4096 * 8), numbers(8)) / experts.roofline(numbers(4096 * 8), numbers(8))
    assert float(beyond) == pytest.approx(float(900 / roofline[3]))


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_times_of_a_table_never_fall_with_more_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, active = (np.sort(rng.choice(512, size=3, replace=False) + 1.0) for _ in range(2))
    us = tuple(map(tuple, (rng.uniform(20, 100, size=(3, 3)) * (1 + sizes[:, None] * active / 500)).tolist()))
    made = ExpertTable("GPU", "drawn", "fp8", 7168, 2048, tuple(sizes.tolist()), tuple(active.tolist()), us)
    experts = ExpertsTime(H200, V3, made)
    for number in (1.0, active[0] / 2 + 0.5, float(active.mean()), active[2] * 2):
        tokens = number * torch.logspace(0, 4, 300, dtype=torch.float64)
        times = experts.us(tokens, torch.full_like(tokens, number))
        assert bool((times > 0).all())
        assert float((times.diff() / times[1:]).min()) >= -1e-12


def test_between_cells_times_do_not_dip_where_the_roofline_is_flat() -> None:
    # Reading limits up to 200 tokens an expert, and measured over roofline falls: 300 us at 128, not below after.
    made = ExpertTable(
        "GPU", "by hand", "fp8", 7168, 2048, (16.0, 128.0, 1024.0), (8.0,), ((270.0,), (300.0,), (900.0,))
    )
    times = ExpertsTime(H200, V3, made).us(numbers(8 * 128, 8 * 150, 8 * 200), numbers(8, 8, 8)).tolist()
    assert times[0] == pytest.approx(300)
    assert times[0] <= times[1] <= times[2]
    # Cells that fall are noise: both have their geometric mean.
    noisy = ExpertsTime(H200, V3, dataclasses.replace(made, us=((400.0,), (256.0,), (900.0,))))
    found = noisy.us(numbers(8 * 16, 8 * 128, 8 * 1024), numbers(8, 8, 8))
    assert found.tolist() == pytest.approx([320, 320, 900])


def test_tables_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    path.write_text(json.dumps(dataclasses.asdict(table())))
    assert read_table(path) == table()
    path.write_text(json.dumps(dataclasses.asdict(table()) | {"active": [8, 2]}))
    with pytest.raises(ValueError, match=r"experts.json: active must be ascending"):
        read_table(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="expected an object with device"):
        read_table(path)
    with pytest.raises(
        ValueError, match="the expert table is for 7168 x 2048, but Qwen3-30B-A3B has experts of 2048 x 768"
    ):
        ExpertsTime(H200, load_model("qwen3-30b-a3b"), table())


def test_a_layer_is_its_slowest_rank_in_every_phase() -> None:
    timing = load_timing("h200", "deepseek-v3", 1, "prefill")
    found = timing.phases(load([9000.0, 7000.0], [16, 16], 2000.0), parse_stack("contiguous"), False)
    assert float(found.experts) == pytest.approx(float(timing.experts.us(numbers(9000), numbers(16))))
    assert float(found.policy) == 0
    assert float(found.total) == pytest.approx(float(found.dispatch + found.experts + found.combine))
    worse = timing.phases(load([12000.0, 4000.0], [16, 16], 2000.0), parse_stack("contiguous"), False)
    assert float(worse.experts) > float(found.experts)
    assert float(worse.dispatch) >= float(found.dispatch)


def test_a_shared_expert_costs_a_kernel_of_its_own_or_a_slot() -> None:
    timing = load_timing("h200", "deepseek-v3", 1, "prefill")
    one = load([8000.0, 8000.0], [16, 16], 2000.0, [1000.0, 1000.0])
    local = timing.phases(one, parse_stack("contiguous"), False)
    experts = timing.experts
    assert float(local.experts) == pytest.approx(
        float(experts.us(numbers(8000), numbers(16)) + experts.dense_us(numbers(1000)))
    )
    spread = timing.phases(one, parse_stack("contiguous+waterfill"), False)
    assert float(spread.experts) == pytest.approx(float(experts.us(numbers(9000), numbers(17))))
    assert float(spread.policy) == H200.policy.all_reduce_us + H200.policy.waterfill_us


@pytest.mark.parametrize(
    ("stack", "redundant", "nodes", "names"),
    [
        ("eplb", True, 2, ()),
        ("eplb+lplb", False, 2, ()),
        ("eplb+lplb", True, 1, ("all_reduce_us", "solve_us", "assign_us")),
        ("eplb+lplb-ipm", False, 2, ("all_reduce_nodes_us", "published_solve_us", "assign_us")),
        ("eplb+lplb+waterfill", True, 2, ("all_reduce_nodes_us", "solve_us", "assign_us", "waterfill_us")),
        ("eplb+waterfill(counts=local)", True, 2, ("waterfill_us",)),
    ],
)
def test_policies_cost_what_was_measured(stack: str, redundant: bool, nodes: int, names: tuple[str, ...]) -> None:
    timing = load_timing("h200", "deepseek-v3", nodes, "prefill")
    expected = sum(getattr(H200.policy, name) for name in names)
    assert timing.policy_us(parse_stack(stack), redundant, 16, 1024.0) == pytest.approx(expected)


def test_halves_that_overlap_gain_in_large_batches_and_lose_in_small_ones() -> None:
    alone = load_timing("h200", "deepseek-v3", 2, "prefill")
    halves = dataclasses.replace(alone, overlap=True)
    stack = parse_stack("contiguous")
    for tokens, gains in ((65536.0, True), (64.0, False)):
        many = load([tokens * 8 / 16] * 16, [min(16, int(tokens * 8 / 16))] * 16, tokens)
        before, after = (float(t.layer_us(many, stack, False)) for t in (alone, halves))
        assert (after < before) == gains


def test_steps_and_gains() -> None:
    timing = load_timing("h200", "deepseek-v3", 2, "prefill")
    stack = parse_stack("contiguous")
    slow, fast = (load([top] + [(131072 - top) / 15] * 15, [16] * 16, 16384.0) for top in (16384.0, 8192.0))
    first, slow_us, _ = timed_metrics(timing, slow, stack, False, True, None)
    second, fast_us, _ = timed_metrics(timing, fast, stack, False, True, slow_us)
    for key in ("layer_time_us", "bytes_read", "throughput_gain"):
        assert isinstance(first[key], torch.Tensor)
        assert first[f"routed_{key}"] == TOGETHER
    gain = second["throughput_gain"]
    assert isinstance(gain, torch.Tensor)
    assert float(gain) == pytest.approx(float(slow_us / fast_us) - 1)
    layer = (float(timing.layer_us(one, stack, False)) for one in (slow, fast))
    assert float(slow_us - fast_us) == pytest.approx(58 * (next(layer) - next(layer)))
    assert float(first["bytes_read"]) == 16 * V3.expert_bytes


def test_a_layer_without_tokens_has_no_time() -> None:
    timing = load_timing("h200", "deepseek-v3", 2, "prefill")
    nothing = load([0.0] * 16, [0] * 16, 0.0)
    values, step_us, _ = timed_metrics(timing, nothing, parse_stack("eplb"), True, False, None)
    assert all(isinstance(value, torch.Tensor) and value.isnan().all() for value in values.values())
    assert step_us.isfinite().all()


def test_what_does_not_fit_is_said() -> None:
    timing = LayerTiming(ExpertsTime(H200, V3), 2)
    with pytest.raises(ValueError, match="the trace has 64 experts, top-8, but DeepSeek-V3 has 256, top-8"):
        timing.check(64, 8, 16, 2)
    with pytest.raises(ValueError, match="9 ranks on 2 nodes"):
        timing.check(256, 8, 9, 2)
