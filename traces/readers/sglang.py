"""SGLang's expert distribution recorder (stat, per_pass, per_token), its `--init-expert-location` JSON, its old CSV.

Format: sglang, python/sglang/srt/eplb/expert_distribution.py.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from epsim.traces.compose import Tokens
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import (
    Recording,
    TraceReader,
    count_blocks,
    has_key,
    one_step_per_file,
    placement_reader,
    settle,
    sparse_recording,
    to_numpy,
    whole,
)
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.ranks import PassCounts, rank_recording
from epsim.traces.readers.tokens import token_recording
from epsim.traces.trace import MAX_EXPERTS, Array, Block, Ints, Phase

MAP = "physical_to_logical_map"
PHASE_OF_MODE: dict[int, Phase] = {1: "prefill", 2: "decode", 3: "mixed"}


def _read_logical_count(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Reads `logical_count` [S, L, E], or [L, E] for one step; several files are joined in order."""
    arrays: list[Array] = []
    for document in documents:
        with naming(document.path, "SGLang recording"):
            array = to_numpy(document.content["logical_count"])
            if array.ndim not in (2, 3) or not array.size:
                raise ValueError(f"logical_count has shape {list(array.shape)}, not [steps, layers, experts]")
            arrays.append(array[None] if array.ndim == 2 else array)
            if arrays[-1].shape[1:] != arrays[0].shape[1:]:
                raise ValueError(
                    f"{list(arrays[-1].shape[1:])} layers x experts, but {documents[0].path.name} has "
                    f"{list(arrays[0].shape[1:])}"
                )
    num_layers, num_experts = arrays[0].shape[1:]
    notes = [one_step_per_file(documents)] if all(len(a) == 1 for a in arrays) else []
    meta = settle(options, documents, level="counts", num_layers=num_layers, num_experts=num_experts, notes=notes)

    def blocks() -> Iterator[Block]:
        first = 0
        for document, array in zip(documents, arrays):
            for low in range(0, len(array), 256):
                with naming(document.path, "SGLang recording"):
                    counts = whole(array[low : low + 256], first=low)
                yield from count_blocks(counts, first + low)
            first += len(array)

    return Recording(meta, blocks, unfilled_end=any(len(a) > 1 for a in arrays))


def _logical_of(document: Document) -> Ints:
    """The logical expert of each physical expert, [L, P]."""
    if "last_physical_to_logical_map" not in document.content:
        raise ValueError("it has no last_physical_to_logical_map, which physical ids need to become logical ids")
    table = whole(document.content["last_physical_to_logical_map"], axes=("layer", "slot"))
    if table.ndim != 2 or not table.size:
        raise ValueError(f"last_physical_to_logical_map has shape {list(table.shape)}, not [layers, slots]")
    return table


def _read_records(documents: Sequence[Document], options: ImportOptions) -> Recording:
    tables: list[Ints] = []
    for document in documents:
        with naming(document.path, "SGLang recording"):
            tables.append(_logical_of(document))
            if tables[-1].shape != tables[0].shape:
                raise ValueError(
                    f"its map has shape {list(tables[-1].shape)}, not {list(tables[0].shape)} as in the first file"
                )
            if not document.content["records"]:
                raise ValueError("it has no records")
            if not all(isinstance(record, dict) for record in document.content["records"]):
                raise ValueError("records are not all dictionaries")
    num_experts = max(int(table.max()) for table in tables) + 1
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{documents[0].path}: its map names expert {num_experts - 1}, beyond {MAX_EXPERTS - 1}")
    notes = ["last_physical_to_logical_map turns physical ids into logical ids (the file has no earlier maps)"]
    if all("topk_ids_of_layer" in record for d in documents for record in d.content["records"]):
        return _read_per_token(documents, options, tables, num_experts, notes)
    passes: list[PassCounts] = []
    touched: dict[int, Any] = {}
    for document, table in zip(documents, tables):
        with naming(document.path, "SGLang recording"):
            for record in document.content["records"]:
                rank, physical = index_of(record, "rank"), _physical(record, table)
                entry = partial(_logical_counts, record, table, num_experts)
                passes.append(PassCounts(index_of(record, "forward_pass_id"), rank, document, entry))
                touched[rank] = np.logical_or(touched.get(rank, False), physical > 0)
    return rank_recording(
        passes,
        documents,
        options,
        num_layers=tables[0].shape[0],
        num_experts=num_experts,
        phase=_common(_step_phases(documents)),
        # Ranks that count the tokens that they serve count different slots: each rank counts only its own slots.
        served=bool((np.sum(list(touched.values()), axis=0) <= 1).all()),
        notes=notes,
    )


def _physical(record: Any, table: Ints) -> Ints:
    counts = whole(record["global_physical_count"], axes=("layer", "slot"))
    if counts.shape != table.shape:
        raise ValueError(f"global_physical_count has shape {list(counts.shape)}, not {list(table.shape)} as the map")
    return counts


def _logical_counts(record: Any, table: Ints, num_experts: int) -> Ints:
    """Counts per logical expert, [L, E]: the sums over its copies."""
    counts = np.zeros((table.shape[0], num_experts), dtype=np.int64)
    np.add.at(counts, (np.arange(table.shape[0])[:, None], table), _physical(record, table))
    return counts


def _step_phases(documents: Sequence[Document]) -> dict[int, Phase]:
    """The phase of each pass; `mixed` if its ranks differ. Idle ranks are ignored."""
    phases: dict[int, Phase] = {}
    for document in documents:
        for record in document.content["records"]:
            mode = record.get("forward_mode")
            phase = PHASE_OF_MODE.get(mode) if isinstance(mode, int) else None
            if phase is not None:
                step = index_of(record, "forward_pass_id")
                phases[step] = phase if phases.get(step, phase) == phase else "mixed"
    return phases


def _common(phases: dict[int, Phase]) -> Phase:
    distinct = set(phases.values())
    return distinct.pop() if len(distinct) == 1 else "mixed" if distinct else "unknown"


def _read_per_token(
    documents: Sequence[Document], options: ImportOptions, tables: Sequence[Ints], num_experts: int, notes: list[str]
) -> Recording:
    """Reads `topk_ids_of_layer` [L, N, 8] int32: the physical ids of N tokens of one rank in one pass, -1 if empty."""
    parts: dict[int, list[tuple[int, Array]]] = {}
    top_k = 1
    for document, table in zip(documents, tables):
        with naming(document.path, "SGLang recording"):
            for record in document.content["records"]:
                ids = to_logical(record["topk_ids_of_layer"], table)
                used = np.flatnonzero(np.greater_equal(ids, 0).any(axis=(0, 1)))
                top_k = max(top_k, int(used[-1]) + 1 if used.size else 1)
                rank = index_of(record, "rank")
                parts.setdefault(rank, []).append((index_of(record, "forward_pass_id"), ids))
    ranks = sorted(parts)
    same = len(ranks) > 1 and all(_same_passes(parts[ranks[0]], parts[rank]) for rank in ranks[1:])
    if same:
        notes.append(f"all {len(ranks)} ranks recorded the same tokens: counted once, source ranks unknown")
    kept = ranks[:1] if same else ranks
    entries = [(step, index, ids[..., :top_k]) for index, rank in enumerate(kept) for step, ids in parts[rank]]
    phases = _step_phases(documents)
    tokens = Tokens(
        np.concatenate([ids for _, _, ids in entries]),
        step=np.concatenate([np.full(len(ids), step) for step, _, ids in entries]),
        source_rank=None if same else np.concatenate([np.full(len(ids), index) for _, index, ids in entries]),
        num_source_ranks=len(kept),
        step_phase=phases if len(set(phases.values())) > 1 else None,
    )
    return token_recording(tokens, documents, options, num_experts=num_experts, phase=_common(phases), notes=notes)


def to_logical(physical: Any, table: Ints) -> Array:
    """Logical ids [N, L, n] int16 from physical ids [L, N, n], without tokens that are padding in every layer."""
    ids: Any = to_numpy(physical)
    if ids.ndim != 3 or ids.shape[0] != table.shape[0] or ids.dtype.kind not in "iu":
        raise ValueError(
            f"topk_ids_of_layer has shape {list(ids.shape)} {ids.dtype}, not [{table.shape[0]}, tokens, k]"
        )
    ids = ids.astype(np.int64)
    if ids.size and (ids.max() >= table.shape[1] or ids.min() < -1):
        layer, token, slot = np.argwhere((ids >= table.shape[1]) | (ids < -1))[0]
        wrong = f"physical id {ids[layer, token, slot]} of token {token} in layer {layer}"
        raise ValueError(f"{wrong} is outside 0..{table.shape[1] - 1}")
    logical = np.where(ids < 0, -1, np.take_along_axis(table[:, None, :], ids.clip(0), axis=2))
    logical = logical.transpose(1, 0, 2)
    kept: Array = logical[(logical >= 0).any(axis=(1, 2))].astype(np.int16)
    return kept


def _same_passes(a: list[tuple[int, Array]], b: list[tuple[int, Array]]) -> bool:
    return len(a) == len(b) and all(s == t and np.array_equal(x, y) for (s, x), (t, y) in zip(a, b))


def index_of(record: Any, key: str) -> int:
    """The value of a record's key. Raises ValueError unless it is a whole number >= 0."""
    value: Any = record[key] if isinstance(record, dict) and key in record else None
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
        raise ValueError(f"{key} is {value!r}, not a whole number >= 0")
    return value


def _is_csv(document: Document) -> bool:
    return document.kind == "csv" and {"layer_id", "expert_id", "count"} <= set(document.content)


def _read_csv(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Reads `layer_id,expert_id,count`: one step per file; pairs that are not listed have no tokens."""
    entries: list[dict[tuple[int, int], float]] = []
    for document in documents:
        with naming(document.path, "expert count CSV"):
            columns = [document.content.index(name) for name in ("layer_id", "expert_id", "count")]
            entry: dict[tuple[int, int], float] = {}
            for number, row in enumerate(document.rows(), 2):
                if row:
                    layer, expert, count = csv_numbers(row, columns, number)
                    entry[layer, expert] = entry.get((layer, expert), 0) + count
            if not entry:
                raise ValueError("it has no counts")
            entries.append(entry)
    layers = sorted({layer for entry in entries for layer, _ in entry})
    return sparse_recording(entries, layers, documents, options, [one_step_per_file(documents)])


def csv_numbers(row: Sequence[str], columns: Sequence[int], line: int) -> list[int]:
    """The values of some columns of a row. Raises ValueError unless they are whole numbers >= 0."""
    try:
        values = [int(row[column]) for column in columns]
        if min(values) >= 0 and max(values) < 2**53:
            return values
    except (ValueError, IndexError):
        pass  # The loop below finds the value, which may be a whole number such as 3.0.
    values = []
    for column in columns:
        text = row[column].strip() if column < len(row) else ""
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 2**53 or value != int(value):
            raise ValueError(f"line {line}, column {column + 1}: {text[:40]!r} is not a whole number >= 0")
        values.append(int(value))
    return values


READERS = (
    TraceReader("SGLang counts (logical_count)", has_key("logical_count", "pt", "json"), _read_logical_count),
    TraceReader("SGLang records (per_pass, per_token)", has_key("records", "pt", holding=list), _read_records),
    placement_reader("SGLang placement", has_key(MAP, "json", "pt"), MAP, "recording (logical_count)"),
    TraceReader("expert count CSV (layer_id, expert_id, count)", _is_csv, _read_csv),
)
