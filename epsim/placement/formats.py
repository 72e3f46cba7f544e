"""Placement files: epsim's own format, and the formats that serving systems load.

sglang: JSON for `--init-expert-location` (python/sglang/srt/eplb/expert_location.py). The path ends in .json. The only
    key is physical_to_logical_map, because SGLang refuses others. There is a row for every layer of the model, dense
    layers included.
vllm: JSON for `eplb_config.expert_map_path` of vLLM-Ascend (vllm_ascend/eplb/core/eplb_utils.py). It is the only
    released vLLM that loads a static map. The file has the layers with experts, in order. A rank can hold an expert
    only once.
trtllm: YAML for `moe_config.load_balancer` (tensorrt_llm's MoeLoadBalancerConfig). Layers have the model's numbers.
    layer_updates_per_iter is 0, so TensorRT-LLM does not change the placement.
epsim: JSON with the whole `Placement`, its version included.

Only the epsim format can hold empty slots (-1). SGLang and vLLM-Ascend would read -1 as the last expert, and need the
same number of experts on every rank. TensorRT-LLM needs an expert in each of its num_slots.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from epsim.files import check_source, reason, whole_file
from epsim.placement.base import Placement

FORMATS = ("epsim", "sglang", "vllm", "trtllm")


def check_format(name: str) -> None:
    """Raises ValueError if there is no format of that name."""
    if name not in FORMATS:
        raise ValueError(f"unknown placement format {name!r}: choose one of {', '.join(FORMATS)}")


def write_placement(
    placement: Placement,
    path: str | os.PathLike[str],
    format_name: str,
    layers: Sequence[int],
    num_model_layers: int | None = None,
) -> None:
    """Writes a placement to a file. If writing fails, the file is not changed.

    layers: the model's number of each of the L layers. num_model_layers: the number of the model's layers, dense layers
    included; by default the largest of `layers` + 1 (for sglang only). Raises ValueError if the format cannot hold the
    placement.
    """
    check_format(format_name)
    if len(layers) != placement.num_layers:
        raise ValueError(f"{len(layers)} layer numbers given for a placement of {placement.num_layers} layers")
    path = Path(path)
    if format_name != "epsim":
        check_full(placement, layers, f"the {format_name} format")
    if format_name == "trtllm":
        text = yaml.dump(_to_trtllm(placement, layers), Dumper=yaml.CSafeDumper, default_flow_style=None, width=10**6)
    elif format_name == "sglang":
        if path.suffix != ".json":
            raise ValueError(f"{path}: SGLang reads a placement from a file ending in .json only")
        text = json.dumps(_to_sglang(placement, layers, num_model_layers))
    else:
        text = json.dumps(_to_vllm(placement) if format_name == "vllm" else _to_epsim(placement, layers))
    with whole_file(path) as temporary:
        temporary.write_text(text + "\n")


def check_full(placement: Placement, layers: Sequence[int], target: object) -> None:
    """Raises ValueError if a slot is empty. layers: the model's numbers. target: the file or the format."""
    short = (placement.filled_slots < placement.slots_per_rank).nonzero().tolist()
    if short:
        layer, rank = short[0]
        raise ValueError(
            f"{target}: layer {layers[layer]}, rank {rank} has {int(placement.filled_slots[layer, rank])} experts in "
            f"{placement.slots_per_rank} slots, and only the epsim format can hold empty slots"
        )


def _to_epsim(placement: Placement, layers: Sequence[int]) -> dict[str, Any]:
    return {
        "format": "epsim-placement",
        "schema": 1,
        "version": placement.version,
        "num_experts": placement.num_experts,
        "num_ranks": placement.num_ranks,
        "num_nodes": placement.num_nodes,
        "layers": list(layers),
        "physical_to_logical": placement.physical_to_logical.tolist(),
    }


def _to_sglang(placement: Placement, layers: Sequence[int], num_model_layers: int | None) -> dict[str, Any]:
    num_rows = max(layers) + 1 if num_model_layers is None else num_model_layers
    if num_rows <= max(layers):
        raise ValueError(f"layer {max(layers)} is not among the {num_rows} layers of the model")
    dense = [p % placement.num_experts for p in range(placement.num_physical)]
    rows = [dense] * num_rows
    for layer, row in zip(layers, placement.physical_to_logical.tolist()):
        rows[layer] = row
    return {"physical_to_logical_map": rows}


def _to_vllm(placement: Placement) -> dict[str, Any]:
    by_rank = placement.physical_to_logical.view(placement.num_layers, placement.num_ranks, -1)
    ordered = by_rank.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1).nonzero().tolist()
    if twice:
        layer, rank = twice[0]
        raise ValueError(f"layer {layer} has an expert twice on rank {rank}, which vLLM cannot load")
    return {
        "moe_layer_count": placement.num_layers,
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": placement.num_ranks,
                "device_list": [{"device_id": rank, "device_expert": experts} for rank, experts in enumerate(ranks)],
            }
            for layer, ranks in enumerate(by_rank.tolist())
        ],
    }


def _to_trtllm(placement: Placement, layers: Sequence[int]) -> dict[str, Any]:
    return {
        "num_slots": placement.num_physical,
        "initial_global_assignments": dict(zip(layers, placement.physical_to_logical.tolist())),
        "layer_updates_per_iter": 0,
    }


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMap:
    """The content of a placement file. rows: for each layer, the logical expert in every slot.

    layers: the layer number of each row. rows_of: what these numbers mean. `numbered`: they are the model's numbers and
    stand in the file. `all layers`: the rows are all layers of the model, dense layers included, numbered from 0.
    `expert layers`: the rows are the layers with experts, numbered from 0.
    given: those of num_ranks, num_nodes, num_experts and version that the file has.
    """

    rows: list[list[int]]
    layers: tuple[int, ...]
    rows_of: Literal["numbered", "all layers", "expert layers"]
    given: Mapping[str, Any]

    @property
    def holds_empty_slots(self) -> bool:
        """Whether the format can store empty slots. Only the epsim format can."""
        return "physical_to_logical" in self.given


def read_map(path: str | os.PathLike[str]) -> ExpertMap:
    """Reads a file in any of the formats, or a bare list of rows. The map may also be part of a larger object. The
    format is detected from the content. Raises ValueError or FileNotFoundError in one line."""
    path = Path(path)
    check_source(path)
    content = _parse(path)
    try:
        found = _map_of(content)
        sizes = [found.given.get(key, 1) for key in ("num_ranks", "num_nodes", "num_experts")]
        numbers = [*found.layers, *sizes, *(expert for row in found.rows for expert in row)]
        whole = all(type(number) is int and abs(number) < 1 << 31 for number in numbers) and min(sizes) > 0
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path}: {_NO_PLACEMENT}") from error
    if not whole or not any(found.rows):
        raise ValueError(f"{path}: {_NO_PLACEMENT}")
    if len(found.layers) != len(found.rows):
        raise ValueError(f"{path}: {len(found.layers)} layer numbers for {len(found.rows)} layers")
    if twice := [layer for layer in found.layers if found.layers.count(layer) > 1]:
        raise ValueError(f"{path}: layer {twice[0]} has two rows: give each layer one")
    return found


_NO_PLACEMENT = "no placement that epsim, SGLang, vLLM, vLLM-Ascend or TensorRT-LLM reads"


def read_placement(
    path: str | os.PathLike[str], num_ranks: int | None = None, num_nodes: int | None = None
) -> tuple[Placement, tuple[int, ...]]:
    """Reads a file in any of the formats. Returns the placement and the number of each of its layers.

    num_ranks: needed if the file does not say it. Files in the formats sglang and vllm have no layer numbers; their
    layers are numbered from 0. Raises ValueError in one line if the file holds no valid placement.
    """
    found = read_map(path)
    given, ranks = found.given, found.given.get("num_ranks", num_ranks)
    nodes = num_nodes if num_nodes is not None else given.get("num_nodes", 1)
    sizes = [len(row) for row in found.rows]
    if uneven := [place for place, size in enumerate(sizes) if size != sizes[0]]:
        layer, first = found.layers[uneven[0]], found.layers[0]
        raise ValueError(f"{path}: layer {layer} has {sizes[uneven[0]]} slots, and layer {first} has {sizes[0]}")
    if given.get("num_experts", 1) > sizes[0]:
        raise ValueError(f"{path}: {sizes[0]} slots a layer cannot hold {given['num_experts']} experts")
    if ranks is None:
        raise ValueError(f"{path}: this form does not say the number of ranks: give --ranks")
    if num_ranks is not None and ranks != num_ranks:
        raise ValueError(f"{path}: a placement for {ranks} ranks, not {num_ranks}")
    try:
        slots = torch.tensor(found.rows, dtype=torch.int64)
        placement = Placement(slots, given.get("num_experts", int(slots.max()) + 1), ranks, nodes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not found.holds_empty_slots:
        check_full(placement, found.layers, path)
    if given.get("version", placement.version) != placement.version:
        raise ValueError(f"{path}: the content is not the one of version {given['version']}: the file was changed")
    return placement, found.layers


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {reason(error)}: give a file that can be read") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return yaml.load(text, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: neither JSON nor YAML") from error


def _map_of(content: Any) -> ExpertMap:
    if isinstance(content, dict) and "physical_to_logical" in content:
        return ExpertMap(content["physical_to_logical"], tuple(content["layers"]), "numbered", content)
    rows = content if isinstance(content, list) and content and isinstance(content[0], list) else None
    if rows is None:
        rows = _nested(content, "physical_to_logical_map")
    if rows is not None:
        return ExpertMap(rows, tuple(range(len(rows))), "all layers", {})
    layer_list = _nested(content, "layer_list")
    if layer_list is not None:
        devices = [layer["device_list"] for layer in layer_list]
        held = [[device["device_expert"] for device in layer] for layer in devices]
        most = max(len(experts) for layer in held for experts in layer)
        rows = [[e for experts in layer for e in (*experts, *[-1] * (most - len(experts)))] for layer in held]
        return ExpertMap(rows, tuple(range(len(rows))), "expert layers", {"num_ranks": len(devices[0])})
    assignments = [(int(layer), row) for layer, row in _nested(content, "initial_global_assignments").items()]
    assignments.sort(key=lambda assignment: assignment[0])
    return ExpertMap([row for _, row in assignments], tuple(layer for layer, _ in assignments), "numbered", {})


def _nested(content: Any, name: str) -> Any:
    """The value of the first key that ends in `name`, at any depth; None if there is none."""
    values = content if isinstance(content, list) else []
    if isinstance(content, dict):
        for key, value in content.items():
            if str(key).endswith(name):
                return value
        values = list(content.values())
    found = (_nested(value, name) for value in values if isinstance(value, dict | list))
    return next((value for value in found if value is not None), None)
