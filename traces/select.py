"""A part of a trace, as a trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from epsim.traces.store import SMALL_BLOCK, StoredTrace, TraceWriter
from epsim.traces.trace import Phase, TokenBlock


def select_phase(trace: StoredTrace, phase: Phase, target: Path) -> StoredTrace:
    """The steps of one phase, with their numbers, written to target.

    Raises ValueError where the trace holds no step of that phase, or does not tell phases apart.
    """
    meta = dataclasses.replace(trace.meta, phase=phase)
    with TraceWriter(target, meta) as writer:
        for block in trace.blocks(max_bytes=SMALL_BLOCK):
            if not isinstance(block, TokenBlock) or block.phase is None:
                raise ValueError(
                    f"--only {phase}: the trace does not tell phases apart, all of it is {trace.meta.phase}"
                )
            chosen = np.asarray(block.phase == phase, dtype=bool)
            if not chosen.any():
                continue
            token = chosen[block.token_step]
            place = np.cumsum(chosen) - 1
            part = dataclasses.replace(
                block,
                steps=block.steps[chosen],
                token_step=place[block.token_step[token]],
                source_rank=block.source_rank[token],
                expert_ids=block.expert_ids[token],
                scores=None if block.scores is None else block.scores[token],
                score_ids=None if block.score_ids is None else block.score_ids[token],
                domain=None if block.domain is None else block.domain[token],
                phase=block.phase[chosen],
            )
            writer.append(part)
        if not writer.num_steps:
            raise ValueError(f"--only {phase}: the trace has no step of that phase")
        writer.add_note(f"only the {writer.num_steps} {phase} steps of {trace.num_steps}")
    return StoredTrace(target)
