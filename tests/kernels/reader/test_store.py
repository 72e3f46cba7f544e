"""Checkpoints on disk: several files, an index, a sketch beside the weights, incomplete downloads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from epsim.cli.main import main
from epsim.kernels.reader.store import (
    INDEX,
    Checkpoint,
    build_checkpoint,
    build_named,
    checkpoint_hash,
    load_sketches,
    save_sketches,
)
from tests.kernels.reader.test_build import checkpoint


def test_a_sketch_beside_the_weights_is_none_of_them(tmp_path: Path) -> None:
    expected, model = checkpoint(tmp_path / "model", True), tmp_path / "model"
    before = checkpoint_hash(model)
    out = model / "a-sketch.safetensors"
    for _ in range(2):
        save_sketches(out, dict(build_checkpoint(model, seed=5)), model, "bfloat16", 5)
        assert checkpoint_hash(model) == before
        found = load_sketches(out, model, "bfloat16")
        assert {layer: torch.equal(found[layer].codes, expected[layer].codes) for layer in found} == {1: True, 3: True}
    out.unlink()
    save_file({"more": torch.zeros(3)}, model / "more.safetensors")
    assert checkpoint_hash(model) != before


def test_a_sketch_of_another_version_beside_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with the command that makes it again, and that command does."""
    model, out = tmp_path / "model", tmp_path / "model/a-sketch.safetensors"
    checkpoint(model, True)
    before = checkpoint_hash(model)
    save_sketches(out, dict(build_checkpoint(model)), model, "bfloat16", 0)
    with safe_open(out, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(out), out, {**metadata, "format": "epsim channel sketch 1"})
    assert checkpoint_hash(model) == before
    with pytest.raises(ValueError, match=r"not a channel sketch of this version: build it again: (.*)") as refused:
        load_sketches(out, model, "bfloat16")
    again = str(refused.value).split("epsim reader build ")[1].split()
    assert run(capsys, monkeypatch, *again)[0] == 0
    assert sorted(load_sketches(out, model, "bfloat16")) == [1, 3]


def test_a_sketch_that_lacks_layers(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "s.safetensors"
    checkpoint(model, True)
    made = dict(build_checkpoint(model))
    for layers, missing in (((3,), 1), ((1,), 3), ((), 1)):
        save_sketches(out, {layer: made[layer] for layer in layers}, model, "bfloat16", 0)
        with pytest.raises(ValueError, match=f"has no sketch of layer {missing}: build it again"):
            load_sketches(out, model, "bfloat16")


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("codes", value) for value in (122, 127, 250, 255)),
        *(("scales", value) for value in (NAN, -1.0)),
        ("errors", float("inf")),
        ("norms", -1.0),
        ("signs", 0),
        ("basis", NAN),
        ("coefficients", float("inf")),
    ],
)
def test_values_that_no_build_gives(tmp_path: Path, name: str, value: float) -> None:
    """A kernel would read other codes than the plain form does, and scores would be no numbers."""
    checkpoint(tmp_path / "model", True)
    out = tmp_path / "s.safetensors"
    save_sketches(out, dict(build_checkpoint(tmp_path / "model")), tmp_path / "model", "bfloat16", 0)
    with safe_open(out, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(out)
    tensors[f"layers.3.{name}"].view(-1)[-1] = value
    save_file(tensors, out, metadata)
    with pytest.raises(ValueError, match=f"layer 3 has {name} that no build produces: build it again"):
        load_sketches(out, tmp_path / "model", "bfloat16")
    # Of fewer dimensions.
    save_file({at: tensor.flatten() for at, tensor in tensors.items()}, out, metadata)
    with pytest.raises(ValueError, match=r"layer 1 has codes \[\d+\], not of 3 dimensions: build it again"):
        load_sketches(out, tmp_path / "model", "bfloat16")


def test_files_of_the_index_that_are_not_there(tmp_path: Path) -> None:
    model = tmp_path / "model"
    checkpoint(model, False)
    names = {f"tensor {n}": f"model-{n}.safetensors" for n in (1, 2)}
    (model / INDEX).write_text(json.dumps({"weight_map": names}))
    assert Checkpoint(model).layers == [1, 3]
    (model / "model-2.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"model-2.safetensors is missing, but .*index.json lists it"):
        Checkpoint(model)
    for text in ("", "[]", '{"weight_map": 3}', '{"weight_map": {"a": []}}'):
        (model / INDEX).write_text(text)
        with pytest.raises(ValueError, match="cannot be read as an index") as error:
            Checkpoint(model)
        assert "\n" not in str(error.value)


def test_layers_behind_the_last_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM-4.5 number the layer that predicts a further token on from the model's."""
    checkpoint(tmp_path / "model", True)
    for text, layers in (
        ({"num_hidden_layers": 3}, [1]),
        ({"text_config": {"num_hidden_layers": 3}}, [1]),
        ({"num_hidden_layers": 4}, [1, 3]),
        ({"hidden_size": 256}, [1, 3]),
    ):
        (tmp_path / "model/config.json").write_text(json.dumps(text))
        assert Checkpoint(tmp_path / "model").layers == layers
    (tmp_path / "model/config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as a model's configuration"):
        Checkpoint(tmp_path / "model")


def test_tensors_of_no_such_shape(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts"
    for shapes, says in (
        (((128,), (128,), (128,)), r"layer 0: gate_proj of expert 0 is \[128\], not \[channels, hidden\]"),
        (((2, 100), (2, 100), (100, 2)), r"layer 0: .* with H a multiple of 128"),
        (((0, 128), (0, 128), (128, 0)), r"layer 0: .* \[1, 0, 128\]"),
    ):
        parts = zip(("gate_proj", "up_proj", "down_proj"), shapes, strict=True)
        save_file({f"{name}.0.{part}.weight": torch.ones(s) for part, s in parts}, tmp_path / "m.safetensors")
        with pytest.raises(ValueError, match=says):
            list(build_checkpoint(tmp_path))
    save_file(
        {f"{name}.gate_up_proj": torch.ones(4, 128), f"{name}.down_proj": torch.ones(128, 2)},
        tmp_path / "m.safetensors",
    )
    with pytest.raises(ValueError, match=r"layer 0: experts of gate_up \[4, 128\]"):
        list(build_checkpoint(tmp_path))


def test_weights_of_every_type_that_is_served(tmp_path: Path) -> None:
    """A sketch is that of the weights as they are served, whichever type the files hold."""
    model = tmp_path / "model"
    checkpoint(model, True)
    weights = {name: t for file in sorted(model.glob("*")) for name, t in load_file(file).items()}
    for stored in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        folder = tmp_path / str(stored)
        folder.mkdir()
        save_file({name: t.to(stored) for name, t in weights.items()}, folder / "model.safetensors")
        for served in ("bfloat16", "float16", "float32"):
            found = dict(build_checkpoint(folder, served, seed=2))[3]
            at = "model.layers.3.mlp.experts"
            own = [weights[f"{at}.{part}_proj"].to(stored).to(getattr(torch, served)) for part in ("gate_up", "down")]
            expected = build_named(3, own[0], own[1], 2, 32)
            for name, tensor in found.tensors().items():
                assert torch.equal(tensor, expected.tensors()[name]), (stored, served, name)


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[object, str]:
    monkeypatch.setattr("sys.argv", ["epsim", "reader", "build", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    printed = capsys.readouterr()
    return stop.value.code, printed.out + printed.err


def test_what_the_command_will_not_write_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    checkpoint(model, True)
    own = model / "model-2.safetensors"
    before = own.read_bytes()
    (tmp_path / "link").symlink_to(own)
    for out in (own, tmp_path / "link"):
        assert run(capsys, monkeypatch, str(model), "--out", str(out)) == (
            2,
            f"epsim: --out {out}: is one of the checkpoint's own files: give another name\n",
        )
    assert own.read_bytes() == before
    code, says = run(capsys, monkeypatch, str(model), "--out", "/dev/full")
    assert code == 2
    assert "a device or pipe, which would be lost" in says
    code, says = run(capsys, monkeypatch, str(tmp_path / "none"), "--out", str(tmp_path / "s"))
    assert (code, says) == (2, f"epsim: {tmp_path}/none: no such folder: give the folder of a checkpoint\n")
    code, says = run(capsys, monkeypatch, str(model), "--out", str(tmp_path / "s"), "--seed", str(10**20))
    assert code == 0, says
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model", "s"]


SLOW_SAVE = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
import epsim.kernels.reader.store as store
def save(*a):
    a[0].write_bytes(b"half")
    print("saving", flush=True)
    time.sleep(60)
store.save_sketches = save
sys.argv = ["epsim", "reader", "build", *sys.argv[1:]]
from epsim.cli.main import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_build_that_is_stopped_leaves_what_was_there(tmp_path: Path, number: signal.Signals) -> None:
    checkpoint(tmp_path / "model", True)
    out = tmp_path / "s.safetensors"
    out.write_bytes(b"before")
    command = [sys.executable, "-c", SLOW_SAVE, str(tmp_path / "model"), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        process.send_signal(number)
        assert process.wait(30) == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert out.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "s.safetensors"]


def test_a_full_disk_costs_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    checkpoint(tmp_path / "model", True)
    out = tmp_path / "s.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        code, says = run(capsys, monkeypatch, str(tmp_path / "model"), "--out", str(out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert code == 2
    assert says.startswith(f"epsim: {out}: cannot be written: ")
    assert says.count("\n") == 1
    assert not out.exists()
