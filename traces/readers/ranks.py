"""Counts that every rank wrote for itself, put together step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from epsim.traces.options import ImportOptions
from epsim.traces.readers.base import Recording, settle
from epsim.traces.readers.document import Document, naming
from epsim.traces.trace import Block, CountsBlock, Ints, Phase, RankCountsBlock


@dataclass(frozen=True, slots=True)
class PassCounts:
    """One rank's counts of one step; load: the counts [L, E], read when they are needed."""

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
    top_k: int | None = None,
    layers: Sequence[int] = (),
    phase: Phase = "unknown",
    served: bool = False,
    notes: Sequence[str] = (),
) -> Recording:
    """Counts by source rank; plain counts where there is one rank, where every rank wrote the same (each saw all
    tokens: counted once), or where ranks counted what they served (served: summed). All said in the notes.
    """
    ranks = sorted({p.rank for p in passes})
    by_step: dict[int, dict[int, list[PassCounts]]] = {}
    for entry in passes:
        by_step.setdefault(entry.step, {}).setdefault(entry.rank, []).append(entry)
    num_ranks = len(ranks)

    def load(step: int) -> Ints:
        """[L, R, E]; a rank's several parts of one step are added."""
        counts = np.zeros((num_layers, num_ranks, num_experts), dtype=np.int64)
        for place, rank in enumerate(ranks):
            for part in by_step[step].get(rank, ()):
                with naming(part.document.path, "recording"):
                    counts[:, place] += part.load()
        return counts

    said = list(notes)
    steps = sorted(by_step)
    missing = sum(num_ranks - len(by_step[step]) for step in steps)
    if missing:
        said.append(f"{missing} of {len(steps) * num_ranks} (step, rank) entries are missing: taken as no tokens")
    if ranks != list(range(num_ranks)):
        said.append(f"source ranks 0..{num_ranks - 1} stand for the recorded ranks {_some(ranks)}")
    same = num_ranks > 1 and not missing and all(_alike(load(step)) for step in steps)
    by_rank = num_ranks > 1 and not same and not served
    if same:
        said.append(f"all {num_ranks} ranks recorded the same counts: counted once, source ranks unknown")
    elif served and num_ranks > 1:
        said.append(f"each of {num_ranks} ranks counted what it served: summed, source ranks unknown")
    meta = settle(
        options,
        documents,
        level="rank_counts" if by_rank else "counts",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        layers=layers,
        phase=phase,
        num_source_ranks=num_ranks if by_rank else 0,
        notes=said,
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
