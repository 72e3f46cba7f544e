"""Recordings of GPT-OSS-MoE-ExpertFingerprinting (openai/gpt-oss-20b, 24 layers x 32 experts, top-4).

Three forms: npz of sequences (`expert_ids` [N, T, L, k] with 255 past the end, `lengths` [N], optional `topk_probs`,
`source_paths`); JSON examples (`router_data`: token -> layer -> selected_experts, selected_probs); JSON summaries
(`..._expert_analytics`: layer -> expert -> count_frequency, the share of tokens that choose the expert).
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from epsim.traces.compose import Tokens
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, half, sparse_recording, to_numpy, whole
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.tokens import check_tokens, token_recording
from epsim.traces.trace import Array, Ints

SECTIONS = ("think", "answer")


def _is_sequences(document: Document) -> bool:
    return document.kind == "npz" and {"expert_ids", "lengths"} <= set(document.content)


def _read_sequences(documents: Sequence[Document], options: ImportOptions) -> Recording:
    ids: list[Array] = []
    scores: list[Array] = []
    sequence: list[Ints] = []
    domain: list[npt.NDArray[np.object_]] = []
    count = 0
    for document in documents:
        with naming(document.path, "npz of sequences"):
            arrays = document.content
            experts: Any = to_numpy(arrays["expert_ids"])
            lengths = whole(arrays["lengths"], axes=("sequence",))
            if experts.ndim != 4 or experts.dtype.kind not in "iu" or lengths.shape != experts.shape[:1]:
                raise ValueError(
                    f"expert_ids {list(experts.shape)} {experts.dtype} and lengths {list(lengths.shape)} are not whole "
                    "numbers [sequences, tokens, layers, k] and [sequences]"
                )
            if not experts.size:
                raise ValueError(f"expert_ids are empty: shape {list(experts.shape)}")
            if lengths.max() > experts.shape[1]:
                raise ValueError(f"a length is {lengths.max()}, but expert_ids has {experts.shape[1]} tokens")
            if ids and experts.shape[2:] != ids[0].shape[1:]:
                raise ValueError(f"[layers, k] is {list(experts.shape[2:])}, not {list(ids[0].shape[1:])}")
            num_tokens = sum(map(len, ids)) + int(lengths.sum())
            check_tokens(num_tokens, num_tokens * experts.shape[2] * experts.shape[3], documents)
            inside = np.arange(experts.shape[1]) < lengths[:, None]
            kept = experts[inside]
            if kept.size and (kept.max() >= 2**15 or kept.min() < 0):
                raise ValueError(f"expert ids from {kept.min()} to {kept.max()} within the lengths")
            ids.append(kept.astype(np.int16))
            if "topk_probs" in arrays:
                probs = to_numpy(arrays["topk_probs"])
                if probs.shape != experts.shape:
                    raise ValueError(f"topk_probs have shape {list(probs.shape)}, expert_ids {list(experts.shape)}")
                scores.append(half(probs[inside]))
            sequence.append(np.repeat(np.arange(len(lengths)) + count, lengths))
            paths = arrays.get("source_paths", np.array([document.path.stem] * len(lengths)))
            if paths.size != len(lengths):
                raise ValueError(f"source_paths names {paths.size} sequences, but there are {len(lengths)}")
            labels = np.array([_dataset(str(path)) for path in paths.reshape(-1)], dtype=object)
            domain.append(labels[sequence[-1] - count])
            count += len(lengths)
    if scores and len(scores) != len(ids):
        raise ValueError(f"{documents[0].path}: only some files have topk_probs: import the others separately")
    tokens = Tokens(
        np.concatenate(ids),
        np.concatenate(scores) if scores else None,
        sequence=np.concatenate(sequence),
        domain=np.concatenate(domain),
    )
    return token_recording(tokens, documents, options)


def _dataset(path: str) -> str:
    """data/<dataset>/<category>/<file> -> <dataset>."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "data" else parts[-1]


def _router_data(value: Any) -> Iterator[Any]:
    """Yields every `router_data` in nested lists and objects: one per sequence."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict) and "router_data" in item:
            yield item["router_data"]
        elif isinstance(item, dict | list):
            children = list(item.values()) if isinstance(item, dict) else item
            pending.extend(reversed([c for c in children if isinstance(c, dict | list)]))


def _is_examples(document: Document) -> bool:
    return document.kind == "json" and next(_router_data(document.content), None) is not None


def _read_examples(documents: Sequence[Document], options: ImportOptions) -> Recording:
    rows: list[list[Any]] = []
    probs: list[list[Any]] = []
    sequence: list[int] = []
    domain: list[str] = []
    layers: list[int] | None = None
    count = 0
    for document in documents:
        with naming(document.path, "router_data"):
            for data in _router_data(document.content):
                for token in _tokens_of(data):
                    numbers = sorted(numbered(token, "layer"))
                    layers = layers or [number for number, _ in numbers]
                    if [number for number, _ in numbers] != layers:
                        raise ValueError(f"ragged: token {len(rows)} has different layers than the first token")
                    rows.append([token[name]["selected_experts"] for _, name in numbers])
                    probs.append([token[name].get("selected_probs") for _, name in numbers])
                    sequence.append(count)
                    domain.append(document.path.stem.split("__")[0])
                count += 1
    if not rows or layers is None:
        raise ValueError(f"{documents[0].path}: no tokens in router_data")
    with naming(documents[0].path, "router_data"):
        ids = whole(rows, axes=("token", "layer", "choice"))
        if ids.ndim != 3 or (ids.size and ids.max() >= 2**15):
            raise ValueError(f"selected_experts make an array {list(ids.shape)} up to {ids.max(initial=0)}")
        known = all(p is not None for token in probs for p in token)
        scores = half(to_numpy(probs)) if known else None
        if scores is not None and scores.shape != ids.shape:
            raise ValueError("selected_probs and selected_experts differ in shape")
    tokens = Tokens(ids.astype(np.int16), scores, sequence=np.array(sequence), domain=np.array(domain, dtype=object))
    return token_recording(tokens, documents, options, layers=layers)


def _tokens_of(data: Any) -> Iterator[dict[str, Any]]:
    for item in data if isinstance(data, list) else [data]:
        for _, name in sorted(numbered(item, "token")):
            yield item[name]


def numbered(value: Any, word: str) -> Iterator[tuple[int, str]]:
    """Yields (number, key) of each key of the form `word_number`."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object with keys {word}_0, {word}_1, ..., found a {type(value).__name__}")
    for name in value:
        match = re.fullmatch(rf"{word}_(\d{{1,9}})", name)
        if not match:
            raise ValueError(f"expected keys {word}_0, {word}_1, ..., found {name[:40]!r}")
        yield int(match.group(1)), name


def _is_summary(document: Document) -> bool:
    content = document.content
    return (
        document.kind == "json"
        and isinstance(content, dict)
        and any(f"{section}_expert_analytics" in content for section in SECTIONS)
    )


def _read_summaries(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Each file is one step; counts = count_frequency x sample_count x tokens per sample, rounded."""
    counts: list[dict[tuple[int, int], float]] = []
    numbers: set[int] = set()
    top_k = 1
    for document in documents:
        with naming(document.path, "expert analytics"):
            content = document.content
            total: dict[tuple[int, int], float] = {}
            for section in SECTIONS:
                layers = content.get(f"{section}_expert_analytics")
                if layers is None:
                    continue
                tokens = _positive(content, "sample_count") * _positive(content, f"num_{section}_tokens")
                for number, name in numbered(layers, "layer"):
                    shares = {int(e): _positive(layers[name][e], "count_frequency") for e in layers[name]}
                    if any(expert < 0 or expert >= 2**15 for expert in shares):
                        raise ValueError(f"an expert number of {name} is outside 0..32766")
                    top_k = max(top_k, math.ceil(sum(shares.values()) - 1e-6))
                    numbers.add(number)
                    for expert, share in shares.items():
                        total[number, expert] = total.get((number, expert), 0.0) + share * tokens
            counts.append(total)
    note = f"one step per file: {len(documents)} summaries; counts are shares x tokens, rounded"
    return sparse_recording(counts, sorted(numbers), documents, options, [note], top_k)


def _positive(content: Any, key: str) -> float:
    value = content.get(key) if isinstance(content, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError(f"{key} is {value!r}, not a number >= 0")
    return float(value)


READERS = (
    TraceReader("npz of sequences (expert_ids, lengths)", _is_sequences, _read_sequences),
    TraceReader("router_data examples", _is_examples, _read_examples),
    TraceReader("expert analytics summaries", _is_summary, _read_summaries),
)
