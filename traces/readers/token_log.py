"""Per-token logs, as patched engines write them: JSON lines, one per (token, layer)."""

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
WARM_UP_ROWS = 32


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
    """The rows of a log, in order of first appearance. A row's key is (request, step, rank, token index, number of
    earlier lines with the same of these and the same layer)."""

    rows: dict[tuple[Any, ...], int] = field(default_factory=dict)
    seen: dict[tuple[Any, ...], int] = field(default_factory=dict)
    entries: list[tuple[int, int, list[int], list[float] | None]] = field(default_factory=list)
    domain: list[str | None] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    lines: int = 0

    def add(self, record: dict[str, Any], number: int) -> None:
        layer = _index(pick(record, LAYER), "layer", number)
        ids = pick(record, IDS)
        if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**15 for i in ids):
            raise ValueError(f"line {number}: expert ids {str(ids)[:60]} are not whole numbers in 0..32766")
        if len(set(ids)) != len(ids):
            raise ValueError(f"line {number}: expert ids {str(ids)[:60]} name an expert twice")
        weights = pick(record, WEIGHTS)
        if weights is not None and not (
            isinstance(weights, list)
            and len(weights) == len(ids)
            and all(type(w) in (int, float) and abs(w) < 65504 for w in weights)
        ):
            raise ValueError(f"line {number}: {len(ids)} expert ids need {len(ids)} finite weights")
        position, step, rank = (pick(record, names) for names in (TOKEN, STEP, RANK))
        request = pick(record, REQUEST)
        key = (
            str(request) if request is not None else None,
            None if step is None else _index(step, "step", number),
            None if rank is None else _index(rank, "rank", number),
            None if position is None else _index(position, "token index", number),
        )
        # A token index that repeats in the same layer belongs to a later pass of the engine.
        again = self.seen.get((layer, key), 0)
        self.seen[layer, key] = again + 1
        row = self.rows.setdefault((*key, again), len(self.rows))
        if row == len(self.domain):
            label = pick(record, DOMAIN)
            self.domain.append(None if label is None else str(label))
        self.entries.append((row, layer, ids, weights))
        self.lines += 1


def _read_log(documents: Sequence[Document], options: ImportOptions) -> Recording:
    log = _Log()
    for document in documents:
        with naming(document.path, "token log"):
            for number, record in document.records():
                if not isinstance(record, dict):
                    raise ValueError(f"line {number} is not a JSON object")
                if _is_route(record):
                    log.add(record, number)
                elif pick(record, IDS) is not None:
                    raise ValueError(f"line {number} has expert ids, but they are not a list or the layer is missing")
                elif pick(record, LAYER) is not None:
                    raise ValueError(f"line {number} has a layer, but no expert ids")
                else:
                    log.header.update(record)
    with naming(documents[0].path, "token log"):
        return _assemble(log, documents, options)


def _assemble(log: _Log, documents: Sequence[Document], options: ImportOptions) -> Recording:
    if not log.entries:
        raise ValueError("it has no routed tokens")
    layers = sorted({layer for _, layer, _, _ in log.entries})
    layer_index = {layer: i for i, layer in enumerate(layers)}
    top_k = max(len(ids) for _, _, ids, _ in log.entries)
    weighted = all(weights is not None for _, _, _, weights in log.entries)
    check_filled(len(log.entries), (len(log.rows), len(layers), top_k), "lines")
    ids = np.full((len(log.rows), len(layers), top_k), -1, dtype=np.int16)
    scores = np.zeros(ids.shape, dtype=np.float16) if weighted else None
    for row, layer, chosen, weights in log.entries:
        ids[row, layer_index[layer], : len(chosen)] = chosen
        if scores is not None and weights is not None:
            scores[row, layer_index[layer], : len(chosen)] = half(weights)
    notes = []
    warm = warm_up_rows(ids)
    if warm == len(ids) >= WARM_UP_ROWS:
        raise ValueError(f"all {warm} tokens have the same expert ids: the log holds warm-up rows only")
    if warm:
        notes.append(f"{warm} warm-up rows of identical expert ids dropped at the start")
    missing = int((ids[warm:, :, 0] < 0).sum())
    if missing:
        notes.append(f"{missing} of {(len(ids) - warm) * len(layers)} (token, layer) lines are missing: left empty")
    keys = list(log.rows)[warm:]
    requests = {request: i for i, request in enumerate(dict.fromkeys(key[0] for key in keys))}
    labels = log.domain[warm:]
    tokens = Tokens(
        ids[warm:],
        None if scores is None else scores[warm:],
        step=_column([key[1] for key in keys]),
        source_rank=_column([key[2] for key in keys]),
        sequence=np.array([requests[key[0]] for key in keys]) if None not in requests else None,
        domain=np.array(labels, dtype=object) if labels and None not in labels else None,
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


def _column(values: Sequence[Any]) -> Ints | None:
    return None if not values or None in values else np.array(values, dtype=np.int64)


def _index(value: Any, what: str, line: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"line {line}: {what} {str(value)[:40]!r} is not a whole number >= 0")
    return value


READERS = (TraceReader("per-token log", _is_log, _read_log),)
