"""Megatron-Core routing logs: JSON lines, one file per rank, one line per (step, layer).

Line: `step, stage, block, layer, rank, num_tokens, topk, top_indices` with top_indices [num_tokens, topk].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from epsim.traces.compose import Tokens
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, check_filled, whole
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.sglang import index_of
from epsim.traces.readers.tokens import token_recording
from epsim.traces.trace import Ints

Key = tuple[int, int, int]
Ids = npt.NDArray[np.int16]
# A line holds the choices of many tokens, so its cost is that of the NumPy calls that read it.
NUMBERS_PER_LINE = 256


def _is_line(record: Any) -> bool:
    return isinstance(record, dict) and {"step", "layer", "rank", "top_indices"} <= set(record)


def _is_log(document: Document) -> bool:
    content = document.content
    if document.kind == "json" and isinstance(content, list) and content:
        content = content[0]
    return document.kind in ("json", "jsonl") and _is_line(content)


def _read_log(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """If a rank wrote a (step, layer) several times, each time is a micro-batch and becomes its own step."""
    choices: dict[Key, dict[tuple[str, str, int], Ids]] = {}
    times: dict[tuple[Any, ...], int] = {}
    stages: dict[str, set[int]] = {}
    top_k = 1
    for document in documents:
        with naming(document.path, "Megatron routing log"):
            for number, record in document.records(NUMBERS_PER_LINE):
                if not _is_line(record):
                    raise ValueError(f"line {number} lacks step, layer, rank or top_indices")
                step, rank, layer = (index_of(record, key) for key in ("step", "rank", "layer"))
                where = (str(record.get("stage", "")), str(record.get("block", "")), layer)
                ids = _indices(record, number).astype(np.int16)
                again = times.get((step, rank, where), 0)
                times[step, rank, where] = again + 1
                choices.setdefault((step, again, rank), {})[where] = ids
                stages.setdefault(where[0], set()).add(rank)
                top_k = max(top_k, ids.shape[1] if len(ids) else 1)
    layers = sorted({where for entry in choices.values() for where in entry}, key=_layer_order)
    layer_index = {where: i for i, where in enumerate(layers)}
    # Ranks of different pipeline stages see the same data, so the ranks of each stage are numbered from 0.
    rank_in_stage = {stage: {rank: i for i, rank in enumerate(sorted(ranks))} for stage, ranks in stages.items()}
    merged: dict[Key, dict[int, Ids]] = {}
    for (step, again, rank), entry in choices.items():
        for where, ids in entry.items():
            source = rank_in_stage[where[0]][rank]
            merged.setdefault((step, again, source), {})[layer_index[where]] = ids
    size = max(again for _, again, _ in merged) + 1
    order = sorted(merged)
    num_tokens = [max(len(ids) for ids in merged[key].values()) for key in order]
    listed = sum(len(ids) for by_layer in merged.values() for ids in by_layer.values())
    shape = (sum(num_tokens), len(layers), top_k)
    check_filled(listed, shape, "choices", documents)
    table = np.full(shape, -1, dtype=np.int16)
    low = 0
    for key, length in zip(order, num_tokens):
        for layer, ids in merged[key].items():
            table[low : low + len(ids), layer, : ids.shape[1]] = ids
        low += length
    missing = len(table) * len(layers) - listed
    notes = [f"{size} micro-batches per step: each becomes its own step"] if size > 1 else []
    if missing:
        notes.append(f"{missing} of {len(table) * len(layers)} (token, layer) choices are missing: left empty")
    numbers = [where[2] for where in layers]
    if len(set(numbers)) != len(numbers):
        notes.append("layer numbers restart in each stage or block: layers are renumbered by stage and block")
        numbers = list(range(len(layers)))
    tokens = Tokens(
        table,
        step=np.repeat(np.array([step * size + again for step, again, _ in order], dtype=np.int64), num_tokens),
        source_rank=np.repeat(np.array([source for _, _, source in order], dtype=np.int64), num_tokens),
        num_source_ranks=max(len(ranks) for ranks in stages.values()),
    )
    return token_recording(tokens, documents, options, phase="training", notes=notes, layers=numbers)


def _layer_order(where: tuple[str, str, int]) -> tuple[Any, ...]:
    stage, block, layer = where
    named = [(0, int(s), "") if s.isdecimal() and len(s) < 10 else (1, 0, s) for s in (stage, block)]
    return (*named, layer)


def _indices(record: Any, number: int) -> Ints:
    """The expert ids of a line, [num_tokens, topk]."""
    try:
        ids = whole(record["top_indices"], axes=("token", "choice"))
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    if ids.ndim == 1 and not ids.size:
        ids = ids.reshape(0, 1)
    if ids.ndim != 2 or ids.max(initial=0) >= 2**15:
        raise ValueError(
            f"line {number}: top_indices {list(ids.shape)} up to {ids.max(initial=0)} are not [tokens, topk]"
        )
    announced = record.get("num_tokens")
    if announced is not None and announced != len(ids):
        raise ValueError(f"line {number}: num_tokens is {announced!r}, but top_indices has {len(ids)} tokens")
    return ids


READERS = (TraceReader("Megatron-Core routing log", _is_log, _read_log),)
