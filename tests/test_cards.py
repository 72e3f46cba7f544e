"""Specifications: what ships loads, and what is wrong in a file costs one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from epsim.cards import known_cards
from epsim.machines.hardware import Link, load_hardware
from epsim.models.known import find_model
from epsim.models.spec import load_model

MODEL = Path(__file__).resolve().parents[1] / "epsim/models/cards/qwen3-30b-a3b.toml"
HARDWARE = MODEL.parents[2] / "machines/cards/h200.toml"


def test_all_that_ships_loads() -> None:
    assert known_cards("machines") == ("b200", "h100", "h200", "h800")
    assert [load_hardware(name).name for name in known_cards("machines")] == ["B200", "H100", "H200", "H800"]
    assert len(known_cards("models")) == 8
    for name in known_cards("models"):
        model, known = load_model(name), find_model(name)
        if known is not None:
            assert (model.num_experts, model.top_k, model.shared_cost) == (
                known.num_experts,
                known.top_k,
                known.shared_cost,
            )


def test_sizes_of_deepseek_v3() -> None:
    model = load_model("deepseek-ai/DeepSeek-V3-0324")
    assert model.expert_bytes == 3 * 7168 * 2048
    assert model.dispatch_row_bytes == 7168 + 7168 // 128 * 4
    assert model.combine_row_bytes == 14336
    assert 58 * 257 * model.expert_bytes == pytest.approx(656.5e9, rel=1e-3)  # of 671e9 parameters


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("hidden = 2048", "hidden = 2048\ncolour = 1", "unknown key 'colour'"),
        ("hidden = 2048\n", "", "key 'hidden' is missing"),
        ("hidden = 2048", 'hidden = "big"', "hidden: 'big' is not of type int"),
        ("hidden = 2048", "hidden = 0", "hidden is 0, give at least 1"),
        ("weight_bytes = 2.0", "weight_bytes = nan", "weight_bytes: nan is not finite"),
        ('compute = "bf16"', 'compute = "int4"', "'int4' is not one of fp8, bf16"),
        ("top_k = 8", "top_k = 129", "top_k 129 is more than the experts"),
        ("top_k = 8", "top_k = = 8", "not TOML"),
    ],
)
def test_a_wrong_model_file_is_one_line(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "model.toml"
    text = MODEL.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(ValueError, match=r"model\.toml") as found:
        load_model(str(path))
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_a_wrong_hardware_file_names_the_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HARDWARE.read_text().replace("rdma_dispatch = { gb_per_s = [47.8] }", "rdma_dispatch = 47.8"))
    with pytest.raises(ValueError, match=r"normal: rdma_dispatch: 47\.8 is not a table"):
        load_hardware(str(path))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("memory_gb = 141", f"memory_gb = {10**400}", "memory_gb: a whole number of 401 digits is too large"),
        ("memory_gb_per_s = 3830", "memory_gb_per_s = 3.83e12", "memory_gb_per_s is 3.83e+12: give GB, GB/s and"),
        ("memory_gb_per_s = 3830", "memory_gb_per_s = 3.83", "memory_gb_per_s is 3.83: give GB/s, not TB/s"),
        ("fp8_tflops = 1030", "fp8_tflops = 1030e12", "fp8_tflops is 1.03e+15: give GB, GB/s and TFLOPS"),
        ("gb_per_s = [47.8]", "gb_per_s = [47.8e9]", "a rate of 4.78e+10 GB/s: give GB/s, not bytes"),
        ("[290, 316, 348, 338]", "[29, 316, 348, 338]", "more bytes would take less time"),
        ("ranks_per_node = 8", "ranks_per_node = 0", "ranks_per_node is 0, give a number above 0"),
        ("tile = 128", f"tile = 128\nx = {'[' * 5000}", "not TOML: nested too deep"),
        ("tile = 128", "tile = 128 # \udcff", "not TOML: not in UTF-8"),
    ],
)
def test_a_hardware_file_that_cannot_be_is_one_line(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    text = HARDWARE.read_text()
    assert before in text
    path.write_text(text.replace(before, after), errors="surrogateescape")
    with pytest.raises(ValueError, match=r"mine\.toml: ") as found:
        load_hardware(str(path))
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match="--hardware h20: give one of b200, h100, h200, h800"):
        load_hardware("h20")
    with pytest.raises(ValueError, match=r"--model gpt-2: give one of deepseek-v3, .*qwen3-30b-a3b"):
        load_model("gpt-2")


@pytest.mark.parametrize(("rates", "sizes"), [((), ()), ((1.0, 2.0), ()), ((1.0, 2.0), (2.0, 1.0)), ((0.0,), ())])
def test_links_need_a_rate_for_each_size(rates: tuple[float, ...], sizes: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        Link(rates, sizes)
