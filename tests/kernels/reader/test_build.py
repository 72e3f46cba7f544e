"""The sketch of a layer: its contents, refused weights, and its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from epsim.kernels.reader import build_layer
from epsim.kernels.reader.build import LayerSketch, main_directions
from epsim.kernels.reader.codes import in_blocks
from epsim.kernels.reader.rotate import rotated
from epsim.kernels.reader.store import build_checkpoint, load_sketches, save_sketches
from tests.kernels.reader.worlds import make_world


def test_decoded_is_the_rotated_gate_and_up_within_the_stored_errors() -> None:
    world = make_world()
    decoded = world.sketch.decoded(torch.float64)
    true = rotated(world.experts.gate_up, world.sketch.signs)
    off = in_blocks(decoded - true).norm(dim=-1)  # [E, 2I, B]
    errors = world.sketch.errors.double().permute(0, 2, 3, 1).flatten(1, 2)
    assert bool((off <= errors).all())
    assert bool((off >= errors * (1 - 2.0**-9)).all())
    # For Gaussian weights, the squared error of a ternary code is 19% of the squared length.
    assert float((off**2).sum() / true.square().sum()) == pytest.approx(0.19, abs=0.01)


def test_norms_and_map() -> None:
    world = make_world()
    down, sketch = world.experts.down, world.sketch
    torch.testing.assert_close(sketch.norms.double(), down.norm(dim=1), rtol=2.0**-8, atol=0)
    columns = down.transpose(0, 1).flatten(1)  # [H, E * I]
    left = torch.linalg.svd(columns)[0][:, :32]
    assert sketch.rank == 32
    # The column spaces are equal: projections agree, even if signs differ.
    basis = main_directions(down, 32)
    torch.testing.assert_close(basis @ basis.T, left @ left.T, rtol=0, atol=1e-9)
    torch.testing.assert_close(sketch.basis.double(), basis, rtol=2.0**-8, atol=0)
    expected = torch.einsum("ehi,hr->eir", down, sketch.basis.double())
    torch.testing.assert_close(sketch.coefficients.double(), expected, rtol=2.0**-8, atol=1e-12)
    # With a map of full rank, the only error is the rounding to 16 bits.
    full = build_layer(world.experts.gate_up, down, rank=256)
    again = full.coefficients.double() @ full.basis.double().T
    assert float((again.transpose(1, 2) - down).norm() / down.norm()) < 0.01


def test_resident_bytes() -> None:
    """Of Qwen3-30B-A3B's shape: the sketch is 8% of the experts, so about 7% of all that is resident."""
    num_experts, hidden, intermediate = 1, 512, 768
    sketch = build_layer(torch.ones(num_experts, 2 * intermediate, hidden), torch.ones(num_experts, hidden, 768))
    held = sketch.resident_bytes()
    blocks = num_experts * 2 * intermediate * hidden // 128
    codes = num_experts * hidden * 320
    assert held["sketch"] == codes + blocks * 4 + num_experts * intermediate * 2 + hidden
    assert held["map"] == (hidden + num_experts * intermediate) * 32 * 2
    weights = num_experts * 3 * hidden * intermediate * 2
    assert (held["sketch"] - hidden) / weights == pytest.approx(0.0805, abs=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("which", [0, 1])
def test_hostile_weights_are_refused_in_one_line(bad: float, which: int) -> None:
    world = make_world(num_experts=2, top_k=2)
    gate_up, down = world.experts.gate_up.clone(), world.experts.down.clone()
    (gate_up, down)[which][1, 3, 5] = bad
    if bad == 1e30 and which == 1:
        assert bool(torch.isfinite(build_layer(gate_up, down).norms).all())
        return
    says = "beyond 65504" if bad == 1e30 else "not finite"
    with pytest.raises(ValueError, match=f"expert 1 has .*{says}") as error:
        build_layer(gate_up, down)
    assert "\n" not in str(error.value)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="H a multiple of 128"):
        build_layer(torch.zeros(2, 8, 64), torch.zeros(2, 64, 4))
    with pytest.raises(ValueError, match="rank 300 of the map: give 1 to 128"):
        build_layer(torch.zeros(2, 8, 128), torch.zeros(2, 128, 4), rank=300)


def checkpoint(folder: Path, fused: bool, seed: int = 0) -> dict[int, LayerSketch]:
    """Writes two layers to disk; returns the sketches expected for them."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {"model.embed_tokens.weight": torch.zeros(3)}
    expected = {}
    for number, layer in enumerate((1, 3)):
        world = make_world(num_experts=3, seed=seed + layer)
        gate_up, down = world.experts.gate_up.to(torch.bfloat16), world.experts.down.to(torch.bfloat16)
        expected[layer] = build_layer(gate_up, down, seed=5 * 100_003 + layer)
        at = f"model.layers.{layer}.mlp.experts"
        if fused:
            tensors |= {f"{at}.gate_up_proj": gate_up, f"{at}.down_proj": down}
        else:
            for e in range(3):
                gate, up = gate_up[e].chunk(2)
                parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[e]}
                tensors |= {f"{at}.{e}.{name}.weight": part.contiguous() for name, part in parts.items()}
        if number == 0:
            save_file(tensors, folder / "model-1.safetensors")
            tensors = {}
    save_file(tensors, folder / "model-2.safetensors")
    return expected


@pytest.mark.parametrize("fused", [True, False])
def test_a_file_of_sketches(fused: bool, tmp_path: Path) -> None:
    expected = checkpoint(tmp_path / "model", fused)
    built = dict(build_checkpoint(tmp_path / "model", seed=5))
    out = tmp_path / "sketch.safetensors"
    save_sketches(out, built, tmp_path / "model", "bfloat16", 5)
    found = load_sketches(out, tmp_path / "model", "bfloat16")
    assert list(found) == [1, 3]
    for layer, sketch in found.items():
        for name, tensor in sketch.tensors().items():
            assert torch.equal(tensor, expected[layer].tensors()[name]), name

    with pytest.raises(ValueError, match="made for weights in bfloat16, but the model runs in float32: build it again"):
        load_sketches(out, tmp_path / "model", "float32")
    checkpoint(tmp_path / "other", fused, seed=1)
    with pytest.raises(ValueError, match=r"made from another checkpoint than the one in .*other: build it again"):
        load_sketches(out, tmp_path / "other", "bfloat16")
    with pytest.raises(ValueError, match="not a channel sketch"):
        load_sketches(tmp_path / "model" / "model-1.safetensors", tmp_path / "model", "bfloat16")
    with pytest.raises(ValueError, match="cannot be read as a channel sketch"):
        load_sketches(tmp_path / "nothing", tmp_path / "model", "bfloat16")


def test_a_sketch_that_is_not_whole(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", True)
    out = tmp_path / "sketch.safetensors"
    save_sketches(out, dict(build_checkpoint(tmp_path / "model", seed=5)), tmp_path / "model", "bfloat16", 5)
    with safe_open(out, "pt") as opened:
        described = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    missing = {name: tensor for name, tensor in tensors.items() if name != "layers.3.scales"}
    for changed, says in (
        (
            missing,
            "layer 3 holds basis, codes, coefficients, errors, norms, signs, which is not a sketch: build it again",
        ),
        ({**tensors, "layers.1.norms": tensors["layers.1.norms"][:2]}, r"layer 1 has norms \[2, 24\], not \[3, 24\]"),
        ({**tensors, "layers.1.codes": tensors["layers.1.codes"].short()}, "layer 1 has codes"),
        ({**tensors, "signs": tensors["layers.1.signs"].clone()}, "signs is not part of a channel sketch"),
    ):
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, out, described)
        with pytest.raises(ValueError, match=says) as error:
            load_sketches(out, tmp_path / "model", "bfloat16")
        assert "\n" not in str(error.value)
    save_file(tensors, out, described)
    assert list(load_sketches(out, tmp_path / "model", "bfloat16")) == [1, 3]
    whole = out.read_bytes()
    for length in (0, 7, 500, len(whole) - 1):
        out.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cannot be read as a channel sketch"):
            load_sketches(out, tmp_path / "model", "bfloat16")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Qwen3.5 numbers them from 0 as well, in files behind the others."""
    expected = checkpoint(tmp_path / "model", False)
    other = {
        f"mtp.layers.1.mlp.experts.{e}.{name}.weight": torch.ones(shape)
        for e in range(3)
        for name, shape in (("gate_proj", (24, 256)), ("up_proj", (24, 256)), ("down_proj", (256, 24)))
    }
    save_file(other, tmp_path / "model" / "model-3.safetensors")
    found = dict(build_checkpoint(tmp_path / "model", seed=5))
    assert list(found) == [1, 3]
    assert torch.equal(found[1].codes, expected[1].codes)
    # Two tensors for the same layer and matrix are refused, whatever their names are.
    twice = {name.replace("mtp", "speech"): tensor for name, tensor in other.items()}
    save_file(twice, tmp_path / "model" / "model-3.safetensors")
    with pytest.raises(ValueError, match=r"model\..* and speech\..* are both the .*_proj of layer 1"):
        list(build_checkpoint(tmp_path / "model"))


def test_weights_that_do_not_stand_for_themselves_are_refused(tmp_path: Path) -> None:
    """8-bit weights need scales, which a sketch does not read."""
    name = "model.layers.0.mlp.experts.0"
    shapes = {"gate_proj": (2, 128), "up_proj": (2, 128), "down_proj": (128, 2)}
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        parts = {f"{name}.{part}.weight": torch.ones(shape).to(dtype) for part, shape in shapes.items()}
        save_file(parts, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="made from weights in bfloat16, float16, float32, not from quantised"):
            list(build_checkpoint(tmp_path))
    parts = {f"{name}.{part}.weight": torch.ones(shape) for part, shape in shapes.items()}
    parts |= {f"{name[:-1]}1.{part}.weight": torch.ones(shape) for part, shape in shapes.items()}
    parts[f"{name[:-1]}1.up_proj.weight"] = torch.ones(3, 128)
    save_file(parts, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layer 0: up_proj of expert 1 is \[3, 128\], not \[2, 128\]"):
        list(build_checkpoint(tmp_path))


def test_down_columns_beyond_bfloat16_are_refused() -> None:
    down = torch.zeros(2, 128, 3)
    down[1, :, 2] = 3e38
    with pytest.raises(ValueError, match="expert 1 has a down column whose length exceeds bfloat16"):
        build_layer(torch.ones(2, 6, 128), down)


def test_checkpoints_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*.safetensors in it"):
        list(build_checkpoint(tmp_path))
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no routed experts"):
        list(build_checkpoint(tmp_path))
    name = "model.layers.0.mlp.experts.0"
    part = {f"{name}.gate_proj.weight": torch.zeros(2, 128), f"{name}.up_proj.weight": torch.zeros(2, 128)}
    save_file(part, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layer 0 has no down_proj of expert 0"):
        list(build_checkpoint(tmp_path))
    part[f"{name}.gate_proj.weight"] = torch.full((2, 128), float("nan"))
    save_file({**part, f"{name}.down_proj.weight": torch.zeros(128, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layer 0: expert 0 has weights that are not finite"):
        list(build_checkpoint(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ValueError, match="an incomplete safetensors file"):
        list(build_checkpoint(tmp_path))
