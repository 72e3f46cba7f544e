"""HarMoEny's wide CSV: `dataset,iteration,layer_idx,0..E-1`, one row per (dataset, iteration, layer)."""

import itertools
from collections.abc import Sequence

import numpy as np

from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, count_recording
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.sglang import csv_numbers
from epsim.traces.trace import Ints

NUMBERS_PER_ROW = 64
MAX_SPANS = 64


def _is_wide(document: Document) -> bool:
    return document.kind == "csv" and {"layer_idx", "0"} <= set(document.content)


def _read_wide(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Each (dataset, iteration) is a step, in the file's order."""
    rows: dict[tuple[str, int], dict[int, Ints]] = {}
    num_experts = 0
    for document in documents:
        with naming(document.path, "wide CSV"):
            header = document.content
            experts = sum(name.isdecimal() for name in header)
            index = {name: column for column, name in reversed(list(enumerate(header)))}
            columns = [index[str(e)] for e in range(experts) if str(e) in index]
            if len(columns) != experts or (num_experts and experts != num_experts):
                raise ValueError("its header does not list experts 0, 1, 2, ... as the first file does")
            num_experts = experts
            keys = [index[name] for name in ("layer_idx", "iteration") if name in index]
            for number, row in enumerate(document.rows(NUMBERS_PER_ROW + experts), 2):
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(f"ragged: line {number} has {len(row)} columns, the header has {len(header)}")
                layer, *iteration = csv_numbers(row, keys, number)
                dataset = row[index["dataset"]] if "dataset" in index else document.path.stem
                step = rows.setdefault((dataset, iteration[0] if iteration else 0), {})
                if layer in step:
                    raise ValueError(f"line {number}: layer {layer} of {dataset!r} is in this iteration twice")
                step[layer] = np.array(csv_numbers(row, columns, number), dtype=np.int64)
    if not rows:
        raise ValueError(f"{documents[0].path}: no rows in it")
    layers = sorted({layer for step in rows.values() for layer in step})
    for (dataset, number), by_layer in rows.items():
        if len(by_layer) != len(layers):
            have = f"{len(by_layer)} of {len(layers)} layers"
            raise ValueError(f"{documents[0].path}: ragged: {dataset!r} iteration {number} has {have}")
    dataset_index = {name: i for i, name in enumerate(dict.fromkeys(dataset for dataset, _ in rows))}
    order = sorted(rows, key=lambda key: (dataset_index[key[0]], key[1]))
    # Rows are freed as they are joined: together they may take most of the memory.
    counts = [np.stack([by_layer[layer] for layer in layers]) for by_layer in map(rows.pop, order)]
    return count_recording(counts, documents, options, layers=layers, notes=[_spans([dataset for dataset, _ in order])])


def _spans(datasets: list[str]) -> str:
    """`steps 0-19 bookcorpus, 20-39 random`. Steps of a dataset are consecutive."""
    parts: list[str] = []
    low = 0
    for name, run in itertools.groupby(datasets):
        high = low + sum(1 for _ in run)
        parts.append(f"{low}-{high - 1} {name}")
        low = high
    more = [f"and {len(parts) - MAX_SPANS:,} more datasets"] if len(parts) > MAX_SPANS else []
    return "steps " + ", ".join(parts[:MAX_SPANS] + more)


READERS = (TraceReader("wide CSV (dataset, iteration, layer_idx, experts)", _is_wide, _read_wide),)
