"""Reads experts from checkpoint files, and saves and loads sketches with the hash of their checkpoint."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from epsim.kernels.reader.build import RANK, LayerSketch, build_layer
from epsim.kernels.reader.codes import NEGATIVE, POWERS

KIND = "epsim channel sketch"
FORMAT = f"{KIND} 2"
INDEX = "model.safetensors.index.json"
FUSED = re.compile(r"layers\.(\d+)\.(?:.*\.)?experts\.(gate_up_proj|down_proj)$")
SINGLE = re.compile(r"layers\.(\d+)\.(?:.*\.)?experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PREDICTORS = re.compile(r"(?:^|\.)(?:mtp|nextn|draft)[^.]*\.")
"""Names of multi-token prediction layers, which are also numbered from 0."""


def checkpoint_files(folder: Path) -> list[Path]:
    """The weight files of a folder, without sketches.

    Raises ValueError if there are none, if one is incomplete, or if a file that the index lists is missing.
    """
    files = [path for path in sorted(folder.glob("*.safetensors")) if not _is_sketch(path)]
    if not files:
        problem = "no *.safetensors in it" if folder.is_dir() else "no such folder"
        raise ValueError(f"{folder}: {problem}: give the folder of a checkpoint")
    index = folder / INDEX
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index}: cannot be read as an index of a checkpoint's files") from None
        if missing := sorted(named - {path.name for path in files}):
            raise ValueError(f"{folder}: {missing[0]} is missing, but {INDEX} lists it: fetch the whole checkpoint")
    return files


def _is_sketch(path: Path) -> bool:
    """Whether a file is a sketch of any version, not a file of weights."""
    try:
        with safe_open(path, "pt") as opened:
            return str((opened.metadata() or {}).get("format")).startswith(KIND)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: an incomplete safetensors file ({error}): fetch it again, or delete it") from None


def _num_layers(folder: Path) -> int | None:
    """The model's number of layers from config.json, or None if the folder has no such file or entry."""
    config = folder / "config.json"
    if not config.is_file():
        return None
    try:
        read = json.loads(config.read_text())
        number = read.get("text_config", read).get("num_hidden_layers")
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{config}: cannot be read as a model's configuration") from None
    return number if isinstance(number, int) else None


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 over the SHA-256 hashes of all weight files, in the order of file names."""

    def digest_of(path: Path) -> bytes:
        digest = hashlib.sha256()
        with path.open("rb") as opened:
            while part := opened.read(1 << 24):
                digest.update(part)
        return digest.digest()

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(digest_of, checkpoint_files(folder)))).hexdigest()


class Checkpoint:
    """The routed experts of a checkpoint, read layer by layer, in the layout of transformers 5
    (`experts.gate_up_proj`) or with one tensor per expert and matrix (`experts.3.gate_proj.weight`)."""

    def __init__(self, folder: Path) -> None:
        self._files = []
        self._at: dict[tuple[int, str, int], tuple[Any, str]] = {}
        for path in checkpoint_files(folder):
            opened = safe_open(path, "pt")
            self._files.append(opened)
            for name in list(opened.keys()):  # type: ignore[no-untyped-call]
                if PREDICTORS.search(name):
                    continue
                if match := FUSED.search(name):
                    self._add((int(match[1]), match[2], -1), opened, name)
                elif match := SINGLE.search(name):
                    self._add((int(match[1]), match[3], int(match[2])), opened, name)
        # DeepSeek-V3 and GLM-4.5 number multi-token prediction layers after the model's last layer.
        end = _num_layers(folder)
        self.layers = sorted({layer for layer, _, _ in self._at if end is None or layer < end})
        if not self.layers:
            raise ValueError(
                f"{folder}: no routed experts: expected tensors such as model.layers.0.mlp.experts.gate_up_proj or "
                "model.layers.0.mlp.experts.0.gate_proj.weight"
            )

    def _add(self, key: tuple[int, str, int], opened: Any, name: str) -> None:
        if key in self._at:
            raise ValueError(
                f"{self._at[key][1]} and {name} are both the {key[1]} of layer {key[0]}: give a folder that "
                "holds one model"
            )
        self._at[key] = (opened, name)

    def experts(self, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [E, 2I, H] and down [E, H, I] of a layer. Raises ValueError if a part is missing, differs in shape
        from the others, or is quantised."""
        if (layer, "gate_up_proj", -1) in self._at:
            return self._tensor(layer, "gate_up_proj", -1).to(dtype), self._tensor(layer, "down_proj", -1).to(dtype)
        experts = sorted({expert for number, _, expert in self._at if number == layer})
        if experts != list(range(len(experts))):
            raise ValueError(f"layer {layer} has experts {experts[:3]}... only: fetch the whole checkpoint")
        names = ("gate_proj", "up_proj", "down_proj")
        parts = {name: [self._tensor(layer, name, expert) for expert in experts] for name in names}
        shape = parts["gate_proj"][0].shape
        if len(shape) != 2:
            raise ValueError(f"layer {layer}: gate_proj of expert 0 is {list(shape)}, not [channels, hidden]")
        for name in names:
            wanted = shape if name != "down_proj" else shape[::-1]
            for expert, tensor in enumerate(parts[name]):
                if tensor.shape != wanted:
                    raise ValueError(
                        f"layer {layer}: {name} of expert {expert} is {list(tensor.shape)}, not {list(wanted)} as the "
                        "gate of expert 0 requires"
                    )
        gate, up, down = (torch.stack(parts[name]).to(dtype) for name in names)
        return torch.cat([gate, up], 1), down

    def _tensor(self, layer: int, name: str, expert: int) -> torch.Tensor:
        if (layer, name, expert) not in self._at:
            of = "" if expert < 0 else f" of expert {expert}"
            raise ValueError(f"layer {layer} has no {name}{of}: fetch the whole checkpoint")
        opened, key = self._at[layer, name, expert]
        tensor: torch.Tensor = opened.get_tensor(key)
        if tensor.dtype not in (*DTYPES.values(), torch.float64):
            raise ValueError(
                f"{key} is {str(tensor.dtype).removeprefix('torch.')}: a sketch is made from weights in "
                f"{', '.join(DTYPES)}, not from quantised ones; give a checkpoint of these"
            )
        return tensor


def build_checkpoint(
    folder: Path, dtype: str = "bfloat16", seed: int = 0, rank: int = RANK, device: str = "cpu"
) -> Iterator[tuple[int, LayerSketch]]:
    """(layer number, sketch on the CPU) of each layer with experts. dtype: the type in which the weights are served.

    Each layer's rotation has its own seed. Raises ValueError with one line, which names the layer.
    """
    checkpoint = Checkpoint(folder)
    for layer in checkpoint.layers:
        gate_up, down = (part.to(device) for part in checkpoint.experts(layer, DTYPES[dtype]))
        yield layer, build_named(layer, gate_up, down, seed, rank).to("cpu")


def build_named(layer: int, gate_up: torch.Tensor, down: torch.Tensor, seed: int, rank: int) -> LayerSketch:
    """`build_layer` for layer `layer` of a model. seed: one for the model. Error messages name the layer."""
    try:
        return build_layer(gate_up, down, (seed * 100_003 + layer) % (1 << 63), rank)
    except ValueError as error:
        raise ValueError(f"layer {layer}: {error}") from None


def save_sketches(path: Path, sketches: dict[int, LayerSketch], folder: Path, dtype: str, seed: int) -> None:
    """Writes sketches by layer number to one safetensors file, with the hash of the checkpoint in `folder`. Raises
    SafetensorError if it cannot be written."""
    tensors = {
        f"layers.{layer}.{name}": tensor.contiguous()
        for layer, sketch in sketches.items()
        for name, tensor in sketch.tensors().items()
    }
    described = {"checkpoint": checkpoint_hash(folder), "dtype": dtype, "seed": str(seed)}
    save_file(tensors, path, {"format": FORMAT, **described})


def load_sketches(path: Path, folder: Path, dtype: str) -> dict[int, LayerSketch]:
    """The sketches of a file, by layer number. Raises ValueError if it is not a sketch, or was made from another
    checkpoint than the one in `folder` or for weights of another type."""
    again = f"build it again: epsim reader build {folder} --out {path} --dtype {dtype}"
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path}: not a channel sketch of this version: {again}")
            tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a channel sketch ({error}): {again}") from None
    if metadata.get("dtype") != dtype:
        raise ValueError(f"{path}: made for weights in {metadata.get('dtype')}, but the model runs in {dtype}: {again}")
    if metadata.get("checkpoint") != checkpoint_hash(folder):
        raise ValueError(f"{path}: made from another checkpoint than the one in {folder}: {again}")
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        named = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if named is None:
            raise ValueError(f"{path}: {name} is not part of a channel sketch: {again}")
        layers.setdefault(int(named[1]), {})[named[2]] = tensor
    if missing := sorted(set(Checkpoint(folder).layers) - set(layers)):
        raise ValueError(f"{path}: has no sketch of layer {missing[0]}: {again}")
    return {layer: _whole(parts, f"{path}: layer {layer}", again) for layer, parts in sorted(layers.items())}


def _whole(parts: dict[str, torch.Tensor], where: str, again: str) -> LayerSketch:
    """The sketch with these tensors. Raises ValueError if one is missing or if shapes do not match."""
    if sorted(parts) != sorted(field.name for field in fields(LayerSketch)):
        raise ValueError(f"{where} holds {', '.join(sorted(parts))}, which is not a sketch: {again}")
    for name, dimensions in (("codes", 3), ("norms", 2), ("basis", 2)):
        if parts[name].ndim != dimensions:
            raise ValueError(f"{where} has {name} {list(parts[name].shape)}, not of {dimensions} dimensions: {again}")
    sketch = LayerSketch(**parts)
    for name, (shape, dtype) in sketch.layout().items():
        if (tuple(parts[name].shape), parts[name].dtype) != (shape, dtype):
            raise ValueError(f"{where} has {name} {list(parts[name].shape)}, not {list(shape)} {dtype}: {again}")
    if wrong := [name for name, tensor in parts.items() if not _possible(name, tensor)]:
        raise ValueError(f"{where} has {wrong[0]} that no build produces: {again}")
    return sketch


def _possible(name: str, tensor: torch.Tensor) -> bool:
    """Whether `build_layer` can produce these values. Kernels and `unpacked` would decode other codes differently."""
    if not tensor.numel():
        return True
    if name == "codes":
        return all(int((expert & (NEGATIVE - 1)).max()) <= sum(POWERS) for expert in tensor)
    if name == "signs":
        return bool((tensor.abs() == 1).all())
    lowest, highest = (float(value) for value in tensor.aminmax())
    return math.isfinite(lowest + highest) and (lowest >= 0 or name in ("basis", "coefficients"))
