"""vLLM: `routed_experts` of finished requests as npy or npz, and dumps of its expert load balancer.

Formats: vllm, CompletionOutput.routed_experts int16 [tokens, L, k]; `load_history[i].logical_expert_load` [L, E].
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from epsim.traces.compose import Tokens
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, count_recording, has_key, natural, whole
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.tokens import check_tokens, token_recording
from epsim.traces.trace import Ints

NAMES = re.compile(r"(prompt_)?routed_experts|arr_\d+", re.I)


def _is_routed(document: Document) -> bool:
    if document.kind == "npy":
        return bool(document.content.ndim == 3 and document.content.dtype.kind in "iu")
    if document.kind != "npz" or not document.content:
        return False
    return all(NAMES.search(n) and a.ndim == 3 and a.dtype.kind in "iu" for n, a in document.content.items())


def _read_routed(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Each array is one request. A prompt is one prefill step. Outputs are sequences: several are composed into decode
    steps, and one alone is a stream of tokens."""
    prompts: list[Any] = []
    outputs: list[Any] = []
    for document in documents:
        with naming(document.path, "routed_experts array"):
            arrays = document.content if document.kind == "npz" else {document.path.stem: document.content}
            for name in sorted(arrays, key=lambda n: natural(document.path / n)):
                array = arrays[name]
                first = prompts[0] if prompts else outputs[0] if outputs else array
                if not array.size or array.shape[1:] != first.shape[1:]:
                    raise ValueError(
                        f"{name} has shape {list(array.shape)}, not [tokens, {first.shape[1]}, {first.shape[2]}]"
                    )
                if array.min() < -1 or array.max() >= 2**15:
                    raise ValueError(f"{name} holds expert ids from {array.min()} to {array.max()}")
                (prompts if "prompt" in name.lower() and document.kind == "npz" else outputs).append(array)
    if prompts and outputs:
        raise ValueError(
            f"{documents[0].path}: prompts and outputs are two phases: save prompt_routed_experts and "
            "routed_experts to separate files and import each by itself"
        )
    chosen = prompts or outputs
    check_tokens(sum(map(len, chosen)), sum(array.size for array in chosen), documents)
    index = np.repeat(np.arange(len(chosen)), [len(array) for array in chosen])
    ids = np.concatenate(chosen).astype(np.int16)
    if prompts:
        tokens = Tokens(ids, step=index)
        return token_recording(tokens, documents, options, phase="prefill", notes=["each prompt is its own step"])
    return token_recording(Tokens(ids, sequence=index), documents, options)


def _read_load_dump(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Each entry of load_history is a step; several files are joined in order."""
    loads: list[Ints] = []
    for document in documents:
        with naming(document.path, "vLLM load dump"):
            for number, entry in enumerate(document.content["load_history"]):
                if not isinstance(entry, dict) or "logical_expert_load" not in entry:
                    raise ValueError(f"load_history[{number}] has no logical_expert_load")
                load = whole(entry["logical_expert_load"])
                if load.ndim != 2 or not load.size or (loads and load.shape != loads[0].shape):
                    raise ValueError(
                        f"load_history[{number}].logical_expert_load has shape {list(load.shape)}, not [L, E]"
                    )
                loads.append(load)
    if not loads:
        raise ValueError(f"{documents[0].path}: load_history is empty")
    return count_recording(loads, documents, options)


READERS = (
    TraceReader("vLLM routed_experts", _is_routed, _read_routed),
    TraceReader("vLLM load dump (load_history)", has_key("load_history", "json", holding=list), _read_load_dump),
)
