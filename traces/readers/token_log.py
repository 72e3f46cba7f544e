"""Per-token logs, as patched engines write them: JSON lines, one per (token, layer)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epsim.traces.compose import Tokens
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, check_filled, half
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.tokens import token_recording
from epsim.traces.trace import Ints

IDS = ("topk_ids", "experts", "expert_ids", "selected_experts", "topk_indices", "topk_idx", "routed_experts", "indices")
WEIGHTS = (
    "topk_weights", "gating_probs", "weights", "scores", "probs", "selected_probs", "routing_weights", "topk_probs",
)  # fmt: skip
LAYER = ("layer", "layer_id", "layer_idx", "layer_index")
TOKEN = ("token_idx", "token_index", "token", "token_position", "position", "pos")
REQUEST = ("req_id", "request_id", "request", "rid", "seq_id", "sequence", "sample_id", "sample")
STEP = ("step", "iteration", "iter", "forward_pass_id")
RANK = ("rank", "source_rank", "dp_rank")
DOMAIN = ("domain", "dataset", "task")
EXPERTS = ("num_experts", "n_routed_experts")
MODEL = ("model_id", "model", "model_name")
FIELDS = (IDS, LAYER, WEIGHTS, TOKEN, REQUEST, STEP, RANK, DOMAIN)
WARM_UP_ROWS = 32
MAX_KNOWN = 1000


def pick(record: dict[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _is_route(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    ids = pick(record, IDS)
    return isinstance(ids, list) and not any(isinstance(i, list) for i in ids) and pick(record, LAYER) is not None


def _is_log(document: Document) -> bool:
    if document.kind not in ("json", "jsonl"):
        return False
    if document.kind == "json" and not isinstance(document.content, list):
        return _is_route(document.content)
    for index, (_, record) in enumerate(document.records()):
        if _is_route(record):
            return True
        if index > 20:
            break
    return False


@dataclass(slots=True)
class _Log:
    """The lines of a log, as columns. A key is (request, step, rank, token index).

    keys, labels: the number of each different key and label; line_key, line_layer, line_label: numbers of each line, a
    label of -1 for none. ids, weights: those of all lines; num_ids: how many of them each line has.
    """

    keys: dict[tuple[Any, ...], int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    line_key: array[int] = field(default_factory=lambda: array("q"))
    line_layer: array[int] = field(default_factory=lambda: array("q"))
    line_label: array[int] = field(default_factory=lambda: array("q"))
    num_ids: array[int] = field(default_factory=lambda: array("q"))
    ids: array[int] = field(default_factory=lambda: array("h"))
    weights: array[float] = field(default_factory=lambda: array("d"))
    weighted: bool = True
    header: dict[str, Any] = field(default_factory=dict)

    def add(self, values: Sequence[Any], number: int) -> None:
        """Adds the line of this number. values: of FIELDS."""
        ids, layer, weights, position, request, step, rank, domain = values
        layer = _index(layer, "layer", number)
        if not ids or set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 2**15:
            raise ValueError(f"line {number}: expert ids {str(ids)[:60]} are not whole numbers in 0..32766")
        if len(set(ids)) != len(ids):
            raise ValueError(f"line {number}: expert ids {str(ids)[:60]} name an expert twice")
        if weights is None:
            self.weighted = False
        elif not (isinstance(weights, list) and len(weights) == len(ids) and _are_finite(weights)):
            raise ValueError(f"line {number}: {len(ids)} expert ids need {len(ids)} finite weights")
        key = (
            str(request) if request is not None else None,
            None if step is None else _index(step, "step", number),
            None if rank is None else _index(rank, "rank", number),
            None if position is None else _index(position, "token index", number),
        )
        self.line_key.append(self.keys.setdefault(key, len(self.keys)))
        self.line_layer.append(layer)
        self.line_label.append(-1 if domain is None else self.labels.setdefault(str(domain), len(self.labels)))
        self.num_ids.append(len(ids))
        self.ids.extend(ids)
        if self.weighted:
            self.weights.extend(weights)


def _are_finite(weights: list[Any]) -> bool:
    return set(map(type, weights)) <= {int, float} and max(map(abs, weights)) < 65504 and not math.isnan(sum(weights))


def _read_log(documents: Sequence[Document], options: ImportOptions) -> Recording:
    log = _Log()
    # The names in FIELDS that a record has, by the record's fields: looking them up for each line is slow.
    known: dict[tuple[str, ...], list[list[str]]] = {}
    for document in documents:
        with naming(document.path, "token log"):
            for number, record in document.records():
                if not isinstance(record, dict):
                    raise ValueError(f"line {number} is not a JSON object")
                fields = tuple(record)
                if fields not in known:
                    known = {} if len(known) == MAX_KNOWN else known
                    known[fields] = [[name for name in names if name in record] for names in FIELDS]
                values = [pick(record, names) if names else None for names in known[fields]]
                ids, layer = values[:2]
                if isinstance(ids, list) and layer is not None and list not in set(map(type, ids)):
                    log.add(values, number)
                elif ids is not None:
                    raise ValueError(f"line {number} has expert ids, but they are not a list or the layer is missing")
                elif layer is not None:
                    raise ValueError(f"line {number} has a layer, but no expert ids")
                else:
                    log.header.update(record)
    with naming(documents[0].path, "token log"):
        return _assemble(log, documents, options)


def _rows(key: Ints, layer: Ints, num_layers: int) -> tuple[Ints, Ints]:
    """The row of each line, and the first line of each row. Rows are numbered in order of first appearance.

    A row holds one line of each layer. A key that repeats in the same layer belongs to a later pass of the engine, so
    the n-th line of each layer with a key is in the key's n-th row.
    """
    same = key * num_layers + layer
    order = np.argsort(same, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(same[order]) != 0))
    again = np.empty_like(same)
    again[order] = np.arange(len(same)) - np.repeat(starts, np.diff(np.append(starts, len(same))))
    _, first, row = np.unique(key * (int(again.max()) + 1) + again, return_index=True, return_inverse=True)
    number = np.empty_like(first)
    number[np.argsort(first)] = np.arange(len(first))
    return number[row.reshape(-1)], np.sort(first)


def _assemble(log: _Log, documents: Sequence[Document], options: ImportOptions) -> Recording:
    if not log.ids:
        raise ValueError("it has no routed tokens")
    layer_numbers, layer = np.unique(np.array(log.line_layer), return_inverse=True)
    layers = layer_numbers.tolist()
    line_key, num_ids = np.array(log.line_key), np.array(log.num_ids)
    row, first = _rows(line_key, layer.reshape(-1), len(layers))
    shape = (len(first), len(layers), int(num_ids.max()))
    check_filled(len(row), shape, "lines", documents)
    ids = np.full(shape, -1, dtype=np.int16)
    scores = np.zeros(shape, dtype=np.float16) if log.weighted else None
    cell = (row * len(layers) + layer.reshape(-1)) * shape[2]
    # Each id goes into the slot of its line and of its position in that line.
    slot = np.repeat(cell - np.cumsum(num_ids) + num_ids, num_ids) + np.arange(len(log.ids))
    ids.reshape(-1)[slot] = np.array(log.ids)
    if scores is not None:
        scores.reshape(-1)[slot] = half(np.array(log.weights))
    notes = []
    warm = warm_up_rows(ids)
    if warm == len(ids) >= WARM_UP_ROWS:
        raise ValueError(f"all {warm} tokens have the same expert ids: the log holds warm-up rows only")
    if warm:
        notes.append(f"{warm} warm-up rows of identical expert ids dropped at the start")
    missing = int((ids[warm:, :, 0] < 0).sum())
    if missing:
        notes.append(f"{missing} of {(len(ids) - warm) * len(layers)} (token, layer) lines are missing: left empty")
    row_key, label = line_key[first[warm:]], np.array(log.line_label)[first[warm:]]
    requests = {request: i for i, request in enumerate(dict.fromkeys(key[0] for key in log.keys))}
    sequence = _column([None if key[0] is None else requests[key[0]] for key in log.keys], row_key)
    tokens = Tokens(
        ids[warm:],
        None if scores is None else scores[warm:],
        step=_column([key[1] for key in log.keys], row_key),
        source_rank=_column([key[2] for key in log.keys], row_key),
        sequence=sequence,
        domain=np.array(list(log.labels), dtype=object)[label] if label.size and label.min() >= 0 else None,
    )
    if tokens.step is None and tokens.source_rank is not None:
        notes.append("source ranks without steps: not used")
    declared = pick(log.header, EXPERTS)
    model = pick(log.header, MODEL)
    return token_recording(
        tokens,
        documents,
        options,
        num_experts=declared if isinstance(declared, int) and declared > 0 else None,
        model=model if isinstance(model, str) else None,
        notes=notes,
        layers=layers,
    )


def warm_up_rows(ids: Any) -> int:
    """How many tokens at the start of ids [T, L, k] have identical ids in the same order; 0 if fewer than 32."""
    differs = (ids != ids[:1]).any(axis=(1, 2))
    run = int(differs.argmax()) if differs.any() else len(ids)
    return run if run >= WARM_UP_ROWS else 0


def _column(values: Sequence[int | None], row_key: Ints) -> Ints | None:
    """The values of the rows, from the value of each key; None if a row has none."""
    column = np.array([-1 if value is None else value for value in values], dtype=np.int64)[row_key]
    return None if not column.size or column.min() < 0 else column


def _index(value: Any, what: str, line: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"line {line}: {what} {str(value)[:40]!r} is not a whole number >= 0")
    return value


READERS = (TraceReader("per-token log", _is_log, _read_log),)
