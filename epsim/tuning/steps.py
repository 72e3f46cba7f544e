"""Steps of a trace for the search: sums of counts over windows, to plan on, and chosen steps, to score."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from epsim.placement.base import Cluster, Placement, Stack, Target
from epsim.planning import to_counts
from epsim.traces.regroup import regroup
from epsim.traces.select import take_layers, take_steps
from epsim.traces.store import SMALL_BLOCK, StoredTrace, block_bytes
from epsim.traces.trace import Block, Ints, TokenBlock

CHUNK_BYTES = 96 << 20


class WindowSums:
    """The counts of a trace, summed between bounds. A window between any two bounds can be planned on.

    bounds: indices of steps. The sums take the memory of the counts of as many steps as there are bounds.
    by_step [S]: the assignments of each step in all layers, up to the last bound.
    """

    def __init__(self, trace: StoredTrace, bounds: Sequence[int]) -> None:
        self.bounds = np.array(sorted({0, *bounds}))
        meta = trace.meta
        self._layers = meta.layers
        self._sums = np.zeros((len(self.bounds) - 1, meta.num_layers, meta.num_experts), dtype=np.int64)
        self.by_step = np.zeros(int(self.bounds[-1]), dtype=np.int64)
        first = 0
        for block in trace.blocks(0, int(self.bounds[-1]), max_bytes=SMALL_BLOCK):
            counts = to_counts(block, meta.num_experts).counts
            window = np.searchsorted(self.bounds, np.arange(first, first + len(counts)), side="right") - 1
            for index in np.unique(window):
                self._sums[index] += counts[window == index].sum(axis=0)
            self.by_step[first : first + len(counts)] = counts.sum(axis=(1, 2))
            first += len(counts)

    def assignments(self, first: int, last: int) -> int:
        """The number of assignments of steps first..last-1 in all layers. first and last are bounds."""
        low, high = np.searchsorted(self.bounds, (first, last))
        return int(self._sums[low:high].sum())

    def plan(self, stack: Stack, cluster: Cluster, first: int, last: int) -> Placement:
        """The stack's placement, planned on steps first..last-1. first and last are bounds."""
        low, high = np.searchsorted(self.bounds, (first, last))
        assert self.bounds[low] == first
        assert self.bounds[high] == last
        cells = torch.from_numpy(self._sums[low:high])
        counts = cells if stack.placement.needs_steps else cells.sum(0, keepdim=True)
        planned: Placement = stack.placement.plan_for(counts, Target(cluster, self._layers, stack))
        return planned


def evenly(first: int, last: int, most: int) -> Ints:
    """At most `most` of the numbers first..last-1, evenly spaced, ascending."""
    if last - first <= most:
        return np.arange(first, last)
    return first + (np.arange(most) * 2 + 1) * (last - first) // (2 * most)


def chosen_blocks(
    trace: StoredTrace, step_indices: Ints, layers: Sequence[int] | None, num_ranks: int
) -> Iterator[tuple[Ints, Block]]:
    """Reads the steps `step_indices` (ascending) and the layers (None: all), regrouped to num_ranks source ranks.
    Yields the step indices and the steps in blocks of about CHUNK_BYTES."""
    pending: list[tuple[Ints, Block]] = []
    size = 0
    for indices, block in _read(trace, step_indices):
        chosen = np.isin(indices, step_indices)
        if not chosen.any():
            continue
        part = regroup(take_layers(take_steps(block, chosen), layers), trace.meta, num_ranks)
        if pending and (size >= CHUNK_BYTES or _has_scores(part) != _has_scores(pending[0][1])):
            yield _joined(pending)
            pending, size = [], 0
        pending.append((indices[chosen], part))
        size += block_bytes(part)
    if pending:
        yield _joined(pending)


def _joined(parts: Sequence[tuple[Ints, Block]]) -> tuple[Ints, Block]:
    return np.concatenate([indices for indices, _ in parts]), joined_blocks([block for _, block in parts])


def _read(trace: StoredTrace, step_indices: Ints) -> Iterator[tuple[Ints, Block]]:
    """The blocks of the row groups that hold any of the steps `step_indices`, with the indices of their steps."""
    starts = trace.group_starts()
    groups = np.unique(np.searchsorted(starts, step_indices, side="right") - 1)
    for run in np.split(groups, np.flatnonzero(np.diff(groups) > 1) + 1):
        step, end = max(int(starts[run[0]]), int(step_indices[0])), int(starts[run[-1] + 1])
        for block in trace.blocks(step, min(end, int(step_indices[-1]) + 1), max_bytes=SMALL_BLOCK):
            yield np.arange(step, step + len(block.steps)), block
            step += len(block.steps)


def joined_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenates blocks of one trace, all with scores or all without."""
    first = blocks[0]
    if len(blocks) == 1:
        return first

    def joined(name: str) -> Any:
        arrays = [getattr(block, name) for block in blocks]
        return None if any(array is None for array in arrays) else np.concatenate(arrays)

    if not isinstance(first, TokenBlock):
        return dataclasses.replace(first, steps=joined("steps"), counts=joined("counts"))
    starts = np.cumsum([0, *(len(block.steps) for block in blocks[:-1])])
    step_of = [len(block.token_step) for block in blocks if isinstance(block, TokenBlock)]
    names = ("steps", "source_rank", "expert_ids", "scores", "score_ids", "phase")
    token_step = joined("token_step") + np.repeat(starts, step_of)
    return TokenBlock(token_step=token_step, domain=None, **{name: joined(name) for name in names})


def _has_scores(block: Block) -> bool:
    return isinstance(block, TokenBlock) and block.scores is not None
