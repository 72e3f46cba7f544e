"""TensorRT-LLM: expert statistics (`meta_info.json` + `rank*.safetensors`) and its placement YAML.

Format: TensorRT-LLM, examples/ep_load_balancer: keys `{iteration}_{layer}` -> token counts [E], one file per rank;
meta_info.json: num_experts, num_experts_per_token.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, number_in_name, placement_reader, whole
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.ranks import PassCounts, rank_recording
from epsim.traces.trace import Ints

KEY = re.compile(r"(\d{1,9})_(\d{1,6})")


def _is_statistic(document: Document) -> bool:
    content = document.content
    if document.kind == "safetensors":
        return bool(content) and all(KEY.fullmatch(name) for name in content)
    return document.kind == "json" and isinstance(content, dict) and "num_experts_per_token" in content


def _read_statistic(documents: Sequence[Document], options: ImportOptions) -> Recording:
    info: dict[str, Any] = {}
    for document in documents:
        if document.kind == "json":
            info.update(document.content)
    files = [document for document in documents if document.kind == "safetensors"]
    if not files:
        raise ValueError(
            f"{documents[0].path}: meta_info.json has no counts: give the rank*.safetensors beside it, or the folder"
        )
    layers = sorted({int(key.split("_")[1]) for file in files for key in file.content})
    num_experts = max(np.size(next(iter(file.content.values()))) for file in files)
    with naming(documents[0].path, "meta_info.json"):
        declared = {key: info[key] for key in ("num_experts", "num_experts_per_token") if info.get(key) is not None}
        for key, value in declared.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{key} is {value!r}, not a whole number >= 1")
    if declared.get("num_experts", num_experts) != num_experts:
        raise ValueError(
            f"{files[0].path}: {num_experts} counts a layer, but meta_info.json says {declared['num_experts']} experts"
        )
    named = [number_in_name(file.path, "rank") for file in files]
    numbered = None not in named and len(set(named)) == len(named)
    passes = []
    for index, file in enumerate(files):
        rank = named[index] if numbered else index
        assert rank is not None
        iterations = sorted({int(key.split("_")[0]) for key in file.content})
        passes += [
            PassCounts(step, rank, file, partial(_counts, file, step, tuple(layers), num_experts))
            for step in iterations
        ]
    return rank_recording(
        passes,
        documents,
        options,
        num_layers=len(layers),
        num_experts=num_experts,
        top_k=declared.get("num_experts_per_token"),
        layers=layers,
        notes=[] if numbered else ["file names have no rank numbers: ranks are taken in the order given"],
    )


def _counts(file: Document, step: int, layers: Sequence[int], num_experts: int) -> Ints:
    """The counts of one iteration, [L, E]."""
    counts = np.zeros((len(layers), num_experts), dtype=np.int64)
    for index, layer in enumerate(layers):
        row = file.content.get(f"{step}_{layer}")
        if row is None:
            raise ValueError(f"ragged: iteration {step} lacks layer {layer}")
        try:
            values = whole(row, axes=("expert",))
        except ValueError as error:
            raise ValueError(f"iteration {step}, layer {layer}: {error}") from None
        if values.shape != (num_experts,):
            raise ValueError(
                f"ragged: iteration {step}, layer {layer} has counts {list(values.shape)}, not [{num_experts}]"
            )
        counts[index] = values
    return counts


READERS = (
    TraceReader("TensorRT-LLM expert statistics", _is_statistic, _read_statistic),
    placement_reader(
        "TensorRT-LLM placement",
        lambda document: document.kind == "yaml",
        "initial_global_assignments",
        "statistics (meta_info.json and rank*.safetensors)",
    ),
)
