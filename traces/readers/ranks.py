"""Joins the counts that each rank recorded, step by step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from epsim.traces.limits import check_size
from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, settle
from epsim.traces.readers.document import Document, naming
from epsim.traces.trace import Block, CountsBlock, Ints, RankCountsBlock


@dataclass(frozen=True, slots=True)
class PassCounts:
    """One rank's counts of one step; load: reads the counts [L, E] when they are needed."""

    step: int
    rank: int
    document: Document
    load: Callable[[], Ints]


def rank_recording(
    passes: Sequence[PassCounts],
    documents: Sequence[Document],
    options: ImportOptions,
    *,
    num_layers: int,
    num_experts: int,
    served: bool = False,
    notes: Sequence[str] = (),
    **known: Any,
) -> Recording:
    """A recording of counts by source rank, or of plain counts in three cases, which the notes state.

    The cases: there is one rank; all ranks wrote the same counts, so each saw all tokens (kept once); or ranks counted
    the tokens they served, not those they sent (served: summed). known: further arguments of `settle`.
    """
    ranks = sorted({p.rank for p in passes})
    by_step: dict[int, dict[int, list[PassCounts]]] = {}
    for entry in passes:
        by_step.setdefault(entry.step, {}).setdefault(entry.rank, []).append(entry)
    num_ranks = len(ranks)

    def load(step: int) -> Ints:
        """The counts of a step, [L, R, E]; several parts of one rank are added."""
        counts = np.zeros((num_layers, num_ranks, num_experts), dtype=np.int64)
        for column, rank in enumerate(ranks):
            for part in by_step[step].get(rank, ()):
                with naming(part.document.path, "recording"):
                    counts[:, column] += part.load()
        return counts

    all_notes = list(notes)
    steps = sorted(by_step)
    missing = sum(num_ranks - len(by_step[step]) for step in steps)
    if missing:
        all_notes.append(f"{missing} of {len(steps) * num_ranks} (step, rank) entries are missing: counted as 0")
    if ranks != list(range(num_ranks)):
        all_notes.append(f"source ranks 0..{num_ranks - 1} are the recorded ranks {_some(ranks)}")
    dense = f"{len(steps):,} steps x {num_layers:,} layers x {num_ranks:,} ranks x {num_experts:,} experts"
    check_size(dense, len(steps) * num_layers * num_ranks * num_experts, *(document.path for document in documents))
    same = num_ranks > 1 and not missing and all(_alike(load(step)) for step in steps)
    by_rank = num_ranks > 1 and not same and not served
    if same:
        all_notes.append(f"all {num_ranks} ranks recorded the same counts: counted once, source ranks unknown")
    elif served and num_ranks > 1:
        all_notes.append(f"each of {num_ranks} ranks counted the tokens it served: summed, source ranks unknown")
    meta = settle(
        options,
        documents,
        level="rank_counts" if by_rank else "counts",
        num_layers=num_layers,
        num_experts=num_experts,
        num_source_ranks=num_ranks if by_rank else 0,
        notes=all_notes,
        **known,
    )

    def blocks() -> Iterator[Block]:
        for step in steps:
            counts = load(step)[None]
            number = np.array([step], dtype=np.int64)
            if by_rank:
                yield RankCountsBlock(number, counts)
            else:
                yield CountsBlock(number, counts[:, :, 0] if same else counts.sum(axis=2))

    return Recording(meta, blocks)


def _alike(counts: Ints) -> bool:
    return bool((counts == counts[:, :1]).all())


def _some(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
