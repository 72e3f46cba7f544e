"""SmartMoE's gate logs: text files, one per (iteration, rank), and the npz made of them.

Text: one line per layer, `layer:[[E counts] x micro-batches]`; only the file's name has the iteration and rank
(table_iter1001_rank0.log). npz: `counts` [S, L, E] or [S, R, L, E], `iterations` [S]. Source: SmartMoE-AE moe_trace.
"""

import json
import re
from collections.abc import Iterator, Sequence

import numpy as np

from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, TraceReader, number_in_name, settle, whole
from epsim.traces.readers.document import Document, naming
from epsim.traces.store import one_line
from epsim.traces.trace import Block, CountsBlock, Ints, RankCountsBlock

LINE = re.compile(r"\s*(\d{1,6})\s*:\s*(\[.*\])\s*$")


def _is_log(document: Document) -> bool:
    return document.kind == "text" and re.match(r"\d{1,6}\s*:\s*\[\s*\[", document.content) is not None


def _parse(document: Document) -> tuple[tuple[int, ...], Ints]:
    """The layer numbers and counts [micro-batches, L, E] of a log."""
    layers: list[int] = []
    rows: list[Ints] = []
    for number, line in enumerate(document.lines(), 1):
        if not line.strip():
            continue
        match = LINE.match(line)
        if not match:
            raise ValueError(f"line {number} is not `layer:[[counts], ...]`")
        try:
            row = whole(json.loads(match.group(2)), axes=("micro-batch", "expert"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {one_line(error)}") from None
        if row.ndim != 2 or not row.size or (rows and row.shape != rows[0].shape):
            raise ValueError(f"ragged: line {number} holds {list(row.shape)} micro-batches x experts")
        layers.append(int(match.group(1)))
        rows.append(row)
    if len(set(layers)) != len(layers):
        raise ValueError("it lists a layer twice")
    return tuple(layers), np.stack(rows, axis=1)


def _read_logs(documents: Sequence[Document], options: ImportOptions) -> Recording:
    """Each micro-batch of an iteration is a step; each file is a source rank."""
    named = [(number_in_name(d.path, "iter"), number_in_name(d.path, "rank")) for d in documents]
    notes = []
    if any(iteration is None or rank is None for iteration, rank in named):
        notes.append("file names have no iteration and rank: taken as the ranks of one iteration, in the order given")
        named = [(0, index) for index in range(len(documents))]
    by_iteration: dict[int, dict[int, Document]] = {}
    for (iteration, rank), document in zip(named, documents):
        assert iteration is not None
        assert rank is not None
        if rank in by_iteration.setdefault(iteration, {}):
            raise ValueError(f"{document.path}: iteration {iteration} of rank {rank} is given twice")
        by_iteration[iteration][rank] = document
    ranks = sorted({rank for _, rank in named if rank is not None})
    for iteration, files in by_iteration.items():
        lacking = [rank for rank in ranks if rank not in files]
        if lacking:
            where = next(iter(files.values())).path
            raise ValueError(f"{where}: iteration {iteration} lacks the file of rank {lacking[0]}")
    if ranks != list(range(len(ranks))):
        notes.append(f"source ranks 0..{len(ranks) - 1} are the recorded ranks {', '.join(map(str, ranks[:8]))}")
    with naming(documents[0].path, "SmartMoE log"):
        layers, sample = _parse(documents[0])
    notes.append(f"each of the {len(sample)} micro-batches of an iteration is a step, numbered in order")
    meta = settle(
        options,
        documents,
        level="rank_counts",
        num_layers=sample.shape[1],
        num_experts=sample.shape[2],
        layers=layers,
        num_source_ranks=len(ranks),
        phase="training",
        notes=notes,
    )

    def blocks() -> Iterator[Block]:
        for iteration in sorted(by_iteration):
            parts = []
            for rank in ranks:
                document = by_iteration[iteration][rank]
                with naming(document.path, "SmartMoE log"):
                    parsed_layers, counts = _parse(document)
                    if parsed_layers != layers or counts.shape != sample.shape:
                        raise ValueError(f"layers or shape {list(counts.shape)} differ from {documents[0].path.name}")
                parts.append(counts)
            steps = iteration * len(sample) + np.arange(len(sample))
            yield RankCountsBlock(steps, np.stack(parts, axis=2))

    return Recording(meta, blocks)


def _is_counts_npz(document: Document) -> bool:
    return document.kind == "npz" and "counts" in document.content and document.content["counts"].ndim in (3, 4)


def _read_counts_npz(documents: Sequence[Document], options: ImportOptions) -> Recording:
    if len(documents) > 1:
        raise ValueError(f"{documents[1].path}: each npz of counts is a separate recording: import one at a time")
    document = documents[0]
    with naming(document.path, "npz of counts"):
        array = document.content["counts"]
        if not array.size:
            raise ValueError(f"counts are empty: shape {list(array.shape)}")
        numbers = document.content.get("iterations", document.content.get("steps"))
        steps = np.arange(len(array)) if numbers is None else whole(numbers, axes=("entry",))
        if steps.shape != (len(array),) or (np.diff(steps) <= 0).any():
            raise ValueError(f"iterations must be {len(array)} ascending whole numbers")
        by_rank = array.ndim == 4
        meta = settle(
            options,
            documents,
            level="rank_counts" if by_rank else "counts",
            num_layers=array.shape[-2],
            num_experts=array.shape[-1],
            num_source_ranks=array.shape[1] if by_rank else 0,
            notes=["counts are read as [steps, source ranks, layers, experts]"] if by_rank else [],
        )

    def blocks() -> Iterator[Block]:
        for low in range(0, len(array), 64):
            with naming(document.path, "npz of counts"):
                counts = whole(array[low : low + 64], first=low)
            if by_rank:
                yield RankCountsBlock(steps[low : low + 64], counts.transpose(0, 2, 1, 3))
            else:
                yield CountsBlock(steps[low : low + 64], counts)

    return Recording(meta, blocks)


READERS = (
    TraceReader("SmartMoE gate logs", _is_log, _read_logs),
    TraceReader("npz of counts", _is_counts_npz, _read_counts_npz),
)
