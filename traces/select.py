"""Selects steps of a trace, or layers of a block."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from epsim.traces.store import SMALL_BLOCK, StoredTrace, TraceWriter
from epsim.traces.trace import Block, Ints, Phase, TokenBlock, TraceMeta


def select_steps(trace: StoredTrace, target: Path, phase: Phase | None = None, min_tokens: int = 1) -> StoredTrace:
    """Writes the steps of one phase (None: any) with at least min_tokens tokens to target, with their numbers.

    Raises ValueError if no step is left, or if the trace does not record the phase of each step.
    For counts, a step's number of tokens is the assignments of its fullest layer / top-k.
    """
    meta = trace.meta if phase is None else dataclasses.replace(trace.meta, phase=phase)
    with TraceWriter(target, meta) as writer:
        for block in trace.blocks(max_bytes=SMALL_BLOCK):
            chosen = _num_tokens(block, meta) >= min_tokens
            if phase is not None:
                if not isinstance(block, TokenBlock) or block.phase is None:
                    raise ValueError(
                        f"--only {phase}: the steps have no phases, all of the trace is {trace.meta.phase}: omit --only"
                    )
                chosen &= np.asarray(block.phase == phase, dtype=bool)
            if chosen.any():
                writer.append(take_steps(block, chosen))
        wanted = f"{phase or ''} steps of at least {min_tokens} tokens".strip()
        if not writer.num_steps:
            raise ValueError(f"the trace has no {wanted}: give another --only or --min-tokens")
        writer.add_note(f"only the {writer.num_steps} {wanted}, of {trace.num_steps} steps")
    return StoredTrace(target)


def _num_tokens(block: Block, meta: TraceMeta) -> Ints:
    """The number of tokens of each step, [S]."""
    if isinstance(block, TokenBlock):
        return np.bincount(block.token_step, minlength=len(block.steps))
    assignments = block.counts.sum(axis=tuple(range(2, block.counts.ndim))).max(axis=1)
    tokens: Ints = assignments // meta.top_k
    return tokens


def take_steps(block: Block, chosen: npt.NDArray[np.bool_]) -> Block:
    """The chosen steps of a block. chosen [S] bool."""
    if not isinstance(block, TokenBlock):
        return dataclasses.replace(block, steps=block.steps[chosen], counts=block.counts[chosen])
    tokens = chosen[block.token_step]
    return block.take(chosen, tokens, (np.cumsum(chosen) - 1)[block.token_step[tokens]])


def take_layers(block: Block, kept: Sequence[int] | None) -> Block:
    """The layers of a block with these indices; None keeps all."""
    if kept is None:
        return block
    if not isinstance(block, TokenBlock):
        return dataclasses.replace(block, counts=block.counts[:, kept])
    return dataclasses.replace(
        block,
        expert_ids=block.expert_ids[:, kept],
        scores=None if block.scores is None else block.scores[:, kept],
        score_ids=None if block.score_ids is None else block.score_ids[:, kept],
    )
