"""Placement files: our own, and what serving systems load as it is.

sglang: JSON for `--init-expert-location` (python/sglang/srt/eplb/expert_location.py): a path ending in .json, one key,
    physical_to_logical_map (further keys are refused there), and a row for every layer of the model, dense ones too.
vllm: JSON for `eplb_config.expert_map_path` of vLLM-Ascend (vllm_ascend/eplb/core/eplb_utils.py), the one static map
    that a released vLLM loads; upstream vLLM has pull requests for it only. Its layers are the mixture-of-experts
    layers by their place, and an expert can be on a rank only once.
trtllm: YAML for `moe_config.load_balancer` (tensorrt_llm's MoeLoadBalancerConfig), layers by the model's number;
    layer_updates_per_iter 0 keeps the placement as it is.
epsim: JSON with everything, the placement's version among it.

Only the epsim format can hold empty slots (-1). SGLang and vLLM-Ascend would take -1 for the last expert, and need the
same number of experts on every rank. TensorRT-LLM needs an expert in each of its num_slots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from epsim.files import whole_file
from epsim.placement.base import Placement

FORMATS = ("epsim", "sglang", "vllm", "trtllm")


def check_format(name: str) -> None:
    """Raises ValueError for a format of no known name."""
    if name not in FORMATS:
        raise ValueError(f"unknown placement format {name!r}: choose one of {', '.join(FORMATS)}")


def write_placement(
    placement: Placement,
    path: str | os.PathLike[str],
    format_name: str,
    layers: Sequence[int],
    num_model_layers: int | None = None,
) -> None:
    """Writes a placement whole or not at all.

    layers: the model's own number of each of the L layers; num_model_layers: layers of the model, dense ones included,
    where the last of `layers` is not the model's last (sglang only). Raises ValueError where the format cannot hold it.
    """
    check_format(format_name)
    if len(layers) != placement.num_layers:
        raise ValueError(f"{len(layers)} layer numbers given for a placement of {placement.num_layers} layers")
    path = Path(path)
    if format_name != "epsim":
        _check_full(placement, layers, f"the {format_name} format")
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


def _check_full(placement: Placement, layers: Sequence[int], target: object) -> None:
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


def read_placement(
    path: str | os.PathLike[str], num_ranks: int | None = None, num_nodes: int | None = None
) -> tuple[Placement, tuple[int, ...]]:
    """Reads any of the formats, told by content. Returns the placement and the model's number of each of its layers.

    num_ranks: needed for the sglang and trtllm forms, which do not carry it. A vllm file numbers layers by place, and
    an sglang file has dense layers as well, so for these the layers are 0, 1, ... Raises ValueError for anything else.
    """
    path = Path(path)
    content = _parse(path)
    try:
        rows, layers, given = _rows(content)
        slots = torch.tensor(rows, dtype=torch.int64)
        ranks = given.get("num_ranks", num_ranks)
        nodes = num_nodes if num_nodes is not None else given.get("num_nodes", 1)
        experts = given.get("num_experts", int(slots.max()) + 1)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path}: no placement that epsim, SGLang, vLLM-Ascend or TensorRT-LLM reads") from error
    if ranks is None:
        raise ValueError(f"{path}: this form does not say the number of ranks: give --ranks")
    if num_ranks is not None and ranks != num_ranks:
        raise ValueError(f"{path}: a placement for {ranks} ranks, not {num_ranks}")
    if len(layers) != len(rows):
        raise ValueError(f"{path}: {len(layers)} layer numbers for {len(rows)} layers")
    try:
        placement = Placement(slots, experts, ranks, nodes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if given is not content:
        _check_full(placement, layers, path)
    if given.get("version", placement.version) != placement.version:
        raise ValueError(f"{path}: the content is not the one of version {given['version']}: the file was changed")
    return placement, layers


def _parse(path: Path) -> Any:
    text = path.read_text()
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.load(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: neither JSON nor YAML") from error


def _rows(content: Mapping[str, Any]) -> tuple[list[list[int]], tuple[int, ...], Mapping[str, Any]]:
    """Rows of logical experts by slot, layer numbers, and what else the file says."""
    if "physical_to_logical" in content:
        return content["physical_to_logical"], tuple(content["layers"]), content
    if "physical_to_logical_map" in content:
        rows = content["physical_to_logical_map"]
        return rows, tuple(range(len(rows))), {}
    if "layer_list" in content:
        devices = [layer["device_list"] for layer in content["layer_list"]]
        held = [[device["device_expert"] for device in layer] for layer in devices]
        most = max(len(experts) for layer in held for experts in layer)
        rows = [[e for experts in layer for e in (*experts, *[-1] * (most - len(experts)))] for layer in held]
        return rows, tuple(range(len(rows))), {"num_ranks": len(devices[0])}
    assignments: dict[int, list[int]] = content["initial_global_assignments"]
    layers = tuple(sorted(assignments))
    return [assignments[layer] for layer in layers], layers, {}
