"""What the reader could gain, by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from epsim.kernels.reader import ReadBytes

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def module() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("reader_predicted", BENCHMARKS / "reader_predicted.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    sys.path.remove(str(BENCHMARKS))
    return found


def test_figures_by_hand(module: Any) -> None:
    found = module.predicted("h200", 0.178, 100.0)
    assert "nothing is timed" in found["predicted"]
    rows = {(row["shape"], row["batch"], row["reader"]): row for row in found["rows"]}
    sizes = ReadBytes(2048, 768)
    token = sizes.token(8, sizes.kept(0.178, 8))
    one = rows["qwen3-30b-a3b", 1, "topk-channels"]
    assert one["bytes"] == pytest.approx(8 * sizes.expert / token)
    # Rows in and out of 8 assignments, and 25 microseconds of the launch: 3,830 bytes a nanosecond.
    beside = 8 * 2 * 2048 * 2
    us = [(read + beside) * 1e-3 / 3830 + 25 for read in (8 * sizes.expert, token)]
    assert one["layer"] == pytest.approx(us[0] / us[1])
    assert one["layer_us"] == pytest.approx(us[1])
    # Attention's weights and 60 microseconds a layer beside.
    rest = 18.9e6 * 2 * 1e-3 / 3830 + 60
    assert one["model"] == pytest.approx((us[0] + rest) / (us[1] + rest), rel=1e-3)
    assert one["tokens_per_second"] == pytest.approx(1e6 / 48 / (us[1] + rest), rel=1e-3)
    gains = [rows["qwen3-30b-a3b", batch, "topk-channels"]["layer"] for batch in module.BATCHES]
    assert module.BATCHES[gains.index(max(gains))] == 16
    assert gains[-1] == min(gains)
    at_budget = rows["gemma-4-26b-a4b", 128, "topk-channels quota=batch"]
    assert at_budget["bytes"] == pytest.approx(1 / 0.178, rel=1e-3)


def test_users_get_their_rate(module: Any) -> None:
    found = module.predicted("h200", 0.178, 100.0)["users"]
    timing = module.timing_of(module.load_model(module.MODEL), "h200")
    for reader, policy in module.readers(0.178).items():
        batch = found[reader]["batch"]
        us = module.steps(timing, policy, module.torch.tensor([batch, batch + 1]))
        assert us[0] <= 10_000
        assert us[1] > 10_000 or batch == 128
    assert found["dense"]["batch"] < found["topk-channels"]["batch"]
    assert module.at_rate(timing, module.Dense(), 1000.0) == 0


def test_steps_with_layers_as_measured(module: Any) -> None:
    """Between measured batches by a straight line, beside attention's weights and 60 microseconds a layer."""
    found, us = module.measured("h200", 0.178, 100.0), module.timed_layers("h200", 0.178)
    gains = {row["batch"]: row for row in found["rows"]}
    rest = 18.9e6 * 2 * 1e-3 / 3830 + 60
    for form in us:
        assert gains[1][form] == pytest.approx((us["dense"][1] + rest) / (us[form][1] + rest), rel=1e-3)
    timing = module.timing_of(module.load_model(module.MODEL), "h200")
    for form, one in found["users"].items():
        batch = one["batch"]
        tokens = module.torch.tensor([batch, batch + 1], dtype=module.torch.float64)
        layer = module.torch.tensor([module.np.interp(n, list(us[form]), list(us[form].values())) for n in tokens])
        step = timing.step_us(layer[:, None], tokens[:, None], 1)
        assert step[0] <= 10_000 < step[1]
        assert one["tokens_per_second"] == 100 * batch


@pytest.mark.parametrize(("hardware", "budget"), [("h100", 0.178), ("h200", 0.3), ("h20", 0.178)])
def test_layers_measured_elsewhere_say_nothing(module: Any, hardware: str, budget: float) -> None:
    assert module.timed_layers(hardware, budget) == {}
    if hardware != "h20":
        assert module.measured(hardware, budget, 100.0) is None
