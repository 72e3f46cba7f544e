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
            rows = {
                name: getattr(block, name) for name in ("source_rank", "expert_ids", "scores", "score_ids", "domain")
            }
            writer.append(
                TokenBlock(
                    steps=block.steps[chosen],
                    token_step=place[block.token_step[token]],
                    phase=block.phase[chosen],
                    **{name: None if values is None else values[token] for name, values in rows.items()},
                )
            )
        if not writer.num_steps:
            raise ValueError(f"--only {phase}: the trace has no step of that phase")
        writer.add_note(f"only the {writer.num_steps} {phase} steps of {trace.num_steps}")
    return StoredTrace(target)
