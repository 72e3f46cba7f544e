"""HarMoEny's wide CSV: `dataset,iteration,layer_idx,0..E-1`, one row per (dataset, iteration, layer)."""

from collections.abc import Sequence

import numpy as np

from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, count_recording
from epsim.traces.readers.document import Document, naming
from epsim.traces.readers.sglang import csv_numbers
from epsim.traces.trace import Ints


def _is_wide(document: Document) -> bool:
    return document.kind == "csv" and {"layer_idx", "0"} <= set(document.content)


def _read_wide(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Each (dataset, iteration) is a step, in the file's order."""
    rows: dict[tuple[str, int], dict[int, list[int]]] = {}
    num_experts = 0
    for document in documents:
        with naming(document.path, "wide CSV"):
            header = document.content
            experts = sum(name.isdecimal() for name in header)
            columns = [header.index(str(e)) for e in range(experts) if str(e) in header]
            if len(columns) != experts or (num_experts and experts != num_experts):
                raise ValueError("its header does not list experts 0, 1, 2, ... as the first file does")
            num_experts = experts
            keys = [header.index(name) for name in ("layer_idx", "iteration") if name in header]
            for number, row in enumerate(document.rows(), 2):
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(f"ragged: line {number} has {len(row)} columns, the header has {len(header)}")
                layer, *iteration = csv_numbers(row, keys, number)
                dataset = row[header.index("dataset")] if "dataset" in header else document.path.stem
                step = rows.setdefault((dataset, iteration[0] if iteration else 0), {})
                if layer in step:
                    raise ValueError(f"line {number}: layer {layer} of {dataset!r} is in this iteration twice")
                step[layer] = csv_numbers(row, columns, number)
    if not rows:
        raise ValueError(f"{documents[0].path}: no rows in it")
    layers = sorted({layer for step in rows.values() for layer in step})
    for (dataset, number), by_layer in rows.items():
        if len(by_layer) != len(layers):
            have = f"{len(by_layer)} of {len(layers)} layers"
            raise ValueError(f"{documents[0].path}: ragged: {dataset!r} iteration {number} has {have}")
    seen = list(dict.fromkeys(dataset for dataset, _ in rows))
    order = sorted(rows, key=lambda key: (seen.index(key[0]), key[1]))
    counts: Ints = np.array([[rows[key][layer] for layer in layers] for key in order], dtype=np.int64)
    return count_recording(counts, documents, options, layers=layers, notes=[_spans([dataset for dataset, _ in order])])


def _spans(datasets: list[str]) -> str:
    """`steps 0-19 bookcorpus, 20-39 random`."""
    parts = []
    for name in dict.fromkeys(datasets):
        low = datasets.index(name)
        parts.append(f"{low}-{low + datasets.count(name) - 1} {name}")
    return "steps " + ", ".join(parts)


READERS = (TraceReader("wide CSV (dataset, iteration, layer_idx, experts)", _is_wide, _read_wide),)
