"""FLAME-MoE's router dumps (.pt): `samples` [B], `scores` f32 [B, k], `indices` i64 [B, k], `layer`, `token_position`.

An entry holds one (layer, token position); a recording is a list of entries, or several files.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from epsim.traces.compose import Tokens
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, check_filled, half, to_numpy, whole
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.tokens import token_recording
from epsim.traces.trace import Array, Ints

KEYS = {"samples", "scores", "indices", "layer", "token_position"}


def _entries(content: Any) -> Iterator[Any]:
    values = content.values() if isinstance(content, dict) and not set(content) >= KEYS else content
    yield from [content] if isinstance(values, dict) else values if hasattr(values, "__iter__") else []


def _is_dump(document: Document) -> bool:
    if document.kind != "pt" or not isinstance(document.content, dict | list | tuple):
        return False
    entries = list(_entries(document.content))
    return bool(entries) and all(isinstance(entry, dict) and set(entry) >= KEYS for entry in entries)


def _read_dump(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Joins the layers by (sample, position). A sample is a sequence whose tokens are in order of position."""
    sample: list[Ints] = []
    position: list[Ints] = []
    layer: list[Ints] = []
    ids: list[Ints] = []
    scores: list[Array] = []
    for document in documents:
        with naming(document.path, "FLAME-MoE dump"):
            for entry in _entries(document.content):
                chosen, score = whole(entry["indices"], axes=("token", "choice")), to_numpy(entry["scores"])
                if chosen.ndim != 2 or score.shape != chosen.shape or (ids and chosen.shape[1] != ids[0].shape[1]):
                    raise ValueError(f"indices {list(chosen.shape)} and scores {list(score.shape)} are not both [B, k]")
                if chosen.max(initial=0) >= 2**15:
                    raise ValueError(f"expert id {chosen.max()} is beyond 32766")
                if not np.isfinite(score).all():
                    raise ValueError("a score is not a finite number")
                ids.append(chosen)
                scores.append(score)
                for name, values in (("samples", sample), ("token_position", position), ("layer", layer)):
                    value = whole(entry[name], axes=("token",))
                    if value.ndim > 1 or (value.ndim == 1 and value.shape not in ((1,), (len(chosen),))):
                        raise ValueError(f"{name} has shape {list(value.shape)}, not [{len(chosen)}]")
                    values.append(np.broadcast_to(value, len(chosen)))
    rows: Any = np.stack([np.concatenate(sample), np.concatenate(position)], axis=1)
    tokens, row = np.unique(rows, axis=0, return_inverse=True)
    layers, column = np.unique(np.concatenate(layer), return_inverse=True)
    row, column = row.reshape(-1), column.reshape(-1)
    flat = row * len(layers) + column
    if len(np.unique(flat)) != len(flat):
        raise ValueError(f"{documents[0].path}: the files hold a (sample, token position, layer) twice")
    shape = (len(tokens), len(layers), ids[0].shape[1])
    check_filled(len(flat), shape, f"entries in {documents[0].path}", documents)
    all_ids = np.full(shape, -1, dtype=np.int16)
    all_scores = np.zeros(shape, dtype=np.float16)
    all_ids[row, column] = np.concatenate(ids)
    all_scores[row, column] = half(np.concatenate(scores))
    missing = len(tokens) * len(layers) - len(flat)
    notes = [f"{missing} of {len(tokens) * len(layers)} (token, layer) entries are missing: left empty"]
    joined = Tokens(all_ids, all_scores, sequence=tokens[:, 0])
    return token_recording(joined, documents, options, notes=notes if missing else (), layers=layers.tolist())


READERS = (TraceReader("FLAME-MoE router dump", _is_dump, _read_dump),)
